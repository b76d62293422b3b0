"""Identities between samples and metrics: they hold for a run by hand, and a fault in one of its
numbers is refused with the names and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from identities import check_identities
from synthetic_samples import pass_samples

from magicdec.records.metrics import run_metrics
from magicdec.records.performance import Metrics
from magicdec.records.samples import PassSamples, PrefillSamples

BANDWIDTH = 1e9


def speculation() -> PassSamples:
    """Two batches of two rows. In the first, row 1 ends after a step without drafts, and row 0
    after two more tokens of three; in the second, both rows end at once."""
    return pass_samples(
        begin_ms=[5.0, 7.0],
        calibration_ms=[40.0, 0.0],
        warmup_calibration_ms=60.0,
        step_ms=[[20.0, 10.0, 16.0], [30.0, 30.0]],
        num_drafted=[[2, 0, 2], [2, 2]],
        num_accepted=[[[2, 0], [], [2]], [[1, 1], [2, 0]]],
        num_emitted=[[[3, 1], [1, 1], [2]], [[2, 2], [3, 1]]],
        sequence_tokens=[[6, 2], [5, 3]],
        sequence_ms=[[46.5, 30.1], [60.0, 60.0]],
        draft_ms=[4.0, 4.0, 6.0, 6.0],
        verify_ms=[15.0, 11.0, 20.0, 20.0],
        decode_ms=[9.0],
        bytes_read=[[10**6, 10**6], [2 * 10**6, 10**6]],
        peak_memory_bytes=[[7, 8], [9, 10]],
        threads=[[2, 1], [2, 1]],
    )


def baseline() -> PassSamples:
    """The same tokens, one a step."""
    return pass_samples(
        begin_ms=[0.0, 0.0],
        step_ms=[[15.0] * 6, [20.0] * 5],
        num_drafted=[[0] * 6, [0] * 5],
        num_accepted=[[[]] * 6, [[]] * 5],
        num_emitted=[[[1, 1]] * 2 + [[1]] * 4, [[1, 1]] * 3 + [[1]] * 2],
        sequence_tokens=[[6, 2], [5, 3]],
        sequence_ms=[[90.0, 30.0], [100.2, 60.1]],
        decode_ms=[14.0] * 11,
        bytes_read=[[10**7], [10**7]],
        peak_memory_bytes=[[7], [8]],
        threads=[[2, 1], [2, 1]],
    )


@dataclass
class Run:
    """Samples and the metrics of them, each of which a test may change."""

    ours: PassSamples
    base: PassSamples
    prefill: PrefillSamples
    metrics: dict[str, Metrics]

    @property
    def passes(self) -> dict[str, PassSamples]:
        return {"autoregressive": self.base, "speculative": self.ours}

    def check(self) -> None:
        check_identities(self.metrics, self.passes, self.prefill, BANDWIDTH)

    def compute(self, is_random: bool = False) -> None:
        self.metrics = run_metrics(self.passes, self.prefill, BANDWIDTH, is_random)

    def change(self, **values: Any) -> None:
        """Other values in the metrics of the strategy."""
        self.metrics["speculative"] = replace(self.metrics["speculative"], **values)


def make_run() -> Run:
    prefill = PrefillSamples(
        prefill_ms=[300.0, 310.0], ttft_ms=[[100.0, 299.0], [150.0, 310.0]], num_tokens=[80, 80]
    )
    run = Run(speculation(), baseline(), prefill, {})
    run.compute()
    return run


def test_they_hold_for_consistent_samples() -> None:
    make_run().check()


def test_they_hold_where_nothing_was_emitted_after_the_first_tokens() -> None:
    run = make_run()
    for samples in (run.ours, run.base):
        for key in ("step_ms", "num_drafted", "num_accepted", "num_emitted"):
            getattr(samples, key)[1] = []
        samples.sequence_tokens[1], samples.sequence_ms[1] = [0, 0], [0.0, 0.0]
        samples.num_tokens[1] = 0
    for key in ("draft_ms", "verify_ms"):
        del getattr(run.ours, key)[2:]
    del run.base.decode_ms[6:]
    run.compute()
    run.check()


def test_metrics_that_random_weights_withhold_are_not_checked() -> None:
    run = make_run()
    run.compute(is_random=True)
    run.check()


# A statement that changes the samples `ours`, `base` or `prefill`, and what is said then.
FAULTS = {
    "a step's time is halved where it drafts":
        ("ours.step_ms[0][0] = 10.0", "step 0: the time of its phases"),
    "the clock of sequences starts late":
        ("ours.sequence_ms[1] = [59.5, 59.5]", "its sequence_ms"),
    "all sequences have the TTFT of the first":
        ("prefill.ttft_ms[0] = [100.0, 100.0]", "does not rise"),
    "a TTFT after the end of prefill":
        ("prefill.ttft_ms[0] = [100.0, 301.0]", "the last TTFT"),
    "a token is counted that no step emitted":
        ("ours.sequence_tokens[1] = [6, 3]", "1 \\+ num_accepted|its tokens"),
    "more is accepted than was drafted":
        ("ours.num_accepted[1][0] = [3, 1]", r"num_drafted 2, num_accepted \[3, 1\]"),
    "more is emitted than was accepted": ("ours.num_emitted[0][0] = [3, 2]", "num_emitted"),
    "an accepted token is lost": ("ours.num_emitted[0][0] = [2, 1]", "num_emitted"),
    "a row is missing from a step": ("base.num_emitted[0][3] = []", "running sequences"),
    "a step is not counted as drafting": ("ours.num_drafted[1][0] = 0", "num_drafted 0"),
    "a phase is missing": ("ours.draft_ms.pop()", "times in draft_ms"),
    "calibration is counted twice": ("ours.begin_ms[0] = -35.0", "begin_ms is -35.0"),
    "the baseline has a thread fewer":
        ("base.threads = [[1, 1], [1, 1]]",
         r"speculative, batch 0: the ranks had \[2, 1\] threads, but \[1, 1\]"),
    "one batch has a rank fewer":
        ("base.threads[1] = [2]",
         r"autoregressive, batch 1: the ranks had \[2\] threads, but \[2, 1\]"),
    "the threads of no batch are measured":
        ("base.threads.clear()", "autoregressive has the threads of 0 batches, but there are 2"),
    "the threads of one batch are not measured":
        ("ours.threads.pop()", "speculative has the threads of 1 batches, but there are 2"),
    "a batch is missing": ("ours.begin_ms.pop()", "numbers of batches differ"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_samples_is_refused(fault: str) -> None:
    run = make_run()
    statement, message = FAULTS[fault]
    exec(statement, dict(vars(run)))
    with pytest.raises(AssertionError, match=message):
        run.check()


def test_a_rate_outside_its_interval_is_refused() -> None:
    run = make_run()
    assert run.metrics["speculative"].acceptance_rate_interval is not None
    for ends in ([0.0, 0.01], [0.99, 1.0]):
        run.change(acceptance_rate_interval=ends)
        with pytest.raises(AssertionError, match="acceptance_rate"):
            run.check()


DOUBLED = (
    *("prefill_tokens_per_s", "mean_ttft_ms", "decode_tokens_per_s", "mean_step_ms", "other_ms"),
    *("roofline_fraction", "mean_tpot_ms", "p50_tpot_ms", "p99_tpot_ms", "acceptance_rate"),
    *("acceptance_length", "mean_emitted_tokens", "speedup", "net_speedup", "draft_ms"),
)


@pytest.mark.parametrize("key", DOUBLED)
def test_a_metric_that_is_doubled_is_refused(key: str) -> None:
    run = make_run()
    run.change(**{key: 2 * getattr(run.metrics["speculative"], key)})
    with pytest.raises(AssertionError, match=r" is .* but .* is "):
        run.check()


@pytest.mark.parametrize("key", ["speedup", "net_speedup"])
def test_a_speedup_other_than_the_median_of_those_of_the_batches_is_refused(key: str) -> None:
    run = make_run()
    median = getattr(run.metrics["speculative"], key)
    each = getattr(run.metrics["speculative"], f"{key}_per_batch")
    run.change(**{key: max(each)})
    with pytest.raises(AssertionError, match="the median"):
        run.check()
    run.change(**{key: median, f"{key}_per_batch": each[::-1]})
    with pytest.raises(AssertionError, match=f"batch 0: {key} x ms"):
        run.check()
