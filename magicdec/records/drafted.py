"""DraftedPass: what a pass drafted and emitted, request by request, in the form that comparisons
read, whatever kind of record it is of. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.records.acceptance import PromptCounts, Verifications
from magicdec.records.samples import PassSamples


@dataclass(frozen=True)
class StepLog:
    """What one step did for one request."""

    number: int  # of the step in its batch, or of the verification of its request
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
    are further numbers of the whole pass, by their names."""

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
        for each in self.verifications.by_request.get(prompt, ()):
            assert each.position is not None, "its drafts run ahead"
            found |= {each.position + i: True for i in range(each.accepted)}
            if each.accepted < each.drafted:
                found[each.position + each.accepted] = False
        return found

    @classmethod
    def of_samples(cls, samples: PassSamples) -> DraftedPass:
        """Of a pass of a run."""
        is_logged = samples.draft_hashes is not None
        return cls(
            Verifications.of(samples),
            samples.output_hashes,
            steps_by_prompt(samples) if is_logged else None,
            {name: getattr(samples, name) for name in ("draft_kv_tokens", "draft_rows")},
        )


def steps_by_prompt(samples: PassSamples) -> list[list[StepLog]]:
    """The steps of each prompt. A row has a part in a step until it has emitted all its tokens."""
    prompts = list[list[StepLog]]()
    for batch, lengths in enumerate(samples.sequence_tokens):
        left = list(lengths)
        logs = [list[StepLog]() for _ in lengths]
        for step, emitted in enumerate(samples.num_emitted[batch]):
            running = [i for i, tokens in enumerate(left) if tokens > 0]
            rows = zip(running, emitted, strict=False)
            for row, (i, tokens) in enumerate(rows):
                left[i] -= tokens
                logs[i].append(step_of(samples, batch, step, row, tokens))
        prompts += logs
    return prompts


def step_of(samples: PassSamples, batch: int, step: int, row: int, emitted: int) -> StepLog:
    accepted = samples.num_accepted[batch][step]
    if row >= len(accepted):  # nothing was drafted
        return StepLog(step, None, 0, 0, 0, emitted)
    assert samples.draft_hashes is not None and samples.draft_keys is not None, "a log is there"
    return StepLog(
        step,
        samples.draft_hashes[batch][step][row],
        samples.draft_keys[batch][step][row],
        samples.num_drafted[batch][step][row],
        accepted[row],
        emitted,
    )
