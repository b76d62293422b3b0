"""DraftLength: the number of tokens that a speculative step drafts.

An automatic length minimizes the time until every row has its tokens. Source: Leviathan et al.,
arXiv 2211.17192, section 3.5, with measured times instead of a cost ratio, and acceptance by
position and row. Rows that accept less end later, alone, which costs about 5 % over 128 tokens of 8
rows.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from magicdec.config.sections import MAX_AUTO_GAMMA, DecodingSection
from magicdec.distributed.groups import Group
from magicdec.kv.cache import upload
from magicdec.runner.request import Batch
from magicdec.speculation import forecast
from magicdec.speculation.forecast import (
    MOST_LIKELY,
    Acceptance,
    ChainLengths,
    StepTimes,
    tokens_of_steps,
)

Measure = Callable[[Batch], Sequence[float]]
"""Gives the seconds of a step of the batch with 0, 1, 2, ... draft tokens. Changes nothing."""


WINDOW = 32  # most steps between two decisions: a decision takes about 5 % of a short step
MARGIN = 1.03  # predicted speedup needed to draft: the best of many predictions is too optimistic
PROBE_COST = 0.005  # share of the time that may go into steps of the kind that was not chosen
MIN_PROBE_STEPS = 32
# Tokens still wanted for each row of the batch: of fewer, less is hoped, as there is less to win,
# and many rows need no patience, because they judge many drafts in few steps.
WORTH_TRYING = 64
COST_UNIT = 10**4  # a cost of 1 as it is broadcast


@dataclass(frozen=True)
class DraftCost:
    """The extra time of a step with drafts, in decode steps: a fixed part, and one for each
    draft token of a row, verification included."""

    step: float
    token: float

    def __call__(self, tokens: float) -> float:
        """The time of a step with `tokens` draft tokens a row, in decode steps."""
        return 1 + self.step + self.token * tokens


LOOKUP = DraftCost(0.2, 0.15)  # of drafts that a lookup makes, as long as nothing is known


class DraftLength(ABC):
    """A choice of draft lengths. By default it measures nothing."""

    max_gamma: int
    """The largest number of tokens that a step drafts."""
    choices: Sequence[int]
    """The numbers of tokens that a step may draft."""
    calibration_s: float | None = None
    """Seconds that `begin` has spent on measuring so far; None if it never measures."""

    cost: DraftCost | None = None
    """The cost of a step with drafts; None if unknown. The same on every rank."""
    lookup_cost: DraftCost | None = None
    """The cost of a step in which lookups alone draft; None if unknown. The same on every rank."""
    is_whole: bool = False
    """Whether lookups draft all that they find, whatever it promises."""
    acceptance: Acceptance | None = None
    """Acceptance of a model's drafts, in earlier passes too; None if nobody needs it. The same on
    every rank."""

    def begin(self, batch: Batch, measure: Measure) -> None:
        """Prepare for decoding `batch`. No decode step counts this time."""
        if self.acceptance is not None:
            # Of a request that begins, nothing is known yet: not what it accepted in another pass.
            running = {r.request_id for r in batch.requests if len(r.output_ids) > 1}
            self.acceptance.keep_rows(running)

    def forget_times(self) -> None:
        return None

    @abstractmethod
    def lengths(self, batch: Batch) -> list[int]:
        """The number of draft tokens of each row in the next step, the same on every rank."""

    def observe(
        self,
        batch: Batch,
        gamma: int,
        accepted: Sequence[int],
        seconds: float | None,
        judged: Sequence[int],
        verified: int | None = None,
    ) -> None:
        """Take note of a step that drafted `gamma` tokens a row, and verified `verified`
        on average (None: all).

        `accepted` is by row, empty without drafts. `seconds` is None unless it times this step
        alone. `judged`: how many tokens of each row a model was asked for, even if it drafted
        fewer."""
        if self.acceptance is not None and any(judged):
            requests = [r.request_id for r in batch.requests]
            self.acceptance.observe(requests, judged, accepted or [0] * len(requests))


class FixedLength(DraftLength):
    def __init__(self, max_gamma: int, acceptance: Acceptance | None = None) -> None:
        self.max_gamma = max_gamma
        self.choices = (max_gamma,)
        self.acceptance = acceptance

    def lengths(self, batch: Batch) -> list[int]:
        return [self.max_gamma] * len(batch.requests)


class WholeLookups(FixedLength):
    """As many tokens as the text has after an earlier occurrence, up to a number."""

    is_whole = True


class AutoLength(DraftLength):
    """A draft length that the first rank chooses every few steps and broadcasts.

    It serves all passes of a run, and keeps acceptance, and times by batch size and context
    length. With `per_row`, only some rows draft if that yields more tokens a second although
    each group takes a forward. With a `given` cost no time is measured."""

    acceptance: Acceptance

    def __init__(
        self,
        max_gamma: int,
        group: Group,
        device: torch.device,
        per_row: bool = False,
        given: DraftCost | None = None,
    ) -> None:
        self.max_gamma = max_gamma
        self.group = group
        self.device = device
        self.per_row = per_row
        self.given = given
        few = min(max_gamma, MAX_AUTO_GAMMA)
        # All that a model may draft, and few of the longer ones of a lookup: each takes time.
        self.choices = sorted({*range(few + 1), *range(few, max_gamma, MAX_AUTO_GAMMA), max_gamma})
        # Acceptance of the tokens that were asked for, whether they were drafted or not: it does
        # not depend on the draft length, while that of drafted tokens would be of confident ones.
        self.acceptance = Acceptance(max_gamma)
        self.chains = ChainLengths(max_gamma)
        self.calibration_s: float = 0.0
        # By the rows in powers of 2, and the context in powers of sqrt(2).
        self._times: dict[tuple[int, int], StepTimes] = {}
        self._window = 1
        self._left = 0
        self._rows = 0
        self._then = 0  # of all steps of the window but the first
        self._split: dict[int, int] = {}  # draft tokens by request, if they differ
        self._since = {False: 0, True: 0}  # steps since the last one without drafts, and with
        # Of steps of lookups alone: their time in steps of decoding, and the drafts of a row.
        self._lookups = deque[tuple[float, int]](maxlen=16)

    def begin(self, batch: Batch, measure: Measure) -> None:
        rows = len(batch.requests)
        longest = max(r.num_cached for r in batch.requests)
        key = math.ceil(math.log2(rows)), round(2 * math.log2(max(longest, 1)))
        known = self._times.get(key)
        was_disturbed = upload([known is not None and known.was_disturbed], self.device)
        if known is None or self.group.broadcast(was_disturbed, 0).item():
            started = time.perf_counter()
            measured = measure if self.given is None else self._given_seconds
            batch_seconds = measured(batch)
            one = Batch(batch.requests[:1])
            self._times[key] = StepTimes(
                rows, batch_seconds, batch_seconds if rows == 1 else measured(one)
            )
            self.calibration_s += time.perf_counter() - started
        self.times = self._times[key]
        self._left = 0
        super().begin(batch, measure)

    def _given_seconds(self, batch: Batch) -> list[float]:
        assert self.given is not None
        return [1.0, *map(self.given, range(1, self.max_gamma + 1))]

    def forget_times(self) -> None:
        self._times.clear()

    def lengths(self, batch: Batch) -> list[int]:
        count = self._then
        ids = [r.request_id for r in batch.requests]
        if self._left == 0 or len(ids) != self._rows:
            self._rows = len(ids)
            before = (self._then, self._split)
            decision = upload(self.decide(batch), self.device)
            numbers = self.group.broadcast(decision, 0).tolist()
            costs = [n / COST_UNIT for n in numbers[:4]]
            (count, self._then, *split) = numbers[4:]
            self.cost = DraftCost(*costs[:2])
            self.lookup_cost = DraftCost(*costs[2:])
            self._split = dict(zip(ids, split, strict=True)) if any(split) else {}
            # After a change the next decision comes soon, because the change may be wrong.
            is_kept = before == (self._then, self._split)
            self._left = self._window = min(2 * self._window, WINDOW) if is_kept else 2
        self._left -= 1
        by_request = self._split if count == self._then else {}
        if count == 0 and not by_request:
            return [0] * len(ids)
        # A step with g drafts may emit g + 1 tokens: no more than the longest row still wants.
        most = max(r.sampling.max_new_tokens - len(r.output_ids) for r in batch.requests) - 1
        return [min(by_request.get(request, count), most) for request in ids]

    def decide(self, batch: Batch) -> list[int]:
        """`cost` and `lookup_cost` in whole numbers, the draft length of the next step, that of
        the steps after it, and `_split_rows`. At times the next step is one of the other kind,
        to measure it."""
        self.times.settle()
        until_done = self.predict(batch, self.choices)
        drafting = min(self.choices[1:], key=until_done.__getitem__)
        # Few unlucky drafts are no reason to stop, and would not be corrected soon.
        wanted = max(r.sampling.max_new_tokens - len(r.output_ids) for r in batch.requests)
        share = min(1.0, wanted / (WORTH_TRYING * len(batch.requests)))
        hope = 1 + share * (self.acceptance.hope - 1)
        hoped = self.predict(batch, [drafting], hope)[drafting]
        best = drafting if hoped * MARGIN < until_done[0] else 0
        rows = len(batch.requests)
        other = 0 if best else 1
        seconds = {k: self.seconds(rows, k) for k in self.choices}
        expected = [mean for mean, _ in tokens_of_steps(self.acceptance.rates())]
        # The time of a step of the other kind, without the time that its tokens save.
        lost_s = seconds[other] - expected[other] * seconds[best] / expected[best]
        steps = max(MIN_PROBE_STEPS, lost_s / (PROBE_COST * seconds[best]))
        # A step with drafts is useless if it would be slower with all its drafts accepted.
        hope = max((k + 1) / self.times(rows, k) for k in self.choices)
        useful = best > 0 or hope * seconds[0] > MARGIN
        first = other if useful and self._since[other > 0] >= steps else best
        few = min(self.max_gamma, MAX_AUTO_GAMMA)
        # A step of decoding that was disturbed takes longer than one with drafts.
        token = max(0.0, seconds[few] - seconds[1]) / max(1, few - 1)
        step = max(0.0, seconds[1] - token - seconds[0])
        cost = DraftCost(step / seconds[0], token / seconds[0])
        lookup = self._cost_of_lookup(cost)
        costs = [cost.step, cost.token, lookup.step, lookup.token]
        whole = [round(cost_s * COST_UNIT) for cost_s in costs]
        return [*whole, first, best, *self._split_rows(batch, best, drafting)]

    def _cost_of_lookup(self, cost: DraftCost) -> DraftCost:
        """A lookup saves the draft, taken as half of a token's cost."""
        token = min(LOOKUP.token, cost.token / 2)
        steps = [time - 1 - token * count for time, count in self._lookups]
        return DraftCost(max(0.0, min(cost.step, median(steps or [LOOKUP.step]))), token)

    def _split_rows(self, batch: Batch, best: int, count: int) -> list[int]:
        """The draft length of each row, `count` or 0; all 0, or empty, for `best` in all rows."""
        if not self.per_row:
            return []
        rows = len(batch.requests)
        rates = [self.acceptance.rates(r.request_id) for r in batch.requests]
        tokens = [tokens_of_steps(row_rates)[count][0] for row_rates in rates]
        uniform = (sum(tokens) if best else rows) / self.seconds(rows, best)
        split = forecast.fastest_split(tokens, count, MARGIN * uniform, self.seconds)
        return [count * is_drafting for is_drafting in split]

    def predict(self, batch: Batch, counts: Sequence[int], factor: float = 1.0) -> dict[int, float]:
        """Seconds until the batch is done, by draft length, with all rates times a factor."""
        remaining = [r.sampling.max_new_tokens - len(r.output_ids) for r in batch.requests]
        rates = [self.acceptance.rates(r.request_id) for r in batch.requests]
        steps = [
            tokens_of_steps([min(MOST_LIKELY, factor * rate) for rate in row]) for row in rates
        ]
        return {
            count: forecast.seconds_until_done(
                remaining, [row[count] for row in steps], partial(self.seconds, asked=count)
            )
            for count in counts
        }

    def seconds(self, rows: int, asked: int) -> float:
        return self.chains.mean(asked, partial(self.times, rows))

    def observe(
        self,
        batch: Batch,
        gamma: int,
        accepted: Sequence[int],
        seconds: float | None,
        judged: Sequence[int],
        verified: int | None = None,
    ) -> None:
        is_drafting = any(judged)
        seconds = seconds if self.given is None else None
        if gamma > 0 and not is_drafting:
            if seconds is not None:
                decode_s = self.times(len(batch.requests), 0)
                self._lookups.append((seconds / decode_s, verified or gamma))
            return
        self._since[not is_drafting] += 1
        self._since[is_drafting] = 0
        if seconds is not None:
            self.times.correct(len(batch.requests), verified or gamma, seconds)
        if is_drafting:
            self.chains.observe(max(judged), gamma)
            super().observe(batch, gamma, accepted, seconds, judged)
        elif self._split:  # so that these rows are tried again
            self.acceptance.fade([r.request_id for r in batch.requests])


def make_draft_length(
    decoding: DecodingSection,
    group: Group,
    device: torch.device,
    per_row: bool = False,
) -> DraftLength:
    if decoding.gamma_or_default == "auto":
        given = None if decoding.step_cost is None else DraftCost(*decoding.step_cost)
        return AutoLength(decoding.max_draft_forwards, group, device, per_row, given)
    gamma = decoding.max_draft_forwards
    is_mixed = decoding.looks_up and bool(decoding.model_drafter)
    return FixedLength(gamma, Acceptance(gamma) if is_mixed else None)
