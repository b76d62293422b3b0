"""The only definition of acceptance, by request, for every record of a pass that drafts.

A verification judges the drafts of one request in one step. The acceptance rate is accepted / draft
tokens, and the acceptance length 1 + accepted tokens / verifications, as `draft_acceptance_rate`
and `mean_acceptance_length` of [vLLM](https://docs.vllm.ai/en/latest/features/spec_decode.html).
Drafts accepted past a request's end count; padding, and drafts cancelled before the target judged
the first of them, do not.

The acceptance of position k is the share of verifications that accepted at least k drafts. Where
draft lengths differ, it is the product, over the positions up to k, of accepted / judged.

Statistics resample requests, because the verifications of one request resemble each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from magicdec.records.fields import RecordPart, recorded
from magicdec.records.intervals import FEWEST_PROMPTS, Array, interval, with_each_left_out
from magicdec.records.samples import PassSamples
from magicdec.runner.request import StepOutput

NOT_DRAFTED = "if nothing was drafted; with random weights"
FEW_PROMPTS = (
    f"with fewer than {FEWEST_PROMPTS} prompts; if the number is the largest or smallest possible, "
    "or the same for every prompt; if nothing was drafted; with random weights"
)
of_drafts = partial(recorded, null=NOT_DRAFTED, by_chance=True)


def interval_of(metric: str, unit: str) -> Any:
    meaning = f"lower and upper end of the 95 % interval of `{metric}`"
    return recorded(meaning, unit, null=FEW_PROMPTS, by_chance=True)


@dataclass(frozen=True, kw_only=True)
class AcceptanceMetrics(RecordPart):
    """The acceptance of a pass, in vLLM's terms. With random weights draft and target agree only by
    chance."""

    # fmt: off
    draft_acceptance_rate: float | None = of_drafts(
        "accepted draft tokens / draft tokens; see *Definitions*", "0 to 1",
        label="acceptance rate", digits=3,
    )
    draft_acceptance_rate_interval: list[float] | None = interval_of(
        "draft_acceptance_rate", "0 to 1"
    )
    mean_acceptance_length: float | None = of_drafts(
        "1 + accepted draft tokens / verifications; see *Definitions*", "tokens",
        label="acceptance length", digits=2,
    )
    mean_acceptance_length_interval: list[float] | None = interval_of(
        "mean_acceptance_length", "tokens"
    )
    mean_emitted_tokens: float | None = of_drafts(
        "mean number of tokens that a verification appends to its row's output; less than "
        "`mean_acceptance_length` where drafts past a row's end were accepted", "tokens",
        label="emitted tokens a verification", digits=2,
    )
    mean_emitted_tokens_interval: list[float] | None = interval_of("mean_emitted_tokens", "tokens")
    acceptance_per_position: list[float] | None = of_drafts(
        "see *Definitions*; one for each draft position", "0 to 1",
        label="acceptance per position", digits=2,
    )
    acceptance_per_position_interval: list[list[float]] | None = recorded(
        "lower and upper end of the 95 % interval of each of `acceptance_per_position`; an empty "
        "list where there is none", "0 to 1", null=FEW_PROMPTS, by_chance=True,
    )
    judged_per_position: list[int] | None = of_drafts(
        "number of verifications that judged the position: they drafted it and accepted all drafts "
        "before it", "verifications",
    )
    acceptance_histogram: list[int] | None = of_drafts(
        "number of verifications that accepted exactly j draft tokens, for j = 0, 1, ...",
        "verifications",
    )
    num_spec_steps: int | None = of_drafts(
        "verifications of drafts, each of one request in one step", "verifications"
    )
    num_draft_tokens: int | None = of_drafts("draft tokens that were judged", "tokens")
    num_accepted_draft_tokens: int | None = of_drafts("those of them that were accepted", "tokens")
    num_cancelled_draft_tokens: int | None = recorded(
        "draft tokens that were launched and cancelled before the target judged the first draft of "
        "their run; they count in no other number", "tokens",
        null=f"{NOT_DRAFTED}; of systems that cancel none", label="cancelled draft tokens",
        by_chance=True,
    )
    # fmt: on


@dataclass(frozen=True)
class Verification:
    drafted: int  # draft tokens, without padding
    accepted: int  # of them
    emitted: int  # tokens that it appended to the output
    digest: tuple[str, int] | None = None  # of what was drafted and read (`kv.draft_log`), if known
    position: int | None = None  # of the first draft in the text, where drafts run ahead


@dataclass
class Verifications:
    """The verifications of a pass by request id, in their order."""

    by_request: dict[int, list[Verification]] = field(default_factory=lambda: defaultdict(list))
    num_cancelled: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    @classmethod
    def of(cls, samples: PassSamples) -> Verifications:
        """The verifications of a run, whose request ids are the indices of its prompts. A step has
        counts for the rows that have not yet emitted all of their tokens, in order."""
        found = cls()
        first = 0
        unpadded: list[list[list[int]]] = [[[]] * len(steps) for steps in samples.padded_gamma]
        for lengths, *of_batch in zip(
            samples.sequence_tokens,
            samples.padded_gamma,
            samples.num_drafted or unpadded,
            samples.num_accepted,
            samples.num_emitted,
            strict=False,
        ):
            left = list(lengths)
            for longest, proposed, accepted, emitted in zip(*of_batch, strict=True):
                running = [i for i, tokens in enumerate(left) if tokens > 0]
                for row, (i, tokens) in enumerate(zip(running, emitted, strict=False)):
                    left[i] -= tokens
                    drafted = proposed[row] if row < len(proposed) else longest
                    if row < len(accepted):
                        found.add(first + i, drafted, accepted[row], tokens)
            first += len(lengths)
        return found

    @property
    def every(self) -> list[Verification]:
        return [each for of_request in self.by_request.values() for each in of_request]

    @property
    def num_drafted(self) -> int:
        return sum(each.drafted for each in self.every)

    @property
    def num_accepted(self) -> int:
        return sum(each.accepted for each in self.every)

    def take(self, request_id: int) -> Verifications:
        """Removes one request's verifications and returns them as those of request 0."""
        taken = Verifications()
        if request_id in self.by_request:
            taken.by_request[0] = self.by_request.pop(request_id)
        if request_id in self.num_cancelled:
            taken.num_cancelled[0] = self.num_cancelled.pop(request_id)
        return taken

    def observe(self, request_ids: Sequence[int], output: StepOutput) -> None:
        for request_id, cancelled in zip(request_ids, output.num_cancelled or (), strict=False):
            self.num_cancelled[request_id] += cancelled
        if output.num_accepted is None:
            return
        drafted = output.num_drafted or [output.padded_gamma] * len(request_ids)
        emitted = map(len, output.token_ids)
        digests: Sequence[tuple[str, int] | None] = output.digests or [None] * len(request_ids)
        positions: Sequence[int | None] = output.draft_positions or [None] * len(request_ids)
        columns = request_ids, drafted, output.num_accepted, emitted, digests, positions
        for counts in zip(*columns, strict=True):
            self.add(*counts)

    def add(
        self,
        request_id: int,
        drafted: int,
        accepted: int,
        emitted: int,
        digest: tuple[str, int] | None = None,
        position: int | None = None,
    ) -> None:
        """A verification. A row without drafts has none."""
        if drafted:
            verification = Verification(drafted, min(accepted, drafted), emitted, digest, position)
            self.by_request[request_id].append(verification)


@dataclass(frozen=True)
class PromptCounts:
    """Counts over the verifications of P prompts at K draft positions. A position is judged if it
    was drafted and all drafts before it were accepted."""

    drafted: Array  # [P] draft tokens
    verifications: Array  # [P]
    emitted: Array  # [P] tokens that the verifications appended to the output
    judged: Array  # [P, K]
    accepted: Array  # [P, K]

    @classmethod
    def of(cls, by_request: Mapping[int, Sequence[Verification]], num_prompts: int) -> PromptCounts:
        prompts, drafted, accepted, emitted = columns_of(by_request, num_prompts)
        positions = np.arange(drafted.max(initial=0))

        def by_prompt(counts: Any) -> Array:
            total = np.zeros((num_prompts, *counts.shape[1:]))
            np.add.at(total, prompts, counts)
            return total

        return cls(
            by_prompt(drafted),
            by_prompt(np.ones(len(prompts))),
            by_prompt(emitted),
            by_prompt(positions < np.minimum(drafted, accepted + 1)[:, None]),
            by_prompt(positions < accepted[:, None]),
        )

    @property
    def num_prompts(self) -> int:
        return len(self.drafted)

    @property
    def rates(self) -> Array:
        """[P] acceptance rates; NaN for a prompt without drafts."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rates: Array = self.accepted.sum(axis=1) / self.drafted
        return rates

    def equals(self, other: PromptCounts) -> bool:
        return all(map(np.array_equal, vars(self).values(), vars(other).values()))

    def with_verifications(self) -> PromptCounts:
        return PromptCounts(*(counts[self.verifications > 0] for counts in vars(self).values()))


@dataclass(frozen=True)
class Estimates:
    """The acceptance metrics of all prompts, then without each prompt."""

    rate: Array  # [1 + P]
    length: Array  # [1 + P]
    emitted: Array  # [1 + P] mean tokens that a verification emits
    per_position: Array  # [1 + P, K]


def columns_of(
    by_request: Mapping[int, Sequence[Verification]], num_prompts: int
) -> tuple[Any, Any, Any, Any]:
    """Four columns [V] over the verifications of the requests 0 to `num_prompts` - 1: request,
    drafted, accepted and emitted tokens."""
    rows = [
        (request, each.drafted, each.accepted, each.emitted)
        for request in range(num_prompts)
        for each in by_request.get(request, ())
    ]
    prompts, drafted, accepted, emitted = np.array(rows, int).reshape(-1, 4).T
    return prompts, drafted, accepted, emitted


def count_by_prompt(samples: PassSamples) -> PromptCounts:
    num_prompts = sum(map(len, samples.sequence_tokens))
    return PromptCounts.of(Verifications.of(samples).by_request, num_prompts)


def estimates_of(counts: PromptCounts) -> Estimates:
    """The metrics of these counts. A value without a prompt is not finite if no other prompt has a
    verification."""
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


def acceptance_metrics(verifications: Verifications, num_requests: int) -> dict[str, Any]:
    """The fields of `AcceptanceMetrics` for the requests 0 to `num_requests` - 1; empty if nothing
    was drafted. Where every draft was cancelled, their number is all that is known."""
    counts = PromptCounts.of(verifications.by_request, num_requests).with_verifications()
    cancelled = verifications.num_cancelled
    num_cancelled = sum(cancelled.values()) if cancelled else None
    if not counts.num_prompts:
        return {"num_cancelled_draft_tokens": num_cancelled} if num_cancelled else {}
    estimates = estimates_of(counts)
    longest = 1 + counts.judged.shape[1]
    positions = [interval(values, 0, 1) or [] for values in estimates.per_position.T]
    every = verifications.every
    histogram = np.bincount([each.accepted for each in every], minlength=longest)
    return {
        "num_spec_steps": len(every),
        "num_draft_tokens": verifications.num_drafted,
        "num_accepted_draft_tokens": verifications.num_accepted,
        "num_cancelled_draft_tokens": num_cancelled,
        "acceptance_histogram": histogram.tolist(),
        "draft_acceptance_rate": float(estimates.rate[0]),
        "mean_acceptance_length": float(estimates.length[0]),
        "mean_emitted_tokens": float(estimates.emitted[0]),
        "acceptance_per_position": estimates.per_position[0].tolist(),
        "draft_acceptance_rate_interval": interval(estimates.rate, 0, 1),
        "mean_acceptance_length_interval": interval(estimates.length, 1, longest),
        "mean_emitted_tokens_interval": interval(estimates.emitted, 1, longest),
        "acceptance_per_position_interval": positions if any(positions) else None,
        "judged_per_position": [int(count) for count in counts.judged.sum(axis=0)],
    }


def acceptance_of(samples: PassSamples) -> dict[str, Any]:
    num_prompts = sum(map(len, samples.sequence_tokens))
    return acceptance_metrics(Verifications.of(samples), num_prompts)
