"""JudgedRecord: a record of drafts, on which comparisons give a verdict; and DraftedPass: what it
drafted and emitted, request by request, in the form that they read. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magicdec.records.acceptance import PromptCounts, Verification, Verifications
from magicdec.records.record import MeasuredRecord, sealed_json
from magicdec.records.workload import WorkloadRecord

EVERY_POSITION = "every position"  # the mode of drafts that are judged there, and never kept


@dataclass(frozen=True, kw_only=True)
class JudgedRecord(MeasuredRecord):
    """A record of drafts: of a pass, or at every position of texts."""

    if TYPE_CHECKING:  # fields of every kind, each at its own place of the line
        workload: WorkloadRecord | None
        margin: float | None
        seal: str | None

    def to_json(self) -> str:
        return sealed_json(self)

    @property
    def mode(self) -> str:
        """In what mode it was decoded; or `EVERY_POSITION`."""
        raise NotImplementedError

    @property
    def passed(self) -> bool:
        """Whether its tokens are not known to be wrong."""
        return True

    @property
    def error(self) -> str | None:
        """What has ended it; None if it did not fail."""
        return None

    @property
    def shares_prefill(self) -> bool:
        """Whether its prompts are in whole batches."""
        return True

    @property
    def is_drafting(self) -> bool:
        """Whether its mode drafts, whether something was drafted or not."""
        return True

    @property
    def is_logged(self) -> bool:
        """Whether the gate has made it, so that it says of each step what was drafted."""
        return self.seal is not None

    @property
    def is_uncompared(self) -> bool:
        """Whether its tokens could have been compared with others, and were not."""
        return False

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted draft tokens / draft tokens; None if nothing was drafted, or it is not known."""
        raise NotImplementedError

    @property
    def kv_tokens_read(self) -> float | None:
        """KV entries of a row that a draft forward read, on average; None if it is not known."""
        return None

    @property
    def draft_totals(self) -> dict[str, Any]:
        """Further numbers of all drafts, by their names, as far as they were counted."""
        return {}

    @property
    def output_hashes(self) -> list[str]:
        """The hash of the output of each request."""
        raise NotImplementedError

    def verifications(self) -> Verifications:
        raise NotImplementedError


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
    def of(cls, record: JudgedRecord) -> DraftedPass:
        """What a pass drafted. Raises ValueError if the record does not say it."""
        if record.draft_acceptance_rate is None:
            raise ValueError("has no draft_acceptance_rate")
        verifications = record.verifications()
        if verifications.reported:
            raise ValueError("has the acceptance that a server reports, which is not compared")
        steps = [
            [
                step_log(i, verification)
                for i, verification in enumerate(verifications.by_request.get(number, ()))
            ]
            for number in range(len(record.output_hashes))
        ]
        logged = steps if record.is_logged else None
        return cls(verifications, record.output_hashes, logged, record.draft_totals)


def step_log(number: int, verification: Verification) -> StepLog:
    """One of the verifications of a request."""
    hashes, num_read = verification.digest or (None, 0)
    counts = verification.drafted, verification.accepted, verification.emitted
    return StepLog(number, hashes, num_read, *counts)
