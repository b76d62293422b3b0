"""Steps that stalled: which are found and which are not, and that they do not move the speedup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from synthetic_records import Batch, command_of, draw_pass, drawn, drawn_command, parts_of
from test_serving_metrics import finished

from magicdec.bench.recording import MeasuredParts
from magicdec.bench.report.frame import frame_of, report_row
from magicdec.bench.report.page import stalls_line
from magicdec.bench.showing import tables
from magicdec.cli.records import table as table_command
from magicdec.output.tables import Table, text_of
from magicdec.records.computing import Beside, pass_metrics, ratios
from magicdec.records.describe import stalls_in
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import GroupRecord, PassRecord, RequestRecord
from magicdec.records.reading import load_passes
from magicdec.records.stalls import FEWEST, PassSteps
from magicdec.runner.request import StepOutput
from magicdec.runner.step_plan import PrefillChunk, StepPlan
from magicdec.systems.observer import PassObserver

Step = tuple[float, int, int, int]
"""Milliseconds, forwards, draft tokens and rows."""
CPU = ROOT / "results" / "cpu" / "records.jsonl.gz"


def passed(*batches: Sequence[Step]) -> MeasuredParts:
    """A pass whose rows emit a token in each step."""
    parts = parts_of(
        [
            Batch(
                rows=[[(0, 0, 1)] * len(batch)],
                step_ms=[ms for ms, *_ in batch],
                step_forwards=[forwards for _, forwards, _, _ in batch],
            )
            for batch in batches
        ]
    )
    groups = [
        replace(
            group,
            step_max_gamma=[drafted for _, _, drafted, _ in batch],
            step_rows=[rows for *_, rows in batch],
        )
        for group, batch in zip(parts.groups, batches, strict=True)
    ]
    requests = [
        replace(request, output_len=1 + sum(rows for *_, rows in batch))
        for request, batch in zip(parts.requests, batches, strict=True)
    ]
    return MeasuredParts(requests, groups)


def metrics_of(parts: MeasuredParts) -> PassMetrics:
    return pass_metrics(parts, Beside(is_drafting=False))


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


def places(parts: MeasuredParts) -> list[tuple[int, int]]:
    return [stall.place for stall in PassSteps.of(parts.groups).stalls]


def test_steps_that_stalled_are_counted_beside_the_median_of_their_kind() -> None:
    batches = [steady(), with_stalls(steady(seed=1), at_3=98.0), with_stalls(steady(), at_30=6.0)]
    samples = passed(*batches)
    assert places(samples) == [(1, 3), (2, 30)]
    metrics = metrics_of(samples)
    assert (metrics.num_decode_steps, metrics.stalled_steps) == (96, 2)
    assert metrics.stalled_ms == pytest.approx(98 + 6 - 2 * 1.5, abs=0.1)
    assert stalls_in(metrics) == "2 of 96 steps stalled (98 ms where the median is 1.5)"
    assert metrics.median_step_ms == pytest.approx(1.5, rel=0.01)
    quiet = metrics_of(passed(steady()))
    assert (quiet.stalled_steps, quiet.stalled_ms, quiet.longest_stall_ms) == (0, 0.0, None)


def test_a_stalled_step_counts_as_the_median_in_the_speedup_and_in_full_in_the_total() -> None:
    ours = passed(*[steady(1.2, seed=seed) for seed in range(5)])
    quiet = [steady(seed=9 + seed) for seed in range(5)]
    baseline = passed(*quiet)
    disturbed = passed(with_stalls(quiet[0], at_7=98.0), *quiet[1:])
    before = ratios(ours, baseline)["speedup_per_group"]
    found = ratios(ours, disturbed)
    assert found["speedup_per_group"] == pytest.approx(before, rel=1e-3)
    assert found["total_speedup_per_group"][1:] == pytest.approx(before[1:], rel=1e-9)
    assert found["total_speedup_per_group"][0] > 2 * before[0]
    only = passed(with_stalls(quiet[0], at_7=98.0))
    metrics = pass_metrics(passed(steady(1.2)), Beside(is_drafting=True, reference=only))
    assert metrics.speedup == pytest.approx(1.25, rel=0.02)
    assert metrics.total_speedup == metrics.total_speedup_per_group[0] > 2.5  # type: ignore[index]


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
    stalls = PassSteps.of(passed(steady() + alone).groups).stalls
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
    steps = [PassSteps.of(record.groups) for record in load_passes(CPU)]
    num_steps = sum(step.num_steps for step in steps)
    num_stalled = sum(len(step.stalls) for step in steps)
    assert num_steps == 30174 and num_stalled / num_steps < 0.002


def test_a_pass_without_steps_has_no_stalls() -> None:
    assert PassSteps.of(passed().groups).stalls == PassSteps.of(passed([]).groups).stalls == []
    assert metrics_of(passed([])).stalled_steps is None
    zero = passed([(0.0, 1, 0, 4)] * 20)
    assert places(zero) == []
    assert metrics_of(zero).stalled_steps == 0


def disturbed_command() -> list[PassRecord]:
    """A run of which one step without drafts took 98 ms."""
    ours = draw_pass(np.random.default_rng(0), np.full(8, 0.8), 4, 63)
    quiet = [[(0, 0, 1)] * count for count in ours[0].tokens]
    times = [1.0] * 63
    times[5] = 98.0
    return command_of(ours, baseline=[Batch(rows=quiet, step_ms=times)])


def labels_of(table: Table) -> list[str]:
    return [text_of(row[0]) for row in table.rows]


def test_a_run_says_how_many_steps_stalled() -> None:
    quiet, *_ = tables(drawn_command(), is_verbose=False)
    (pays,) = quiet.below
    assert pays.startswith("Speculation ")
    table, *_ = tables(disturbed_command(), is_verbose=False)
    _, first, last = table.below
    assert first == "static: 1 of 63 steps stalled (98 ms where the median is 1)"
    assert "speedup" in last
    assert {"speedup", "total speedup"} <= {*labels_of(table)}
    assert "total speedup" not in labels_of(quiet)


def test_a_report_says_how_many_steps_stalled() -> None:
    record = drawn_command()[0]
    stalls = {"stalled_steps": 2, "longest_stall_ms": 98.0, "longest_stall_median_ms": 1.5}
    assert record.metrics is not None
    other = replace(record, metrics=replace(record.metrics, **stalls))  # type: ignore[arg-type]
    found = [
        stalls_line(frame_of([report_row(3, "", stalled, None)])) for stalled in (record, other)
    ]
    assert found[0] == [] and len(found[1]) == 1
    assert "2 of " in found[1][0] and "took 98 ms where the median is 1.5" in found[1][0]
    assert found[1][0].endswith("run 3, static.")


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


def served(steps: Sequence[tuple[float, int, int, int]]) -> PassMetrics:
    """A request of 31 tokens, from 0 to 1 s, and steps of a mode: milliseconds, prompt tokens,
    draft tokens and rows."""
    request = RequestRecord(
        arrival_ms=0.0,
        joined_ms=[0.0],
        preempted_ms=[],
        prefilled_ms=[0.0],
        first_token_ms=0.0,
        finished_ms=1000.0,
        prompt_len=1,
        output_len=31,
        output_hash="",
    )
    group = GroupRecord(
        num_requests=1,
        num_steps=33,
        step_ms=[ms for ms, *_ in steps],
        step_prompt_tokens=[prompt for _, prompt, _, _ in steps],
        step_max_gamma=[drafted for _, _, drafted, _ in steps],
        step_rows=[rows for *_, rows in steps],
        draft_ms=[],
        verify_ms=[],
        decode_ms=[],
        threads=[1],
    )
    return metrics_of(MeasuredParts([request], [group]))


def test_a_stalled_step_of_a_mode_is_counted_and_its_time_left_out() -> None:
    """Not one that takes a part of a prompt beside its rows."""
    quiet = [(2.0, 0, 0, 4)] * 30
    metrics = served([*quiet[:15], (502.0, 0, 0, 4), *quiet[15:], (40.0, 256, 0, 4)])
    assert (metrics.num_decode_steps, metrics.stalled_steps) == (32, 1)
    assert (metrics.longest_stall_ms, metrics.longest_stall_median_ms) == (502.0, 2.0)
    assert metrics.stalled_ms == 500.0 and metrics.output_throughput == 31.0
    assert metrics.steady_output_throughput == pytest.approx(62.0)
    assert stalls_in(metrics).startswith("1 of 32 steps stalled (502 ms")
    calm = served([*quiet, (2.0, 0, 0, 4)])
    assert calm.stalled_steps == 0 and calm.steady_output_throughput == calm.output_throughput
    untimed = served([])
    assert untimed.stalled_steps is untimed.steady_output_throughput is None


def test_a_step_is_timed_with_the_prompt_tokens_that_it_takes() -> None:
    observer = PassObserver(is_timed=True)
    request = finished(0, 0.0, [0.0])
    observer.watch(
        StepPlan(parts=(PrefillChunk(request, 0, 3, 10), PrefillChunk(request, 1, 0, 5)))
    )
    observer.observe([4, 5], StepOutput([[1], [2, 3]], draft_width=2), 0.25)
    observer.watch(StepPlan())
    observer.observe([4], StepOutput([[1]]), 0.5)
    assert [
        (step.seconds, step.prompt_tokens, step.draft_width, len(step.request_ids))
        for step in observer.steps
    ] == [(0.25, 12, 2, 2), (0.5, 0, 0, 1)]
