"""Pipelined speculation in the threads of one process: the parts of a target, a drafter and the
head, joined by local channels."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from magicdec.distributed.channels.message import Ends, Loopback, Message, words_of
from magicdec.engine.arrivals import Arrivals
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import Cancellation, Cancelled
from magicdec.runner.request import Moves, Request
from magicdec.systems.pipeinfer.head import Events, Head, Wires, forward, in_thread
from magicdec.systems.pipeinfer.messages import Candidate, RunLaunch
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.path_drafter import DraftRequest, PathDrafter, PathDraftHandler
from magicdec.systems.pipeinfer.run_stage import CancelBoard, Canceller, RunStage
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler
from magicdec.systems.stages.spans import Spans
from magicdec.systems.stages.stage import StageLoop


@dataclass
class ServedInThreads:
    """What each stage and the drafter did, the scheduler that decided it, what the drafter gave,
    and when each request got its lane. `first_run` is the number of the scheduler's first run."""

    scheduler: PipelinedScheduler
    stages: list[Spans]
    head: Spans
    drafts: Spans
    drafted: list[tuple[DraftRequest, Candidate | None]]
    moves: dict[int, Moves]
    first_run: int


@dataclass
class Noted:
    """Notes what `drafter` gives in each step, and for which path."""

    drafter: PathDrafter
    steps: list[tuple[DraftRequest, Candidate | None]] = field(default_factory=list)

    def propose(self, step: DraftRequest, text: list[int]) -> Candidate | None:
        candidate = self.drafter.propose(step, text)
        if step.path is not None:
            self.steps.append((step, candidate))
        return candidate


def drafted_in(steps: Sequence[tuple[DraftRequest, Candidate | None]]) -> list[tuple[Any, ...]]:
    """The request, the length of the text before the path, the path and its candidate."""
    return [
        (step.request, step.kept + len(step.new), step.path, candidate) for step, candidate in steps
    ]


def serve(
    stages: Sequence[RunStage],
    drafter: PathDrafter,
    options: Options,
    requests: Sequence[Request] | Arrivals,
    prefill_chunk: int | None = None,
    board: CancelBoard | None = None,
    before: Sequence[Request] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> ServedInThreads:
    """Serve `requests` to their end. A head before serves `before` through the same channels, with
    the same options."""
    board = board or CancelBoard()
    events = Events()
    noted = Noted(drafter)
    channels = [Loopback() for _ in range(len(stages) + 1)]
    asks = Loopback()
    answers = Loopback()
    spans = [Spans() for _ in stages]
    head_spans = Spans()
    draft_spans = Spans()
    drafts = StageLoop(PathDraftHandler(noted), Ends(asks, answers), draft_spans)
    loops: list[Callable[[], None]] = [drafts.serve]
    for stage, (inbound, outbound), stage_spans in zip(
        stages, pairwise(channels), spans, strict=True
    ):
        stage.board = board
        loops.append(StageLoop(stage, Ends(inbound, outbound), stage_spans).serve)
    threads = [in_thread(loop, events) for loop in loops]
    threads += [forward(channels[-1], True, events), forward(answers, False, events)]
    wires = Wires(launches=channels[0], canceller=Canceller(board), asks=asks)
    first_run = 0
    if before:
        earlier = PipelinedScheduler(options, prefill_chunk)
        Head(wires, events, head_spans, earlier, before).serve()
        first_run = earlier.counts.runs
        noted.steps.clear()
    scheduler = PipelinedScheduler(options, prefill_chunk)
    head = Head(wires, events, head_spans, scheduler, requests, first_run=first_run, clock=clock)
    head.serve()
    head.close()
    for thread in threads:
        thread.join()
    return ServedInThreads(
        scheduler, spans, head_spans, draft_spans, noted.steps, head.moves, first_run
    )


@dataclass
class FakeStage(RunStage):
    """A stage without a model. `wait(run, layer)` is called before each layer, and `computed(run)`
    after the last. Behind position p comes token p + 1."""

    num_layers: int
    is_last: bool
    wait: Callable[[int, int], None] = lambda run, layer: None
    computed: Callable[[int], None] = lambda run: None
    board: CancelBoard | None = None
    texts: None = None
    awaits_prompt: dict[int, bool] = field(default_factory=lambda: defaultdict(bool))

    def compute(
        self,
        launch: RunLaunch,
        message: Message,
        cancellation: Cancellation | None,
        is_of_prompt: bool,
    ) -> tuple[int, ...] | None:
        for layer in range(self.num_layers):
            self.wait(message.run, layer)
            if cancellation is not None and cancellation.is_set():
                raise Cancelled(layer)
        self.computed(message.run)
        if not self.is_last:
            return None
        shown = launch.positions[launch.num_rows - launch.num_outputs :]
        return (*(p + 1 for p in shown), *words_of([0.0] * len(shown)))


def divide(model: Transformer, num_stages: int) -> list[Transformer]:
    """The model as stages of about equal numbers of layers, the last with the rest."""
    config = model.config
    weights = model.state_dict()
    stages = []
    num_layers = config.num_layers // num_stages
    for stage in range(num_stages):
        is_last = stage == num_stages - 1
        layers = range(
            stage * num_layers, config.num_layers if is_last else (stage + 1) * num_layers
        )
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
