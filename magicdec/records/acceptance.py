"""What a pass accepted of its drafts, by prompt: the counts, the acceptance metrics, and their
intervals over the prompts. Prompts are what the statistics resample, because the verifications of
one prompt resemble each other. Imports no torch.

The acceptance rate is accepted tokens / draft tokens. The acceptance length is 1 + accepted tokens
/ verifications, as in vLLM; drafts that were accepted past a row's end count, and padding of rows
with fewer drafts than others does not. The acceptance of position k is the share of verifications
that accepted at least k drafts, as in vLLM. If steps draft different numbers of tokens, it is a
product over the positions up to k: the share of the steps that accepted this position among those
that drafted it and accepted all before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.records.intervals import Array, interval, with_each_left_out
from magicdec.records.samples import PassSamples


@dataclass(frozen=True)
class PromptCounts:
    """Counts over the verifications of each prompt, P prompts and K draft positions. A position is
    judged by a verification that drafted it and accepted all drafts before it."""

    drafted: Array  # [P] draft tokens
    verifications: Array  # [P]
    emitted: Array  # [P] tokens that the verifications appended to the output
    judged: Array  # [P, K]
    accepted: Array  # [P, K]

    @property
    def num_prompts(self) -> int:
        return len(self.drafted)

    def equals(self, other: PromptCounts) -> bool:
        """Whether all counts of all prompts are equal."""
        return all(map(np.array_equal, vars(self).values(), vars(other).values()))

    def with_verifications(self) -> PromptCounts:
        """Without the prompts that have no verification, which say nothing about acceptance."""
        return PromptCounts(*(counts[self.verifications > 0] for counts in vars(self).values()))


@dataclass(frozen=True)
class Estimates:
    """The acceptance metrics of all prompts, then without each prompt."""

    rate: Array  # [1 + P]
    length: Array  # [1 + P]
    emitted: Array  # [1 + P] mean tokens that a verification emits
    per_position: Array  # [1 + P, K]


def verifications(samples: PassSamples) -> Iterator[tuple[int, int, int, int]]:
    """(prompt, draft tokens, accepted ones, emitted tokens) of each verification. A step has counts
    for the rows that still run, in order; a row runs until it has emitted all of its tokens."""
    first = 0
    unpadded: list[list[list[int]]] = [[[]] * len(steps) for steps in samples.num_drafted]
    for lengths, *of_batch in zip(
        samples.sequence_tokens, samples.num_drafted, samples.num_proposed or unpadded,
        samples.num_accepted, samples.num_emitted, strict=False,
    ):  # fmt: skip
        left = list(lengths)
        for longest, proposed, accepted, emitted in zip(*of_batch, strict=True):
            running = [i for i, tokens in enumerate(left) if tokens > 0]
            for row, (i, tokens) in enumerate(zip(running, emitted, strict=False)):
                left[i] -= tokens
                drafted = proposed[row] if row < len(proposed) else longest
                if drafted and row < len(accepted):
                    yield first + i, drafted, min(accepted[row], drafted), tokens
        first += len(lengths)


def count_by_prompt(samples: PassSamples) -> PromptCounts:
    """The counts of each prompt, in the order of the prompts."""
    rows = np.array(list(verifications(samples)), int).reshape(-1, 4)
    prompts, drafted, accepted, emitted = rows.T
    positions = np.arange(max((d for batch in samples.num_drafted for d in batch), default=0))
    num_prompts = sum(map(len, samples.sequence_tokens))

    def by_prompt(counts: Any) -> Array:
        total = np.zeros((num_prompts, *counts.shape[1:]))
        np.add.at(total, prompts, counts)
        return total

    return PromptCounts(
        by_prompt(drafted),
        by_prompt(np.ones(len(rows))),
        by_prompt(emitted),
        by_prompt(positions < np.minimum(drafted, accepted + 1)[:, None]),
        by_prompt(positions < accepted[:, None]),
    )


def estimates_of(counts: PromptCounts) -> Estimates:
    """A number without a prompt is not finite if no other prompt has a verification."""
    drafted, verified, emitted, judged, accepted = map(with_each_left_out, vars(counts).values())
    num_accepted = accepted.sum(axis=1)  # each token counts once, at its position
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(judged > 0, accepted / judged, 0.0)
        return Estimates(
            rate=num_accepted / drafted,
            length=1 + num_accepted / verified,
            emitted=emitted / verified,
            per_position=shares.cumprod(axis=1),
        )


def acceptance_metrics(samples: PassSamples) -> dict[str, Any]:
    """The fields of `Metrics` that concern acceptance, with their intervals; none if nothing was
    drafted."""
    counts = count_by_prompt(samples).with_verifications()
    if not counts.num_prompts:
        return {}
    estimates, longest = estimates_of(counts), 1 + counts.judged.shape[1]
    positions = [interval(values, 0, 1) or [] for values in estimates.per_position.T]
    return {
        "acceptance_rate": float(estimates.rate[0]),
        "acceptance_length": float(estimates.length[0]),
        "mean_emitted_tokens": float(estimates.emitted[0]),
        "acceptance_per_position": estimates.per_position[0].tolist(),
        "acceptance_rate_interval": interval(estimates.rate, 0, 1),
        "acceptance_length_interval": interval(estimates.length, 1, longest),
        "mean_emitted_tokens_interval": interval(estimates.emitted, 1, longest),
        "acceptance_per_position_interval": positions if any(positions) else None,
        "judged_per_position": [int(count) for count in counts.judged.sum(axis=0)],
    }
