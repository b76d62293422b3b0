"""The record of `magicdec audit`, its tables, and its comparison with an earlier audit. Imports no
torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from magicdec.bench.audit.pays import LOSES, PAYS, ArmCell, arm_tables, compared
from magicdec.names import AUDIT_CHECKS, PAYS_CHECK
from magicdec.output.tables import Column, Line, Table
from magicdec.records.comparison.compare import INCOMPARABLE, REGRESSION, SAME, Comparison
from magicdec.records.fields import RecordPart, recorded
from magicdec.records.record import MeasuredRecord, Status

CHECKS = (*AUDIT_CHECKS, PAYS_CHECK)
# From the best to the worst.
STATUSES = (
    Status.VERIFIED,
    Status.VERIFIED_WITH_TIES,
    Status.UNVERIFIED,
    Status.FAILED,
    Status.MISMATCH,
)
MOST_LOSS = 0.1  # share of the tokens a step that another audit may have lost by chance
IN_WORDS = {
    Status.VERIFIED: "clean",
    Status.VERIFIED_WITH_TIES: "clean but for near ties",
    Status.UNVERIFIED: "not judged",
    Status.FAILED: "not judged: the server failed",
    Status.MISMATCH: "FAULT",
}
STYLES = {
    Status.VERIFIED: "green",
    Status.VERIFIED_WITH_TIES: "green",
    Status.UNVERIFIED: "yellow",
    Status.FAILED: "yellow",
    Status.MISMATCH: "bold red",
}


@dataclass(frozen=True, kw_only=True)
class AuditFinding(RecordPart):
    name: str = recorded("what is wrong, in one or two words, such as `tokens` or `double counts`")
    text: str = recorded("a sentence with the evidence")


@dataclass(frozen=True, kw_only=True)
class AuditCheck(RecordPart):
    """What one check of an audit found."""

    name: str = recorded("the check", choices=CHECKS)
    status: str = recorded(
        "`verified`: no fault; `verified_with_ties`: no fault, but tokens that lost to near ties; "
        "`mismatch`: a fault; `unverified`: it could not be judged; `failed`: the server failed",
        choices=STATUSES,
    )
    text: str = recorded("what was judged and found, in a sentence")
    bound: str | None = recorded("which fault could hide", null="if nothing was judged")
    findings: list[AuditFinding] = recorded("the faults")

    @classmethod
    def of(
        cls,
        name: str,
        findings: list[AuditFinding],
        text: str,
        sound: Status = Status.VERIFIED,
        bound: str | None = None,
    ) -> AuditCheck:
        """A check whose status without findings is `sound`."""
        status = Status.MISMATCH if findings else sound
        return cls(name=name, status=status, text=text, bound=bound, findings=findings)


@dataclass(frozen=True, kw_only=True)
class NoisePair(RecordPart):
    """How far log-probabilities of one place differ that a server says in two ways."""

    ways: str = recorded("the two ways")
    num_places: int = recorded("places that were compared")
    median: float = recorded(
        "median difference of the gap between the two likeliest tokens", "natural logarithm"
    )
    largest: float = recorded("the largest difference of it", "natural logarithm")


@dataclass(frozen=True, kw_only=True)
class GreedyCell(RecordPart):
    """The greedy answers at one context with so many requests at once."""

    context: int = recorded("tokens of the prompts", "tokens")
    concurrency: int = recorded("requests at once")
    num_requests: int = recorded("answers")
    num_tokens: int = recorded("tokens that were judged", "tokens")
    num_near: int = recorded("of them places where the two likeliest tokens are a near tie")
    num_flips: int = recorded("of these tokens that are not the likeliest one")
    num_wrong: int = recorded("tokens that lost by more than noise")
    num_wrong_requests: int = recorded("answers with such a token")
    largest_margin: float = recorded(
        "the most by which a token was less likely than the likeliest one", "natural logarithm"
    )
    tokens_per_step: float | None = recorded(
        "tokens of an answer after the first, over its decode steps",
        "tokens",
        null="if the server does not say it",
    )


@dataclass(frozen=True, kw_only=True)
class WrongToken(RecordPart):
    """A token of an answer that lost to a likelier one by more than noise."""

    context: int = recorded("tokens of the prompt", "tokens")
    concurrency: int = recorded("requests at once")
    state: str | None = recorded("the state of the server, as in `states`", null="in `greedy`")
    request: int = recorded("number of the answer, from 0 on")
    position: int = recorded("its place in the answer, from 0 on")
    token: int = recorded("its id")
    likelier: int = recorded("the id of the likeliest token")
    margin: float = recorded("by how much that one is likelier", "natural logarithm")

    def __str__(self) -> str:
        return (
            f"context {self.context}, {self.concurrency} at once, request {self.request}, token "
            f"{self.position}: {self.token} in place of {self.likelier}, which is "
            f"{self.margin:.2f} likelier"
        )


@dataclass(frozen=True, kw_only=True)
class SampledPlace(RecordPart):
    """Draws of one token, beside the server's own distribution."""

    context: int = recorded("tokens before it", "tokens")
    depth: int = recorded("its place in an answer; at 2 it is the first that drafts can be")
    num_draws: int = recorded("draws")
    num_cells: int = recorded("tokens that were told apart, rare ones as one")
    p_value: float = recorded(
        "of the chi-squared test, with the measured noise; below .05 it is .05 times that of new "
        "draws",
        "0 to 1",
    )
    total_variation: float = recorded("half the summed difference of shares", "0 to 1")
    total_variation_interval: list[float] = recorded("its 95 % interval", "0 to 1")
    total_variation_by_chance: float = recorded("what 95 % of right draws stay below", "0 to 1")
    num_impossible: int = recorded("draws that `top_k` or `top_p` exclude")


@dataclass(frozen=True, kw_only=True)
class StateCell(RecordPart):
    """Answers in a state of the server, beside the same prompts without any KV of them."""

    state: str = recorded("the state, such as `after a cache hit`")
    context: int = recorded("tokens of the prompts, at most", "tokens")
    concurrency: int = recorded("requests at once")
    num_requests: int = recorded("pairs of answers")
    tokens_per_step: float | None = recorded(
        "in the state", "tokens", null="if the server does not say it"
    )
    cold_tokens_per_step: float | None = recorded(
        "without KV of the prompt", "tokens", null="if the server does not say it"
    )
    difference: float | None = recorded(
        "mean difference of the tokens a step of the pairs",
        "tokens",
        null="with fewer than 4 pairs; if the server does not say it",
    )
    difference_interval: list[float] | None = recorded(
        "its 95 % interval over pairs",
        "tokens",
        null="with fewer than 4 pairs; if the server does not say it",
    )
    num_cached: int | None = recorded(
        "prompt tokens of which the server had the KV", "tokens", null="if it does not say it"
    )
    num_different: int = recorded("answers with other tokens than without KV of the prompt")
    num_wrong: int = recorded("tokens of these that lost by more than noise")


@dataclass(frozen=True, kw_only=True)
class AuditRecord(MeasuredRecord):
    kind: Literal["audit"] = recorded("`audit`", default="audit")
    status: str = recorded("the worst of the checks", choices=STATUSES)
    program: str | None = recorded(
        "the program in whose form the server reports drafts", null="if it reports none"
    )
    server: str | None = recorded(
        "its URL, without credentials", null="if arms of it are compared and nothing else"
    )
    model: str | None = recorded(
        "the model as the server names it", null="if no server has answered"
    )
    checks: list[AuditCheck] = recorded("a verdict for each check")
    noise: list[NoisePair] = recorded("the noise of the server's own log-probabilities")
    tolerance: float | None = recorded(
        "by how much a token may be less likely than the likeliest one",
        "natural logarithm",
        null="if the server says no log-probabilities",
    )
    greedy: list[GreedyCell] = recorded("greedy answers by context and concurrency")
    wrong: list[WrongToken] = recorded("the first wrong token of each answer that has one")
    sampled: list[SampledPlace] = recorded("places at which tokens were drawn")
    states: list[StateCell] = recorded("acceptance and tokens in states of the server")
    arms: list[ArmCell] = recorded("times of the arms by context and concurrency")
    meters: str | None = recorded(
        "the meters of energy of the machine, and why others could not be read",
        null="if no arms were compared",
    )
    num_requests: int = recorded("requests that the audit sent")
    seconds: float = recorded("time of the audit", "s")


def worst(statuses: Sequence[str]) -> Status:
    return max(map(Status, statuses), key=STATUSES.index, default=Status.UNVERIFIED)


def comparisons_of(record: AuditRecord, old: AuditRecord | None) -> list[Comparison]:
    """A comparison for each check: a fault is a regression, also one that an earlier audit had.
    What was judged then and is not now could not be compared; a loss of tokens a step beside the
    same cell then is a regression, and drafts that paid there and no longer do."""
    found = [_comparison(check) for check in record.checks]
    if old is None:
        return found
    now = {check.name: check for check in record.checks}
    for check in old.checks:
        is_judged = check.status not in (Status.UNVERIFIED, Status.FAILED)
        again = now.get(check.name)
        if is_judged and (again is None or again.status in (Status.UNVERIFIED, Status.FAILED)):
            text = "was judged in the baseline, and is not now"
            found.append(Comparison(f"{check.name}, beside the baseline", INCOMPARABLE, text))
    before = {(cell.context, cell.concurrency): cell.tokens_per_step for cell in old.greedy}
    for cell in record.greedy:
        then = before.get((cell.context, cell.concurrency))
        if then is None or cell.tokens_per_step is None:
            continue
        is_lost = cell.tokens_per_step < (1 - MOST_LOSS) * then
        text = f"{cell.tokens_per_step:.2f} tokens a step, {then:.2f} in the baseline"
        name = f"tokens a step after {cell.context} tokens, {cell.concurrency} at once"
        found.append(Comparison(name, REGRESSION if is_lost else SAME, text))
    speedups = {(cell.context, cell.concurrency): cell for cell in compared(old.arms)}
    for now_cell in compared(record.arms):
        earlier = speedups.get((now_cell.context, now_cell.concurrency))
        if earlier is None:
            continue
        is_lost = earlier.verdict == PAYS and now_cell.verdict == LOSES
        text = f"{now_cell.speedup} times as fast as plain, {earlier.speedup} in the baseline"
        name = f"drafts after {now_cell.context} tokens, {now_cell.concurrency} at once"
        found.append(Comparison(name, REGRESSION if is_lost else SAME, text))
    return found


def _comparison(check: AuditCheck) -> Comparison:
    verdicts = {
        Status.MISMATCH: REGRESSION,
        Status.FAILED: INCOMPARABLE,
        Status.UNVERIFIED: INCOMPARABLE,
    }
    text = "; ".join(f"{finding.name}: {finding.text}" for finding in check.findings) or check.text
    return Comparison(check.name, verdicts.get(Status(check.status), SAME), text)


def tables(records: Sequence[AuditRecord]) -> list[Table]:
    """What a person reads: the verdicts first, then the evidence."""
    found = list[Table]()
    for record in records:
        found.append(_verdicts(record))
        found += [table for table in (_greedy(record), _sampled(record), _states(record)) if table]
        found += arm_tables(record.arms)
    return found


def _verdicts(record: AuditRecord) -> Table:
    status = Status(record.status)
    program = record.program or "program unknown"
    where = f" at {record.server}" if record.server else ""
    above = [
        Line(f"{record.model or 'no model'}{where} ({program})"),
        Line(IN_WORDS[status], STYLES[status]),
    ]
    rows = [(check.name, IN_WORDS[Status(check.status)], check.text) for check in record.checks]
    below = list[str]()
    for check in record.checks:
        below += [f"{check.name}: {finding.name}: {finding.text}" for finding in check.findings]
        below += [f"{check.name}: what could hide: {check.bound}"] if check.bound else []
    below.append(f"{record.num_requests} requests in {record.seconds:.0f} s")
    columns = [Column(label, is_text=True) for label in ("check", "verdict", "what was found")]
    return Table(columns, rows, above=above, below=below)


def _greedy(record: AuditRecord) -> Table | None:
    if not record.greedy:
        return None
    columns = [
        *("context", "at once", "answers", "tokens", "near ties", "flips", "wrong"),
        *("largest margin", "tokens a step"),
    ]
    rows = [
        (
            cell.context,
            cell.concurrency,
            cell.num_requests,
            cell.num_tokens,
            cell.num_near,
            cell.num_flips,
            cell.num_wrong,
            f"{cell.largest_margin:.3f}",
            _number(cell.tokens_per_step),
        )
        for cell in record.greedy
    ]
    noise = [
        f"noise, {pair.ways}: median {pair.median:.3f}, largest {pair.largest:.3f} "
        f"({pair.num_places} places)"
        for pair in record.noise
    ]
    return Table(columns, rows, title="Greedy answers, judged token by token", below=noise)


def _sampled(record: AuditRecord) -> Table | None:
    if not record.sampled:
        return None
    columns = ["context", "token", "draws", "cells", "p-value", "distance", "by chance"]
    rows = [
        (
            place.context,
            place.depth,
            place.num_draws,
            place.num_cells,
            f"{place.p_value:.2g}",
            f"{place.total_variation:.3f} "
            f"[{place.total_variation_interval[0]:.3f}, {place.total_variation_interval[1]:.3f}]",
            f"{place.total_variation_by_chance:.3f}",
        )
        for place in record.sampled
    ]
    title = "Sampled tokens beside the server's own distribution (distance: total variation)"
    return Table(columns, rows, title=title)


def _states(record: AuditRecord) -> Table | None:
    if not record.states:
        return None
    columns: list[Column | str] = [
        Column("state", is_text=True),
        *("context", "at once", "pairs", "tokens a step", "cold", "cached", "other", "wrong"),
    ]
    rows = [
        (
            cell.state,
            cell.context,
            cell.concurrency,
            cell.num_requests,
            _number(cell.tokens_per_step),
            _number(cell.cold_tokens_per_step),
            cell.num_cached,
            cell.num_different,
            cell.num_wrong,
        )
        for cell in record.states
    ]
    return Table(columns, rows, title="The same prompts in other states of the server")


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"
