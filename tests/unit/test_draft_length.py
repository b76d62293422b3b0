"""The draft length that pays: on simulated costs, where the best is known. No clock is read."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magicdec.decoding.draft_length import (
    Acceptance,
    AutoLength,
    FixedLength,
    StepTimes,
    make_draft_length,
)
from magicdec.distributed.groups import Group
from magicdec.request import Batch, Request, SamplingParams
from magicdec.sections import DecodingSection

CPU, MOST = torch.device("cpu"), 8


def make_length(most: int = MOST) -> AutoLength:
    return AutoLength(most, Group((0,), 0), CPU)


def make_batch(rows: int, prompt: int = 100, wanted: int = 10**6) -> Batch:
    requests = [Request(i, (1,) * prompt, SamplingParams(wanted)) for i in range(rows)]
    return Batch(tuple(requests), is_prefill=False)


@dataclass
class World:
    """What steps cost and how drafts fare. `decode` may change while it is decoded in."""

    decode: float
    draft: float  # of one draft token
    verify: float  # of one token more than a decode
    rate: float  # of each draft token, given those before it

    def seconds(self, count: int) -> float:
        return self.decode + count * (self.draft + self.verify)

    def measure(self, batch: Batch) -> Sequence[float]:
        return [self.seconds(count) for count in range(MOST + 1)]

    def best(self) -> float:
        """Tokens a second of the best fixed draft length, 0 included."""
        tokens, survival, best = 1.0, 1.0, 1 / self.decode
        for count in range(1, MOST + 1):
            survival *= self.rate
            tokens += survival
            best = max(best, tokens / self.seconds(count))
        return best

    def run(
        self, length: AutoLength, rows: int, steps: int, seed: int = 0
    ) -> tuple[float, list[int]]:
        """(tokens a second and row, draft length of each step)."""
        draws, batch, emitted, seconds = random.Random(seed), make_batch(rows), 0.0, 0.0
        counts = []
        for _ in range(steps):
            count = length.choose(batch)
            accepted = []
            for _ in range(rows):
                taken = 0
                while taken < count and draws.random() < self.rate:
                    taken += 1
                accepted.append(taken)
            emitted += 1 + sum(accepted) / rows
            seconds += self.seconds(count)
            length.observe(count, accepted if count else (), self.seconds(count))
            counts.append(count)
        return emitted / seconds, counts


CHEAP = World(decode=1.0, draft=0.1, verify=0.02, rate=0.9)
EVEN = World(decode=1.0, draft=0.5, verify=0.1, rate=0.6)
WORTHLESS = World(decode=1.0, draft=0.2, verify=0.1, rate=0.02)
DEAR = World(decode=1.0, draft=1.0, verify=0.1, rate=0.95)
WORLDS = {"cheap": CHEAP, "even": EVEN, "worthless": WORTHLESS, "dear": DEAR}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_never_slower_than_decoding_and_near_the_best(name: str, rows: int) -> None:
    """After a warm-up of 40 steps, as in a run. Single rows are noisy: mean of many seeds."""
    world, against_decode, against_best = WORLDS[name], [], []
    for seed in range(20):
        length = make_length()
        length.begin(make_batch(rows), world.measure)
        world.run(length, rows, 40, seed)
        speed, _ = world.run(length, rows, 80, 1000 + seed)
        against_decode.append(speed * world.decode)
        against_best.append(speed / world.best())
    assert sum(against_decode) / 20 >= 0.985, against_decode
    assert min(against_decode) >= 0.93, against_decode
    assert sum(against_best) / 20 >= 0.93, against_best


def test_where_no_acceptance_could_pay_nothing_is_drafted() -> None:
    length = make_length()
    length.begin(make_batch(2), DEAR.measure)
    assert set(DEAR.run(length, 2, 500)[1]) == {0}


def test_worthless_drafts_are_tried_rarely_and_forever() -> None:
    """Text changes: a draft that was of no use is tried again, at a bounded cost."""
    length = make_length()
    length.begin(make_batch(4), WORTHLESS.measure)
    WORTHLESS.run(length, 4, 100)
    speed, counts = WORTHLESS.run(length, 4, 2000)
    assert 0 < sum(count > 0 for count in counts) < 2000 / 20
    assert speed >= 0.985
    useful = World(WORTHLESS.decode, WORTHLESS.draft, WORTHLESS.verify, rate=0.95)
    _, counts = useful.run(length, 4, 3000)
    assert all(count > 0 for count in counts[-20:-10])


def test_a_growing_context_brings_speculation_back() -> None:
    """Decoding gets dearer with context, drafting on a budget does not."""
    length, world = make_length(), World(decode=1.0, draft=0.9, verify=0.05, rate=0.9)
    length.begin(make_batch(4), world.measure)
    assert world.run(length, 4, 100)[1][-1] == 0
    world.decode = 4.0
    assert world.run(length, 4, 400)[1][-1] > 0


@given(
    seconds=st.lists(st.floats(0.1, 10), min_size=MOST + 1, max_size=MOST + 1),
    counts=st.lists(st.integers(0, MOST), max_size=30),
)
def test_the_decision_is_the_argmax(seconds: list[float], counts: list[int]) -> None:
    length = make_length()
    length.begin(make_batch(1), lambda batch: seconds)
    for count in counts:
        length.acceptance.observe(MOST, [count])
    rates = length.acceptance.rates()
    survival = [1.0]
    for rate in rates:
        survival.append(survival[-1] * rate)
    speeds = [sum(survival[: k + 1]) / s for k, s in enumerate(seconds)]
    _, chosen = length.decide(1)
    if chosen:
        assert speeds[chosen] == pytest.approx(max(speeds))
    else:
        assert max(speeds) <= 1.01 * speeds[0] * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=200))
def test_rates_are_rates_and_fade_into_their_prior(steps: list[tuple[int, int]]) -> None:
    acceptance = Acceptance(5)
    assert acceptance.rates() == pytest.approx([0.8] * 5)
    for accepted, drafted in steps:
        acceptance.observe(drafted, [min(accepted, drafted)])
    assert all(0 < rate < 1 for rate in acceptance.rates())
    tokens = acceptance.expected_tokens()
    assert tokens[0] == 1 and all(a < b for a, b in pairwise(tokens))


def test_a_position_is_judged_only_if_it_was_reached() -> None:
    acceptance = Acceptance(3)
    for _ in range(400):
        acceptance.observe(2, [0, 1])  # half the first; none of the second; no third
    assert acceptance.rates() == pytest.approx([0.48, 0.05, 0.38], abs=0.05)


def test_times_between_one_row_and_all() -> None:
    times = StepTimes(5, of_all=[10.0, 14.0], of_one=[2.0, 6.0])
    assert [times(rows, 0) for rows in (1, 2, 3, 5)] == [2, 4, 6, 10]
    for seconds in (30.0, 30.0, 1000.0):  # one step was disturbed
        times.correct(5, 0, seconds)
    assert times(5, 0) == 30 and times(1, 0) == 6
    assert times(5, 1) == 14, "the other kind has not been seen"
    assert StepTimes(1, [3.0], [3.0])(1, 0) == 3


def test_one_measurement_serves_a_batch_size_and_context() -> None:
    measured, length = [], make_length()

    def measure(batch: Batch) -> Sequence[float]:
        measured.append(len(batch.requests))
        return CHEAP.measure(batch)

    assert length.calibration_s == 0
    for rows, prompt in ((4, 1000), (4, 1010), (2, 1000), (4, 4000), (1, 1000), (4, 1000)):
        length.begin(make_batch(rows, prompt), measure)
    assert measured == [4, 1, 2, 1, 4, 1, 1]
    assert length.calibration_s > 0


def test_no_more_is_drafted_than_is_still_wanted() -> None:
    length = make_length()
    length.begin(make_batch(2), CHEAP.measure)
    assert CHEAP.run(length, 2, 30)[1][-1] == MOST
    for wanted in (5, 2, 1):
        assert length.choose(make_batch(2, wanted=wanted)) == wanted - 1


def test_all_ranks_do_as_the_first_says() -> None:
    """The second rank would never draft; the group's broadcast says otherwise."""

    class Told(Group):
        def broadcast(self, x: torch.Tensor, index: int) -> torch.Tensor:
            assert index == 0
            return torch.tensor([3, 5])

    length = AutoLength(MOST, Told((0, 1), 1), CPU)
    length.begin(make_batch(2), DEAR.measure)
    counts = []
    for _ in range(7):
        counts.append(length.choose(make_batch(2)))
        length.observe(counts[-1], [0, 0], 1.0)
    assert counts == [3, 3, 5, 3, 5, 5, 5]  # windows of 1, 2, 4 steps
    assert length.choose(make_batch(2)) == 3, "the next window"
    assert length.choose(make_batch(1)) == 3, "a row has ended: decided anew, within the window"


def test_the_section_decides() -> None:
    group = Group((0,), 0)
    fixed = make_draft_length(DecodingSection(num_draft_tokens=3), group, CPU)
    assert isinstance(fixed, FixedLength) and fixed.most == 3 and fixed.calibration_s is None
    assert fixed.choose(make_batch(1)) == 3
    auto = make_draft_length(DecodingSection(num_draft_tokens="auto"), group, CPU)
    assert isinstance(auto, AutoLength) and auto.most == 8
