"""The measuring code under a scripted clock: every number of a record is the one that follows from
the script.

The run is real (`execute`, on a tiny model), and so are its prefills. Only the strategy is
scripted: its steps advance the clock by given times, and emit given numbers of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_clock import FakeClock
from identities import check_record
from pretend_cuda import DEVICE, Event, OnDevice, waits

from magicdec.bench import runner as runner_module
from magicdec.bench.measure import execute
from magicdec.bench.roofline import weight_bytes
from magicdec.bench.study.cells import config_key, make_cells
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    OutputSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Group, Launch
from magicdec.hardware import timing
from magicdec.hardware.timing import PhaseTimer
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import PassRecord
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch, StepOutput
from magicdec.setup.prepare import prepare
from magicdec.speculation.draft_length import DraftLength
from magicdec.speculation.steps import build
from magicdec.speculation.steps.strategy import Phase, Setup
from magicdec.systems import prefilled_batching

PROMPT = 20
CHUNK = 8
NEW = 7
PREFILL_S = [[0.2, 0.1], [0.3, 0.3], [0.2, 0.5]]  # by batch and row
SLOWNESS = [1.0, 2.0, 4.0]  # of the machine in each batch
BASELINE_STEP_S = [0.020, 0.015, 0.030]  # of each batch, before the slowness
UNMEASURED = 100.0  # slowness of the passes that must change no number
# Both lie outside the decode steps.
ADMIT_S = 0.05
RELEASE_S = 0.006
LAUNCH_S = 0.02  # of ADMIT_S; the rest is computed while the host goes on
CALIBRATION_S = 0.01  # of all rows, and of one row
BANDWIDTHS = [2e9, 3e9]  # before and after

__all__ = ["waits"]  # a fixture


@dataclass(frozen=True)
class ScriptedStep:
    """Phases in seconds, then what is not part of any phase; the accepted drafts of each row."""

    phases: dict[str, float]
    other_s: float = 0.001
    draft_width: int = 0
    accepted: Sequence[int] | None = None

    @property
    def seconds(self) -> float:
        return sum(self.phases.values()) + self.other_s


# Rows 0 and 1 emit 3 and 1, 1 and 1, 2 and 2 tokens; then row 0 has its 6, and row 1 emits 2.
SPECULATION = [
    ScriptedStep({"draft": 0.004, "verify": 0.015}, draft_width=2, accepted=[2, 0]),
    ScriptedStep({"decode": 0.007}),
    ScriptedStep({"draft": 0.004, "verify": 0.015}, draft_width=2, accepted=[1, 1]),
    ScriptedStep({"draft": 0.003, "verify": 0.008}, draft_width=2, accepted=[1]),
]


@dataclass
class Script:
    """The clock and what has happened so far. `passes` are (name, index of the batch, whether the
    phases of its steps are timed)."""

    clock: FakeClock = field(default_factory=FakeClock)
    passes: list[tuple[str, int, bool]] = field(default_factory=list)
    num_forwards: int = 0
    launched_s: float = 0.0  # time of work that the host has not waited for

    def synchronize(self, device: torch.device) -> None:
        self.clock.advance(self.launched_s)
        self.launched_s = 0.0

    def prefill_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of a runner, which takes an equal share of its prompt's time."""
        chunks = -(-PROMPT // CHUNK)
        times = [seconds / chunks for seconds in chain(*PREFILL_S) for _ in range(chunks)]

        def scripted(*args: Any, **options: Any) -> Any:
            self.clock.advance(times[self.num_forwards])
            self.num_forwards += 1
            return forward(*args, **options)

        return scripted

    def make_strategy(self, name: str, setup: Setup) -> ScriptedStrategy:
        assert setup.draft_length is not None
        return ScriptedStrategy(self, name, setup.runner, setup.draft_length, setup.phase)


@dataclass
class ScriptedStrategy:
    """One pass of the script over the requests that it is given."""

    script: Script
    name: str
    runner: ModelRunner
    draft_length: DraftLength
    phase: Phase

    def admit(self, batch: Batch) -> None:
        index = batch.requests[0].request_id // len(batch.requests)
        is_timed = isinstance(self.phase, PhaseTimer) and self.phase.enabled
        self.script.passes.append((self.name, index, is_timed))
        self.slowness = SLOWNESS[index] if is_timed else UNMEASURED
        baseline = [ScriptedStep({"decode": BASELINE_STEP_S[index] - 0.001})] * (NEW - 1)
        self.steps = iter(baseline if self.name == "autoregressive" else SPECULATION)
        self._advance(LAUNCH_S)
        self.script.launched_s = (ADMIT_S - LAUNCH_S) * self.slowness
        if self.name == "speculative":
            self.draft_length.begin(batch, self.measure)

    def measure(self, batch: Batch) -> list[float]:
        self._advance(CALIBRATION_S)
        return [0.01] * (1 + self.draft_length.max_gamma)

    def step(self, batch: Batch) -> StepOutput:
        step = next(self.steps)
        for name, seconds in step.phases.items():
            with self.phase(name):
                self._advance(seconds)
        self._advance(step.other_s)
        self.runner.counts.num_forwards += 1
        accepted = None if step.accepted is None else list(step.accepted)
        emitted = [[7] * (1 + count) for count in accepted or [0] * len(batch.requests)]
        return StepOutput(emitted, step.draft_width, accepted)

    def release(self, rows: Sequence[int]) -> None:
        self._advance(RELEASE_S)

    def _advance(self, seconds: float) -> None:
        self.script.clock.advance(seconds * self.slowness)


def make_config(model: Path, text: Path, results: Path) -> RunConfig:
    return RunConfig(
        model=ModelSection(str(model), "float32"),
        parallel=ParallelSection(device="cpu", threads=1),
        kv=KVSection("streaming_llm", 18),
        attention=AttentionSection("grouped", CHUNK),
        decoding=DecodingSection("speculative", "self", "auto", ignore_eos=True),
        workload=WorkloadSection(
            str(text), batch_size=2, prefix_len=PROMPT, gen_len=NEW, num_batches=3, warmup_batches=2
        ),
        output=OutputSection(results=str(results)),
    )


@dataclass(frozen=True)
class ClockedRun:
    script: Script
    plain: PassRecord
    record: PassRecord
    weight_bytes: int

    @property
    def baseline_metrics(self) -> PassMetrics | None:
        return self.plain.metrics


@pytest.fixture(scope="module")
def measured(
    tiny_checkpoint: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClockedRun]:
    """A whole run of the script."""
    results = tmp_path_factory.mktemp("scripted") / "runs.jsonl"
    prepared = prepare(make_config(tiny_checkpoint, text_file, results), Launch(0, 1, 0, 1))
    script = Script()
    bandwidths = iter(BANDWIDTHS)
    weights = []
    forward = script.prefill_forward(ModelRunner.forward)

    def make_strategy(name: str, setup: Setup) -> ScriptedStrategy:
        weights.append(weight_bytes(setup.runner.model))
        return script.make_strategy(name, setup)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", script.clock)
        patch.setattr(ModelRunner, "forward", forward)
        patch.setattr(build, "make_strategy", make_strategy)
        patch.setattr(prefilled_batching, "synchronize", script.synchronize)
        patch.setattr(runner_module, "read_bandwidth", lambda group, device: next(bandwidths))
        plain, record = execute(prepared).records
    for passed in (plain, record):
        assert passed.status == "verified"
        check_record(passed)
    yield ClockedRun(script, plain, record, weights[0])


def test_every_strategy_is_warmed_up_and_they_take_turns_at_going_first(
    measured: ClockedRun,
) -> None:
    both = ["autoregressive", "speculative"]
    first = [(name, 0, is_timed) for name in both for is_timed in (False, False, True)]
    assert measured.script.passes[:6] == first
    timed = [(name, 1) for name in reversed(both)] + [(name, 2) for name in both]
    assert measured.script.passes[6:] == [(name, batch, True) for name, batch in timed]
    assert measured.script.num_forwards == 3 * 2 * 3, "every prompt is prefilled once, in 3 chunks"


def test_the_time_of_a_step_is_that_of_the_strategy(measured: ClockedRun) -> None:
    """Drafting or not, and nothing of what is done between steps."""
    for record, seconds in (
        (measured.plain, [[s] * (NEW - 1) for s in BASELINE_STEP_S]),
        (measured.record, [[step.seconds for step in SPECULATION]] * 3),
    ):
        expected = [
            [pytest.approx(1e3 * s * slowness) for s in batch]
            for batch, slowness in zip(seconds, SLOWNESS, strict=True)
        ]
        assert [group.step_ms for group in record.groups] == expected, record.name


def test_the_forwards_of_a_step_are_those_that_it_ran(measured: ClockedRun) -> None:
    for record, count in ((measured.plain, NEW - 1), (measured.record, len(SPECULATION))):
        assert [group.step_forwards for group in record.groups] == [[1] * count] * 3


def test_metrics_of_the_steps(measured: ClockedRun) -> None:
    """By hand: a batch of speculation takes 60 ms before the slowness, which is 7 in sum."""
    metrics = measured.record.metrics
    baseline = measured.baseline_metrics
    assert metrics is not None and baseline is not None
    found = asdict(metrics)
    expected = {
        "decode_tokens_per_s": 3 * 12 / 0.420,
        "mean_step_ms": 420 / 12,
        "draft_ms": 11 * 7 / 9,
        "verify_ms": 38 * 7 / 9,
        "decode_ms": 7 * 7 / 3,
        "other_ms": 4 * 7 / 12,
        "mean_draft_tokens": 6 / 4,
        "draft_acceptance_rate": 5 / 10,
        "mean_acceptance_length": 2.0,
        "acceptance_per_position": [0.8, 0.2],
        "bytes_read": 12 * measured.weight_bytes,
        "roofline_fraction": 12 * measured.weight_bytes / 3e9 / 0.420,
    }
    assert {name: found[name] for name in expected} == {
        name: pytest.approx(value) for name, value in expected.items()
    }
    assert baseline.decode_tokens_per_s == pytest.approx(36 / 1.020)
    assert baseline.mean_step_ms == pytest.approx(1020 / 18)
    assert baseline.draft_ms is baseline.verify_ms is baseline.draft_acceptance_rate is None


def test_tpot_is_the_time_from_the_first_token_to_the_last(measured: ClockedRun) -> None:
    """Row 0 waits for the prefill of row 1, and ends after 48 ms of steps, row 1 12 ms of a step
    and 6 ms of a release later; 6 tokens each. Both wait 50 ms before the first step, and in the
    first batch 20 ms for calibration."""
    metrics = measured.record.metrics
    baseline = measured.baseline_metrics
    assert metrics is not None and baseline is not None
    tpot_ms = []
    for batch, slowness in enumerate(SLOWNESS):
        before_ms = 50 * slowness + (20 if batch == 0 else 0)
        tpot_ms.append((1e3 * PREFILL_S[batch][1] + before_ms + 48 * slowness) / 6)
        tpot_ms.append((before_ms + 66 * slowness) / 6)
    tpot_ms.sort()
    assert metrics.mean_tpot_ms == pytest.approx(sum(tpot_ms) / 6)
    assert metrics.p50_tpot_ms == pytest.approx((tpot_ms[2] + tpot_ms[3]) / 2)
    assert metrics.p90_tpot_ms == pytest.approx((tpot_ms[4] + tpot_ms[5]) / 2)
    assert metrics.p99_tpot_ms == pytest.approx(tpot_ms[4] + 0.95 * (tpot_ms[5] - tpot_ms[4]))
    waits_ms = [1e3 * rows[1] / 2 + 50 * s for rows, s in zip(PREFILL_S, SLOWNESS, strict=True)]
    steps_ms = [20, 30, 120]
    expected = (sum(steps_ms) + sum(waits_ms) / 6) / 3
    assert baseline.mean_tpot_ms == pytest.approx(expected), "one row of two waits for the other"


def test_prefill_rate_and_the_ttft_of_each_sequence(measured: ClockedRun) -> None:
    """A row's prompt waits for those of the rows before it."""
    ttft_s = [sum(rows[: row + 1]) for rows in PREFILL_S for row in range(len(rows))]
    for metrics in (measured.record.metrics, measured.baseline_metrics):
        assert metrics is not None
        assert metrics.mean_ttft_ms == pytest.approx(1e3 * sum(ttft_s) / len(ttft_s))
        assert metrics.prefill_tokens_per_s == pytest.approx(6 * PROMPT / sum(chain(*PREFILL_S)))


def test_the_speedup_is_the_median_of_batches(measured: ClockedRun) -> None:
    metrics = measured.record.metrics
    baseline = measured.baseline_metrics
    assert metrics is not None and baseline is not None
    assert metrics.speedup_per_group == [pytest.approx(x) for x in (2.0, 1.5, 3.0)]
    assert metrics.speedup == pytest.approx(2.0)
    assert baseline.speedup is baseline.speedup_per_group is None


def test_the_net_speedup_begins_at_the_end_of_prefill(measured: ClockedRun) -> None:
    """Each strategy is admitted in 50 ms; the last sequence ends after 66 ms of speculation. Each
    of its 6 tokens takes 11 ms then, so that it gains 9, 4 and 19 ms with each. The first batch
    also pays 20 ms of calibration, which it has back after 3 tokens."""
    metrics = measured.record.metrics
    baseline = measured.baseline_metrics
    assert metrics is not None and baseline is not None
    begin = [50 + 20, 50, 50]
    net = [
        (50 + 6 * 1e3 * step) / (ms + 66) for step, ms in zip(BASELINE_STEP_S, begin, strict=True)
    ]
    assert metrics.net_speedup_per_group == [pytest.approx(x) for x in net]
    assert metrics.net_speedup == pytest.approx(sorted(net)[1])
    assert metrics.begin_ms == baseline.begin_ms == pytest.approx(50 * sum(SLOWNESS) / 3)
    assert metrics.break_even_gen_len == 2, "the median of 4, 2 and 2"
    assert baseline.net_speedup is baseline.break_even_gen_len is None


def test_calibration_is_counted_once_in_the_warm_up_and_once_in_the_batches(
    measured: ClockedRun,
) -> None:
    """The batches have one shape."""
    metrics = measured.record.metrics
    assert metrics is not None
    warm_up = 1e3 * 2 * CALIBRATION_S * UNMEASURED
    found = [group.calibration_ms for group in measured.record.groups]
    assert found == [pytest.approx(20), 0, 0]
    assert metrics.warmup_calibration_ms == pytest.approx(warm_up)
    assert metrics.calibration_ms == pytest.approx(warm_up + 20)
    assert [group.calibration_ms for group in measured.plain.groups] == [None] * 3


def test_the_bandwidth_is_the_larger_of_those_before_and_after(measured: ClockedRun) -> None:
    assert measured.record.environment.read_bandwidth_bytes_per_s == 3e9


def test_bandwidth_is_the_best_of_all_reads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, the second of which reads fastest while the first reads slowest."""
    clock = FakeClock()
    reads = iter([0.5, 0.25, 0.1])

    class Buffer:
        def sum(self) -> None:
            clock.advance(next(reads))

    class TwoRanks(Group):
        def all_gather_values(self, value: Any, kind: Any) -> list[Any]:
            return [value, [8e9, 5e9, 1e9]]

    sizes: list[int] = []
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(torch, "ones", lambda n, device: sizes.append(4 * n) or Buffer())
    found = timing.read_bandwidth(TwoRanks((0, 1), 0), torch.device("cpu"), repeats=3)
    share = timing.BANDWIDTH_BYTES // 2
    assert sizes == [share]
    rates = [share / 0.5 + 8e9, share / 0.25 + 5e9, share / 0.1 + 1e9]
    assert found == pytest.approx(max(rates)) and max(rates) == rates[0]


def test_a_gpu_reads_many_times_between_two_events(
    waits: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits before and after each measurement."""
    sums: list[object] = []
    add = OnDevice.sum
    monkeypatch.setattr(OnDevice, "sum", lambda buffer: sums.append(add(buffer)))
    monkeypatch.setattr(Event, "elapsed_time", lambda first, last: 8.0)
    monkeypatch.setattr(timing, "GPU_BANDWIDTH_BYTES", 1 << 10)
    rates = timing.read_bandwidths(Group((0,), 0), DEVICE, repeats=3)
    assert rates == [pytest.approx((1 << 10) * timing.GPU_SUMS / 8e-3)] * 3
    assert len(sums) == 3 * timing.GPU_SUMS >= 60
    assert waits == {
        "hardware/timing.synchronize: synchronize": 3,
        "kernels/gpu_clock.seconds_on_gpu: synchronize": 3,
    }


def test_without_a_number_a_run_has_five_batches_or_those_that_its_text_holds(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """A study finds its record again by them."""
    config = make_config(tiny_checkpoint, text_file, tmp_path / "runs.jsonl")
    launch = Launch(0, 1, 0, 1)
    available = prepare(config, launch).workload.num_available
    assert available is not None and available > 20
    for rows, expected in ((available // 20, 5), (available // 2, 2), (available, 1)):
        workload = replace(config.workload, batch_size=rows, num_batches=None)
        asked = replace(config, workload=workload)
        prepared = prepare(asked, launch)
        assert prepared.config.workload.num_batches == expected
        assert len(prepared.workload.prompts) == expected * rows
        (cell,) = make_cells([asked], launch)
        assert cell.key == config_key(prepared.config.to_dict())
    given = replace(config.workload, batch_size=available, num_batches=2)
    with pytest.raises(ValueError, match="are needed"):
        prepare(replace(config, workload=given), launch)
