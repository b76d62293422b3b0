"""What a ring shows of its time: the spans of its stages, the queues between them, and charts."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from conftest import TINY, make_requests, make_runner
from fake_clock import FakeClock
from test_record import run_records
from test_recurrent_order import CHUNK, LIMITS, OrderedRing

from magicdec.bench.timeline import (
    HEAD,
    PROMPT,
    STAGE_LOOKS,
    ServedGroup,
    decoding_window,
    served_groups,
    stages_panel,
    trace_events,
)
from magicdec.distributed.channels.message import Ends, Kind, Loopback, Message, Traffic
from magicdec.distributed.tensor_parallel import Shard
from magicdec.runner.request import Request
from magicdec.systems.mdi_llm.details import uses_of
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.stages import clocks
from magicdec.systems.stages.clocks import Ahead
from magicdec.systems.stages.emulation import EmulatedTime, SleepingModel
from magicdec.systems.stages.spans import Span, SpanKind, Spans
from magicdec.systems.stages.stage import StageLoop
from magicdec.systems.system import PassTrace


def served() -> tuple[RecurrentPipeline, list[Request]]:
    """Five samples of two chunks and four tokens each, three of them in flight."""
    model = SleepingModel(TINY, Shard(), range(1), True, 0.0, torch.zeros(1), EmulatedTime())
    stage = Stage(make_runner(model, 3, 60), is_last=False)
    ring = OrderedRing()
    pipeline = RecurrentPipeline(stage, Ends(ring, ring), 3, 1, LIMITS, CHUNK)
    requests = make_requests([(5,) * 12] * 5, 4)
    pipeline.serve(requests)
    return pipeline, requests


def test_the_first_stage_notes_its_spans_and_whose_they_are() -> None:
    pipeline, requests = served()
    stages = pipeline.spans.of(SpanKind.STAGE)
    heads = pipeline.spans.of(SpanKind.HEAD)
    assert [span.run for span in stages] == list(range(5 * (2 + 3)))
    assert [span.run for span in heads] == [-1, *range(5 * (2 + 3))]
    assert [pipeline.samples.count([request.request_id]) for request in requests] == [5] * 5
    assert len(pipeline.prompts) == 2 * 5
    assert all(a.end_s <= b.begin_s for spans in (stages, heads) for a, b in pairwise(spans))
    inside = [s for s in stages if any(h.begin_s <= s.begin_s <= s.end_s <= h.end_s for h in heads)]
    assert inside == stages, "its layers are a part of the head's work"


def test_queues_by_the_times_of_both_sides() -> None:
    """A message is queued from its sending until it is taken: four seconds on the way to the second
    stage, and two on the way home."""
    first = Spans()
    second = Spans()
    for run in range(3):
        first.append(Span(SpanKind.STAGE, run, 10.0 + run, 10.5 + run))
        second.append(Span(SpanKind.STAGE, run, 14.5 + run, 15.0 + run))
    for run in (-1, 0, 1, 2):
        first.append(Span(SpanKind.HEAD, run, 17.0 + run, 17.25 + run))
    sent = [Traffic(8, 320), Traffic(4, 640)]
    uses = uses_of([first, second], sent, {0, 1})
    assert [use.queued_s for use in uses] == [3 * 2.0, 3 * 4.0]
    links_s = [list(use.links_s) for use in uses_of([first, second], sent, {1, 2})]
    assert links_s == [[], [4.0]], "the others find a busy stage"
    assert uses[1].total_s == 19.25 - 14.5 and uses[1].queue_depth == 12.0 / (19.25 - 14.5)
    assert [(use.num_sent, use.num_bytes) for use in uses] == sent
    (alone,) = uses_of([first], sent[:1], {0, 1})
    assert alone.queued_s == sum((17.0 + run) - (10.5 + run) for run in range(3))


def make_trace(num_samples: int = 3) -> PassTrace:
    """Two stages whose messages take a second each."""
    count = 2 * num_samples
    spans = [
        [Span(SpanKind.STAGE, i, 100.0 + s + i, 101.0 + s + i) for i in range(count)]
        for s in range(2)
    ]
    spans[0] += [Span(SpanKind.HEAD, i, 102.0 + i, 102.25 + i) for i in range(count)]
    samples = {i: [i % num_samples] for i in range(count)}
    return PassTrace(["stage 0", "stage 1"], spans, samples, frozenset(range(num_samples)))


def test_a_chart_has_a_row_for_each_stage() -> None:
    trace = make_trace()
    panel = stages_panel("ring", trace, 60e3)
    assert list(panel.rows) == ["stage 0", "stage 1"] and (panel.begin_s, panel.end_s) == (0, 7.25)
    first = [bar for bar in panel.bars if bar.row == 0 and bar.text]
    assert [(bar.begin_s, bar.text) for bar in first] == [
        (0.0, "0"),
        (1.0, "1"),
        (2.0, "2"),
        (3.0, "0"),
        (4.0, "1"),
        (5.0, "2"),
    ]
    assert [bar.look.hatch for bar in first[:4]] == [STAGE_LOOKS[PROMPT].hatch] * 3 + [""]
    assert sum(bar.look == STAGE_LOOKS[HEAD] for bar in panel.bars) == 6
    late = replace(
        trace,
        spans=[
            [
                replace(span, begin_s=span.begin_s + 20, end_s=span.end_s + 20)
                if span.begin_s >= 103
                else span
                for span in spans
            ]
            for spans in trace.spans
        ],
        clock_error_s=0.01,
    )
    begin_s, end_s = decoding_window(late, None)
    assert begin_s == 124 - 60 / 4 and end_s == max(s.end_s for spans in late.spans for s in spans)
    assert "clocks within 10.00 ms" in stages_panel("ring", late, None).title


def test_a_trace_has_an_event_for_each_span() -> None:
    trace = make_trace()
    events = trace_events([ServedGroup("ring", 0, [], trace)])
    names = [metadata["args"] for metadata in events if metadata["ph"] == "M"]
    assert names == [{"name": f"ring: {row}"} for row in ("requests", "stage 0", "stage 1")]
    event = next(e for e in events if e["name"] == "stage 1" and e["pid"] == 2)
    assert (event["ph"], event["ts"], event["dur"]) == ("X", 2e6, 1e6)
    assert len(events) == 3 + 3 * 6


def test_a_trace_has_every_repeat_with_its_own_stages() -> None:
    """The requests and stages of each are processes of their own, whose time begins at 0."""
    record, _ = run_records()
    first = make_trace()
    second = replace(
        first,
        spans=[
            [replace(span, begin_s=span.begin_s + 50, end_s=span.end_s + 50) for span in spans[1:]]
            for spans in first.spans
        ],
    )
    groups = served_groups([record], [[first, second]])
    assert [(group.name, len(group.requests)) for group in groups] == [
        ("static, repeat 1", 1),
        ("static, repeat 2", 1),
    ]
    assert [group.requests for group in groups] == [[request] for request in record.requests]
    events = trace_events(groups)
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]  # type: ignore[index]
    row_names = ("requests", "stage 0", "stage 1")
    assert names == [f"static, repeat {n}: {row}" for n in (1, 2) for row in row_names]
    counts = [sum(e["pid"] == pid and e["ph"] == "X" for e in events) for pid in range(6)]
    assert counts[1:3] == [len(spans) for spans in first.spans]
    assert counts[4:6] == [len(spans) for spans in second.spans]
    begins = [min(e["ts"] for e in events if e["pid"] == pid and e["ph"] == "X") for pid in (1, 4)]  # type: ignore[type-var]
    assert begins == [0.0, 0.0]
    (alone,) = served_groups(
        [replace(record, groups=record.groups[:1], requests=record.requests[:1])], [[None]]
    )
    assert alone.name == "static"


class Passing:
    """Takes so many seconds for each message, and passes it on."""

    what: ClassVar[SpanKind] = SpanKind.STAGE

    def __init__(self, clock: FakeClock, seconds: list[float]) -> None:
        self.clock = clock
        self.seconds = iter(seconds)

    def answer(self, message: Message) -> tuple[Message, int | None]:
        self.clock.advance(next(self.seconds))
        return message, None if message.kind is Kind.FREE else 3


def test_a_stage_between_others_has_a_span_from_taking_to_sending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What frees rows has none, since it belongs to no run."""
    inbound = Loopback()
    clock = FakeClock()
    spans = Spans()
    monkeypatch.setattr("time.perf_counter", clock)
    begin_s = clock.now
    for run, kind in enumerate((Kind.HIDDEN, Kind.FREE, Kind.VOID, Kind.END)):
        inbound.send(Message(kind, run))
    StageLoop(Passing(clock, [1.0, 0.5, 1.5]), Ends(inbound, Loopback()), spans).serve()
    assert list(spans) == [
        Span(SpanKind.STAGE, 0, begin_s, begin_s + 1.0, 3),
        Span(SpanKind.STAGE, 2, begin_s + 1.5, begin_s + 3.0, 3),
    ]


def test_a_clock_is_compared_by_the_fastest_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other clock is 50 s ahead. Messages take 3 s there and 1 s back, but once 0.25 s."""
    clock = FakeClock()
    slow = [3.0, 1.0]
    ways = iter(slow * 7 + [0.25, 0.25] + slow * (clocks.ROUNDS - 8))

    def receive(answer: torch.Tensor, rank: int) -> None:
        answer[0] = clock.now + 50.0
        clock.advance(next(ways))

    exchange = SimpleNamespace(send=lambda answer, rank: clock.advance(next(ways)), recv=receive)
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(clocks, "dist", exchange)
    assert clocks.compare_clocks(0, 2) == [Ahead(), Ahead(50.0, 0.25)]


def test_spans_of_another_host_are_converted_to_the_clock_of_the_first_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = Spans(
        [Span(SpanKind.STAGE, 7, 102.5, 103.0, 3), Span(SpanKind.DRAFT, 2, 103.0, 103.25)]
    )
    ours = Spans([Span(SpanKind.LAUNCH, 7, 1.0, 1.0, 2)])
    aheads = [Ahead(), Ahead(100.0)]
    monkeypatch.setattr(clocks, "all_gather_values", lambda own, kind, size: [own, theirs])
    expected = [Span(SpanKind.STAGE, 7, 2.5, 3.0, 3), Span(SpanKind.DRAFT, 2, 3.0, 3.25, 0)]
    assert [list(gather_span) for gather_span in clocks.gather_spans(ours, aheads)] == [
        list(ours),
        expected,
    ]
