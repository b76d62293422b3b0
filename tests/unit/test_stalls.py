"""Steps that stalled: which are found and which are not, and that they do not move the speedup."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from identities import check_metrics
from synthetic_records import drawn
from synthetic_samples import pass_samples
from test_serving_metrics import finished

from magicdec.bench.report.frame import frame_of, report_rows
from magicdec.bench.report.page import stalls_line
from magicdec.bench.serving.metrics import ServingMetrics, serving_metrics
from magicdec.cli.records import table as table_command
from magicdec.engine.scheduler import StepCounts
from magicdec.records.metrics import (
    add_speedup,
    decode_metrics,
    speedups,
    step_metrics,
    total_speedups,
)
from magicdec.records.performance import Metrics
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.renewing import renewed
from magicdec.records.samples import PassSamples
from magicdec.records.stalls import FEWEST, PassSteps, TimedStep
from magicdec.records.table import stalls_in, table_of
from magicdec.runner.request import Moves, StepOutput
from magicdec.runner.step_plan import PrefillChunk, StepPlan
from magicdec.systems.observer import PassObserver

Step = tuple[float, int, int, int]
"""Milliseconds, forwards, draft tokens and rows."""
CPU = ROOT / "results" / "cpu" / "records.jsonl.gz"


def passed(*batches: Sequence[Step]) -> PassSamples:
    """A pass whose rows emit a token in each step."""
    return pass_samples(
        begin_ms=[0.0] * len(batches),
        sequence_ms=[[sum(ms for ms, *_ in batch)] for batch in batches],
        step_ms=[[ms for ms, *_ in batch] for batch in batches],
        num_forwards=[[forwards for _, forwards, _, _ in batch] for batch in batches],
        padded_gamma=[[drafted for _, _, drafted, _ in batch] for batch in batches],
        num_emitted=[[[1] * rows for *_, rows in batch] for batch in batches],
        sequence_tokens=[[sum(rows for *_, rows in batch)] for batch in batches],
    )


def steady(ms: float = 1.5, count: int = 32, spread: float = 0.02, seed: int = 0) -> list[Step]:
    """Steps of one kind whose times vary a little."""
    factors = np.exp(np.random.default_rng(seed).normal(0, spread, count))
    return [(ms * float(factor), 1, 0, 4) for factor in factors]


def with_stalls(steps: Sequence[Step], **times: float) -> list[Step]:
    """The steps with other times at places such as `at_5`."""
    found = list(steps)
    for place, ms in times.items():
        at = int(place.removeprefix("at_"))
        found[at] = (ms, *found[at][1:])
    return found


def places(samples: PassSamples) -> list[tuple[int, int]]:
    return [stall.place for stall in PassSteps.of(samples).stalls]


def test_steps_that_stalled_are_counted_beside_the_median_of_their_kind() -> None:
    batches = [steady(), with_stalls(steady(seed=1), at_3=98.0), with_stalls(steady(), at_30=6.0)]
    samples = passed(*batches)
    assert places(samples) == [(1, 3), (2, 30)]
    metrics = Metrics(bytes_read=0, **step_metrics(samples))
    assert (metrics.num_steps, metrics.stalled_steps) == (96, 2)
    assert metrics.stalled_ms == pytest.approx(98 + 6 - 2 * 1.5, abs=0.1)
    assert (
        stalls_in(metrics, metrics.num_steps)
        == "2 of 96 steps stalled (98 ms where the median is 1.5)"
    )
    assert metrics.median_step_ms == pytest.approx(1.5, rel=0.01)
    quiet = Metrics(bytes_read=0, **step_metrics(passed(steady())))
    assert (quiet.stalled_steps, quiet.stalled_ms, quiet.longest_stall_ms) == (0, 0.0, None)


def test_a_stalled_step_counts_as_the_median_in_the_speedup_and_in_full_in_the_total() -> None:
    ours = passed(*[steady(1.2, seed=seed) for seed in range(5)])
    quiet = [steady(seed=9 + seed) for seed in range(5)]
    baseline = passed(*quiet)
    disturbed = passed(with_stalls(quiet[0], at_7=98.0), *quiet[1:])
    before = speedups(baseline, ours)
    after = speedups(disturbed, ours)
    assert after == pytest.approx(before, rel=1e-3)
    assert total_speedups(disturbed, ours)[1:] == pytest.approx(before[1:], rel=1e-9)
    assert total_speedups(disturbed, ours)[0] > 2 * before[0]
    only = passed(with_stalls(quiet[0], at_7=98.0))
    metrics = add_speedup(Metrics(bytes_read=0), only, passed(steady(1.2)))
    assert metrics.speedup == pytest.approx(1.25, rel=0.02)
    assert metrics.total_speedup == metrics.total_speedup_per_batch[0] > 2.5  # type: ignore[index]


@pytest.mark.parametrize("rare", ["forwards", "drafted", "rows"])
def test_a_step_that_does_more_is_no_stall(rare: str) -> None:
    """One step in five has more forwards, draft tokens or rows, and takes eight times as long; of
    these, one that takes eight times as long again stalled."""
    kinds = {"forwards": (5, 0, 4), "drafted": (1, 4, 4), "rows": (1, 0, 32)}
    heavy = (8 * 1.5, *kinds[rare])
    steps = [step if i % 5 else heavy for i, step in enumerate(steady(count=60))]
    assert places(passed(steps)) == []
    assert places(passed(with_stalls(steps, at_20=96.0))) == [(0, 20)]


def test_growing_contexts_and_a_slower_machine_are_no_stalls() -> None:
    """Over 400 steps the time grows thirtyfold, and is four times as long from one step to the next
    and on; a stall among them is found."""
    grown = [(0.1 + 0.008 * i, 1, 0, 4) for i in range(400)]
    slower = [(ms * (4 if i >= 200 else 1), *kind) for i, (ms, *kind) in enumerate(grown)]
    assert places(passed(grown, slower)) == []  # type: ignore[arg-type]
    assert places(passed(grown, with_stalls(grown, at_60=4.0))) == [(1, 60)]


def test_a_rare_kind_is_judged_by_kinds_that_do_at_least_as_much() -> None:
    """Short batches and kinds of single steps have medians too."""
    steps = steady(count=FEWEST - 1)
    few = with_stalls(steps, at_3=98.0)
    assert places(passed(few, steps)) == [(0, 3)]
    assert places(passed(few)) == [], "seven steps have no median"
    alone: list[Step] = [(98.0, 1, 0, 3), (1.0, 1, 0, 2), (98.0, 3, 2, 4)]
    assert places(passed(steady() + alone)) == [(0, 32)]
    stalls = PassSteps.of(passed(steady() + alone)).stalls
    assert stalls[0].median_ms == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3, 0.6])
def test_noise_is_no_stall(spread: float) -> None:
    """However wide it is: the bound is three times the median or six deviations, whichever is
    more."""
    for seed in range(20):
        samples = passed(*[steady(count=64, spread=spread, seed=10 * seed + b) for b in range(5)])
        assert places(samples) == []
    assert places(passed(with_stalls(steady(), at_9=1.5 * 2.7))) == []


def test_hardly_any_step_of_a_quiet_machine_stalled() -> None:
    """The share that docs/results.md names."""
    found = [
        step_metrics(samples.restored())
        for record in load_records(CPU)
        for samples in (record.samples or {}).values()
    ]
    num_steps, num_stalled = (
        sum(each[key] for each in found) for key in ("num_steps", "stalled_steps")
    )
    assert num_steps == 30174 and num_stalled / num_steps < 0.002


def test_a_pass_without_steps_has_no_stalls() -> None:
    assert step_metrics(passed()) == step_metrics(passed([])) == {}
    zero = passed([(0.0, 1, 0, 4)] * 20)
    assert places(zero) == []
    assert decode_metrics(zero, 1e9, False).stalled_steps == 0


def test_a_run_says_how_many_steps_stalled() -> None:
    record = drawn()
    assert record.samples is not None and record.metrics is not None
    (pays,) = table_of(record).below
    assert pays.startswith("Speculation ")
    samples = {name: each.restored() for name, each in record.samples.items()}
    samples["autoregressive"].step_ms[0][5] = 98.0
    record = with_metrics_of(record, samples)
    _, first, last = table_of(record).below
    assert first == "autoregressive: 1 of 63 steps stalled (98 ms where the median is 1)"
    assert "speedup" in last
    labels = [row[0] for row in table_of(record).rows]
    assert "speedup, median of 1 batch" in labels and "total speedup, median of 1 batch" in labels
    assert "total speedup, median of 1 batch" not in [row[0] for row in table_of(drawn()).rows]


def with_metrics_of(record: RunRecord, samples: dict[str, PassSamples]) -> RunRecord:
    """The record whose metrics of steps follow from other samples."""
    assert record.metrics is not None and record.baseline_metrics is not None
    ours = samples["speculative"]
    baseline = samples["autoregressive"]
    metrics = replace(record.metrics, **step_metrics(ours))
    return replace(
        record,
        metrics=add_speedup(metrics, baseline, ours),
        baseline_metrics=replace(record.baseline_metrics, **step_metrics(baseline)),
    )


def test_records_of_earlier_versions_get_the_speedup_of_their_samples(tmp_path: Path) -> None:
    """The run whose baseline took 98 ms for one of its steps of 1.6 ms."""
    raw = json.loads((Path(__file__).parent / "one_long_step.json").read_text())
    totals = raw["metrics"]["total_speedup_per_batch"]
    assert totals == [pytest.approx(1.219, abs=1e-3), pytest.approx(2.335, abs=1e-3)]
    added = {"num_steps", "median_step_ms", *(name for name in raw["metrics"] if "stall" in name)}
    for part in ("metrics", "baseline_metrics"):
        raw[part] = {name: value for name, value in raw[part].items() if name not in added}
    old = raw["metrics"]
    old |= {
        "speedup": old.pop("total_speedup"),
        "speedup_per_batch": old.pop("total_speedup_per_batch"),
    }
    assert old["speedup"] == pytest.approx(1.777, abs=1e-3)
    file = tmp_path / "old.jsonl"
    file.write_text(json.dumps(raw) + "\n")
    (record,) = load_records(file)
    assert check_metrics(record) == []
    assert record.metrics is not None and record.baseline_metrics is not None
    assert record.metrics.total_speedup_per_batch == totals
    assert record.metrics.total_speedup == pytest.approx(1.777, abs=1e-3)
    assert record.metrics.speedup == pytest.approx(1.2, abs=0.05)
    assert record.baseline_metrics.stalled_steps == 1
    assert math.floor(record.baseline_metrics.longest_stall_ms or 0) == 98
    assert renewed(record) is record


def test_a_report_says_how_many_steps_stalled() -> None:
    record = drawn()
    assert record.baseline_metrics is not None
    stalls = {"stalled_steps": 2, "longest_stall_ms": 98.0, "longest_stall_median_ms": 1.5}
    other = replace(record, baseline_metrics=replace(record.baseline_metrics, **stalls))  # type: ignore[arg-type]
    found = [stalls_line(frame_of(report_rows(3, "", each))) for each in (record, other)]
    assert found[0] == [] and len(found[1]) == 1
    assert "2 of " in found[1][0] and "took 98 ms where the median is 1.5" in found[1][0]
    assert found[1][0].endswith("run 3, autoregressive.")


def test_a_table_can_have_the_stalls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(drawn().to_json() + "\n")
    words = ["--columns", "stalled_steps", "median_step_ms", "total_speedup"]
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["magicdec table", str(file), *words])
        table_command()
    assert not ended.value.code
    shown = capsys.readouterr().out.split()
    assert shown[-3:-1] == ["0", "1.00"]


def timed(steps: Sequence[tuple[float, int, int, int]]) -> list[TimedStep]:
    """Steps of a mode: milliseconds, prompt tokens, draft tokens and rows."""
    return [TimedStep(ms, (prompt, drafted, rows)) for ms, prompt, drafted, rows in steps]


def served(steps: Sequence[TimedStep]) -> ServingMetrics:
    """A request of 31 tokens, from 0 to 1 s."""
    stamps = [number / 30 for number in range(31)]
    request = finished(0, 0.0, stamps)
    return serving_metrics(
        [request], StepCounts(num_steps=33, moves={0: Moves([0.0])}), steps=steps
    )


def test_a_stalled_step_of_a_mode_is_counted_and_its_time_left_out() -> None:
    """Not one that takes a part of a prompt beside its rows."""
    quiet = [(2.0, 0, 0, 4)] * 30
    metrics = served(timed([*quiet[:15], (502.0, 0, 0, 4), *quiet[15:], (40.0, 256, 0, 4)]))
    assert (metrics.num_decode_steps, metrics.stalled_steps) == (32, 1)
    assert (metrics.longest_stall_ms, metrics.longest_stall_median_ms) == (502.0, 2.0)
    assert metrics.stalled_ms == 500.0 and metrics.output_throughput == 31.0
    assert metrics.steady_output_throughput == pytest.approx(62.0)
    assert stalls_in(metrics, metrics.num_decode_steps).startswith("1 of 32 steps stalled (502 ms")
    calm = served(timed([*quiet, (2.0, 0, 0, 4)]))
    assert calm.stalled_steps == 0 and calm.steady_output_throughput == calm.output_throughput
    untimed = served([])
    assert untimed.stalled_steps is untimed.steady_output_throughput is None


def test_a_step_is_timed_with_the_prompt_tokens_that_it_takes() -> None:
    observer = PassObserver(is_timed=True)
    request = finished(0, 0.0, [0.0])
    observer.watch(
        StepPlan(parts=(PrefillChunk(request, 0, 3, 10), PrefillChunk(request, 1, 0, 5)))
    )
    observer.observe([4, 5], StepOutput([[1], [2, 3]], padded_gamma=2), 0.25)
    observer.watch(StepPlan())
    observer.observe([4], StepOutput([[1]]), 0.5)
    assert observer.timed_steps == [(250.0, (12, 2, 2)), (500.0, (0, 0, 1))]
