"""The draft length that pays, in simulated worlds where the best is known; what is timed before
decoding under `--gamma auto`, under a scripted clock; and what steps will yield: rates from counts,
and the time until a batch is done, against simulation."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from statistics import fmean, pvariance
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magicdec.config.sections import DecodingSection
from magicdec.distributed.groups import Group
from magicdec.model.config import ExpertsConfig
from magicdec.runner.request import Batch, Request, SamplingParams
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.draft_length import (
    MARGIN,
    AutoLength,
    DraftCost,
    DraftLength,
    FixedLength,
    make_draft_length,
)
from magicdec.speculation.drafter import Drafter
from magicdec.speculation.forecast import (
    Acceptance,
    StepTimes,
    order_statistics,
    seconds_until_done,
    tokens_of_steps,
)
from magicdec.speculation.no_drafter import NoDrafter
from magicdec.speculation.steps import calibration
from magicdec.speculation.steps.calibration import measure_steps, repeated

CPU = torch.device("cpu")
MOST = 8


def make_length(most: int = MOST) -> AutoLength:
    return AutoLength(most, Group((0,), 0), CPU)


def make_batch(rows: int, prompt: int = 100, wanted: int = 10**6) -> Batch:
    requests = [Request(i, (1,) * prompt, SamplingParams(wanted)) for i in range(rows)]
    return Batch(tuple(requests))


@dataclass
class World:
    """What steps cost and how drafts fare. May change while it is decoded in."""

    decode: float
    draft: float  # of one draft token
    verify: float  # of one token more than a decode
    rate: float  # of each draft token, given those before it
    fixed: float = 0.5  # the share of a step of 8 rows that one of few rows costs too
    rates: dict[int, float] = field(default_factory=dict)  # of single requests
    unsure: float = 0.0  # the share of draft tokens behind which the chain of their row stops

    def seconds(self, rows: int, count: int) -> float:
        share = self.fixed + (1 - self.fixed) * rows / 8
        return share * (self.decode + count * (self.draft + self.verify))

    def measure(self, batch: Batch) -> Sequence[float]:
        return [self.seconds(len(batch.requests), count) for count in range(MOST + 1)]

    def run(
        self, length: DraftLength, rows: int, wanted: int, seed: int = 0, most_steps: int = 1 << 30
    ) -> float:
        """Seconds until every row has `wanted` tokens more, or of `most_steps` steps. `counts` is
        what each group of rows drafted, `lengths` what each row did, `emitted` how many tokens
        there were."""
        draws = random.Random(seed)
        total = 0.0
        self.emitted = 0
        self.counts = list[int]()
        self.lengths = list[list[int]]()
        batch = make_batch(rows, wanted=wanted)
        length.begin(batch, self.measure)
        while batch.requests and len(self.lengths) < most_steps:
            self.lengths.append(length.lengths(batch))
            for count in sorted(set(self.lengths[-1])):
                pairs = zip(batch.requests, self.lengths[-1], strict=True)
                group = Batch(tuple(r for r, n in pairs if n == count))
                accepted = []
                drafted = self.draw_length(draws, len(group.requests), count)
                for request in group.requests:
                    taken = 0
                    rate = self.rates.get(request.request_id, self.rate)
                    while taken < drafted and draws.random() < rate:
                        taken += 1
                    accepted.append(taken)
                    new = min(1 + taken, wanted - len(request.output_ids))
                    request.output_ids.extend([1] * new)
                seconds = self.seconds(len(group.requests), drafted)
                judged = [count] * len(group.requests)
                length.observe(group, drafted, accepted if count else (), seconds, judged)
                total = total + seconds
                self.emitted = self.emitted + sum(accepted) + len(accepted)
                self.counts.append(count)
            going = [r for r in batch.requests if len(r.output_ids) < wanted]
            batch = Batch(tuple(going))
        return total

    def draw_length(self, draws: random.Random, rows: int, count: int) -> int:
        """Of a chain that stops when all rows have; at once if none is sure of its first token."""
        if not self.unsure:
            return count
        going = rows
        drafted = 0
        while going and drafted < count:
            going = sum(draws.random() >= self.unsure for _ in range(going))
            drafted += going > 0
        return drafted

    def best(self, rows: int, wanted: int, seed: int) -> float:
        """Seconds under the best fixed draft length, 0 included."""
        return min(self.run(FixedLength(k), rows, wanted, seed) for k in range(MOST + 1))


@dataclass
class OfExperts(World):
    """`decode` is what a step takes without its experts, `expert` what each of them takes."""

    expert: float = 0.0
    experts: ExpertsConfig = ExpertsConfig(64, 4, 1)

    def seconds(self, rows: int, count: int) -> float:
        read = self.expert * self.experts.touched(rows * (count + 1))
        return super().seconds(rows, count) + read


CHEAP = World(decode=1.0, draft=0.1, verify=0.02, rate=0.9)
EVEN = World(decode=1.0, draft=0.5, verify=0.1, rate=0.6)
CLOSE = World(decode=1.0, draft=0.75, verify=0.1, rate=0.92)
WORTHLESS = World(decode=1.0, draft=0.2, verify=0.1, rate=0.02)
DEAR = World(decode=1.0, draft=1.0, verify=0.1, rate=0.95)
STOPPING = World(decode=1.0, draft=0.2, verify=0.05, rate=0.95, unsure=0.4)
WORLDS = {
    "cheap": CHEAP,
    "even": EVEN,
    "close": CLOSE,
    "worthless": WORTHLESS,
    "dear": DEAR,
    "stopping": STOPPING,
    "experts": OfExperts(decode=0.4, draft=0.1, verify=0.02, rate=0.8, expert=0.15),
}


@pytest.mark.narrow(7)
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("rows", [1, pytest.param(4, marks=pytest.mark.wide), 8])
def test_never_slower_than_decoding_and_near_the_best(name: str, rows: int) -> None:
    """Batches of 128 tokens a row after a warm-up of one, as in a run: mean of twenty."""
    world = WORLDS[name]
    against_decode = []
    against_best = []
    for seed in range(20):
        length = make_length()
        world.run(length, rows, 128, seed)
        seconds = world.run(length, rows, 128, 1000 + seed)
        against_decode.append(world.run(FixedLength(0), rows, 128) / seconds)
        against_best.append(world.best(rows, 128, 1000 + seed) / seconds)
    assert fmean(against_decode) >= 0.985, against_decode
    assert min(against_decode) >= 0.93, against_decode
    assert fmean(against_best) >= 0.93, against_best


def test_fewer_are_drafted_where_each_token_reads_more_experts() -> None:
    """At the same times of decode steps and drafts, and the same acceptance."""
    costs = {"draft": 0.1, "verify": 0.02, "rate": 0.8, "fixed": 1.0}
    dense = World(decode=1.0, **costs)
    mixture = OfExperts(decode=0.6, expert=0.1, **costs)
    drafted = []
    for world in (dense, mixture):
        length = make_length()
        for seed in range(4):
            world.run(length, 1, 512, seed)
        drafted.append(fmean(world.counts))
        best = min(world.run(FixedLength(k), 1, 512, 3) for k in range(MOST + 1))
        assert world.run(length, 1, 512, 3) < 1.06 * best
    assert drafted[0] > drafted[1] + 1.5, drafted


@pytest.mark.parametrize("rate", [0.6, 0.75, 0.8, 0.9])
def test_few_unlucky_drafts_do_not_end_drafting(rate: float) -> None:
    """One row whose drafts pay a little, as those of a small model do: three batches after a short
    warm-up are within 3 % of the best fixed length. Without hope the mean is 0.967 at 0.75."""
    world = World(decode=1.0, draft=0.5, verify=0.15, rate=rate)
    shares = []
    for seed in range(30):
        length = make_length()
        world.run(length, 1, 32, seed)
        seeds = [1000 * batch + seed for batch in (1, 2, 3)]
        seconds = sum(world.run(length, 1, 128, number) for number in seeds)
        fixed = [FixedLength(count) for count in range(MOST + 1)]
        shares.append(min(sum(world.run(k, 1, 128, s) for s in seeds) for k in fixed) / seconds)
    assert fmean(shares) >= 0.975, shares


@pytest.mark.parametrize("rows", [1, 4])
def test_chains_that_stop_are_forecast_without_bias(rows: int) -> None:
    """Tokens and seconds of a step by the tokens that are asked for, after steps that asked for any
    number in turn, are those of steps that always ask for so many."""

    class InTurn(AutoLength):
        def decide(self, batch: Batch) -> list[int]:
            return [500, 2500, 0, 0, *[next(turns)] * 2]

    turns = cycle(range(1, MOST + 1))
    length = InTurn(MOST, Group((0,), 0), CPU)
    STOPPING.run(length, rows, 10**6, most_steps=3000)
    length.times.settle()
    tokens = tokens_of_steps(length.acceptance.rates())
    for count in range(1, MOST + 1):
        world = replace(STOPPING)
        seconds = world.run(FixedLength(count), rows, 10**6, seed=1, most_steps=3000) / 3000
        assert length.seconds(rows, count) == pytest.approx(seconds, rel=0.06), count
        assert tokens[count][0] == pytest.approx(world.emitted / 3000 / rows, rel=0.06), count


def test_rows_that_end_late_are_counted() -> None:
    """Drafting one token is faster by the mean of tokens, but not until the last of 8 rows has its
    20."""
    barely = World(decode=1.0, draft=0.62, verify=0.06, rate=0.75)
    assert (1 + barely.rate) / barely.seconds(8, 1) > MARGIN
    assert fmean(barely.run(FixedLength(1), 8, 20, seed) for seed in range(40)) > 20.5
    assert fmean(barely.run(make_length(), 8, 20, seed) for seed in range(40)) < 20.2


def test_where_no_acceptance_could_pay_nothing_is_drafted() -> None:
    DEAR.run(make_length(), 2, 500)
    assert set(DEAR.counts) == {0}


def test_worthless_drafts_are_tried_rarely_and_forever() -> None:
    """Text changes: a draft that was of no use is tried again, at a bounded cost."""
    length = make_length()
    world = replace(WORTHLESS)
    world.run(length, 4, 100)
    seconds = world.run(length, 4, 2000)
    assert 0 < sum(count > 0 for count in world.counts) < 2000 / 20
    assert world.run(FixedLength(0), 4, 2000) / seconds >= 0.985
    world.rate = 0.95
    world.run(length, 4, 6000)
    assert sum(count > 0 for count in world.counts[-100:]) > 90


def test_a_growing_context_brings_speculation_back() -> None:
    """Decoding gets dearer with context, drafting on a budget does not."""
    length = make_length()
    world = World(decode=1.0, draft=0.9, verify=0.05, rate=0.9)
    world.run(length, 4, 100)
    assert world.counts[-1] == 0
    world.decode = 4.0
    world.run(length, 4, 800)
    assert sum(count > 0 for count in world.counts[-100:]) > 90


def test_times_between_one_row_and_all() -> None:
    times = StepTimes(5, batch_seconds=[10.0, 14.0], row_seconds=[2.0, 6.0])
    assert [times(rows, 0) for rows in (1, 2, 3, 5)] == [2, 4, 6, 10]
    for seconds in (30.0, 30.0, 1000.0):  # one step was disturbed
        times.correct(5, 0, seconds)
    assert times(5, 0) == 10, "not yet taken into account"
    times.settle()
    assert times(5, 0) == 30 and times(1, 0) == 6
    assert times(5, 1) == 14, "the other kind has not been seen"
    assert StepTimes(1, [3.0], [3.0])(1, 0) == 3


def test_one_measurement_serves_a_batch_size_and_context() -> None:
    """Until the warm-up has ended, after which steps are measured again."""
    measured = []
    length = make_length()

    def measure(batch: Batch) -> Sequence[float]:
        measured.append(len(batch.requests))
        return CHEAP.measure(batch)

    assert length.calibration_s == 0
    for rows, prompt in ((4, 1000), (4, 1010), (2, 1000), (4, 4000), (1, 1000), (4, 1000)):
        length.begin(make_batch(rows, prompt), measure)
    assert measured == [4, 1, 2, 1, 4, 1, 1]
    assert length.calibration_s > 0
    length.forget_times()
    length.begin(make_batch(4, 1000), measure)
    length.begin(make_batch(4, 1000), measure)
    assert measured[7:] == [4, 1]


@pytest.mark.parametrize(("factor", "times"), [(10.0, 2), (0.1, 2), (1.5, 1), (0.7, 1)])
def test_steps_are_measured_again_if_something_disturbed_that(factor: float, times: int) -> None:
    """Once, with the next batch. Drafts that seemed slow would not be tried for a long time."""
    measured = []
    length = make_length()
    batch = make_batch(1)
    factors = iter([factor, 1.0, 1.0])

    def measure(batch: Batch) -> Sequence[float]:
        measured.append(next(factors))
        return [seconds * measured[-1] for seconds in CHEAP.measure(batch)]

    for _ in range(3):
        length.begin(batch, measure)
        for _ in range(8):
            length.observe(batch, 0, [], CHEAP.seconds(1, 0), [0])
    assert len(measured) == times


def test_all_ranks_measure_again_as_the_first_says() -> None:
    """A measurement takes forwards of all ranks, whose times differ."""

    class Told(Group):
        def broadcast(self, x: torch.Tensor, index: int) -> torch.Tensor:
            assert index == 0
            return 1 - x

    for factor, times in ((1.0, 2), (10.0, 1)):
        measured = list[int]()
        length = AutoLength(MOST, Told((0, 1), 1), CPU)
        batch = make_batch(1)

        def measure(batch: Batch, measured: list[int] = measured) -> Sequence[float]:
            measured.append(len(batch.requests))
            return CHEAP.measure(batch)

        for _ in range(2):
            length.begin(batch, measure)
            for _ in range(8):
                length.observe(batch, 0, [], factor * CHEAP.seconds(1, 0), [0])
        assert len(measured) == times


def test_no_more_is_drafted_than_is_still_wanted() -> None:
    length = make_length()
    CHEAP.run(length, 2, 100)
    assert max(CHEAP.counts) == MOST
    for wanted in (5, 2, 1):
        assert max(length.lengths(make_batch(2, wanted=wanted))) <= wanted - 1


@pytest.mark.parametrize(
    ("decode", "cost"),
    # The last decode step was disturbed while it was timed.
    [(2.0, DraftCost(0.2, 0.1)), (1.0, DraftCost(1.4, 0.2)), (7.0, DraftCost(0, 0.0286))],
)
def test_what_drafts_cost_is_in_steps_of_decoding(decode: float, cost: DraftCost) -> None:
    length = make_length()
    batch = make_batch(2)
    length.begin(batch, lambda batch: [decode, *(2.4 + 0.2 * n for n in range(1, MOST + 1))])
    length.lengths(batch)
    assert length.cost == cost
    assert decode == 7.0 or cost(3) * decode == pytest.approx(3.0)


def test_what_a_lookup_costs_is_that_of_steps_in_which_no_model_drafts() -> None:
    """Its drafts are taken to cost half of a model's, and no more beside them than a model's."""
    length = make_length()
    batch = make_batch(2)
    length.begin(batch, lambda batch: [2.0, *(4.0 + 0.4 * n for n in range(1, MOST + 1))])
    costs = []
    for seconds in (None, 2.9, 2.9, 20.0, 100.0, 100.0, 100.0):
        length.observe(batch, 4, [0, 0], seconds, [0, 0], verified=4)
        length.lengths(make_batch(2 - len(costs) % 2))  # another number of rows: decided anew
        costs.append(length.lookup_cost)
    assert length.cost == DraftCost(1.0, 0.2)
    first, second, *_, last = [cost.step for cost in costs if cost is not None]
    assert (first, second, last) == (0.2, pytest.approx(0.05), 1.0)
    assert {cost.token for cost in costs if cost is not None} == {0.1}


def test_all_ranks_do_as_the_first_says() -> None:
    """The second rank would never draft; the group's broadcast says otherwise."""

    class Told(Group):
        def broadcast(self, x: torch.Tensor, index: int) -> torch.Tensor:
            assert index == 0
            return torch.tensor([500, 2500, 100, 900, 3, 5])

    length = AutoLength(MOST, Told((0, 1), 1), CPU)
    batch = make_batch(2)
    length.begin(batch, DEAR.measure)
    counts = []
    for _ in range(14):
        counts.append(length.lengths(batch)[0])
        length.observe(batch, counts[-1], [0, 0], 1.0, [counts[-1]] * 2)
    assert counts == [3, 5, 3, 5, 5, 5, 3, *[5] * 7]  # windows of 2, 4 and 8 steps
    assert length.lengths(batch) == [3, 3], "the next window"
    assert length.cost == DraftCost(0.05, 0.25) and length.lookup_cost == DraftCost(0.01, 0.09)
    assert length.lengths(make_batch(1)) == [3], "a row has ended: decided anew, within the window"


def test_the_section_decides() -> None:
    group = Group((0,), 0)
    fixed = make_draft_length(DecodingSection(gamma=3), group, CPU)
    assert isinstance(fixed, FixedLength) and fixed.max_gamma == 3 and fixed.calibration_s is None
    assert fixed.lengths(make_batch(2)) == [3, 3]
    assert fixed.acceptance is None, "nobody needs to know"
    mixed = make_draft_length(DecodingSection("speculative", "ngram+self", 3), group, CPU)
    mixed.observe(make_batch(2), 3, [3, 0], 1.0, [3, 0])
    assert mixed.acceptance is not None and mixed.acceptance.accepted == [1, 1, 1]
    auto = make_draft_length(DecodingSection(gamma="auto"), group, CPU)
    assert isinstance(auto, AutoLength) and auto.max_gamma == 8


@pytest.mark.parametrize("per_row", [False, True])
def test_a_row_whose_drafts_do_not_pay_gets_none(per_row: bool) -> None:
    """Of 8 rows, 3 accept almost nothing. Rows cost the same with drafts or without, so that a
    forward more is soon paid for. After the text of these rows has changed, they draft again."""
    world = World(8.0, 2.2, 1.0, 0.9, fixed=0.0125, rates=dict.fromkeys(range(3), 0.02))
    length = AutoLength(MOST, Group((0,), 0), CPU, per_row=per_row)
    seconds = world.run(length, 8, 10**6, most_steps=600)
    uniform = max(
        (5 * sum(0.9**k for k in range(n + 1)) + 3) / world.seconds(8, n) for n in range(MOST + 1)
    )
    is_split = [lengths[0] == 0 < lengths[7] for lengths in world.lengths[100:]]
    if not per_row:
        assert not any(len(set(lengths)) > 1 for lengths in world.lengths)
        assert world.emitted / seconds < uniform
        return
    assert fmean(is_split) > 0.7 and world.emitted / seconds > 1.02 * uniform
    world.rates.clear()
    world.run(length, 8, 10**6, seed=1, most_steps=600)
    assert fmean(lengths[0] > 0 for lengths in world.lengths[-100:]) > 0.8


BATCH = Batch((Request(0, (1, 2), SamplingParams(9)), Request(1, (3,), SamplingParams(9))))
CACHED = [2, 1]


@dataclass
class ScriptedSteps:
    """Steps whose work advances the clock. A draft costs 2 ms and 1 ms for each token, a decode
    step 10 ms, a verification 11 ms and 0.5 ms for each draft token."""

    disturbed: int = -1  # the call that takes 70 ms more
    now: float = 0.0
    calls: list[tuple[str, int]] = field(default_factory=list)
    phase: Any = "timed"
    drafter: Drafter = NoDrafter()
    reads_experts: bool = False

    def padded_gamma(self, count: int) -> int:
        return count

    def decode(self, batch: Batch) -> None:
        self._work("decode", 0, 0.010)

    def draft(self, batch: Batch, count: int) -> Proposal:
        self._work("draft", count, 0.002 + 0.001 * count)
        return Proposal(torch.ones(2, count, dtype=torch.int64))

    def verify(self, batch: Batch, proposal: Proposal) -> None:
        assert proposal.ids.shape[0] == 2
        count = proposal.ids.shape[1]
        self._work("verify", count, 0.011 + 0.0005 * count)

    def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
        assert batch is BATCH and lengths == CACHED
        self.now += 5.0
        self.calls.append(("undo", 0))

    def _work(self, kind: str, count: int, seconds: float) -> None:
        assert self.phase != "timed", "this is no phase of a step"
        is_disturbed = sum(kind != "undo" for kind, _ in self.calls) == self.disturbed
        self.now += seconds + 0.07 * is_disturbed
        self.calls.append((kind, count))


def measure(steps: ScriptedSteps, most: int, patch: pytest.MonkeyPatch) -> list[float]:
    patch.setattr("time.perf_counter", lambda: steps.now)
    return measure_steps(cast(Any, steps), BATCH, CACHED, most)


def seconds_of(most: int) -> list[float]:
    drafting = [0.002 + 0.001 * k + 0.011 + 0.0005 * k for k in range(1, most + 1)]
    return [pytest.approx(s) for s in (0.010, *drafting)]


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_seconds_lie_on_the_lines_through_what_was_timed(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ScriptedSteps()
    assert measure(steps, most, monkeypatch) == seconds_of(most)
    assert steps.phase == "timed", "the phases of steps are timed again"


def test_what_the_drafter_observed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.arange(3.0)
    drafter = SimpleNamespace(draft_kv=SimpleNamespace(state=[weights]), pa=0.3)

    class Observing(ScriptedSteps):
        def undo(self, batch: Batch, lengths: Sequence[int]) -> None:
            super().undo(batch, lengths)
            weights.add_(1.0)
            assert drafter.pa == 0, "chains do not stop while they are timed"

    measure(Observing(drafter=drafter), 8, monkeypatch)
    assert weights.tolist() == [0.0, 1.0, 2.0] and drafter.pa == 0.3


@pytest.mark.parametrize("disturbed", range(10))
def test_one_disturbance_changes_nothing(disturbed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(ScriptedSteps(disturbed), 8, monkeypatch) == seconds_of(8)


def test_few_steps_are_timed_and_each_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = ScriptedSteps()
    measure(steps, 8, monkeypatch)
    once = [("decode", 0), ("draft", 1), ("draft", 3), ("verify", 1), ("verify", 8)]
    assert [call for call in steps.calls if call[0] != "undo"] == once * calibration.REPEATS
    assert steps.calls[1::2] == [("undo", 0)] * len(once) * calibration.REPEATS


def test_of_experts_unlike_tokens_are_verified_and_three_lengths_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those between lie on the lines through what was timed."""
    experts = ExpertsConfig(64, 4, 1)

    class Reading(ScriptedSteps):
        def draft(self, batch: Batch, count: int) -> Proposal:
            super().draft(batch, count)
            return Proposal(torch.arange(count).repeat(2, 1))

        def verify(self, batch: Batch, proposal: Proposal) -> None:
            unlike = len(proposal.ids.unique())
            self._work("verify", proposal.ids.shape[1], 0.001 * experts.touched(unlike + 1))

    steps = Reading(reads_experts=True)
    found = measure(steps, 12, monkeypatch)
    verify = [0.001 * experts.touched(count + 1) for count in range(13)]
    timed = {1: verify[1], 3: verify[3], 8: verify[8]}
    for count in range(1, 13):
        exact = found[count] - 0.002 - 0.001 * count
        assert count not in timed or exact == pytest.approx(verify[count])
        assert abs(exact / verify[count] - 1) < (0.04 if count <= 8 else 0.1), count
    counts = [count for kind, count in steps.calls if kind == "verify"]
    assert counts == [1, 3, 8] * calibration.REPEATS


def test_longer_drafts_are_never_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only noise makes them appear so."""

    class Odd(ScriptedSteps):
        def verify(self, batch: Batch, proposal: Proposal) -> None:
            self._work("verify", proposal.ids.shape[1], 0.020 - 0.001 * proposal.ids.shape[1])

    seconds = measure(Odd(), 8, monkeypatch)
    assert seconds[8] - seconds[1] == pytest.approx(7 * 0.001)


def test_a_proposal_is_repeated_with_its_probabilities() -> None:
    ids = torch.tensor([[4, 5], [6, 7]])
    probs = torch.rand(2, 2, 9)
    found = repeated(Proposal(ids, probs), 5)
    assert found.ids.tolist() == [[4, 5, 4, 5, 4], [6, 7, 6, 7, 6]]
    assert found.probabilities is not None
    assert torch.equal(found.probabilities, probs[:, [0, 1, 0, 1, 0]])
    assert repeated(Proposal(ids), 1).ids.tolist() == [[4], [6]]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(0, 2)), max_size=200))
def test_rates_are_rates(steps: list[tuple[int, int, int]]) -> None:
    acceptance = Acceptance(5)
    assert acceptance.rates() == pytest.approx([0.8] * 5)
    assert acceptance.rates(7) == acceptance.rates()
    for accepted, drafted, request in steps:
        acceptance.observe([request], [drafted], [min(accepted, drafted)])
    for request in (None, 0, 1, 2, 3):
        rates = acceptance.rates(request)
        assert all(0 < rate < 1 for rate in rates)
        means = [mean for mean, _ in tokens_of_steps(rates)]
        assert means[0] == 1 and all(a < b for a, b in pairwise(means))
    assert acceptance.rates(3) == acceptance.rates(), "nothing is known of it"


def test_accepted_padding_is_not_counted() -> None:
    padded = Acceptance(3)
    plain = Acceptance(3)
    padded.observe([4, 9], [1, 0], [3, 2])
    plain.observe([4, 9], [1, 0], [1, 0])
    assert (padded.judged, padded.accepted) == (plain.judged, plain.accepted) == ([1, 0, 0],) * 2
    assert padded.rates(4) == plain.rates(4) and padded.rates(9) == plain.rates(9)


def test_a_position_is_judged_only_if_it_was_reached() -> None:
    acceptance = Acceptance(3)
    for _ in range(400):
        acceptance.observe([0, 1], [2, 2], [0, 1])  # half the first; none of the second; no third
    assert acceptance.rates() == pytest.approx([0.48, 0.05, 0.38], abs=0.05)


def test_rows_differ_and_are_forgotten() -> None:
    acceptance = Acceptance(3)
    for _ in range(100):
        acceptance.observe([4, 9], [3, 3], [3, 0])
    good = acceptance.rates(4)[0]
    bad = acceptance.rates(9)[0]
    mean = acceptance.rates()[0]
    assert bad < 0.7 * mean and good > 1.15 * mean
    acceptance.keep_rows(())
    assert acceptance.rates(4) == acceptance.rates(9) == acceptance.rates()


def test_what_is_old_counts_less() -> None:
    acceptance = Acceptance(1)
    for accepted in (0, 1):
        for _ in range(200):
            acceptance.observe([0], [1], [accepted])
    assert acceptance.rates()[0] > 0.9


def draw(rates: list[float], count: int, draws: random.Random) -> int:
    """Tokens of one step."""
    taken = 0
    while taken < count and draws.random() < rates[taken]:
        taken += 1
    return 1 + taken


def test_mean_and_variance_of_a_step() -> None:
    rates = [0.9, 0.7, 0.4]
    draws = random.Random(0)
    for count, (mean, variance) in enumerate(tokens_of_steps(rates)):
        sample = [draw(rates, count, draws) for _ in range(40000)]
        assert fmean(sample) == pytest.approx(mean, abs=0.02)
        assert pvariance(sample) == pytest.approx(variance, abs=0.03)


def test_order_statistics_are_those_of_normal_numbers() -> None:
    draws = random.Random(0)
    for count in (1, 2, 5, 8):
        samples = [sorted(draws.gauss(0, 1) for _ in range(count)) for _ in range(20000)]
        means = [fmean(column) for column in zip(*samples, strict=True)]
        assert order_statistics(count) == pytest.approx(means, abs=0.04)


def test_without_drafts_the_time_is_exact() -> None:
    """Rows that want 2, 5 and 5 tokens: two steps of three rows, three of two."""
    step = [(1.0, 0.0)] * 3
    assert seconds_until_done([5, 2, 5], step, lambda rows: 10.0 * rows) == 2 * 30 + 3 * 20


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("rates", [[0.9] * 4, [0.7, 0.5, 0.3, 0.1]], ids=str)
@pytest.mark.parametrize(
    ("wanted", "apart", "within"), [(30, 0, 0.04), (200, 0, 0.02), (80, 5, 0.05)]
)
def test_the_time_until_done_is_that_of_simulation(
    rows: int, rates: list[float], wanted: int, apart: int, within: float
) -> None:
    """The mean of tokens alone falls short of it."""
    draws = random.Random(1)
    count = len(rates)
    wants = [wanted - apart * r for r in range(rows)]

    def seconds(active: int) -> float:
        return 1.0 + 0.2 * active

    def simulate() -> float:
        left = list(wants)
        total = 0.0
        while left:
            total += seconds(len(left))
            left = [n - draw(rates, count, draws) for n in left]
            left = [n for n in left if n > 0]
        return total

    simulated = fmean(simulate() for _ in range(400))
    tokens = tokens_of_steps(rates)[count]
    predicted = seconds_until_done(wants, [tokens] * rows, seconds)
    assert predicted == pytest.approx(simulated, rel=within)
