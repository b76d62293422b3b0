"""How the stages of a pipeline spend their time, under a fake clock: every wait counts as one from
the first message on, also before the first that decodes, and work counts until it is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import TINY, make_requests, make_runner
from fake_clock import Clock, Device
from test_pipelined_parts import CHAIN
from test_recurrent_order import CHUNK, LIMITS, Ring
from threaded_pipeline import FakePart
from torch import Tensor

from magicdec.distributed.channels.connect import RingEnds
from magicdec.distributed.channels.message import Kind, Message
from magicdec.distributed.tensor_parallel import Shard
from magicdec.executor.executor import Cancellation
from magicdec.model.transformer import Transformer
from magicdec.pipeline import speculation, stage
from magicdec.pipeline.emulation import EmulatedStage
from magicdec.pipeline.recurrent import RecurrentPipeline
from magicdec.pipeline.speculation import Speculation
from magicdec.pipeline.stage import VERIFY, WANTED
from magicdec.pipeline.tracing import Ahead, CountingEnds, Span, Spans, What, uses_of
from magicdec.pipelined_run import stage as pipelined_stage
from magicdec.pipelined_run.channels import CancelBoard
from magicdec.pipelined_run.layout import Layout
from magicdec.pipelined_run.measured.measure import observe
from magicdec.pipelined_run.measured.metrics import pipeline_use
from magicdec.pipelined_run.passes import Outcome
from magicdec.pipelined_run.stage import Predictions, StageLoop
from magicdec.pipelined_speculation.messages import Launch
from magicdec.pipelined_speculation.options import Counts
from magicdec.serving.metrics import StepCounts

STAGE_S, LINK_S = 0.5, 0.25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Sleeping takes no time but on this clock."""
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr("time.sleep", clock.advance)
    return clock


@dataclass
class Scripted:
    """Both ends of a rank. Each message comes so many seconds after the rank began to wait, and
    what is sent takes LINK_S."""

    clock: Clock
    arrivals: deque[tuple[float, Message]]
    sent: list[Message] = field(default_factory=list)
    num_bytes = 0

    def receive(self) -> Message:
        wait_s, message = self.arrivals.popleft()
        self.clock.advance(wait_s)
        return message

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self.clock.advance(LINK_S)

    def close(self) -> None:
        """There is nothing to wait for."""


def scripted(clock: Clock, arrivals: Iterable[tuple[float, Message]]) -> tuple[Scripted, RingEnds]:
    ends = Scripted(clock, deque(arrivals))
    return ends, RingEnds(ends, ends)


def hidden(num_tokens: int, status: int, words: tuple[int, ...] = (0,)) -> Message:
    payload = torch.zeros(1, num_tokens, TINY.hidden_size)
    return Message(Kind.HIDDEN, 0, status, words, payload)


# The first chunk of a prompt, its last one, a decoded token, rows that drafts follow, and the end.
ARRIVALS = [
    (9.0, hidden(8, 0)), (2.0, hidden(4, WANTED)), (1.0, hidden(1, WANTED)),
    (4.0, hidden(3, VERIFY, (0, 13))), (0.25, Message(Kind.FREE, words=(0,))),
    (0.5, Message(Kind.END)),
]  # fmt: skip
WAITS_S = 2.0 + 1.0 + 4.0 + 0.25 + 0.5  # all but the first


def make_stage(is_first: bool = False, num_rows: int = 1) -> EmulatedStage:
    layers = range(1) if is_first else range(1, 2)
    model = Transformer(TINY, Shard(), layers, has_ends=is_first).eval()
    return EmulatedStage(make_runner(model, num_rows, 60), not is_first, seconds=STAGE_S)


def test_another_stage_waits_from_its_first_message_on(clock: Clock) -> None:
    """The last stage sends VOID for the first chunk, and does not pass on what frees rows."""
    spent, (ends, ring) = make_stage(), scripted(clock, ARRIVALS)
    spent.serve(ring)
    assert [message.kind for message in ends.sent] == [
        *(Kind.VOID, Kind.HIDDEN, Kind.HIDDEN, Kind.HIDDEN, Kind.END),
    ]
    assert spent.occupancy.waiting_s == WAITS_S
    assert spent.occupancy.total_s == WAITS_S + 4 * (STAGE_S + LINK_S)
    assert list(spent.occupancy.decodes_s) == [STAGE_S + LINK_S] * 2


@dataclass
class Distant(Ring):
    """Messages come home LINK_S after the first stage began to wait for them."""

    clock: Clock

    def __post_init__(self) -> None:
        super().__init__()

    def receive(self) -> Message:
        self.clock.advance(LINK_S)
        return super().receive()


def first_stage(clock: Clock) -> tuple[EmulatedStage, CountingEnds]:
    """Five samples of two chunks and four tokens each, of which two are in flight."""
    first, ring = make_stage(is_first=True, num_rows=2), Distant(clock)
    counting = CountingEnds(RingEnds(ring, ring), is_first=True)
    counting.restart(has_spans=True)
    pipeline = RecurrentPipeline(first, counting.ends, 2, 1, LIMITS, CHUNK)
    pipeline.on_send = counting.begin
    pipeline.serve(make_requests([(5,) * 12] * 5, 4))
    return first, counting


NUM_MESSAGES = 5 * (2 + 3)


def test_the_first_stage_waits_for_prompts_too(clock: Clock) -> None:
    spent = first_stage(clock)[0].occupancy
    assert spent.waiting_s == NUM_MESSAGES * LINK_S
    assert spent.total_s == NUM_MESSAGES * (LINK_S + STAGE_S)
    # Of the three messages of a sample that decode, the last is followed by the next sample's
    # prompt, and does not count; or by nothing, as in the last sample of each lane.
    assert sorted(spent.decodes_s) == [0.0] * 2 + [STAGE_S] * 5 * 2


def test_the_spans_of_the_first_stage_are_its_work_alone(clock: Clock) -> None:
    begin_s, (_, counting) = clock.now, first_stage(clock)
    spans = counting.traffic.spans
    assert spans is not None
    stages = spans.intervals(What.STAGE)
    assert [end - begin for begin, end in stages] == [STAGE_S] * NUM_MESSAGES
    assert stages[0][0] == begin_s
    assert sum(end - begin for begin, end in spans.intervals(What.HEAD)) == 0.0


def test_a_message_is_queued_from_its_sending_until_it_is_taken(clock: Clock) -> None:
    """It is sent when the sender begins to send."""
    sender, taker = (CountingEnds(scripted(clock, [(1.0, hidden(1, 1))])[1], True) for _ in "ab")
    for each in (sender, taker):
        each.restart(has_spans=False)
    sender.ends.outbound.send(hidden(1, 1))
    taker.ends.inbound.receive()
    sides = [
        [1.0, 0.0, 0.0, 0, each.traffic.num_sent, each.traffic.sent_s, each.traffic.num_taken,
         each.traffic.taken_s]
        for each in (sender, taker)
    ]  # fmt: skip
    assert uses_of(sides, [Ahead(), Ahead()])[1].queued_s == LINK_S + 1.0


@pytest.fixture(params=["cpu", "cuda"], ids=["at_once", "meanwhile"])
def device(request: pytest.FixtureRequest, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Device:
    """What `wait_for_stream` waits for."""
    device = Device(request.param, clock)
    for module in (stage, speculation, pipelined_stage):
        monkeypatch.setattr(module, "wait_for_stream", lambda of: device.wait())
    return device


@dataclass
class LaunchedStage(EmulatedStage):
    """Computes on a device."""

    device: Device = field(default_factory=lambda: Device("cpu"))

    def compute(self, x: Tensor, rows: Sequence[int], last_only: bool) -> Tensor:
        self.device.launch(STAGE_S)
        return super().compute(x, rows, last_only)


def test_a_message_that_decodes_takes_until_the_device_is_done(
    clock: Clock, device: Device
) -> None:
    launched = LaunchedStage(make_stage().runner, is_last=True, device=device)
    launched.serve(scripted(clock, ARRIVALS)[1])
    assert list(launched.occupancy.decodes_s) == [STAGE_S + LINK_S] * 2


def test_drafting_takes_until_the_device_is_done(device: Device) -> None:
    drafter = SimpleNamespace(draft_kv=None, admit=lambda requests: device.launch(STAGE_S))
    drafting = Speculation(make_stage(is_first=True).runner, cast(Any, drafter), 3)
    drafting.admit(make_requests([(5,)], 4), [0])
    assert drafting.counts.draft_s == STAGE_S


@dataclass
class LaunchedPart(FakePart):
    """A stage of pipelined speculation that computes on a device."""

    device: Device = field(default_factory=lambda: Device("cpu"))

    def compute(
        self, launch: Launch, message: Message, cancellation: Cancellation
    ) -> Tensor | Predictions:
        self.device.launch(STAGE_S)
        return super().compute(launch, message, cancellation)


def runs(first: int, num_runs: int, wait_s: float) -> Iterator[tuple[float, Message]]:
    for run in range(first, first + num_runs):
        yield wait_s, Message(Kind.HIDDEN, run, words=replace(CHAIN, run=run).to_words())


def served(clock: Clock, device: Device) -> list[Span]:
    """The spans of a stage that waits 2 s for each of two runs, and 4 s for each of two others."""
    arrivals = [*runs(0, 2, 2.0), *runs(2, 2, 4.0), (1.0, Message(Kind.END))]
    (ends, _), spans = scripted(clock, arrivals), Spans()
    part = LaunchedPart(3, is_last=False, device=device)
    StageLoop(part, ends, ends, CancelBoard(), spans).serve()
    return spans


def test_a_span_is_from_the_arrival_of_a_run_until_the_device_is_done(
    clock: Clock, device: Device
) -> None:
    begin_s, each_s = clock.now, STAGE_S + LINK_S
    arrived_s = [2.0, 4.0 + each_s, 8.0 + 2 * each_s, 12.0 + 3 * each_s]
    assert served(clock, device) == [
        Span(What.STAGE, run, begin_s + at_s, begin_s + at_s + STAGE_S, 3)
        for run, at_s in enumerate(arrived_s)
    ]


def test_a_rank_is_idle_from_the_first_token_on(clock: Clock) -> None:
    """Also before its first run: the requests have their first tokens at 1001 s and 1000 s, and the
    rank its first run at 1002 s. The last token comes in the middle of its last run."""
    first, second = make_requests([(9,), (9,)], 3)
    first.append([1], 1001.0)
    first.append([2, 3], 1014.5)
    second.append([1], 1000.0)
    second.append([2, 3], 1006.0)
    head = [Span(What.RESULT, run, 1019.0, 1019.0) for run in range(4)]
    outcome = Outcome(
        [first, second], StepCounts(), 0.0, spans=[head, served(clock, Device("cpu", clock))]
    )
    layout = Layout((range(0), range(3)), (0,))
    observed = observe(cast(Any, SimpleNamespace(layout=layout)), outcome)
    use = pipeline_use(observed, Counts(), has_drafts=False)
    assert use.idle_s == [14.5, 14.5 - 3.5 * STAGE_S]
    assert use.busy == [0.0, 3.5 * STAGE_S / 14.5]
