"""The only definition of acceptance, by request, for every record of a pass that drafts.

A verification judges the drafts of one request in one step. The acceptance rate is accepted / draft
tokens, and the acceptance length 1 + accepted tokens / verifications, as `draft_acceptance_rate`
and `mean_acceptance_length` of [vLLM](https://docs.vllm.ai/en/latest/features/spec_decode.html).
Drafts accepted past a request's end count; padding, and drafts cancelled before the target judged
the first of them, do not.

The acceptance of position k is the share of verifications that accepted at least k drafts. Where
draft lengths differ, it is the product, over the positions up to k, of accepted / judged.

Of another program's drafts only some of this may be known (`ReportedCounts`). What is not known is
NaN in the counts and None in the metrics.

Statistics resample requests, because the verifications of one request resemble each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import numpy as np

from magicdec.records.fields import RecordPart, recorded
from magicdec.records.intervals import FEWEST_PROMPTS, Array, interval, with_each_left_out
from magicdec.runner.request import StepOutput

NOT_DRAFTED = "if nothing was drafted; with random weights"
FEW_PROMPTS = (
    f"with fewer than {FEWEST_PROMPTS} prompts; if the number is the largest or smallest possible, "
    "or the same for every prompt; if nothing was drafted; with random weights"
)
NONE_OF_GROUP = "if nothing was drafted for them"
NOT_REPORTED = "if another program does not report it"
NOTHING_DRAFTED = {"num_spec_steps": 0, "num_draft_tokens": 0, "num_accepted_draft_tokens": 0}
FEW_OF_GROUP = (
    f"with fewer than {FEWEST_PROMPTS} of them drafted for; if the number is the largest or "
    "smallest possible, or the same for each of them"
)
draft_metric = partial(recorded, null=NOT_DRAFTED, by_chance=True)


def interval_of(metric: str, unit: str) -> Any:
    meaning = f"lower and upper end of the 95 % interval of `{metric}`"
    return recorded(meaning, unit, null=FEW_PROMPTS, by_chance=True)


@dataclass(frozen=True, kw_only=True)
class GroupAcceptance(RecordPart):
    """The acceptance of some prompts of a pass, such as those of one category."""

    num_prompts: int = recorded("number of its prompts, drafted for or not", label="prompts")
    num_spec_steps: int | None = recorded(
        "as in `metrics`, of these prompts",
        "verifications",
        null=NOT_REPORTED,
    )
    num_draft_tokens: int | None = recorded(
        "as in `metrics`, of these prompts",
        "tokens",
        null=NOT_REPORTED,
        label="drafts",
    )
    num_accepted_draft_tokens: int | None = recorded(
        "as in `metrics`, of these prompts",
        "tokens",
        null=NOT_REPORTED,
    )
    draft_acceptance_rate: float | None = recorded(
        "as in `metrics`, of these prompts",
        "0 to 1",
        null=NONE_OF_GROUP,
        label="acceptance rate",
        digits=3,
    )
    draft_acceptance_rate_interval: list[float] | None = recorded(
        "its 95 % interval over these prompts",
        "0 to 1",
        null=FEW_OF_GROUP,
    )
    mean_acceptance_length: float | None = recorded(
        "as in `metrics`, of these prompts",
        "tokens",
        null=NONE_OF_GROUP,
        label="acceptance length",
        digits=2,
    )
    mean_acceptance_length_interval: list[float] | None = recorded(
        "its 95 % interval over these prompts",
        "tokens",
        null=FEW_OF_GROUP,
    )


@dataclass(frozen=True, kw_only=True)
class AcceptanceMetrics(RecordPart):
    """The acceptance of a pass, in vLLM's terms. With random weights draft and target agree only by
    chance."""

    draft_acceptance_rate: float | None = draft_metric(
        "accepted draft tokens / draft tokens; see *Definitions*",
        "0 to 1",
        label="acceptance rate",
        digits=3,
    )
    draft_acceptance_rate_interval: list[float] | None = interval_of(
        "draft_acceptance_rate", "0 to 1"
    )
    mean_acceptance_length: float | None = draft_metric(
        "1 + accepted draft tokens / verifications; see *Definitions*",
        "tokens",
        label="acceptance length",
        digits=2,
    )
    mean_acceptance_length_interval: list[float] | None = interval_of(
        "mean_acceptance_length", "tokens"
    )
    tokens_per_verification: float | None = draft_metric(
        "mean number of tokens that a verification appends to its row's output; less than "
        "`mean_acceptance_length` where drafts past a row's end were accepted",
        "tokens",
        label="emitted tokens a verification",
        digits=2,
    )
    tokens_per_verification_interval: list[float] | None = interval_of(
        "tokens_per_verification", "tokens"
    )
    acceptance_per_position: list[float] | None = draft_metric(
        "see *Definitions*; one for each draft position",
        "0 to 1",
        label="acceptance per position",
        digits=2,
    )
    acceptance_per_position_interval: list[list[float]] | None = recorded(
        "lower and upper end of the 95 % interval of each of `acceptance_per_position`; an empty "
        "list where there is none",
        "0 to 1",
        null=FEW_PROMPTS,
        by_chance=True,
    )
    judged_per_position: list[int] | None = draft_metric(
        "number of verifications that judged the position: they drafted it and accepted all drafts "
        "before it",
        "verifications",
    )
    acceptance_histogram: list[int] | None = draft_metric(
        "number of verifications that accepted exactly j draft tokens, for j = 0, 1, ...",
        "verifications",
    )
    num_spec_steps: int | None = draft_metric(
        "verifications of drafts, each of one request in one step", "verifications"
    )
    num_draft_tokens: int | None = draft_metric("draft tokens that were judged", "tokens")
    num_accepted_draft_tokens: int | None = draft_metric(
        "those of them that were accepted", "tokens"
    )
    num_cancelled_draft_tokens: int | None = recorded(
        "draft tokens that were launched and cancelled before the target judged the first draft of "
        "their run; they count in no other number",
        "tokens",
        null=f"{NOT_DRAFTED}; of systems that cancel none",
        label="cancelled draft tokens",
        by_chance=True,
    )
    acceptance_by_category: dict[str, GroupAcceptance] | None = recorded(
        "the acceptance of the prompts of each category of `workload.categories`, by its name",
        null=f"{NOT_DRAFTED}; if no prompt has a category",
        by_chance=True,
    )


class Verification(NamedTuple):
    drafted: int  # draft tokens, without padding
    accepted: int  # of them
    emitted: int  # tokens that it appended to the output
    digest: tuple[str, int] | None = None  # of what was drafted and read (`DraftLog`), if known
    position: int | None = None  # of the first draft in the text, where drafts run ahead
    context: int | None = None  # tokens of the text before its drafts, where they follow it

    @property
    def num_before(self) -> int | None:
        """The tokens of the text before the first draft, prompt included, if they are known."""
        return self.context if self.position is None else self.position


@dataclass(frozen=True)
class ReportedCounts:
    """What another program reports of the drafts of one request, or of a pass, in the terms of this
    module. None: it does not say."""

    drafted: int | None = None
    accepted: int | None = None
    verifications: int | None = None
    emitted: int | None = None
    histogram: tuple[int, ...] | None = None  # verifications that accepted j draft tokens
    steps: tuple[tuple[int, int], ...] | None = None  # by verification: drafted and accepted

    @classmethod
    def of(cls, verifications: Sequence[Verification]) -> ReportedCounts:
        """All counts of known verifications."""
        accepted = [verification.accepted for verification in verifications]
        return cls(
            sum(verification.drafted for verification in verifications),
            sum(accepted),
            len(verifications),
            sum(verification.emitted for verification in verifications),
            tuple(np.bincount(accepted, minlength=1).tolist()),
            tuple((verification.drafted, verification.accepted) for verification in verifications),
        )

    @classmethod
    def sum_of(cls, parts: Sequence[ReportedCounts | None]) -> ReportedCounts | None:
        """The counts of several groups together, but their steps. What one of them does not say is
        not known of all."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        histograms = [part.histogram for part in known if part.histogram is not None]
        columns = zip_longest(*histograms, fillvalue=0)
        has_histograms = len(histograms) == len(known)
        return cls(
            drafted=_sum_of_known([part.drafted for part in known]),
            accepted=_sum_of_known([part.accepted for part in known]),
            verifications=_sum_of_known([part.verifications for part in known]),
            emitted=_sum_of_known([part.emitted for part in known]),
            histogram=tuple(sum(column) for column in columns) if has_histograms else None,
        )

    @property
    def has_drafts(self) -> bool:
        return any((self.drafted, self.accepted, self.verifications))

    def find_contradiction(self, num_tokens: int) -> str | None:
        """A sentence if the counts contradict each other, or the output tokens of the requests
        without the first one of each, of which every verification emits one or more."""
        verified = self.verifications
        accepted = self.accepted
        drafted = self.drafted
        histogram = self.histogram
        if accepted is not None and drafted is not None and accepted > drafted:
            return f"{accepted} accepted of {drafted} draft tokens"
        if drafted is not None and verified is not None and verified > drafted:
            return f"{verified} verifications of {drafted} draft tokens"
        if verified is not None and verified > num_tokens:
            return f"{verified} verifications, but {num_tokens} output tokens after the first ones"
        if histogram is not None:
            count = sum(histogram)
            total = sum(number * length for number, length in enumerate(histogram))
            if verified is not None and count != verified:
                return f"a histogram of {count} verifications, not {verified}"
            if accepted is not None and total != accepted:
                return f"a histogram of {total} accepted draft tokens, not {accepted}"
        if self.steps is not None:
            sums = [sum(column) for column in zip(*self.steps, strict=True)] or [0, 0]
            if [len(self.steps), *sums] != [verified, drafted, accepted]:
                return f"single steps that are not the {verified} verifications of its sums"
            if any(taken > proposed for proposed, taken in self.steps):
                return "a step that accepted more draft tokens than it had"
        return None

    @property
    def num_positions(self) -> int:
        lengths = [proposed for proposed, _ in self.steps or ()]
        return max(lengths, default=len(self.histogram or (0,)) - 1)

    def accepted_by_position(self) -> list[int] | None:
        """The verifications that accepted the draft of each position."""
        if self.steps is not None:
            taken = [accepted for _, accepted in self.steps]
            return [sum(k < count for count in taken) for k in range(self.num_positions)]
        if self.histogram is None:
            return None
        return list(accumulate(self.histogram[:0:-1]))[::-1]

    def judged_by_position(self) -> list[int] | None:
        """The verifications that judged the draft of each position. Without single steps, this is
        known if each of them drafted a token for every position."""
        positions = range(self.num_positions)
        if self.steps is not None:
            return [sum(k < min(n, taken + 1) for n, taken in self.steps) for k in positions]
        accepted = self.accepted_by_position()
        verified = self.verifications
        if accepted is None or verified is None or self.drafted != verified * len(positions):
            return None
        return [verified, *accepted][: len(positions)]


@dataclass
class Verifications:
    """The verifications of a pass by request id, in their order. Of a pass of another program what
    it reports in place of them, by request and of the whole pass."""

    by_request: dict[int, list[Verification]] = field(default_factory=lambda: defaultdict(list))
    num_cancelled: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    reported: dict[int, ReportedCounts] = field(default_factory=dict)
    reported_total: ReportedCounts | None = None

    @property
    def has_drafts(self) -> bool:
        """Whether something was drafted, as far as is known."""
        total = [] if self.reported_total is None else [self.reported_total]
        reported = any(counts.has_drafts for counts in (*self.reported.values(), *total))
        return reported or any(self.by_request.values())

    @property
    def every(self) -> list[Verification]:
        return [
            verification
            for verifications in self.by_request.values()
            for verification in verifications
        ]

    @property
    def num_drafted(self) -> int:
        return sum(verification.drafted for verification in self.every)

    @property
    def num_accepted(self) -> int:
        return sum(verification.accepted for verification in self.every)

    def counts_of(self, request_id: int) -> ReportedCounts | None:
        """What is known of the drafts of a request; None if nothing was drafted for it."""
        if steps := self.by_request.get(request_id):
            return ReportedCounts.of(steps)
        reported = self.reported.get(request_id)
        return reported if reported is not None and reported.has_drafts else None

    def subset(self, request_ids: Sequence[int]) -> Verifications:
        """Those of some requests, which become the requests 0, 1, ..."""
        found = Verifications()
        for number, request_id in enumerate(request_ids):
            if request_id in self.by_request:
                found.by_request[number] = self.by_request[request_id]
            if request_id in self.num_cancelled:
                found.num_cancelled[number] = self.num_cancelled[request_id]
            if request_id in self.reported:
                found.reported[number] = self.reported[request_id]
        return found

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
        drafted = output.num_drafted or [output.draft_width] * len(request_ids)
        emitted = map(len, output.token_ids)
        digests: Sequence[tuple[str, int] | None] = output.digests or [None] * len(request_ids)
        positions: Sequence[int | None] = output.draft_positions or [None] * len(request_ids)
        contexts: Sequence[int | None] = output.contexts or [None] * len(request_ids)
        columns = (drafted, output.num_accepted, emitted, digests, positions, contexts)
        for counts in zip(request_ids, *columns, strict=True):
            self.add(*counts)

    def use_digests(self, digests: Mapping[int, Sequence[tuple[str, int] | None]]) -> None:
        """Put these digests of the verifications of each request in place of their own."""
        for request_id, verifications in self.by_request.items():
            pairs = zip(verifications, digests[request_id], strict=True)
            self.by_request[request_id] = [
                verification._replace(digest=digest) for verification, digest in pairs
            ]

    def add(
        self,
        request_id: int,
        drafted: int,
        accepted: int,
        emitted: int,
        digest: tuple[str, int] | None = None,
        position: int | None = None,
        context: int | None = None,
    ) -> None:
        """A verification. A row without drafts has none."""
        if drafted:
            counts = drafted, min(accepted, drafted), emitted
            self.by_request[request_id].append(Verification(*counts, digest, position, context))


@dataclass(frozen=True)
class PromptCounts:
    """Counts over the verifications of P prompts at K draft positions; NaN where a count is not
    known. A position is judged if it was drafted and all drafts before it were accepted."""

    drafted: Array  # [P] draft tokens
    num_accepted: Array  # [P]
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
            by_prompt(accepted),
            by_prompt(np.ones(len(prompts))),
            by_prompt(emitted),
            by_prompt(positions < np.minimum(drafted, accepted + 1)[:, None]),
            by_prompt(positions < accepted[:, None]),
        )

    @classmethod
    def from_reported(
        cls, reported: Mapping[int, ReportedCounts], num_prompts: int
    ) -> PromptCounts:
        num_positions = max((counts.num_positions for counts in reported.values()), default=0)
        rows = [reported.get(prompt, ReportedCounts(0, 0, 0, 0)) for prompt in range(num_prompts)]

        def column(name: str) -> Array:
            return np.array([getattr(row, name) for row in rows], float)  # None is NaN

        def by_position(counts: list[int] | None, row: ReportedCounts) -> list[float]:
            if counts is None:
                return [math.nan if row.has_drafts else 0.0] * num_positions
            return [*counts, *[0.0] * (num_positions - len(counts))]

        judged = [by_position(row.judged_by_position(), row) for row in rows]
        accepted = [by_position(row.accepted_by_position(), row) for row in rows]
        shape = num_prompts, num_positions
        return cls(
            column("drafted"),
            column("accepted"),
            column("verifications"),
            column("emitted"),
            np.array(judged, float).reshape(shape),
            np.array(accepted, float).reshape(shape),
        )

    @property
    def num_prompts(self) -> int:
        return len(self.drafted)

    @property
    def rates(self) -> Array:
        """[P] acceptance rates; NaN for a prompt without drafts."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rates: Array = self.num_accepted / self.drafted
        return rates

    def equals(self, other: PromptCounts) -> bool:
        return all(map(np.array_equal, vars(self).values(), vars(other).values()))

    def with_verifications(self) -> PromptCounts:
        has_none = (self.verifications == 0) | (self.drafted == 0)
        return PromptCounts(*(counts[~has_none] for counts in vars(self).values()))


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
        (request, verification.drafted, verification.accepted, verification.emitted)
        for request in range(num_prompts)
        for verification in by_request.get(request, ())
    ]
    prompts, drafted, accepted, emitted = np.array(rows, int).reshape(-1, 4).T
    return prompts, drafted, accepted, emitted


def estimates_of(counts: PromptCounts) -> Estimates:
    """The metrics of these counts. A value without a prompt is not finite if no other prompt has a
    verification."""
    sums = map(with_each_left_out, vars(counts).values())
    drafted, num_accepted, verified, emitted, judged, accepted = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(judged == 0, 0.0, accepted / judged)
        return Estimates(
            rate=num_accepted / drafted,
            length=1 + num_accepted / verified,
            emitted=emitted / verified,
            per_position=shares.cumprod(axis=1),
        )


def counts_of(verifications: Verifications, num_requests: int) -> PromptCounts:
    """The counts of the requests 0 to `num_requests` - 1 with drafts."""
    if verifications.reported:
        counts = PromptCounts.from_reported(verifications.reported, num_requests)
    else:
        counts = PromptCounts.of(verifications.by_request, num_requests)
    return counts.with_verifications()


def acceptance_metrics(
    verifications: Verifications,
    num_requests: int,
    categories: Sequence[str | None] | None = None,
) -> dict[str, Any]:
    """The fields of `AcceptanceMetrics` for the requests 0 to `num_requests` - 1, of which some may
    have a category; empty if nothing was drafted. Where every draft was cancelled, their number is
    all that is known. What a program reports of the whole pass fills in what it does not report by
    request."""
    found = metrics_of(counts_of(verifications, num_requests))
    if found and categories is not None:
        found["acceptance_by_category"] = acceptance_by(categories, verifications) or None
    total = verifications.reported_total
    if total is not None:
        pass_metrics = metrics_of(PromptCounts.from_reported({0: total}, 1).with_verifications())
        found = pass_metrics | {name: value for name, value in found.items() if value is not None}
    cancelled = verifications.num_cancelled
    num_cancelled = sum(cancelled.values()) if cancelled else None
    if found or num_cancelled:
        found["num_cancelled_draft_tokens"] = num_cancelled
    return found


def metrics_of(counts: PromptCounts) -> dict[str, Any]:
    """The metrics of prompts with drafts; empty if there is none. None where a metric is not
    known."""
    if not counts.num_prompts:
        return {}
    estimates = estimates_of(counts)
    longest = 1 + counts.judged.shape[1]
    num_steps = counts.verifications.sum()
    accepted = counts.accepted.sum(axis=0)
    # Those that accepted j tokens accepted the j-th and not the next one.
    histogram = -np.diff([num_steps, *accepted, 0.0])
    has_histogram = longest > 1 and np.isfinite(histogram).all()
    per_position = estimates.per_position
    has_positions = longest > 1 and np.isfinite(per_position[0]).all()
    positions = [interval(values, 0, 1) or [] for values in per_position.T]
    return {
        "num_spec_steps": whole(num_steps),
        "num_draft_tokens": whole(counts.drafted.sum()),
        "num_accepted_draft_tokens": whole(counts.num_accepted.sum()),
        "acceptance_histogram": histogram.astype(int).tolist() if has_histogram else None,
        "draft_acceptance_rate": known(estimates.rate[0]),
        "mean_acceptance_length": known(estimates.length[0]),
        "tokens_per_verification": known(estimates.emitted[0]),
        "acceptance_per_position": per_position[0].tolist() if has_positions else None,
        "draft_acceptance_rate_interval": interval(estimates.rate, 0, 1),
        "mean_acceptance_length_interval": interval(estimates.length, 1, longest),
        "tokens_per_verification_interval": interval(estimates.emitted, 1, longest),
        "acceptance_per_position_interval": positions if any(positions) else None,
        "judged_per_position": counts.judged.sum(axis=0).astype(int).tolist()
        if has_positions
        else None,
    }


def known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def whole(count: float) -> int | None:
    return int(count) if math.isfinite(count) else None


def acceptance_by(
    groups: Sequence[str | None], verifications: Verifications
) -> dict[str, GroupAcceptance]:
    """The acceptance of each group, by its name in the order of the alphabet. `groups` has the name
    of the group of request 0, 1, ...; a request without one is in none."""
    return {
        name: acceptance_of_group(verifications.subset(members), len(members))
        for name, members in members_of(groups).items()
    }


def members_of(groups: Sequence[str | None]) -> dict[str, list[int]]:
    """The places of the members of each group, by its name in the order of the alphabet. `groups`
    has the name of the group at each place, None for one that is in none."""
    names = sorted({name for name in groups if name is not None})
    return {name: [i for i, group in enumerate(groups) if group == name] for name in names}


def acceptance_of_group(verifications: Verifications, num_prompts: int) -> GroupAcceptance:
    """The acceptance of the requests 0 to `num_prompts` - 1."""
    found: dict[str, Any] = metrics_of(counts_of(verifications, num_prompts)) or NOTHING_DRAFTED
    names = {field.name for field in fields(GroupAcceptance)}
    kept = {name: value for name, value in found.items() if name in names}
    return GroupAcceptance(num_prompts=num_prompts, **kept)


def _sum_of_known(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
