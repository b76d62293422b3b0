"""The statistics of an audit against scipy, simulation and definitions."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, ttest_1samp

from magicdec.bench.audit.asking import ServerAnswer
from magicdec.bench.audit.counters import full_draft
from magicdec.bench.audit.counting import num_steps_of, seen_steps, tokens_per_step
from magicdec.bench.audit.greedy import distinct_ties
from magicdec.bench.audit.judging import margin
from magicdec.bench.audit.noise import Noise, spacing
from magicdec.bench.audit.record import SampledPlace
from magicdec.bench.audit.sampling import (
    ALPHA,
    LEAST_DRAWS,
    NUM_DEPTHS,
    SUSPICION,
    TAIL,
    OpenPlace,
    combined,
    compare_draws,
    draw,
    draws_needed,
    expected_of,
)
from magicdec.bench.audit.statistics import (
    chance_of_mean,
    chi_squared_tail,
    compare_counts,
    most_undetected,
    num_draws,
    rejected,
)
from magicdec.records.acceptance import ReportedCounts
from magicdec.systems.servers.server_format import AskedSampling, ScoredToken

QUIET = Noise([], 0.01, 0.0, [])
SAMPLED = AskedSampling(1.0)


@pytest.mark.parametrize(
    ("cells", "distance", "expected"),
    [(5, 0.05, 2768), (10, 0.1, 852), (20, 0.05, 4264), (50, 0.01, 147868)],
)
def test_the_draws_that_a_distance_needs(cells: int, distance: float, expected: int) -> None:
    """At level .001 and power .9, as by noncentral chi-squared distributions elsewhere."""
    assert num_draws(cells, distance, 1e-3, 0.9) == pytest.approx(expected, rel=2e-3)


def test_that_many_draws_find_that_distance() -> None:
    """In 9 of 10 trials, for the distribution that is hardest to find."""
    right = np.full(10, 0.1)
    wrong = right + np.where(np.arange(10) % 2, 0.02, -0.02)
    count = num_draws(10, 0.1, 1e-3, 0.9)
    random = np.random.default_rng(0)
    found = 0
    for _ in range(200):
        test = compare_counts(random.multinomial(count, wrong).tolist(), right.tolist())
        assert test is not None
        found += test.p_value < 1e-3
    assert 165 <= found <= 195


def test_right_counts_are_rejected_as_often_as_the_level() -> None:
    random = np.random.default_rng(1)
    right = random.dirichlet(np.full(15, 0.5))
    p_values = []
    for _ in range(300):
        test = compare_counts(random.multinomial(500, right).tolist(), right.tolist())
        assert test is not None
        p_values.append(test.p_value)
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.09
    assert test.total_variation < 2 * test.by_chance


@given(st.lists(st.integers(20, 200), min_size=2, max_size=12), st.integers(0, 99))
def test_without_rare_cells_it_is_the_test_of_scipy(counts: list[int], seed: int) -> None:
    right = np.random.default_rng(seed).uniform(0.5, 1.0, len(counts))
    right /= right.sum()
    found = compare_counts(counts, right.tolist())
    expected = chisquare(counts, right * sum(counts))
    assert found is not None
    if (right * sum(counts)).min() >= 5:
        assert found.statistic == pytest.approx(expected.statistic)
        assert found.p_value == pytest.approx(expected.pvalue)


def test_an_error_of_the_probabilities_is_no_fault() -> None:
    """Counts that are as far off as the noise are rejected without it, and not with it."""
    right = [0.25] * 4
    counts = [26_000, 24_000, 26_000, 24_000]
    without = compare_counts(counts, right)
    beside = compare_counts(counts, right, error=0.04)
    assert without is not None and beside is not None
    assert without.p_value < 1e-9 and beside.p_value > 0.01
    assert chi_squared_tail(10.0, 3) < chi_squared_tail(10.0, 3, 5.0)


def test_many_tests_together() -> None:
    assert rejected([0.02, 0.0004, 0.04], 0.05) == [True, True, True]
    assert rejected([0.03, 0.0004, 0.04], 0.05) == [False, True, False]
    assert rejected([], 0.05) == []
    assert most_undetected(59) == pytest.approx(0.0495, abs=1e-3)


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=9))
def test_the_chance_of_a_mean_is_that_of_scipys_t_test(values: list[float]) -> None:
    if np.std(values) > 1e-6:
        expected = ttest_1samp(values, 0.0, alternative="less").pvalue
        assert chance_of_mean(values) == pytest.approx(expected)


def test_losses_that_are_all_alike_are_certain() -> None:
    assert chance_of_mean([-0.5] * 4) == 0 and chance_of_mean([0.0] * 4) == 1


def whole(logits: list[float]) -> ScoredToken:
    total = math.log(sum(map(math.exp, logits)))
    return ScoredToken(0, {token: value - total for token, value in enumerate(logits)})


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("top_k", [None, 3])
def test_the_expected_distribution_is_that_of_sampling(
    temperature: float, top_k: int | None
) -> None:
    """From all log-probabilities, by the definition of temperature and top-k."""
    logits = [2.0, 1.0, 0.5, -1.0, -3.0]
    found = expected_of(whole(logits), AskedSampling(temperature, top_k), QUIET)
    weights = [math.exp(value / temperature) for value in logits][: top_k or 5]
    assert found is not None
    cells = {token: chance for token, chance in found.cells.items() if token != TAIL}
    assert cells == pytest.approx(dict(enumerate(np.array(weights) / sum(weights))))


def test_the_expected_distribution_under_top_p() -> None:
    chances = [0.5, 0.2, 0.15, 0.1, 0.05]
    scored = ScoredToken(0, {token: math.log(chance) for token, chance in enumerate(chances)})
    found = expected_of(scored, AskedSampling(top_p=0.75, temperature=1), QUIET)
    assert found is not None and found.is_closed
    assert found.cells == pytest.approx({0: 0.5 / 0.85, 1: 0.2 / 0.85, 2: 0.15 / 0.85})
    few = ScoredToken(0, {0: math.log(0.5), 1: math.log(0.2)})
    assert expected_of(few, AskedSampling(top_p=0.75, temperature=1), QUIET) is None


def test_draws_that_top_k_excludes() -> None:
    expected = expected_of(whole([2.0, 1.0, 0.5, -1.0]), AskedSampling(1.0, 2), QUIET)
    assert expected is not None
    found = compare_draws([0] * 73 + [1] * 27 + [2, 3], expected, 0.0)
    assert found is not None and found.num_impossible == 2 and found.p_value > 0.5


def test_tokens_at_the_edge_of_top_k_are_not_judged() -> None:
    near = expected_of(whole([2.0, 1.0, 0.995, -1.0]), AskedSampling(1.0, 2), QUIET)
    assert near is not None and near.edge == {1, 2} and set(near.cells) == {0}


class Drawing:
    """In place of a server: after the token 1, tokens are drawn with the probabilities `drawn`, and
    said to have those of `right`; all others are certain."""

    def __init__(self, right: list[float], drawn: list[float]) -> None:
        self.right = right
        self.drawn = drawn
        self.random = np.random.default_rng(5)
        self.seeds: list[int | None] = []

    def answer(self, ids: tuple[int, ...], count: int, sampling: AskedSampling) -> ServerAnswer:
        self.seeds.append(sampling.seed)
        token = int(self.random.choice(len(self.drawn), p=self.drawn))
        return ServerAnswer(ids, [1, token, *[0] * (count - 2)])

    def next_token(self, ids: list[int]) -> ScoredToken:
        if ids == [7, 7, 7, 1]:
            return ScoredToken(0, {token: math.log(p) for token, p in enumerate(self.right)})
        return ScoredToken(0, {0: 0.0, 1: -30.0})


@pytest.mark.parametrize("chance", [0.6, 0.8, 1.0])
def test_draws_are_enough_for_a_test_however_far_it_may_be_off(chance: float) -> None:
    """Also at a distance that fewer draws would show than a test is worth."""
    place = OpenPlace((1, 2), 3, chance, (4, 5))
    ((first, _),) = draws_needed([place], 0.5)
    begin_right = np.random.default_rng(0).binomial(first, chance, 10_000)
    assert (begin_right >= LEAST_DRAWS).mean() > 0.99
    assert first < 2 * LEAST_DRAWS / chance


def draws_of(server: Drawing, trials: int) -> list[float]:
    """The p-values of so many places, and of each that no seed is drawn twice."""
    place = OpenPlace((7, 7, 7), 1, 1.0, (0, 1))
    (counts,) = draws_needed([place], 0.2)
    found = []
    for _ in range(trials):
        server.seeds.clear()
        drawn = draw(server, SimpleNamespace(server=server), place, counts, SAMPLED, 1, QUIET)  # type: ignore[arg-type]
        assert len({*server.seeds}) == len(server.seeds) == len(drawn.answers)
        assert len(server.seeds) in (counts[0], sum(counts))
        (tested,) = drawn.tested
        found.append(tested.p_value)
    return found


def test_right_draws_that_look_wrong_are_drawn_again() -> None:
    """In 1 of 20 trials, while the others keep their p-value; and the p-value of both is still
    one."""
    right = [0.1] * 10
    found = np.array(draws_of(Drawing(right, right), 200))
    assert 2 <= (found < 0.05).sum() <= 22 and (found > 0.5).sum() > 50
    assert (found < 0.01).sum() <= 8 and (found < 1e-3).sum() <= 2


def test_a_depth_that_looks_right_keeps_its_p_value_beside_one_that_is_drawn_again() -> None:
    def tested(p_value: float) -> SampledPlace:
        return SampledPlace(
            context=3,
            depth=2,
            num_draws=400,
            num_cells=10,
            p_value=p_value,
            total_variation=0.05,
            total_variation_interval=[0.03, 0.07],
            total_variation_by_chance=0.08,
            num_impossible=0,
        )

    assert combined(tested(0.6), tested(0.3)).p_value == 0.6
    assert combined(tested(0.04), tested(0.3)).p_value == pytest.approx(SUSPICION * 0.3)
    assert combined(tested(0.04), None).p_value == SUSPICION


def test_wrong_draws_are_found_with_the_power_of_both_draws() -> None:
    """In 9 of 10 trials, for the distribution that is hardest to find."""
    wrong = [0.14, 0.06] * 5
    found = draws_of(Drawing([0.1] * 10, wrong), 100)
    assert 81 <= sum(p_value < ALPHA / NUM_DEPTHS for p_value in found) <= 98


def answer(
    sizes: list[int], counts: ReportedCounts | None = None, gap_s: float = 0.1
) -> ServerAnswer:
    """An answer whose events have so many tokens."""
    parts = [(gap_s * number, size) for number, size in enumerate(sizes, 1)]
    return ServerAnswer((1, 2), [3] * sum(sizes), parts, counts=counts)


def test_steps_that_are_seen() -> None:
    assert seen_steps(answer([1, 3, 1, 4])) == [3, 1, 4]
    assert seen_steps(answer([2, 3])) == [1, 3]  # the first step came with the prompt's token
    assert seen_steps(answer([1, 1, 1])) is None
    bursts = ServerAnswer((1,), [3] * 6, [(t, 1) for t in (0.1, 0.2, 0.2002, 0.2004, 0.3, 0.3001)])
    assert seen_steps(bursts) == [3, 2]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=20))
def test_steps_follow_from_what_is_accepted(sizes: list[int]) -> None:
    """A step emits one token more than it accepts."""
    accepted = sum(size - 1 for size in sizes)
    counts = ReportedCounts(drafted=4 * len(sizes), accepted=accepted)
    made = answer([1, *sizes], counts)
    assert num_steps_of(made) == len(sizes)
    assert tokens_per_step([made]) == pytest.approx(sum(sizes) / len(sizes))


def test_a_verification_is_a_step_though_its_drafts_are_accepted_past_the_end() -> None:
    """As in vLLM: 64 tokens in 13 steps after the first, 66 with those that are cut off."""
    made = answer([1, *[5] * 12, 3], ReportedCounts(52, 52, 13))
    assert num_steps_of(made) == 13


def test_the_length_of_drafts_is_seen_where_most_are_accepted() -> None:
    assert full_draft([answer([1, 5, 5, 2, 5])]) == 4
    assert full_draft([answer([1, 5, 1, 2, 1])]) is None


def test_margins_and_spacings() -> None:
    scored = ScoredToken(4, {1: -0.5, 2: -1.0, 3: -4.0})
    assert [margin(scored, token) for token in (1, 2, 9)] == [0.0, 0.5, 3.5]
    assert spacing([0.125, 0.375, 1.0]) == 0.125
    assert spacing([0.1234, 0.0377]) == 0.0


def test_a_near_tie_of_answers_that_begin_alike_counts_once() -> None:
    """Else an answer alone and the same one among others would be two pieces of evidence."""
    near = ScoredToken(5, {5: -0.7, 6: -0.705})
    far = ScoredToken(7, {7: -0.1, 8: -3.0})
    scores = {0: near, 1: far}
    places = {((1, 2), (6, 7)): scores, ((1, 2), (6, 8)): scores, ((1, 3), (5, 7)): scores}
    assert distinct_ties(places, QUIET.tolerance) == (2, 1)
