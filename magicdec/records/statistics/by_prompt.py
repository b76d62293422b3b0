"""The counts of a pass for each prompt, taken from its samples. Prompts are what the statistics
resample, because the verifications of one prompt resemble each other. Imports no torch.

Must not know how an interval is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.records.samples import PassSamples

Array = np.ndarray[Any, np.dtype[np.float64]]


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

    def accepted_tokens(self) -> Array:
        """[P] accepted draft tokens: each counts once, at its position."""
        return self.accepted.sum(axis=-1)

    def equals(self, other: PromptCounts) -> bool:
        """Whether all counts of all prompts are equal."""
        pairs = zip(self._each(), other._each(), strict=True)
        return all(np.array_equal(one, theirs) for one, theirs in pairs)

    def of_prompts(self, chosen: Any) -> PromptCounts:
        """The counts of some prompts: a mask [P], or indices."""
        return PromptCounts(*(counts[chosen] for counts in self._each()))

    def totals(self) -> PromptCounts:
        """[1 + P] in place of [P]: the sum over all prompts, then the sums without each prompt."""
        sums = [(counts.sum(axis=0, keepdims=True), counts) for counts in self._each()]
        return PromptCounts(*(np.concatenate((total, total - each)) for total, each in sums))

    def _each(self) -> tuple[Array, ...]:
        return self.drafted, self.verifications, self.emitted, self.judged, self.accepted


def count_by_prompt(samples: PassSamples) -> PromptCounts:
    """The counts of each prompt, in the order of the prompts. A step has counts for the rows that
    still run, in order; a row runs until it has emitted all of its tokens. Whether the samples
    contradict each other is checked elsewhere (`identities/of_samples.py`)."""
    num_positions = max((d for batch in samples.num_drafted for d in batch), default=0)
    counts: list[list[int]] = []
    for batch, wanted in enumerate(samples.sequence_tokens):
        of_batch = [[0] * (3 + 2 * num_positions) for _ in wanted]
        left = list(wanted)
        steps = zip(
            samples.num_drafted[batch], samples.num_accepted[batch], samples.num_emitted[batch],
            strict=True,
        )  # fmt: skip
        for drafted, accepted, emitted in steps:
            running = [i for i, tokens in enumerate(left) if tokens > 0]
            for row, (i, tokens) in enumerate(zip(running, emitted, strict=False)):
                left[i] -= tokens
                if drafted and row < len(accepted):
                    _add(of_batch[i], drafted, accepted[row], tokens, num_positions)
        counts += of_batch
    found = np.array(counts, float).reshape(len(counts), 3 + 2 * num_positions)
    judged, accepted_at = found[:, 3 : 3 + num_positions], found[:, 3 + num_positions :]
    return PromptCounts(found[:, 0], found[:, 1], found[:, 2], judged, accepted_at)


def _add(counts: list[int], drafted: int, accepted: int, emitted: int, num_positions: int) -> None:
    """Add one verification to the counts of its prompt."""
    counts[0] += drafted
    counts[1] += 1
    counts[2] += emitted
    for position in range(min(drafted, accepted + 1)):
        counts[3 + position] += 1
    for position in range(accepted):
        counts[3 + num_positions + position] += 1
