"""Requests in flight of a closed loop: at most so many at once in every kind of system, another as
soon as one ends, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import make_requests
from fake_clock import VirtualClock
from identities import check_metrics
from serving_command import parse_as
from test_batching import LENGTHS, batches, lone_outputs, make_batching
from test_recurrent_order import serve as serve_in_ring
from threaded_pipeline import FakeStage
from threaded_pipeline import serve as serve_in_threads

from magicdec.cli.serve import COMMANDS
from magicdec.config.sections import SamplingSection
from magicdec.distributed.groups import Group, Launch
from magicdec.engine.arrivals import Arrivals
from magicdec.engine.scheduler import StepCounts
from magicdec.hardware.timing import GroupClock
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import read_records
from magicdec.runner.request import Request, SamplingParams
from magicdec.systems.modes import Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.pipeinfer.options import Options
from magicdec.systems.pipeinfer.scripted_drafter import ScriptedPathDrafter
from magicdec.systems.system import make_requests as requests_of

ALONE = Launch(0, 1, 0, 1)
CPU = torch.device("cpu")
AT_ONCE = [1, 2, 3]


def most_in_flight(requests: Sequence[Request]) -> int:
    """The largest number of requests that have arrived and not ended, at any arrival."""
    ends_s = [end_s for r in requests if (end_s := r.finished_s) is not None]
    assert len(ends_s) == len(requests), "all have ended"
    return max(
        sum(r.arrived_s <= at_s < end_s for r, end_s in zip(requests, ends_s, strict=True))
        for at_s in {request.arrived_s for request in requests}
    )


def check_loop(requests: Sequence[Request], concurrency: int) -> None:
    """Request k + N arrives at the end that comes k-th, and not before."""
    ends_s = sorted(end_s for r in requests if (end_s := r.finished_s) is not None)
    begin_s = requests[0].arrived_s
    expected = [*[begin_s] * concurrency, *ends_s][: len(requests)]
    assert [request.arrived_s for request in requests] == expected
    assert most_in_flight(requests) == min(concurrency, len(requests))


def test_another_request_arrives_with_each_end() -> None:
    requests = [Request(i, (1,) * (i != 4), SamplingParams(1)) for i in range(6)]  # one is empty
    arrivals = Arrivals(requests, 3)
    assert arrivals.count(-5.0) == 3, "no clock decides"
    first, second, third = arrivals.take(2) + arrivals.take(9)
    assert arrivals.count(1e9) == 0 and arrivals.next_s == float("inf") and len(arrivals) == 3
    third.append([7], 2.0)
    first.append([7], 4.0)
    assert arrivals.known_s == [2.0, 4.0] and arrivals.next_s == 2.0
    assert arrivals.take(1) == [requests[3]] and arrivals.known_s == [4.0]
    second.append([7], 5.0)
    assert arrivals.take(9) == requests[4:] and not arrivals
    requests[3].append([7], 6.0)
    assert arrivals.take(9) == [], "the last ends have no follower"
    assert [r.arrived_s for r in requests] == [0, 0, 0, 2, 4, 5]


def test_the_engine_keeps_so_many_in_flight(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """With the tokens of lone runs. Requests wait where a mode has fewer than 3 rows."""
    torch.set_num_threads(1)  # as its command would
    batching = make_batching(tiny_checkpoint, tmp_path, 2)
    prompts = batching.run.workload.prompts
    shapes = batching.options.shapes
    expected = lone_outputs(batching)
    for concurrency, mode in product(AT_ONCE, ("sequential", "static", "dynamic", "inflight")):
        batching.clock = GroupClock(VirtualClock(1e-3), Group((0,), 0), CPU)
        observer = PassObserver(StepCounts(batching.now))
        requests = requests_of(prompts, shapes, batching.now(), SamplingSection())
        for request in requests:
            request.arrived_s = 0.0
        batching.serve(Pass(mode, False, concurrency=concurrency), requests, observer)
        assert [request.output_ids for request in requests] == expected, mode
        check_loop(requests, concurrency)
        counts = observer.counts
        rows = 1 if mode == "sequential" else min(2, concurrency)
        assert counts.num_in_flight <= rows * counts.num_steps
        if rows == 1 or mode == "inflight":  # no row is free before the last request
            longest = max(output for _, output in LENGTHS)
            assert counts.num_in_flight >= rows * (counts.num_steps - longest), mode


def test_a_batch_begins_with_all_that_are_in_flight() -> None:
    """Others cannot come, so that no batch waits for them; here no request ends."""
    for name in ("static", "dynamic"):
        assert batches(name, [0.0] * 2, 3, 5.0, concurrency=2) == [(0, [0, 1])]


@pytest.mark.parametrize("concurrency", AT_ONCE)
def test_a_ring_keeps_so_many_in_flight(concurrency: int) -> None:
    requests = make_requests([(5,) * 4] * 6, [2, 9, 4, 4, 7, 3])
    ring = serve_in_ring(
        Arrivals(requests, concurrency), num_lanes=3, lane_size=1, clock=VirtualClock()
    )
    assert [len(request.output_ids) for request in requests] == [2, 9, 4, 4, 7, 3]
    check_loop(requests, concurrency)
    assert max(ring.depths) == concurrency, "a message of each request is under way"


@pytest.mark.parametrize("concurrency", AT_ONCE)
def test_pipelined_speculation_keeps_so_many_in_flight(concurrency: int) -> None:
    lengths = [4, 9, 5, 6, 3]
    requests = make_requests([(5,) * 4] * 5, lengths)
    outputs = [list(range(4, 4 + count)) for count in lengths]
    drafter = ScriptedPathDrafter(outputs, [4] * 5, [[True, False] * 10] * 5, 0.9)
    ticks = iter(range(10**6))
    parts = [FakeStage(1, is_last) for is_last in (False, True)]
    options = Options(mode="pipeline+draft", gamma=2, lanes=3)
    arrivals = Arrivals(requests, concurrency)
    serve_in_threads(parts, drafter, options, arrivals, clock=lambda: float(next(ticks)))
    assert [request.output_ids for request in requests] == outputs
    check_loop(requests, concurrency)


def test_every_kind_of_mode_is_recorded_with_its_loop(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    words = [
        *("--model", str(tiny_checkpoint), "--dataset", str(text_file), "--dtype", "float32"),
        *("--device", "cpu", "--threads", "1", "--out", str(tmp_path / "out.jsonl")),
        *("--num_requests", "5", "--prefix_len", "uniform:5:20", "--gen_len", "uniform:2:9"),
        *("--ignore_eos", "--draft", "ngram", "--concurrency", "2"),
        *("--modes", "sequential", "inflight+draft", "ring", "ring+draft", "pipeline", "pipeinfer"),
    ]
    assert COMMANDS["serve"].parse(words, ALONE).run(words, ALONE) == 0
    records = list(read_records(tmp_path / "out.jsonl", PassRecord))
    assert len(records) == 6
    for record in records:
        assert (record.status, record.concurrency) == ("verified", 2), record.name
        assert check_metrics(record) == [], record.name
        assert record.name == f"{record.mode}, 2 at once" and record.arrival == "closed loop"
        ends_ms = sorted(request.finished_ms for request in record.requests)
        arrivals_ms = [request.arrival_ms for request in record.requests]
        assert arrivals_ms == pytest.approx([0.0, 0.0, *ends_ms[:3]]), record.name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--concurrency", "2", "--arrival", "burst"],
            "--arrival does nothing here: --concurrency says when requests arrive",
        ),
        (["--concurrency", "2", "2"], "--concurrency names 2 twice; name each once"),
        (["--concurrency", "0"], "--concurrency 0 is too small; it must be at least 1"),
        (["--concurrency", "2", "9"], "--concurrency 9 exceeds the 8 requests"),
    ],
)
def test_contradictions_are_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as refused:
        parse_as("serve", tmp_path, "--modes", "inflight", *words)
    assert message in str(refused.value)


def test_each_concurrency_is_a_pass_of_its_own(tmp_path: Path) -> None:
    words = "--modes", "sequential", "inflight", "--concurrency", "1", "4"
    options = parse_as("serve", tmp_path, *words).options
    names = [serving_pass.full_name for serving_pass in options.passes]
    assert names == [
        "sequential, 1 at once",
        "sequential, 4 at once",
        "inflight, 1 at once",
        "inflight, 4 at once",
    ]
    assert list(map(Pass.named, names)) == list(options.passes)
    settings = options.settings_of(options.passes[0])
    assert settings.rows(options, world_size=1) == 4 and {
        shape.arrival_ms for shape in options.shapes
    } == {0.0}
    described = options.describe()
    assert described["modes"] == ["sequential", "inflight"] and described["arrival"] == "burst"
