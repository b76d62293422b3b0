"""Pipelined speculation in the threads of one process: the parts of a target, a drafter and the
head, joined by local channels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from magicdec.distributed.channels.message import Ends, Loopback, Message
from magicdec.executor.executor import Cancellation, check
from magicdec.hardware.timing import Clock
from magicdec.model.transformer import Transformer
from magicdec.pipeline.stage import StageLoop
from magicdec.pipeline.tracing import Spans
from magicdec.pipelined_run.channels import CancelBoard, Canceller
from magicdec.pipelined_run.drafter import Drafter, DraftLoop
from magicdec.pipelined_run.head import Drafted, Events, Head, forward, in_thread
from magicdec.pipelined_run.stage import CancellableStage, Predictions, RunPart
from magicdec.pipelined_speculation.messages import Launch
from magicdec.pipelined_speculation.options import Options
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.request import Moves, Request


@dataclass
class Served:
    """What each stage and the drafter did, the scheduler that decided it, what the drafter gave,
    and when each request got its lane. `first_run` is the number of the scheduler's first run."""

    scheduler: PipelinedScheduler
    stages: list[Spans]
    head: Spans
    drafts: Spans
    drafted: list[Drafted]
    moves: dict[int, Moves]
    first_run: int


def serve(
    parts: Sequence[RunPart],
    drafter: Drafter,
    options: Options,
    requests: Sequence[Request],
    prefill_chunk: int | None = None,
    board: CancelBoard | None = None,
    before: Sequence[Request] = (),
    clock: Clock | None = None,
) -> Served:
    """Serve `requests` to their end. The same head serves `before` first, with the same options."""
    board, events = board or CancelBoard(), Events()
    channels = [Loopback() for _ in range(len(parts) + 1)]
    asks, answers = Loopback(), Loopback()
    spans, of_head, of_drafts = [Spans() for _ in parts], Spans(), Spans()
    loops: list[Callable[[], None]] = [DraftLoop(drafter, asks, answers, of_drafts).serve]
    for part, (inbound, outbound), of_stage in zip(parts, pairwise(channels), spans, strict=True):
        stage = CancellableStage(part, board)
        loops.append(StageLoop(stage, Ends(inbound, outbound), of_stage).serve)
    threads = [in_thread(loop, events) for loop in loops]
    threads += [forward(channels[-1], True, events), forward(answers, False, events)]
    head = Head(channels[0], Canceller(board), asks, events, of_head, clock)
    if before:
        head.serve(PipelinedScheduler(options, prefill_chunk), before)
    first_run, scheduler = head.first_run, PipelinedScheduler(options, prefill_chunk)
    head.serve(scheduler, requests)
    head.close()
    for thread in threads:
        thread.join()
    return Served(
        scheduler, spans, of_head, of_drafts, head.drafted, head.moves, first_run
    )  # fmt: skip


@dataclass
class FakePart:
    """A stage without a model. `wait(run, layer)` is called before each layer, and `computed(run)`
    after the last. Behind position p comes token p + 1."""

    num_layers: int
    is_last: bool
    wait: Callable[[int, int], None] = lambda run, layer: None
    computed: Callable[[int], None] = lambda run: None

    def prepare(self, launch: Launch) -> None:
        """There is no cache."""

    def compute(
        self, launch: Launch, message: Message, cancellation: Cancellation
    ) -> Tensor | Predictions | None:
        for layer in range(self.num_layers):
            self.wait(message.run, layer)
            check(cancellation, layer)
        self.computed(message.run)
        if not self.is_last:
            return None
        shown = launch.positions[launch.num_rows - launch.num_outputs :]
        return Predictions([p + 1 for p in shown], [0.0] * len(shown))


def divide(model: Transformer, num_stages: int) -> list[Transformer]:
    """The model as stages of about equal numbers of layers, the last with the rest."""
    config, weights, stages = model.config, model.state_dict(), []
    each = config.num_layers // num_stages
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        layers = range(stage * each, config.num_layers if is_last else (stage + 1) * each)
        part = Transformer(config, layers=layers)
        own = {name: weights[whole_name(name, layers.start)] for name in part.state_dict()}
        part.load_state_dict(own)
        stages.append(part.requires_grad_(False).eval())
    return stages


def whole_name(name: str, first_layer: int) -> str:
    """The name in the whole model of a parameter of a part that begins with that layer."""
    first, *rest = name.split(".")
    if first != "blocks":
        return name
    return ".".join([first, str(int(rest[0]) + first_layer), *rest[1:]])
