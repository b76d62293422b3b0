"""How the stages of a pipeline spend their time, under a fake clock: every wait counts as one from
the first message on, also before the first that decodes, and work counts until it is done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import TINY, make_requests, make_runner
from fake_clock import Device, FakeClock
from test_recurrent_order import CHUNK, LIMITS, OrderedRing
from threaded_pipeline import FakeStage
from torch import Tensor

from magicdec.distributed.channels.message import Ends, Kind, Message, Traffic
from magicdec.distributed.layout import PipelineLayout
from magicdec.distributed.tensor_parallel import Shard
from magicdec.runner.forward_batch import Cancellation
from magicdec.systems.mdi_llm import recurrent, ring_stage
from magicdec.systems.mdi_llm.details import StageUse, uses_of
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline, RingSpeculation
from magicdec.systems.mdi_llm.ring_stage import VERIFY, WANTED, Stage
from magicdec.systems.pipeinfer import run_stage
from magicdec.systems.pipeinfer.details import Observed, speculation_metrics
from magicdec.systems.pipeinfer.messages import RunLaunch
from magicdec.systems.pipeinfer.run_stage import CancelBoard
from magicdec.systems.pipeinfer.scheduler import Counts
from magicdec.systems.stages.emulation import EmulatedTime, SleepingModel
from magicdec.systems.stages.spans import Span, SpanKind, Spans
from magicdec.systems.stages.stage import StageLoop

STAGE_S = 0.5
LINK_S = 0.25


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Sleeping takes no time but on this clock."""
    clock = FakeClock()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr("time.sleep", clock.advance)
    return clock


@dataclass
class ScriptedStage:
    """Both ends of a rank. Each message comes so many seconds after the rank began to wait, and
    what is sent takes LINK_S."""

    clock: FakeClock
    arrivals: deque[tuple[float, Message]]
    sent: list[Message] = field(default_factory=list)
    traffic = Traffic()

    def receive(self) -> Message:
        wait_s, message = self.arrivals.popleft()
        self.clock.advance(wait_s)
        return message

    def send(self, message: Message) -> None:
        self.sent.append(message)
        self.clock.advance(LINK_S)

    def close(self) -> None:
        """There is nothing to wait for."""


def scripted(
    clock: FakeClock, arrivals: Iterable[tuple[float, Message]]
) -> tuple[ScriptedStage, Ends]:
    ends = ScriptedStage(clock, deque(arrivals))
    return ends, Ends(ends, ends)


def hidden(run: int, num_tokens: int, status: int, words: tuple[int, ...] = (0,)) -> Message:
    payload = torch.zeros(1, num_tokens, TINY.hidden_size)
    return Message(Kind.HIDDEN, run, status, words, payload)


# The first chunk of a prompt, its last one, a decoded token, rows that drafts follow, and the end.
ARRIVALS = [
    (9.0, hidden(0, 8, 0)),
    (2.0, hidden(1, 4, WANTED)),
    (1.0, hidden(2, 1, WANTED)),
    (4.0, hidden(3, 3, VERIFY, (0, 13))),
    (0.25, Message(Kind.FREE, words=(0,))),
    (0.5, Message(Kind.END)),
]
WAITS_S = 2.0 + 1.0 + 4.0 + 0.25 + 0.5  # all but the first


class RealTime(EmulatedTime):
    """Work counts from when it really begins."""

    def begin(self, seconds: float) -> None:
        self.due_s = time.perf_counter()


def make_stage(is_first: bool = False, num_rows: int = 1, seconds: float = STAGE_S) -> Stage:
    layers = range(1) if is_first else range(1, 2)
    model = SleepingModel(TINY, Shard(), layers, is_first, seconds, torch.zeros(1), RealTime())
    return Stage(make_runner(model, num_rows, 60), not is_first)


def use_of(spans: Spans, end_s: float, prompts: set[int]) -> StageUse:
    """The use of a second stage, if the head has the last run home at `end_s`."""
    first = Spans(
        Span(what, run, end_s, end_s)
        for what in (SpanKind.STAGE, SpanKind.HEAD)
        for run in range(len(spans))
    )
    return uses_of([first, spans], [Traffic()] * 2, prompts)[1]


def test_another_stage_waits_from_its_first_message_on(clock: FakeClock) -> None:
    """The last stage sends VOID for the first chunk, and does not pass on what frees rows."""
    (ends, ring) = scripted(clock, ARRIVALS)
    spans = Spans()
    StageLoop(make_stage(), ring, spans).serve()
    assert [message.kind for message in ends.sent] == [
        *(Kind.VOID, Kind.HIDDEN, Kind.HIDDEN, Kind.HIDDEN, Kind.END),
    ]
    use = use_of(spans, clock.now - LINK_S, {0, 1})
    assert use.waiting_s == WAITS_S + 4 * LINK_S, "what it sends is under way meanwhile"
    assert use.total_s == WAITS_S + 4 * (STAGE_S + LINK_S)
    assert use.decode_s == STAGE_S


def test_only_runs_that_decode_are_in_the_median(clock: FakeClock) -> None:
    spans = Spans(
        Span(SpanKind.STAGE, run, 0.0, seconds) for run, seconds in enumerate([9, 8, 1, 3])
    )
    assert use_of(spans, 9.0, {0, 1}).decode_s == 2.0
    assert use_of(spans, 9.0, {0, 1, 2, 3}).decode_s is None


@dataclass
class Distant(OrderedRing):
    """Messages come home LINK_S after the first stage began to wait for them."""

    clock: FakeClock

    def __post_init__(self) -> None:
        super().__init__()

    def receive(self) -> Message:
        self.clock.advance(LINK_S)
        return super().receive()


def first_stage(clock: FakeClock) -> RecurrentPipeline:
    """Five samples of two chunks and four tokens each, of which two are in flight."""
    first = make_stage(is_first=True, num_rows=2)
    ring = Distant(clock)
    pipeline = RecurrentPipeline(first, Ends(ring, ring), 2, 1, LIMITS, CHUNK)
    pipeline.serve(make_requests([(5,) * 12] * 5, 4))
    return pipeline


NUM_MESSAGES = 5 * (2 + 3)


def test_the_first_stage_waits_for_prompts_too(clock: FakeClock) -> None:
    spans = first_stage(clock).spans
    (use,) = uses_of([spans], [Traffic()], ())
    assert use.waiting_s == NUM_MESSAGES * LINK_S
    assert use.total_s == NUM_MESSAGES * (LINK_S + STAGE_S)
    # Of the three messages of a sample that decode, the last is followed by the next sample's
    # prompt, and does not count; or by nothing, as in the last sample of each lane.
    decoded = sorted(span.seconds for span in spans.of(SpanKind.HEAD) if span.value)
    assert decoded == [0.0] * 2 + [STAGE_S] * 5 * 2 and use.decode_s == STAGE_S


def test_the_spans_of_the_first_stage_are_its_work_alone(clock: FakeClock) -> None:
    begin_s = clock.now
    spans = first_stage(clock).spans
    stages = spans.of(SpanKind.STAGE)
    heads = spans.of(SpanKind.HEAD)
    assert [span.seconds for span in stages] == [STAGE_S] * NUM_MESSAGES
    assert stages[0].begin_s == begin_s
    assert sum(span.seconds for span in heads) == STAGE_S * NUM_MESSAGES


def test_a_message_is_queued_from_its_sending_until_it_is_taken(clock: FakeClock) -> None:
    """It is sent when the sender begins to send. Before the taker waits, the end is sent too."""
    sender = Spans()
    taker = Spans()
    for spans in (sender, taker):
        arrivals = [(1.0, hidden(0, 1, WANTED)), (0.0, Message(Kind.END))]
        StageLoop(make_stage(), scripted(clock, arrivals)[1], spans).serve()
    sender.append(Span(SpanKind.HEAD, 0, clock.now, clock.now))
    assert uses_of([sender, taker], [Traffic()] * 2, ())[1].queued_s == 2 * LINK_S + 1.0


@pytest.fixture(params=["cpu", "cuda"], ids=["at_once", "meanwhile"])
def device(
    request: pytest.FixtureRequest, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> Device:
    """What `wait_for_stream` waits for."""
    device = Device(request.param, clock)
    for module in (ring_stage, run_stage, recurrent):
        monkeypatch.setattr(module, "wait_for_stream", lambda _: device.wait())
    return device


@dataclass
class LaunchedStage(Stage):
    """Computes on a device."""

    device: Device = field(default_factory=lambda: Device("cpu"))

    def compute(
        self, x: Tensor, rows: Sequence[int], num_outputs: int | None, is_of_prompt: bool
    ) -> Tensor:
        self.device.launch(STAGE_S)
        return super().compute(x, rows, num_outputs, is_of_prompt)


def test_a_message_that_decodes_takes_until_the_device_is_done(
    clock: FakeClock, device: Device
) -> None:
    launched = LaunchedStage(make_stage(seconds=0.0).runner, is_last=True, device=device)
    spans = Spans()
    StageLoop(launched, scripted(clock, ARRIVALS)[1], spans).serve()
    assert [span.seconds for span in spans] == [STAGE_S] * 4


def test_drafting_takes_until_the_device_is_done(device: Device) -> None:
    drafter = SimpleNamespace(draft_kv=None, admit=lambda requests: device.launch(STAGE_S))
    drafting = RingSpeculation(make_stage(is_first=True).runner, cast(Any, drafter), 3)
    drafting.admit(make_requests([(5,)], 4), [0])
    assert drafting.counts.draft_s == STAGE_S


@dataclass
class LaunchedRuns(FakeStage):
    """A stage of pipelined speculation that computes on a device."""

    device: Device = field(default_factory=lambda: Device("cpu"))

    def compute(
        self,
        launch: RunLaunch,
        message: Message,
        cancellation: Cancellation | None,
        is_of_prompt: bool,
    ) -> Tensor:
        self.device.launch(STAGE_S)
        super().compute(launch, message, cancellation, is_of_prompt)
        return torch.zeros(1, launch.num_rows, 1)


def runs(first: int, num_runs: int, wait_s: float) -> Iterator[tuple[float, Message]]:
    for run in range(first, first + num_runs):
        launch = RunLaunch(run, 0, 1, True, 2, num_committed=4, first=5, tokens=(7, 8))
        yield wait_s, Message(Kind.HIDDEN, run, words=launch.to_words())


def served(clock: FakeClock, device: Device) -> Spans:
    """The spans of a stage that waits 2 s for each of two runs, and 4 s for each of two others."""
    arrivals = [*runs(0, 2, 2.0), *runs(2, 2, 4.0), (1.0, Message(Kind.END))]
    (_, ends) = scripted(clock, arrivals)
    spans = Spans()
    launched = LaunchedRuns(3, is_last=False, board=CancelBoard(), device=device)
    StageLoop(launched, ends, spans).serve()
    return spans


def test_a_span_is_from_the_arrival_of_a_run_until_the_device_is_done(
    clock: FakeClock, device: Device
) -> None:
    begin_s = clock.now
    each_s = STAGE_S + LINK_S
    arrived_s = [2.0, 4.0 + each_s, 8.0 + 2 * each_s, 12.0 + 3 * each_s]
    assert list(served(clock, device)) == [
        Span(SpanKind.STAGE, run, begin_s + at_s, begin_s + at_s + STAGE_S, 3)
        for run, at_s in enumerate(arrived_s)
    ]


def test_a_rank_is_idle_from_the_first_token_on(clock: FakeClock) -> None:
    """Also before its first run: the requests have their first tokens at 1001 s and 1000 s, and the
    rank its first run at 1002 s. The last token comes in the middle of its last run."""
    first, second = make_requests([(9,), (9,)], 3)
    first.append([1], 1001.0)
    first.append([2, 3], 1014.5)
    second.append([1], 1000.0)
    second.append([2, 3], 1006.0)
    head = [Span(SpanKind.RESULT, run, 1019.0, 1019.0) for run in range(4)]
    layout = PipelineLayout((range(0), range(3)), 0)
    spans = served(clock, Device("cpu", clock))
    observed = Observed.from_requests(layout, [head, spans], [first, second])
    use = speculation_metrics(observed, Counts(), has_drafts=False)
    assert use.idle_s == [14.5, 14.5 - 3.5 * STAGE_S]
    assert use.busy == [0.0, 3.5 * STAGE_S / 14.5]
