"""The relative change of the acceptance rate between two records of the same prompts, with its
interval. Imports no torch.

The prompts are paired: each is left out of both records at once (jackknife), so that what all
prompts have in common cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from magicdec.records.acceptance import PromptCounts, count_by_prompt, estimates_of
from magicdec.records.intervals import FEWEST_PROMPTS, LEVEL, Array, jackknife_error, quantile
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples


@dataclass(frozen=True)
class Pair:
    """The counts of one thing in two records, prompt by prompt."""

    before: PromptCounts
    after: PromptCounts
    num_different: int  # outputs that differ between the records

    @property
    def is_equal(self) -> bool:
        """Whether all counts of all prompts are equal."""
        return self.before.equals(self.after)

    def rates(self) -> tuple[float, float]:
        """The acceptance rates of both records."""
        return float(estimates_of(self.before).rate[0]), float(estimates_of(self.after).rate[0])

    def log_ratios(self) -> Array:
        """[1 + P] the logarithm of the ratio of the acceptance rates, over all prompts and without
        each prompt."""
        before, after = estimates_of(self.before).rate, estimates_of(self.after).rate
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(after / before)


@dataclass(frozen=True)
class Change:
    """A relative change, such as -0.05 for a loss of 5 %, and its interval."""

    relative: float
    interval: tuple[float, float] | None  # None: there are too few prompts for one
    num_prompts: int

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 0, or does not exist."""
        return self.interval is None or self.interval[0] <= 0 <= self.interval[1]

    def __str__(self) -> str:
        text = f"{100 * self.relative:+.1f} %"
        if self.interval is not None:
            text += " [{:+.1f}, {:+.1f}]".format(*(100 * end for end in self.interval))
        return text


def pair_of(new: RunRecord, old: RunRecord) -> Pair:
    """Raises ValueError if a record has no samples, or none of what its drafts were."""
    before, after = samples_of(old, "baseline"), samples_of(new, "new record")
    pairs = zip(before.output_hashes, after.output_hashes, strict=True)
    return Pair(
        count_by_prompt(before), count_by_prompt(after),
        num_different=sum(one != other for one, other in pairs),
    )  # fmt: skip


def samples_of(record: RunRecord, name: str) -> PassSamples:
    """Those of the requested strategy; `name` stands for the record in the error."""
    if record.metrics is None or record.metrics.acceptance_rate is None:
        raise ValueError(f"the {name} has no acceptance_rate")
    if record.samples is None:
        raise ValueError(f"the {name} has no samples; renew it with `magicdec gate save`")
    return record.samples[record.config["decoding"]["strategy"]].restored()


def change_of(pair: Pair, level: float = LEVEL) -> Change:
    """The change of a pair, with its interval at that level."""
    ratios = pair.log_ratios()  # the first is of all prompts
    mean, num_prompts = float(ratios[0]), len(ratios) - 1
    interval = None
    if num_prompts >= FEWEST_PROMPTS and np.isfinite(ratios).all():
        reach = jackknife_error(ratios) * quantile(num_prompts - 1, level)
        interval = (math.expm1(mean - reach), math.expm1(mean + reach))
    return Change(math.expm1(mean), interval, num_prompts)
