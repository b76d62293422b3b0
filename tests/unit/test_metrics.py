"""Metrics: the definitions in docs/record.md, and None where there is nothing to measure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic_samples import pass_samples

from magicdec.records.acceptance import acceptance_of
from magicdec.records.metric_tables import break_even_length
from magicdec.records.metrics import (
    add_prefill,
    break_even_gen_len,
    decode_metrics,
    net_speedups,
    percentile,
    run_metrics,
    speedups,
)
from magicdec.records.performance import Metrics
from magicdec.records.samples import PassSamples, PrefillSamples
from magicdec.runner.request import Request, SamplingParams, StepOutput


def finished(num_output: int, finished_s: float | None) -> Request:
    request = Request(0, (1,), SamplingParams(99), list(range(num_output)))
    request.finished_s = finished_s
    return request


def acceptance(batches: Sequence[Sequence[list[int]]], drafted: list[list[int]]) -> Metrics:
    """The acceptance metrics of accepted counts by batch, step and row, and of the numbers of draft
    tokens by batch and step. Every row emits what it accepts and one token more; a step without
    drafts emits one token of the first row."""
    samples = pass_samples(padded_gamma=drafted, num_accepted=batches)
    emit(samples)
    return Metrics(bytes_read=0, **acceptance_of(samples))


def emit(samples: PassSamples) -> None:
    """Fill in what the rows of each batch emit: the last rows end first."""
    samples.num_emitted = [
        [[count + 1 for count in step] or [1] for step in batch] for batch in samples.num_accepted
    ]
    samples.sequence_tokens = [
        [sum(step[row] for step in batch if row < len(step)) for row in range(len(batch[0]))]
        if batch
        else []
        for batch in samples.num_emitted
    ]
    samples.num_tokens = [sum(tokens) for tokens in samples.sequence_tokens]
    samples.sequence_ms = [[1.0] * len(tokens) for tokens in samples.sequence_tokens]


def test_acceptance_counts_survivors() -> None:
    """Ten verifications accepted 0, 0, 0, 1, 1, 3, 3, 4, 4, 4: nobody stopped at two, so as many
    got past the second draft token as past the third."""
    batches = [[[0, 1], [0, 3], [4]], [[1, 4], [0, 3], [4]]]
    result = acceptance(batches, [[4] * 3, [4] * 3])
    assert result.acceptance_per_position == [0.7, 0.5, 0.5, 0.3]
    assert result.draft_acceptance_rate == 20 / 40
    assert result.mean_acceptance_length == 3.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_acceptance_agrees_with_itself(counts: list[int]) -> None:
    result = acceptance([[counts]], [[5]])
    survived = result.acceptance_per_position
    rate = result.draft_acceptance_rate
    length = result.mean_acceptance_length
    assert survived is not None and rate is not None and length is not None
    assert len(survived) == 5
    assert survived == sorted(survived, reverse=True)
    assert math.isclose(1 + sum(survived), length)
    assert math.isclose(1 + 5 * rate, length)


def test_nothing_accepted_is_zero_and_nothing_drafted_is_none() -> None:
    none = acceptance([[[0, 0]]], [[2]])
    assert (none.draft_acceptance_rate, none.mean_acceptance_length) == (0.0, 1.0)
    assert none.acceptance_per_position == [0.0, 0.0]
    for batches, drafted in (([], []), ([[]], [[]]), ([[[]]], [[2]]), ([[[], []]], [[0, 0]])):
        assert acceptance(batches, drafted) == Metrics(bytes_read=0)


def test_padding_is_no_draft() -> None:
    """Of two rows with 3 and 0 proposed tokens in a step of 4, the first accepted 2; in the next
    step the second alone had drafts. What they accept of their padding says nothing."""
    samples = replace(
        PassSamples.empty(),
        sequence_tokens=[[7, 6]],
        padded_gamma=[[4, 4]],
        num_drafted=[[[3, 0], [0, 2]]],
        num_accepted=[[[2, 1], [0, 2]]],
        num_emitted=[[[3, 2], [4, 4]]],
    )
    metrics = acceptance_of(samples)
    assert metrics["num_spec_steps"] == 2
    assert (
        metrics["draft_acceptance_rate"] == 4 / 5 and metrics["mean_acceptance_length"] == 1 + 4 / 2
    )


def test_steps_may_draft_different_numbers() -> None:
    """Of 4 rows that drafted, 3 accepted their first; of the 2 among these that drafted a second, 1
    accepted it, and not its third. Steps without drafts are no verifications."""
    result = acceptance([[[1, 0], [], [2], [1]], [[]]], [[1, 0, 3, 2], [0]])
    assert result.acceptance_per_position == [3 / 4, 3 / 4 * 1 / 2, 0.0]
    assert result.draft_acceptance_rate == 4 / 7
    assert result.mean_acceptance_length == 2.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
@example([3.0, 1.0, 2.0], 50.0)
@example([1.0, 2.0], 100.0)
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    found = percentile(values, percent)
    assert percentile([], percent) is None
    assert found is not None and math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-6)


def test_tpot_is_decode_time_over_the_tokens_after_the_first() -> None:
    samples = PassSamples.empty()
    samples.begin_batch()
    requests = [finished(5, 10.4), finished(3, 10.1), finished(1, 9.0)]
    samples.end_batch(requests, started_s=10.0)
    assert samples.sequence_ms == [[400, 100, 0]] and samples.sequence_tokens == [[4, 2, 0]]
    assert samples.num_tokens == [4 + 2 + 0]
    with pytest.raises(AssertionError, match="every request has ended"):
        samples.end_batch([finished(3, None)], started_s=10.0)
    metrics = decode_metrics(samples, 1e9, False)
    assert metrics.mean_tpot_ms == pytest.approx(75)
    assert metrics.p50_tpot_ms == pytest.approx(75)
    assert metrics.p90_tpot_ms == pytest.approx(95)
    assert metrics.p99_tpot_ms == pytest.approx(99.5)


def observed(*batches: Sequence[tuple[float, list[int] | None]]) -> PassSamples:
    samples = PassSamples.empty()
    for batch in batches:
        samples.begin_batch()
        for seconds, accepted in batch:
            drafted = 0 if accepted is None else 3
            tokens = [[1] * (count + 1) for count in accepted or [0]]
            samples.observe(StepOutput(tokens, drafted, accepted), seconds)
    return samples


def test_decode_metrics_by_hand() -> None:
    samples = observed([(0.25, [1, 0]), (0.25, [2])], [(0.5, [3])])
    samples.sequence_tokens = [[10, 20], [20]]
    samples.sequence_ms = [[100, 500], [500]]
    samples.num_tokens = [30, 20]
    samples.bytes_read = [[10**9, 10**9], [2 * 10**9, 0]]
    samples.peak_memory_bytes = [[3, 5], [7]]
    samples.observe_phases({"draft": [0.1] * 3, "verify": [0.1, 0.2, 0.3]})
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
    assert (metrics.bytes_read, metrics.peak_memory_bytes) == (4 * 10**9, 8)
    assert metrics.draft_acceptance_rate == 6 / 12
    assert samples.num_accepted == [[[1, 0], [2]], [[3]]]


def test_steps_that_draft_and_steps_that_do_not() -> None:
    samples = observed([(0.2, [1, 2]), (0.1, None)], [(0.1, None), (0.2, [3])])
    phases = {"draft": [0.05, 0.06], "verify": [0.1, 0.1], "decode": [0.09, 0.08]}
    samples.observe_phases(phases)
    emit(samples)
    metrics = decode_metrics(samples, bandwidth=1e10, is_drafting=True)
    assert metrics.mean_draft_tokens == 1.5
    assert metrics.draft_ms == pytest.approx(55) and metrics.decode_ms == pytest.approx(85)
    assert metrics.other_ms == pytest.approx(150 - 480 / 4)
    assert metrics.draft_acceptance_rate == 6 / 9 and metrics.mean_acceptance_length == 3


def test_what_was_not_measured_is_none_and_never_zero() -> None:
    samples = observed([])
    samples.end_batch([finished(1, 1.0)], 0.0)
    metrics = decode_metrics(samples, 1e9, True)
    assert metrics.bytes_read == 0  # a count: no step ran, nothing was read
    assert all(value is None for key, value in asdict(metrics).items() if key != "bytes_read"), (
        metrics
    )
    nothing = PrefillSamples(prefill_ms=[], ttft_ms=[], num_tokens=[])
    assert add_prefill(Metrics(bytes_read=0), nothing) == Metrics(bytes_read=0)


def timed(
    begin: Sequence[float],
    steps: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    calibration: list[float] | None = None,
) -> PassSamples:
    """All in ms and by batch. Each sequence ends with its batch's last step."""
    return pass_samples(
        begin_ms=list(begin),
        calibration_ms=calibration,
        step_ms=[list(batch) for batch in steps],
        sequence_tokens=[list(batch) for batch in tokens],
        sequence_ms=[[sum(batch)] * len(row) for batch, row in zip(steps, tokens, strict=True)],
    )


def test_speedups_are_of_throughput_batch_by_batch() -> None:
    """The second batch emitted fewer tokens than its baseline did (ends differ between ties), which
    counts as slower."""
    baseline = timed([0] * 3, [[1.0, 1.0], [2.0], [1.0]], [[40], [40], [5]])
    ours = timed([0] * 3, [[0.5], [0.5, 0.5], []], [[40], [20], [0]])
    assert speedups(baseline, ours) == net_speedups(baseline, ours) == [4.0, 1.0]
    assert speedups(ours, ours) == [1.0, 1.0]
    with pytest.raises(ValueError, match="zip"):
        speedups(timed([0], [[1.0]], [[4]]), ours)


def test_the_net_speedup_counts_what_comes_before_the_first_step() -> None:
    """Steps are twice as fast. 20 ms of selection and 20 ms of calibration eat that up in the first
    batch, and 130 ms do so and more in the second; the baseline's own 10 ms count too. Calibration
    in the warm-up does not."""
    baseline = timed([10, 10, 10], [[10.0] * 10] * 3, [[10, 10]] * 3)
    ours = timed([20, 130, 0], [[5.0] * 10] * 3, [[10, 10]] * 3, [20.0, 0.0, 0.0])
    ours.warmup_calibration_ms = 5000.0
    assert speedups(baseline, ours) == [2.0] * 3
    assert net_speedups(baseline, ours) == pytest.approx([110 / 90, 110 / 180, 110 / 50])
    # After its first token a sequence gains 5 ms with each token: 30 ms are gained after 6, and
    # the seventh makes the difference.
    assert break_even_gen_len(baseline, ours) == 1 + 7
    metrics = run_metrics(
        {"autoregressive": baseline, "speculative": ours},
        PrefillSamples(prefill_ms=[1.0], ttft_ms=[[1.0]], num_tokens=[1]),
        1e9,
        False,
    )
    found = metrics["speculative"]
    assert (found.speedup, found.net_speedup) == (2.0, pytest.approx(110 / 90))
    assert found.begin_ms == 50 and metrics["autoregressive"].begin_ms == 10
    assert (found.calibration_ms, found.warmup_calibration_ms) == (5020.0, 5000.0)
    assert found.break_even_gen_len == 8 and found.net_speedup_per_batch == net_speedups(
        baseline, ours
    )


def test_calibration_without_a_warm_up_is_that_of_the_batches() -> None:
    ours = timed([0, 0], [[5.0], [5.0]], [[1], [1]], [20.0, 3.0])
    assert decode_metrics(ours, 1e9, True).calibration_ms == 23.0
    ours.warmup_calibration_ms = 0.0
    assert decode_metrics(ours, 1e9, True).calibration_ms == 23.0


def test_steps_that_are_not_faster_never_break_even() -> None:
    baseline = timed([0], [[10.0]], [[4]])
    same = timed([1], [[10.0]], [[4]])
    assert break_even_gen_len(baseline, same) is None
    assert break_even_gen_len(baseline, timed([0], [[9.0]], [[4]])) == 2
    assert break_even_gen_len(baseline, timed([0], [[]], [[0]])) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 90), st.integers(1, 30), st.integers(1, 30), st.integers(1, 40)),
        min_size=1,
        max_size=5,
    ).filter(lambda batches: len(batches) % 2 == 1)
)
def test_the_net_speedup_is_above_1_where_the_output_is_long_enough(
    batches: list[tuple[int, int, int, int]],
) -> None:
    """All batches have the same number of tokens, an odd number of times."""
    n = batches[0][3]
    tokens = [[n]] * len(batches)
    baseline = timed([0] * len(batches), [[float(b)] * n for _, b, _, _ in batches], tokens)
    ours = timed([a for a, *_ in batches], [[float(c)] * n for _, _, c, _ in batches], tokens)
    length = break_even_gen_len(baseline, ours)
    net = sorted(net_speedups(baseline, ours))[len(batches) // 2]
    assert (net > 1 + 1e-12) == (length is not None and n + 1 >= length)


def test_drafts_accepted_past_the_end_of_a_row_were_not_emitted() -> None:
    """Both rows accept three drafts; the first row wants one more token only. The acceptance length
    is that of vLLM, 1 + accepted / verifications."""
    samples = PassSamples.empty()
    samples.begin_batch()
    samples.observe(StepOutput([[1], [1, 1, 1, 1]], 3, [3, 3]), 0.1)
    samples.observe(StepOutput([[1]]), 0.1)
    samples.sequence_tokens = [[1, 5]]
    samples.sequence_ms = [[100, 200]]
    samples.num_tokens = [6]
    metrics = decode_metrics(samples, 1e9, True)
    assert (metrics.mean_acceptance_length, metrics.mean_emitted_tokens) == (4.0, 2.5)
    assert samples.num_emitted == [[[1, 4], [1]]]


def test_samples_are_restored_from_a_record() -> None:
    samples = observed([(0.25, [1, 0]), (0.25, None)])
    samples.end_batch([finished(5, 10.4)], 10.0)
    samples.observe_begin(0.3, 0.1, True)
    assert samples.begin_ms == samples.draft_prefill_ms == [200] and samples.calibration_ms == [100]
    kept = samples.to_record(is_drafting=True, is_random=False)
    assert kept.restored() == samples
    withheld = samples.to_record(is_drafting=True, is_random=True)
    assert withheld.padded_gamma is withheld.num_accepted is withheld.num_emitted is None
    assert withheld.restored().num_emitted == [[[], []]]


@pytest.mark.parametrize("plain", [0, 7, 40, 41])
@pytest.mark.parametrize("cost", [0.5, 1.8, 3.0])
def test_drafts_pay_from_the_time_of_a_verification_in_plain_steps(plain: int, cost: float) -> None:
    """Forty verifications beside so many steps that drafted nothing; with more of these, they hide
    what a verification takes."""
    length = break_even_length(plain + 40 * 3, plain + 40 * cost, 40, 3.0)
    assert length == (pytest.approx(cost) if plain <= 40 else None)
    assert break_even_length(10, 10, 0, None) is None
