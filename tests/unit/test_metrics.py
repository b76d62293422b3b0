"""Metrics: the definitions in docs/record.md, and None where there is nothing to measure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from synthetic_records import Batch, Step, even_batch, parts_of

from magicdec.bench.recording import MeasuredParts
from magicdec.records.acceptance import AcceptanceMetrics, acceptance_metrics
from magicdec.records.computing import Beside, pass_metrics, percentile, ratios
from magicdec.records.metric_tables import break_even_length
from magicdec.records.metrics import PassMetrics, StepMetrics
from magicdec.records.pass_record import verifications_of

BANDWIDTH = 1e9


def acceptance(*batches: Sequence[Sequence[Step]]) -> AcceptanceMetrics:
    """The acceptance metrics of rows by batch: the (drafted, accepted, emitted) of their steps."""
    requests = parts_of([even_batch(rows) for rows in batches], is_drafting=True).requests
    return AcceptanceMetrics(**acceptance_metrics(verifications_of(requests), len(requests)))


def row(*accepted: int, drafted: int = 4) -> list[Step]:
    """A row that drafts the same number in each step, and emits a token more than it accepts."""
    return [(drafted, count, count + 1) for count in accepted]


def drafting(parts: MeasuredParts, **beside: Any) -> PassMetrics:
    return pass_metrics(parts, Beside(is_drafting=True, bandwidth=BANDWIDTH, **beside))


def test_acceptance_counts_survivors() -> None:
    """Ten verifications accepted 0, 0, 0, 1, 1, 3, 3, 4, 4, 4: nobody stopped at two, so as many
    got past the second draft token as past the third."""
    result = acceptance([row(0, 0, 4), row(1, 3)], [row(1, 0, 4), row(4, 3)])
    assert result.acceptance_per_position == [0.7, 0.5, 0.5, 0.3]
    assert result.draft_acceptance_rate == 20 / 40
    assert result.mean_acceptance_length == 3.0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_acceptance_agrees_with_itself(counts: list[int]) -> None:
    result = acceptance([row(count, drafted=5) for count in counts])
    survived = result.acceptance_per_position
    rate = result.draft_acceptance_rate
    length = result.mean_acceptance_length
    assert survived is not None and rate is not None and length is not None
    assert len(survived) == 5
    assert survived == sorted(survived, reverse=True)
    assert math.isclose(1 + sum(survived), length)
    assert math.isclose(1 + 5 * rate, length)


def test_nothing_accepted_is_zero_and_nothing_drafted_is_none() -> None:
    none = acceptance([row(0, drafted=2), row(0, drafted=2)])
    assert (none.draft_acceptance_rate, none.mean_acceptance_length) == (0.0, 1.0)
    assert none.acceptance_per_position == [0.0, 0.0]
    plain: Step = (0, 0, 1)
    for batches in ((), ([[], []],), ([[plain], [plain, plain]],)):
        assert acceptance(*batches) == AcceptanceMetrics()


def test_steps_without_drafts_are_no_verifications() -> None:
    """Of two rows the first drafts 3 tokens, then none, and the second none, then 2."""
    metrics = acceptance([[(3, 2, 3), (0, 0, 1)], [(0, 0, 1), (2, 2, 3)]])
    assert metrics.num_spec_steps == 2
    assert metrics.draft_acceptance_rate == 4 / 5 and metrics.mean_acceptance_length == 1 + 4 / 2


def test_steps_may_draft_different_numbers() -> None:
    """Of 4 rows that drafted, 3 accepted their first; of the 2 among these that drafted a second, 1
    accepted it, and not its third."""
    rows = [[(1, 1, 2), (0, 0, 1), (3, 2, 3), (2, 1, 2)], [(1, 0, 1)]]
    result = acceptance(rows, [[(0, 0, 1)]])
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


def test_tpot_is_the_time_from_the_first_token_over_the_tokens_after_it() -> None:
    """The shared prefill ends 10 ms after the first token of the first row."""
    batch = Batch(
        rows=[[(0, 0, 1)] * 4, [(0, 0, 1)] * 2, []],
        step_ms=[50.0, 50.0, 150.0, 150.0],
        prefill_ms=30.0,
        ttft_ms=[20.0, 25.0, 30.0],
    )
    metrics = pass_metrics(parts_of([batch]), Beside(is_drafting=False))
    tpots = [(30 + 400 - 20) / 4, (30 + 100 - 25) / 2]
    assert metrics.mean_tpot_ms == pytest.approx(sum(tpots) / 2)
    assert metrics.p50_tpot_ms == pytest.approx(sum(tpots) / 2)
    assert metrics.p90_tpot_ms == pytest.approx(tpots[1] + 0.9 * (tpots[0] - tpots[1]))
    assert metrics.mean_ttft_ms == 25 and metrics.mean_e2el_ms == pytest.approx(
        (430 + 130 + 30) / 3
    )


def test_decode_metrics_by_hand() -> None:
    batches = [
        Batch(
            rows=[[(3, 1, 15), (3, 2, 15)], [(3, 0, 1)]],
            step_ms=[250.0, 250.0],
            draft_ms=[100.0] * 2,
            verify_ms=[100.0, 200.0],
            bytes_read=[10**9, 10**9],
            peak_memory_bytes=[3, 5],
        ),
        Batch(
            rows=[[(3, 3, 19)]],
            step_ms=[500.0],
            draft_ms=[100.0],
            verify_ms=[300.0],
            bytes_read=[2 * 10**9, 0],
            peak_memory_bytes=[7],
        ),
    ]
    metrics = pass_metrics(parts_of(batches), Beside(is_drafting=True, bandwidth=1e10))
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


def test_steps_that_draft_and_steps_that_do_not() -> None:
    plain: Step = (0, 0, 1)
    batches = [
        Batch(
            rows=[[(3, 1, 2), plain], [(3, 2, 3)]],
            step_ms=[200.0, 100.0],
            draft_ms=[50.0],
            verify_ms=[100.0],
            decode_ms=[90.0],
        ),
        Batch(
            rows=[[plain, (3, 3, 4)]],
            step_ms=[100.0, 200.0],
            draft_ms=[60.0],
            verify_ms=[100.0],
            decode_ms=[80.0],
        ),
    ]
    metrics = drafting(parts_of(batches))
    assert metrics.mean_draft_tokens == 1.5
    assert metrics.draft_ms == pytest.approx(55) and metrics.decode_ms == pytest.approx(85)
    assert metrics.other_ms == pytest.approx(150 - 480 / 4)
    assert metrics.draft_acceptance_rate == 6 / 9 and metrics.mean_acceptance_length == 3


def test_what_was_not_measured_is_none_and_never_zero() -> None:
    metrics = drafting(parts_of([Batch(rows=[[]], step_ms=[], begin_ms=0.0)], is_drafting=True))
    counts = {"bytes_read", "peak_memory_bytes", "begin_ms", "prefill_tokens_per_s"}
    step_fields = {field.name for field in fields(StepMetrics)} - counts
    draft_fields = {field.name for field in fields(AcceptanceMetrics)}
    others = {name for name in asdict(metrics) if "tpot" in name or "speedup" in name}
    for name in step_fields | draft_fields | others:
        assert getattr(metrics, name) is None, name


def timed(
    begin: Sequence[float],
    steps: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[int]],
    calibration: Sequence[float] | None = None,
) -> MeasuredParts:
    """All in ms and by batch. Each row ends with its batch's last step, in which it emits all its
    tokens after the first."""
    return parts_of(
        [
            Batch(
                rows=[[(0, 0, 0)] * (len(steps_ms) - 1) + [(0, 0, n)] * (n > 0) for n in counts],
                step_ms=list(steps_ms),
                begin_ms=begin[batch],
                calibration_ms=None if calibration is None else calibration[batch],
            )
            for batch, (steps_ms, counts) in enumerate(zip(steps, tokens, strict=True))
        ]
    )


def speedups(baseline: MeasuredParts, ours: MeasuredParts) -> Any:
    return ratios(ours, baseline).get("speedup_per_group")


def net_speedups(baseline: MeasuredParts, ours: MeasuredParts) -> Any:
    return ratios(ours, baseline).get("net_speedup_per_group")


def break_even_gen_len(baseline: MeasuredParts, ours: MeasuredParts) -> Any:
    return ratios(ours, baseline).get("break_even_gen_len")


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
    assert speedups(baseline, ours) == [2.0] * 3
    assert net_speedups(baseline, ours) == pytest.approx([110 / 90, 110 / 180, 110 / 50])
    # After its first token a sequence gains 5 ms with each token: 30 ms are gained after 6, and
    # the seventh makes the difference.
    assert break_even_gen_len(baseline, ours) == 1 + 7
    found = drafting(ours, reference=baseline, warmup_calibration_ms=5000.0)
    plain = pass_metrics(baseline, Beside(is_drafting=False))
    assert (found.speedup, found.net_speedup) == (2.0, pytest.approx(110 / 90))
    assert found.begin_ms == 50 and plain.begin_ms == 10
    assert (found.calibration_ms, found.warmup_calibration_ms) == (5020.0, 5000.0)
    assert found.break_even_gen_len == 8 and found.net_speedup_per_group == net_speedups(
        baseline, ours
    )


def test_calibration_without_a_warm_up_is_that_of_the_batches() -> None:
    ours = timed([0, 0], [[5.0], [5.0]], [[1], [1]], [20.0, 3.0])
    assert drafting(ours).calibration_ms == 23.0
    assert drafting(ours, warmup_calibration_ms=0.0).calibration_ms == 23.0


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
    metrics = acceptance([[(3, 3, 1)], [(3, 3, 4), (0, 0, 1)]])
    assert (metrics.mean_acceptance_length, metrics.tokens_per_verification) == (4.0, 2.5)


@pytest.mark.parametrize("plain", [0, 7, 40, 41])
@pytest.mark.parametrize("cost", [0.5, 1.8, 3.0])
def test_drafts_pay_from_the_time_of_a_verification_in_plain_steps(plain: int, cost: float) -> None:
    """Forty verifications beside so many steps that drafted nothing; with more of these, they hide
    what a verification takes."""
    length = break_even_length(plain + 40 * 3, plain + 40 * cost, 40, 3.0)
    assert length == (pytest.approx(cost) if plain <= 40 else None)
    assert break_even_length(10, 10, 0, None) is None
