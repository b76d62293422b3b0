"""Metrics: the definitions in docs/record.md, and None where there is nothing to measure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from magicdec.records.metrics import (
    AcceptanceMetrics,
    PassSamples,
    PrefillMetrics,
    acceptance,
    decode_metrics,
    percentile,
    prefill_metrics,
    speedups,
)
from magicdec.request import Request, SamplingParams, StepOutput


def finished(num_output: int, finished_s: float | None) -> Request:
    request = Request(0, (1,), SamplingParams(99), list(range(num_output)))
    request.finished_s = finished_s
    return request


def test_acceptance_counts_survivors() -> None:
    """Ten verifications accepted 0, 0, 0, 1, 1, 3, 3, 4, 4, 4: nobody stopped at two, so as many
    got past the second draft token as past the third."""
    batches = [[[0, 1], [0, 3], [4]], [[1, 4], [0, 3], [4]]]
    result = acceptance(batches, [[4] * 3, [4] * 3])
    assert result.per_position == [0.7, 0.5, 0.5, 0.3]
    assert result.rate == 20 / 40
    assert result.length == 3.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_acceptance_agrees_with_itself(counts: list[int]) -> None:
    result = acceptance([[counts]], [[5]])
    survived = result.per_position
    assert survived is not None and result.rate is not None and result.length is not None
    assert len(survived) == 5
    assert survived == sorted(survived, reverse=True)
    assert math.isclose(1 + sum(survived), result.length)
    assert math.isclose(1 + 5 * result.rate, result.length)


def test_nothing_accepted_is_zero_and_nothing_drafted_is_none() -> None:
    assert acceptance([[[0, 0]]], [[2]]) == AcceptanceMetrics(0.0, 1.0, [0.0, 0.0])
    for batches, drafted in (([], []), ([[]], [[]]), ([[[]]], [[2]]), ([[[], []]], [[0, 0]])):
        assert acceptance(batches, drafted) == AcceptanceMetrics(None, None, None)


def test_steps_may_draft_different_numbers() -> None:
    """Of 4 rows that drafted, 3 accepted their first; of the 2 among these that drafted a second, 1
    accepted it, and not its third. Steps without drafts are no verifications."""
    result = acceptance([[[1, 0], [], [2], [1]], [[]]], [[1, 0, 3, 2], [0]])
    assert result.per_position == [3 / 4, 3 / 4 * 1 / 2, 0.0]
    assert result.rate == 4 / 7
    assert result.length == 2.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
@example([3.0, 1.0, 2.0], 50.0)
@example([1.0, 2.0], 100.0)
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    found = percentile(values, percent)
    assert found is not None and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-6)


def test_no_values_no_percentile() -> None:
    assert percentile([], 50) is None


def test_tpot_is_decode_time_over_the_tokens_after_the_first() -> None:
    samples = PassSamples()
    requests = [finished(5, 10.4), finished(3, 10.1), finished(1, 10.0), finished(3, None)]
    samples.end_batch(requests, started_s=10.0)
    assert samples.tpot_s == pytest.approx([0.1, 0.05])
    assert samples.num_tokens == [4 + 2 + 0 + 2]
    metrics = decode_metrics(samples, 1e9, False)
    assert metrics.mean_tpot_ms == pytest.approx(75)
    assert metrics.p50_tpot_ms == pytest.approx(75)
    assert metrics.p90_tpot_ms == pytest.approx(95)
    assert metrics.p99_tpot_ms == pytest.approx(99.5)


def observed(*batches: Sequence[tuple[float, list[int] | None]]) -> PassSamples:
    samples = PassSamples()
    for batch in batches:
        samples.begin_batch()
        for seconds, accepted in batch:
            drafted = 0 if accepted is None else 3
            samples.observe(StepOutput([[1]], drafted, accepted), seconds)
    return samples


def test_decode_metrics_by_hand() -> None:
    samples = observed([(0.25, [1, 0]), (0.25, [2])], [(0.5, [3])])
    samples.num_tokens, samples.bytes_read, samples.peak_memory_bytes = [30, 20], 4 * 10**9, 7
    samples.phase_s = {"draft": [0.1] * 3, "verify": [0.1, 0.2, 0.3], "decode": []}
    metrics = decode_metrics(samples, bandwidth=1e10, is_drafting=True)
    assert metrics.decode_tokens_per_s == 50.0
    assert metrics.mean_step_ms == pytest.approx(1000 / 3)
    assert (metrics.draft_ms, metrics.verify_ms, metrics.decode_ms) == (
        pytest.approx(100),
        pytest.approx(200),
        None,
    )
    assert metrics.mean_draft_tokens == 3
    assert metrics.other_ms == pytest.approx(1000 / 3 - 300)
    assert metrics.roofline_fraction == pytest.approx(0.4)
    assert (metrics.bytes_read, metrics.peak_memory_bytes) == (4 * 10**9, 7)
    assert metrics.acceptance_rate == 6 / 12
    assert samples.num_accepted == [[[1, 0], [2]], [[3]]]


def test_steps_that_draft_and_steps_that_do_not() -> None:
    samples = observed([(0.2, [1, 2]), (0.1, None)], [(0.1, None), (0.2, [3])])
    samples.phase_s = {"draft": [0.05, 0.06], "verify": [0.1, 0.1], "decode": [0.09, 0.08]}
    metrics = decode_metrics(samples, bandwidth=1e10, is_drafting=True)
    assert metrics.mean_draft_tokens == 1.5
    assert metrics.draft_ms == pytest.approx(55) and metrics.decode_ms == pytest.approx(85)
    assert metrics.other_ms == pytest.approx(150 - 480 / 4)
    assert metrics.acceptance_rate == 6 / 9 and metrics.acceptance_length == 3


def test_what_was_not_measured_is_none_and_never_zero() -> None:
    samples = observed([], [])
    samples.end_batch([finished(1, 1.0)], 0.0)
    metrics = decode_metrics(samples, 1e9, True)
    assert metrics.bytes_read == 0  # a count: no step ran, nothing was read
    assert all(value is None for key, value in asdict(metrics).items() if key != "bytes_read"), (
        metrics
    )
    assert prefill_metrics([], 0, 0.0) == PrefillMetrics(None, None)


def test_untimed_phases_leave_no_rest() -> None:
    samples = observed([(0.1, None)])
    metrics = decode_metrics(samples, 1e9, False)
    assert metrics.mean_step_ms == 100.0 and metrics.other_ms is None


def test_an_autoregressive_pass_has_no_acceptance() -> None:
    metrics = decode_metrics(observed([(0.1, None), (0.1, None)]), 1e9, False)
    assert metrics.acceptance_rate is metrics.acceptance_length is None
    assert metrics.acceptance_per_position is metrics.mean_draft_tokens is None


def test_prefill_metrics() -> None:
    metrics = prefill_metrics([0.5, 1.0], 3000, 1.5)
    assert metrics == PrefillMetrics(tokens_per_s=2000.0, mean_ttft_ms=750.0)


def test_speedups_are_of_throughput_batch_by_batch() -> None:
    """The second batch emitted fewer tokens than its baseline did (ends differ between ties), which
    counts as slower."""
    baseline = PassSamples([[1.0, 1.0], [2.0], [1.0]], [], [40, 40, 5])
    ours = PassSamples([[0.5], [0.5, 0.5], []], [], [40, 20, 0])
    assert speedups(baseline, ours) == [4.0, 1.0]
    assert speedups(ours, ours) == [1.0, 1.0]
    with pytest.raises(ValueError, match="zip"):
        speedups(PassSamples([[1.0]], [], [4]), ours)
