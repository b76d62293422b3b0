"""Runs that are measured together: one prefill and one baseline for all drafts, and what is left
when the time or the user ends them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from identities import check_record
from test_sweep import base, variants

from magicdec.bench.runner import MeasuredPass, PlannedPass
from magicdec.bench.study import drafts as module
from magicdec.bench.study import progress, timed_runner
from magicdec.bench.study.drafts import BaselineTimes, DraftTrials, Found, fitting, smaller
from magicdec.bench.study.progress import PassProgress
from magicdec.bench.study.timed_runner import OutOfTime, TimedRunner
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import WorkloadSection
from magicdec.distributed.groups import Launch
from magicdec.engine.engine import Engine
from magicdec.names import BASELINE
from magicdec.output.console import Advance, Silent
from magicdec.records.stalls import PassSteps

ALONE = Launch(0, 1, 0, 1)
BATCHES = 3
__all__ = ["base"]  # a fixture


class Watched(PassProgress):
    """Counts passes by name. `ending` is called before each of them, with their number."""

    def __init__(self, ending: Callable[[int], None] = lambda number: None) -> None:
        super().__init__(Silent(), ALONE)
        self.passes = list[str]()
        self.ending = ending

    def end(self) -> None:
        super().end()
        self.passes.append(self.label.split(": ")[1].removesuffix("; "))
        self.ending(len(self.passes))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft is far behind by chance."""
    monkeypatch.setattr(timed_runner, "FAR_BEHIND", float("inf"))


@pytest.fixture
def configs(base: RunConfig) -> dict[str, RunConfig]:
    """Drafts of every kind, also of a low-bit copy, which has another draft but the same target."""
    decoding = replace(base.decoding, ignore_eos=True)
    workload = replace(base.workload, batch_size=1, num_batches=BATCHES, warmup_batches=1)
    first = replace(base, decoding=decoding, workload=workload)
    copy_decoding = replace(decoding, draft_weights="int8")
    others = [variant for variant in variants(first)[1:] if variant.decoding.gamma != 5]
    all_configs = [*others, replace(first, decoding=copy_decoding)]
    return {f"draft{number}": config for number, config in enumerate(all_configs)}


@pytest.fixture
def prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The prompts of each prefill of a batch."""
    found: list[int] = []
    original = Engine.prefill

    def counted(self: Engine, requests: Any, *others: Any) -> Any:
        found.append(len(requests))
        return original(self, requests, *others)

    monkeypatch.setattr(Engine, "prefill", counted)
    return found


def measure(configs: dict[str, RunConfig], pace: PassProgress) -> Found:
    return DraftTrials(ALONE, pace).measure(configs)


def test_all_drafts_have_one_prefill_and_one_baseline(
    configs: dict[str, RunConfig], prefills: list[int]
) -> None:
    """And the record of each is as if it had run alone."""
    pace = Watched()
    found = measure(configs, pace)
    assert list(found.records) == list(configs) and found.left_out == []
    assert len(prefills) == BATCHES
    assert Counter(pace.passes) == dict.fromkeys([BASELINE, *configs], BATCHES)
    assert pace.passes[0] == BASELINE and pace.passes[len(configs) + 1] == list(configs)[-1]
    baselines = [(passes[0].requests, passes[0].groups) for passes in found.passes.values()]
    assert baselines[1:] == baselines[:-1]
    for name, record in found.records.items():
        check_record(record)
        assert record.status == "verified" and record.correctness is not None, name
        assert record.correctness.identical and record.metrics is not None
        assert len(record.metrics.net_speedup_per_group or ()) == BATCHES
    weights = found.records[list(configs)[-1]].config["decoding"]["draft_weights"]
    assert weights == "int8"
    assert {r.workload.sha256 for r in found.records.values() if r.workload} == {
        baseline_sha(configs, BATCHES)
    }


def baseline_sha(configs: dict[str, RunConfig], num_batches: int) -> str:
    """The prompts of a run of so many batches."""
    from magicdec.setup.prepare import prepare

    config = next(iter(configs.values()))
    workload = replace(config.workload, num_batches=num_batches)
    return prepare(replace(config, workload=workload), ALONE).workload.sha256


@pytest.mark.parametrize("num_batches", [BATCHES, 2])
def test_drafts_that_are_far_behind_end_after_the_first_batch(
    num_batches: int,
    configs: dict[str, RunConfig],
    prefills: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record of each is that of a run of one batch. Of two batches nothing is saved."""
    few = {
        name: replace(config, workload=replace(config.workload, num_batches=num_batches))
        for name, config in list(configs.items())[:4]
    }
    times = iter([10.0, 14.0, 12.0, 13.5])
    monkeypatch.setattr(timed_runner, "FAR_BEHIND", 1.3)
    monkeypatch.setattr(timed_runner, "batch_ms", lambda measured: next(times))
    pace = Watched()
    found = measure(few, pace)
    slow = ["draft1", "draft3"] if num_batches == BATCHES else []
    counts = {name: 1 if name in slow else num_batches for name in few}
    assert Counter(pace.passes) == counts | {BASELINE: num_batches}
    assert list(found.records) == list(few) and not pace.left.num_left
    assert len(prefills) == num_batches
    assert [line.partition(": batches after the first")[0] for line in found.left_out] == slow
    for name, record in found.records.items():
        check_record(record)
        assert record.status == "verified" and record.correctness is not None, name
        assert record.correctness.forwards is not None, "also of those that ended"
        assert record.config["workload"]["num_batches"] == counts[name]
        assert record.metrics is not None
        assert len(record.metrics.net_speedup_per_group or ()) == counts[name]
        assert record.workload is not None
        assert record.workload.sha256 == baseline_sha(few, counts[name])


def test_a_batch_takes_its_steps_and_what_begins_it(
    configs: dict[str, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stalled steps count as the others of their kind."""
    drafts = list(configs.items())[:4]
    found = dict[str, float]()
    original = timed_runner.batch_ms

    def noted(measured: MeasuredPass) -> float:
        name = drafts[len(found)][0]
        found[name] = original(measured)
        return found[name]

    monkeypatch.setattr(timed_runner, "batch_ms", noted)
    records = measure(dict(drafts), Watched()).records
    for name, ms in found.items():
        first = records[name].groups[0]
        assert first.begin_ms is not None and first.begin_ms > 0
        assert ms == PassSteps.of([first]).steady_ms[0] + first.begin_ms


def interrupted(number: int) -> None:
    if number == 19:
        raise KeyboardInterrupt


def failed(number: int) -> None:
    if number == 19:
        raise RuntimeError("a pass has failed")


@pytest.mark.parametrize("ending", [interrupted, failed])
def test_what_is_done_is_kept_when_it_ends_early(
    configs: dict[str, RunConfig], ending: Callable[[int], None]
) -> None:
    """In the second batch, whose passes go in the other order: the baseline comes last, so that
    nothing of this batch counts."""
    few = dict(list(configs.items())[:11])
    pace = Watched(ending)
    found = measure(few, pace)
    assert list(found.records) == list(few)
    assert found.is_interrupted == (ending is interrupted) and found.is_broken
    assert str(found.error) == ("None" if ending is interrupted else "a pass has failed")
    for record in found.records.values():
        check_record(record)
        assert record.config["workload"]["num_batches"] == 1 and record.passed
        assert record.workload is not None and record.workload.num_prompts == 1
        assert record.workload.sha256 == baseline_sha(few, 1)
    assert found.left_out == [f"2 of {BATCHES} batches"]


def test_drafts_without_a_batch_are_left_out(configs: dict[str, RunConfig]) -> None:
    few = dict(list(configs.items())[:3])
    found = measure(few, Watched(lambda number: interrupted(number * 19 // 2)))
    assert list(found.records) == ["draft0"] and found.is_interrupted
    assert found.left_out == [f"2 of {BATCHES} batches", "draft1", "draft2"]


class Hurried(Watched):
    """Has time for the first so many things."""

    def __init__(self, num_things: int) -> None:
        super().__init__()
        self.num_things = num_things

    def has_time(self, seconds: float) -> bool:
        self.num_things -= 1
        return self.num_things >= 0

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Advance]:
        yield lambda amount=1: None


@pytest.mark.parametrize(
    ("num_things", "names", "left_out"),
    [(2, ["draft0", "draft1"], [f"2 of {BATCHES} batches", "draft2"]), (4, None, ["1 of 3"])],
)
def test_without_time_drafts_and_then_batches_are_left_out(
    num_things: int, names: list[str] | None, left_out: list[str], configs: dict[str, RunConfig]
) -> None:
    few = dict(list(configs.items())[:3])
    pace = Hurried(num_things)
    found = measure(few, pace)
    assert list(found.records) == (names or list(few))
    assert all(any(text in note for note in found.left_out) for text in left_out)
    assert not found.is_interrupted and not found.is_broken
    assert pace.passes.count(BASELINE) == (1 if names else 2)


def test_a_pass_that_runs_over_the_time_ends(
    configs: dict[str, RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = dict(list(configs.items())[:2])
    pace = PassProgress(Silent(), ALONE, deadline_s=progress.time.monotonic() + 1000)
    original = TimedRunner.serve_measured

    def late(self: TimedRunner, planned: PlannedPass, number: int) -> Any:
        if number == 1 and planned.name != BASELINE:
            pace.until_s = 0.0
        return original(self, planned, number)

    monkeypatch.setattr(TimedRunner, "serve_measured", late)
    found = measure(few, pace)
    assert list(found.records) == list(few) and not found.is_interrupted and found.is_broken
    assert all(r.config["workload"]["num_batches"] == 1 for r in found.records.values())
    other_rank = PassProgress(Silent(), Launch(0, 2, 0, 2), deadline_s=0.0)
    with other_rank.task("", 1) as advance:
        advance()  # which others wait for
    with pytest.raises(OutOfTime), PassProgress(Silent(), ALONE, 0.0).task("", 1) as advance:
        advance()


def test_drafts_for_which_the_memory_has_no_room_beside_each_other_come_after_each_other(
    configs: dict[str, RunConfig], monkeypatch: pytest.MonkeyPatch, prefills: list[int]
) -> None:
    names = list(configs)
    few = {name: configs[name] for name in (names[0], names[-1])}
    monkeypatch.setattr(module, "has_room", lambda cells: len(cells) == 1)
    pace = Watched()
    found = measure(few, pace)
    assert list(found.records) == list(few) and len(prefills) == 2 * BATCHES
    assert pace.passes.count(BASELINE) == 2 * BATCHES


def test_a_draft_that_cannot_run_is_left_out(configs: dict[str, RunConfig]) -> None:
    good = configs["draft0"]
    long = replace(good, workload=replace(good.workload, prefix_len=10**6))
    found = measure({"good": good, "long": long}, Watched())
    assert list(found.records) == ["good"] and found.left_out[0].startswith("long: ")
    with pytest.raises(ValueError, match="prefix_len"):
        measure({"long": long}, Watched())


def test_a_workload_is_cut_down_to_the_time() -> None:
    asked = WorkloadSection("demo", 2, 2048, 64, num_batches=5)
    rates = BaselineTimes(prefill_s=0.001, step_s=0.1)
    fixed = frozenset[str]()
    whole = rates.seconds(asked, 10)
    assert fitting(asked, fixed, rates, 10, 2 * whole) == asked
    sizes = [rates.seconds(fewer, 10) for fewer in smaller(asked, fixed)]
    least = min(sizes)
    for seconds in (whole, whole / 3, 2 * least):
        found = fitting(asked, fixed, rates, 10, seconds)
        assert rates.seconds(found, 10) <= seconds and found != asked
    smallest = fitting(asked, fixed, rates, 10, 0.0)
    assert (smallest.prefix_len, smallest.gen_len, smallest.num_batches) == (256, 16, 3)
    kept = fitting(asked, frozenset(["prefix_len", "gen_len"]), rates, 10, 0.0)
    assert (kept.prefix_len, kept.gen_len, kept.num_batches) == (2048, 64, 3)
    small = replace(asked, prefix_len=100, gen_len=4, num_batches=1)
    assert fitting(small, fixed, rates, 10, 0.0) == small


def test_passes_show_their_number_and_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of ten passes takes 30 s, so that a line after each says it."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    pace = PassProgress(Silent(), ALONE, deadline_s=1000.0)
    pace.expect(10, 2)
    pace.next_group()
    assert pace.has_time(500.0) and not pace.has_time(501.0)
    pace.begin("a")
    assert pace.label == "1/10: a; "
    for _ in range(2):
        pace.begin("a")
        clock[0] += 30
        pace.end()
    pace.begin("b")
    assert pace.label == "3/10, about 4 min left: b; "
    printed = capsys.readouterr().err
    assert printed == "1/10 passes\n2/10 passes, about 4 min left\n", "the first has what all share"
    pace.next_group()
    assert pace.has_time(940.0) and not pace.has_time(941.0)
