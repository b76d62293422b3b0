"""What a ring shows of its time: the spans of its stages, the queues between them, Gantt charts,
and tokens against time."""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, make_requests, make_runner
from fake_clock import Clock
from magicdec.pipeline.showing import (
    ALL_SAMPLES,
    EACH_SAMPLE,
    HEAD,
    LEGEND,
    MEMORY,
    PROMPT,
    RUN_COLUMNS,
    Curves,
    append_run,
    by_first,
    decoding_window,
    draw_ring,
    memory_label,
    panels_of,
    points_of,
)
from test_recurrent_order import CHUNK, LIMITS, Ring

from magicdec.distributed.channels.message import Ends, Kind, Loopback, Message, Traffic
from magicdec.distributed.tensor_parallel import Shard
from magicdec.memory.sampler import MemorySampler
from magicdec.model.transformer import Transformer
from magicdec.pipeline import tracing
from magicdec.pipeline.emulation import EmulatedStage
from magicdec.pipeline.recurrent import RecurrentPipeline
from magicdec.pipeline.stage import StageLoop
from magicdec.pipeline.tracing import Ahead, RingTrace, Span, Spans, What, uses_of, without
from magicdec.request import Request


def served() -> tuple[RecurrentPipeline, list[Request]]:
    """Five samples of two chunks and four tokens each, three of them in flight."""
    model = Transformer(TINY, Shard(), range(1), has_ends=True).eval()
    stage, ring = EmulatedStage(make_runner(model, 3, 60), is_last=False), Ring()
    pipeline = RecurrentPipeline(stage, Ends(ring, ring), 3, 1, LIMITS, CHUNK)
    requests = make_requests([(5,) * 12] * 5, 4)
    pipeline.serve(requests)
    return pipeline, requests


def test_the_first_stage_notes_its_spans_and_whose_they_are() -> None:
    pipeline, requests = served()
    stages, heads = pipeline.spans.of(What.STAGE), pipeline.spans.of(What.HEAD)
    assert [span.run for span in stages] == list(range(5 * (2 + 3)))
    assert [span.run for span in heads] == [-1, *range(5 * (2 + 3))]
    assert [pipeline.samples.count([request.request_id]) for request in requests] == [5] * 5
    assert sum(pipeline.are_prompts) == 2 * 5
    alone = without(heads, stages)
    every = sorted([*alone, *((span.begin_s, span.end_s) for span in stages)])
    assert all(begin <= end for begin, end in every)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(every))
    assert len(alone) == len(heads) + len(stages)


def test_queues_by_the_times_of_both_sides() -> None:
    """A message is queued from its sending until it is taken: four seconds on the way to the second
    stage, and two on the way home."""
    first, second = Spans(), Spans()
    for run in range(3):
        first._append(Span(What.STAGE, run, 10.0 + run, 10.5 + run))
        second._append(Span(What.STAGE, run, 14.5 + run, 15.0 + run))
    for run in (-1, 0, 1, 2):
        first._append(Span(What.HEAD, run, 17.0 + run, 17.25 + run))
    sent = [Traffic(8, 320), Traffic(4, 640)]
    uses = uses_of([first, second], sent, {2})
    assert [use.queued_s for use in uses] == [3 * 2.0, 3 * 4.0]
    assert uses[1].total_s == 19.25 - 14.5 and uses[1].queue_depth == 12.0 / (19.25 - 14.5)
    assert [(use.num_sent, use.num_bytes) for use in uses] == sent
    (alone,) = uses_of([first], sent[:1], {2})
    assert alone.queued_s == sum((17.0 + run) - (10.5 + run) for run in range(3))


def test_spans_are_those_that_were_added() -> None:
    every = [Span(What.STAGE, 2**40, 0.1, 0.3, 5), Span(What.HEAD, -1, 0.1 + 0.2, 1e9)]
    spans = Spans(every)
    assert list(spans) == every and spans[-1] == every[1] and spans[:1] == every[:1]
    assert len(spans) == 2 and spans.of(What.HEAD) == every[1:]
    with pytest.raises(IndexError):
        spans[2]


def make_trace(num_samples: int = 3) -> RingTrace:
    """Two stages whose messages take a second each."""
    count = 2 * num_samples
    stages = [[(100.0 + s + i, 101.0 + s + i) for i in range(count)] for s in range(2)]
    samples = [[i % num_samples] for i in range(count)]
    heads = [(102.0 + i, 102.25 + i) for i in range(count)]
    return RingTrace(stages, heads, samples, [i < num_samples for i in range(count)], 0.0)


def test_a_chart_has_a_row_for_each_stage_and_for_each_sample(tmp_path: Path) -> None:
    trace = make_trace()
    stages, samples = panels_of(trace, 100.0, 0.0, 4.5)
    assert list(stages.rows) == ["stage 0", "stage 1"]
    assert list(samples.rows) == ["sample 0", "sample 1", "sample 2"]
    of_first = [(bar.begin_s, bar.text) for bar in stages.bars if bar.row == 0 and bar.text]
    assert of_first == [(0.0, "0"), (1.0, "1"), (2.0, "2"), (3.0, "0"), (4.0, "1")]
    assert [bar.look.hatch for bar in stages.bars[:4]] == [LEGEND[PROMPT].hatch] * 3 + [""]
    assert sum(bar.look == LEGEND[HEAD] for bar in stages.bars) == 3
    of_sample = [(bar.begin_s, bar.text) for bar in samples.bars if bar.row == 0]
    assert of_sample == [(0.0, "0"), (3.0, "0"), (1.0, "1"), (4.0, "1")]
    assert decoding_window(trace) == (0.0, 60.0)
    stages_late = [[(b + 20, e + 20) if b >= 103 else (b, e) for b, e in of] for of in trace.stages]
    late = replace(trace, stages=stages_late)
    assert decoding_window(late) == (24 - 60 / 4, 24 - 60 / 4 + 60)
    later, _ = panels_of(late, 100.0, 23.5, 80.0)
    assert (later.begin_s, later.end_s) == (23.5, 80.0) and len(later.bars) < len(stages.bars)
    path = tmp_path / "new" / "chart.png"
    draw_ring("--plot", path, replace(trace, clock_error_s=0.01), None)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="--plot: 80 rows are too many to draw; at most 64"):
        draw_ring("--plot", path, make_trace(80), 1e9)


class Passing:
    """Takes so many seconds for each message, and passes it on."""

    def __init__(self, clock: Clock, seconds: list[float]) -> None:
        self.clock, self.seconds = clock, iter(seconds)

    def answer(self, message: Message) -> tuple[Message, int]:
        self.clock.advance(next(self.seconds))
        return message, 3


def test_a_stage_between_others_has_a_span_from_taking_to_sending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What frees rows has none, since it belongs to no run."""
    inbound, clock, spans = Loopback(), Clock(), Spans()
    monkeypatch.setattr("time.perf_counter", clock)
    begin_s = clock.now
    for run, kind in enumerate((Kind.HIDDEN, Kind.FREE, Kind.VOID, Kind.END)):
        inbound.send(Message(kind, run))
    StageLoop(Passing(clock, [1.0, 0.5, 1.5]), Ends(inbound, Loopback()), spans).serve()
    assert list(spans) == [
        Span(What.STAGE, 0, begin_s, begin_s + 1.0, 3),
        Span(What.STAGE, 2, begin_s + 1.5, begin_s + 3.0, 3),
    ]


def test_curves_of_several_runs_share_a_plot(tmp_path: Path) -> None:
    curves = Curves("--curves", tmp_path / "plots", "/some/where/TinyLlama-1.1B/", 2)
    requests = make_requests([(5,)] * 2, 2)
    for request, times in zip(requests, ([10.5, 12.0], [10.75, 11.0]), strict=True):
        request.token_times_s = list(times)
    assert points_of(requests, 10.0) == [(0.0, 0), (0.5, 1), (0.75, 2), (1.0, 3), (2.0, 4)]
    for num_nodes in (12, 1, 3):
        curves.write(num_nodes, requests, [], 10.0)
    replace(curves, model="other").write(2, requests, [], 10.0)
    assert curves.numbers_of_nodes(ALL_SAMPLES) == [1, 3, 12]
    lines = curves.path(ALL_SAMPLES, 3).read_text().splitlines()
    assert (
        curves.path(ALL_SAMPLES, 3).name == "tokens_time_samples_3nodes_TinyLlama-1.1B_2samples.csv"
    )
    assert lines[:2] == ["0.000000,0", "0.500000,1"] and len(lines) == 5
    each = [line.split(",") for line in curves.path(EACH_SAMPLE, 3).read_text().splitlines()]
    assert each[0] == ["sample", "tokens", "time_s"]
    rows = curves.rows(curves.path(EACH_SAMPLE, 3), has_head=True)
    assert by_first(rows) == [[(1, 0.5), (2, 2.0)], [(1, 0.75), (2, 1.0)]]
    curves.draw_tokens()
    assert curves.plot("time_vs_tokens").read_bytes().startswith(b"\x89PNG")
    curves.path(EACH_SAMPLE, 12).unlink()
    with pytest.raises(ValueError, match=r"--curves .*12nodes.* cannot be read"):
        curves.draw()


def test_memory_of_ranks_is_sampled_and_drawn(tmp_path: Path) -> None:
    before = threading.active_count()
    with MemorySampler(torch.device("cpu"), interval_s=0.001) as sampler:
        held = mmap.mmap(-1, 64 << 20)  # the C library may take a bytearray from what it kept
        held.write(b"x" * len(held))
        while len(sampler.samples) < 2 * 4:
            time.sleep(0.001)
    assert threading.active_count() == before, "the thread ends with the block"
    times_s, sizes = sampler.samples[::2], sampler.samples[1::2]
    assert list(times_s) == sorted(times_s) and max(sizes) - sizes[0] > 0.9 * len(held)
    curves = Curves("--curves", tmp_path, "demo", 2)
    requests = make_requests([(5,)] * 2, 2)
    for request in requests:
        request.token_times_s = [11.0, 12.0]
    ranks = [torch.tensor([[9.0, 2e6], [11.0, 3.5e6]]), torch.tensor([[9.5, 1e6]])]
    for num_nodes in (1, 2):
        curves.write(num_nodes, requests, ranks[:num_nodes], 10.0)
    lines = curves.path(MEMORY, 2).read_text().splitlines()
    assert curves.path(MEMORY, 2).name == "memory_2nodes_demo_2samples.csv"
    assert lines == [
        *("rank,time_s,memory_mb", "0,-1.000,2.000", "0,1.000,3.500", "1,-0.500,1.000"),
    ]
    found = by_first(curves.rows(curves.path(MEMORY, 2), has_head=True))
    assert found == [[(-1.0, 2.0), (1.0, 3.5)], [(-0.5, 1.0)]]
    assert memory_label(2, 0, found[0]) == "2 nodes, rank 0: at most 4 MB"
    curves.draw()
    assert curves.plot("memory_vs_time").read_bytes().startswith(b"\x89PNG")


def test_run_times_are_appended_below_one_head(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    append_run(path, ("2026-01-02 03:04:05", 3, 6, 210, "1.500000", 2))
    append_run(path, ("2026-01-02 03:04:06", 3, 6, 210, "1.250000", 3))
    head, first, second = path.read_text().splitlines()
    assert head.split(",") == list(RUN_COLUMNS)
    assert first.endswith(",3,6,210,1.500000,2") and second.endswith(",1.250000,3")


def test_a_clock_is_compared_by_the_fastest_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other clock is 50 s ahead. Messages take 3 s there and 1 s back, but once 0.25 s."""
    clock, slow = Clock(), [3.0, 1.0]
    ways = iter(slow * 7 + [0.25, 0.25] + slow * (tracing.ROUNDS - 8))

    def receive(answer: torch.Tensor, rank: int) -> None:
        answer[0] = clock.now + 50.0
        clock.advance(next(ways))

    exchange = SimpleNamespace(send=lambda answer, rank: clock.advance(next(ways)), recv=receive)
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(tracing, "dist", exchange)
    assert tracing.compare_clocks(0, [1]) == {1: Ahead(50.0, 0.25)}


def test_spans_of_another_host_are_converted_to_the_clock_of_the_first_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = Spans([Span(What.STAGE, 7, 102.5, 103.0, 3), Span(What.DRAFT, 2, 103.0, 103.25)])
    ours, clocks = Spans([Span(What.LAUNCH, 7, 1.0, 1.0, 2)]), [Ahead(), Ahead(100.0)]
    monkeypatch.setattr(tracing, "all_gather", lambda own, world_size: [own, theirs])
    expected = [Span(What.STAGE, 7, 2.5, 3.0, 3), Span(What.DRAFT, 2, 3.0, 3.25, 0)]
    assert [list(each) for each in tracing.gather_spans(ours, clocks)] == [list(ours), expected]
