"""DraftedPass: what a pass drafted and emitted, request by request, in the form that comparisons
read. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.records.acceptance import PromptCounts, Verification, Verifications
from magicdec.records.pass_record import PassRecord


@dataclass(frozen=True)
class StepLog:
    """What one verification did for one request."""

    number: int  # of the verification of its request
    hashes: str | None  # of the drafted tokens, then of what was read; None: not known
    num_read: int
    proposed: int
    accepted: int
    emitted: int

    def differences(self, before: StepLog) -> Iterator[str]:
        """What is not as it was, the cause before what follows from it."""
        half = len(self.hashes or "") // 2
        if (self.hashes is None) != (before.hashes is None):
            yield "nothing drafted, as it was" if self.hashes is None else "drafts, which had none"
        elif self.hashes is not None and before.hashes is not None:
            if self.num_read != before.num_read:
                yield f"its draft forwards read {self.num_read} keys, was {before.num_read}"
            elif self.hashes[half:] != before.hashes[half:]:
                yield f"its draft forwards read other positions ({self.num_read} keys, as before)"
            if self.hashes[:half] != before.hashes[:half]:
                yield "other tokens drafted"
        if self.proposed != before.proposed:
            yield f"{self.proposed} drafts proposed, was {before.proposed}"
        if (self.accepted, self.proposed) != (before.accepted, before.proposed):
            yield f"accepted {self.accepted} of {self.proposed}, was {before.accepted}"
        if self.emitted != before.emitted:
            yield f"emitted {self.emitted}, was {before.emitted}"


@dataclass(frozen=True)
class DraftedPass:
    """Of P requests. `steps` is None where what each step drafted and read is not known; `totals`
    are further numbers of the whole pass, by their names, as far as it has counted them."""

    verifications: Verifications
    output_hashes: Sequence[str]
    steps: Sequence[Sequence[StepLog]] | None
    totals: Mapping[str, Any]

    @property
    def num_prompts(self) -> int:
        return len(self.output_hashes)

    @property
    def counts(self) -> PromptCounts:
        return PromptCounts.of(self.verifications.by_request, self.num_prompts)

    def verdicts(self, prompt: int) -> dict[int, bool]:
        """By position in the text: whether the draft there was right. Of drafts that were judged,
        of a pass whose drafts run ahead."""
        found: dict[int, bool] = {}
        for verification in self.verifications.by_request.get(prompt, ()):
            assert verification.position is not None, "its drafts run ahead"
            found |= {verification.position + i: True for i in range(verification.accepted)}
            if verification.accepted < verification.drafted:
                found[verification.position + verification.accepted] = False
        return found

    @classmethod
    def of(cls, record: PassRecord) -> DraftedPass:
        """What a pass drafted. Raises ValueError if the record does not say it."""
        if record.metrics is None or record.metrics.draft_acceptance_rate is None:
            raise ValueError("has no draft_acceptance_rate")
        verifications = record.verifications()
        if verifications.reported:
            raise ValueError("has the acceptance that a server reports, which is not compared")
        steps = [
            [step_log(i, each) for i, each in enumerate(verifications.by_request.get(number, ()))]
            for number in range(len(record.requests))
        ]
        totals = {
            name: values
            for name in ("draft_kv_tokens", "draft_rows")
            if None not in (values := [getattr(group, name) for group in record.groups])
        }
        return cls(verifications, record.output_hashes, steps if record.is_logged else None, totals)


def step_log(number: int, verification: Verification) -> StepLog:
    """One of the verifications of a request."""
    hashes, num_read = verification.digest or (None, 0)
    counts = verification.drafted, verification.accepted, verification.emitted
    return StepLog(number, hashes, num_read, *counts)
