"""The intervals of a record: they cover the truth as often as they say, and they are absent where
there is too little to say anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from identities import acceptance, check_group
from synthetic_records import (
    Batch,
    baseline_pass,
    draw_chances,
    draw_pass,
    even_batch,
    parts_of,
    scaled,
)

from magicdec.records.acceptance import PromptCounts, acceptance_metrics, counts_of, estimates_of
from magicdec.records.computing import Beside, pass_metrics
from magicdec.records.intervals import interval, ratio_interval
from magicdec.records.pass_record import verifications_of

NUM_TRIALS = 1000
MOST_WITHOUT = 5  # of these trials may have no interval
WIDE = pytest.mark.wide
# Drafts.
FAIR = (0.55, 0.12, 4, 63)
GOOD = (0.8, 0.1, 2, 63)


def counts_by_prompt(batches: Sequence[Batch]) -> PromptCounts:
    requests = parts_of(batches).requests
    return counts_of(verifications_of(requests), len(requests))


def acceptance_of(batches: Sequence[Batch]) -> dict[str, Any]:
    requests = parts_of(batches).requests
    return acceptance_metrics(verifications_of(requests), len(requests))


@cache
def population(mean: float, spread: float, gamma: int, num_tokens: int) -> dict[str, list[float]]:
    """The true values, over so many prompts that their own error does not count."""
    rng = np.random.default_rng(0)
    chances = draw_chances(rng, 20_000, mean, spread)
    found = estimates_of(counts_by_prompt(draw_pass(rng, chances, gamma, num_tokens)))
    return {
        "draft_acceptance_rate": [found.rate[0]],
        "mean_acceptance_length": [found.length[0]],
        "tokens_per_verification": [found.emitted[0]],
        "acceptance_per_position": list(found.per_position[0]),
    }


@pytest.mark.narrow(1)
@pytest.mark.parametrize(
    ("num_prompts", "mean", "spread", "gamma", "num_tokens"),
    [
        (4, *FAIR),
        (4, *GOOD),
        pytest.param(8, *FAIR, marks=WIDE),
        pytest.param(16, *GOOD, marks=WIDE),
        pytest.param(32, *FAIR, marks=WIDE),
    ],
)
def test_the_intervals_of_acceptance_cover_the_truth(
    num_prompts: int, mean: float, spread: float, gamma: int, num_tokens: int
) -> None:
    """In 93 to 97 % of 1000 records, for every metric and position."""
    truth = population(mean, spread, gamma, num_tokens)
    rng = np.random.default_rng(100 + num_prompts)
    covered: Counter[tuple[str, int]] = Counter()
    existing: Counter[tuple[str, int]] = Counter()
    for _ in range(NUM_TRIALS):
        chances = draw_chances(rng, num_prompts, mean, spread)
        samples = draw_pass(rng, chances, gamma, num_tokens)
        found = acceptance_of(samples)
        for name, values in truth.items():
            ends = found[f"{name}_interval"]
            ends = ends if name == "acceptance_per_position" else [ends]
            for place, (value, both) in enumerate(zip(values, ends, strict=True)):
                existing[name, place] += bool(both)
                covered[name, place] += bool(both) and both[0] <= value <= both[1]
    assert min(existing.values()) >= NUM_TRIALS - MOST_WITHOUT
    shares = {key: covered[key] / existing[key] for key in existing}
    assert len(shares) == 3 + gamma
    assert all(0.93 <= share <= 0.97 for share in shares.values()), shares


@pytest.mark.wide
@pytest.mark.parametrize("num_batches", [3, pytest.param(8, marks=WIDE)])
def test_the_intervals_of_speeds_cover_the_truth(num_batches: int) -> None:
    """Of passes whose times differ by 5 % from batch to batch, and by as much between passes."""
    rng = np.random.default_rng(num_batches)
    covered: Counter[str] = Counter()
    chances = np.full(num_batches, 0.5)
    draft = draw_pass(rng, chances, 4, 63, num_batches)
    plain = [in_63_ms(batch) for batch in baseline_pass(draft)]
    draft = [in_63_ms(batch) for batch in draft]
    for _ in range(NUM_TRIALS):
        machine, pass_noise = rng.normal(0, 0.05, (2, num_batches))
        # The steps of each batch have the same time, so that only the noise is left.
        ours = parts_of(scaled(draft, np.exp(machine + pass_noise)))
        base = parts_of(scaled(plain, np.exp(machine)))
        found = pass_metrics(ours, Beside(is_drafting=True, reference=base))
        truth = {"speedup": 1.0, "net_speedup": 1.0, "decode_tokens_per_s": 63 / 0.063}
        for name, value in truth.items():
            low, high = getattr(found, f"{name}_interval")
            covered[name] += low <= value <= high
    assert all(0.93 <= count / NUM_TRIALS <= 0.97 for count in covered.values()), covered


def in_63_ms(batch: Batch) -> Batch:
    """The batch with steps that take 63 ms together."""
    count = len(batch.step_ms)
    return replace(batch, step_ms=[63.0 / count] * count)


def test_the_counts_of_prompts_are_those_of_their_requests() -> None:
    rng = np.random.default_rng(1)
    samples = draw_pass(rng, draw_chances(rng, 6, 0.6, 0.2), 4, 30, num_batches=2)
    parts = parts_of(samples)
    check_group("drawn", parts.groups[0], parts.requests[:3])
    counts = counts_by_prompt(samples)
    assert counts.emitted.tolist() == [30] * 6, "each prompt emits its own tokens"
    rate, length, per_position = acceptance(parts.requests)
    found = estimates_of(counts)
    assert math.isclose(found.rate[0], rate)
    assert math.isclose(found.length[0], length)
    assert np.allclose(found.per_position[0], per_position)
    assert counts.num_prompts == 6 and len(found.rate) == 7


def test_steps_that_draft_other_numbers_of_tokens_are_counted_by_position() -> None:
    """The first row ends in the step without drafts."""
    rows = [[(2, 2, 3), (0, 0, 1)], [(2, 0, 1), (0, 0, 1), (1, 1, 1)]]
    counts = counts_by_prompt([even_batch(rows)])
    assert counts.judged.tolist() == [[1, 1], [2, 0]]
    assert counts.accepted.tolist() == [[1, 1], [1, 0]]
    assert counts.verifications.tolist() == [1, 2] and counts.drafted.tolist() == [2, 3]


def test_intervals_by_hand() -> None:
    """The quantiles of Student's t for 95 % are 3.182446 with 3 degrees of freedom, and 4.302653
    with 2."""
    share = np.array([0.5, 0.4, 0.5, 0.6, 0.5])  # of all four prompts, then without each
    error = math.sqrt(3 / 4 * (0.1**2 + 0.1**2))
    reach = 3.182446 * error / (0.5 * 0.5)
    ends = [1 / (1 + math.exp(reach)), 1 / (1 + math.exp(-reach))]
    assert interval(share, 0, 1) == pytest.approx(ends, rel=1e-6)
    reach = 3.182446 * error / 0.5
    ends = [0.5 * math.exp(-reach), 0.5 * math.exp(reach)]
    assert interval(share, 0, math.inf) == pytest.approx(ends, rel=1e-6)
    reach = 4.302653 * math.log(2) / math.sqrt(3)
    ends = [2 * math.exp(-reach), 2 * math.exp(reach)]
    assert ratio_interval([1.0, 2.0, 4.0]) == pytest.approx(ends, rel=1e-6)


def test_there_is_no_interval_where_nothing_can_be_said() -> None:
    few = np.array([0.5, 0.4, 0.5, 0.6])
    assert interval(few, 0, 1) is None, "three prompts"
    assert interval(few, 0, 1, fewest=3) is not None
    assert interval(np.full(9, 0.5), 0, 1) is None, "no spread"
    for bound in (0.0, 1.0):
        assert interval(np.full(9, bound), 0, 1) is None
    assert interval(np.array([0.5, 0.4, 0.5, 0.6, np.nan]), 0, 1) is None
    assert ratio_interval([1.5, 1.6]) is None and ratio_interval([1.5] * 5) is None
    assert ratio_interval([1.5, 1.6, 1.7]) is not None


def test_an_interval_stays_within_its_bounds() -> None:
    rng = np.random.default_rng(2)
    for mean in (0.1, 0.9):
        samples = draw_pass(rng, draw_chances(rng, 4, mean, 0.05), 4, 40)
        found = acceptance_of(samples)
        low, high = found["draft_acceptance_rate_interval"]
        assert 0 < low < high < 1
        low, high = found["mean_acceptance_length_interval"]
        assert 1 < low < high < 5
