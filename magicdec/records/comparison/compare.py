"""Compares new records with a baseline's under one rule, which docs/results.md states: what is
the same, a change, a gain, a regression, or cannot be compared. Shows the comparisons as JUnit XML,
which CI servers show as tests, and as Markdown.

What changed is the acceptance rate between two records of the same prompts, with its interval. The
prompts are paired: each is left out of both records at once (jackknife), so that what all prompts
have in common cancels. Times are not compared. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from magicdec.config.setting import setting
from magicdec.output.tables import Column, Table
from magicdec.records.acceptance import (
    PromptCounts,
    columns_of,
    estimates_of,
)
from magicdec.records.comparison.conditions import (
    describe,
    first_difference,
    measured_thing,
    placement,
)
from magicdec.records.comparison.exact import (
    RENEW,
    are_compared_by_place,
    at_the_same_places,
    find_change,
    find_other_verdict,
    why_not_exact,
)
from magicdec.records.describe import verdict_of
from magicdec.records.drafted import DraftedPass, JudgedRecord
from magicdec.records.intervals import FEWEST_PROMPTS, LEVEL, Array, jackknife_error, quantile
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import Status


@dataclass(frozen=True)
class PairedCounts:
    """The counts of one thing in two records, prompt by prompt."""

    before: PromptCounts
    after: PromptCounts
    num_different: int  # outputs that differ between the records
    # [P] the standard error of the difference of a prompt's rates, as far as its verifications
    # scatter; None: unknown.
    errors: Array | None = None

    @property
    def is_equal(self) -> bool:
        return self.before.equals(self.after)

    def rates(self) -> tuple[float, float]:
        return float(estimates_of(self.before).rate[0]), float(estimates_of(self.after).rate[0])

    def worst_prompt(self) -> WorstPrompt | None:
        """The prompt that has lost most beside how its verifications scatter; None if none has
        lost, or if that is not known."""
        if self.errors is None:
            return None
        before = self.before.rates
        after = self.after.rates
        losses = np.where(self.errors > 0, (before - after) / np.maximum(self.errors, 1e-12), 0.0)
        losses = np.nan_to_num(losses)
        # If all prompts have changed more than that, as after other rounding, one has to do so all
        # the more.
        spread = max(1.0, 1.4826 * float(np.median(np.abs(losses - np.median(losses)))))
        worst = int(losses.argmax())
        if losses[worst] <= 0:
            return None
        rates = float(before[worst]), float(after[worst])
        return WorstPrompt(worst, rates, float(losses[worst]) / spread, len(losses))

    def log_ratios(self) -> Array:
        """[1 + P] the logarithm of the ratio of the acceptance rates, over all prompts and without
        each prompt."""
        before = estimates_of(self.before).rate
        after = estimates_of(self.after).rate
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(after / before)


@dataclass(frozen=True)
class WorstPrompt:
    """The prompt that has lost most of its acceptance rate: `score` standard errors."""

    number: int
    rates: tuple[float, float]
    score: float
    num_prompts: int

    def is_loss(self, false_alarms: float) -> bool:
        """Whether chance would show such a loss of any prompt in fewer runs than this share."""
        return self.score > NormalDist().inv_cdf(1 - false_alarms / self.num_prompts)

    def __str__(self) -> str:
        return "prompt {} lost most, {:.3f} -> {:.3f}".format(self.number, *self.rates)


@dataclass(frozen=True)
class Change:
    """A relative change, such as -0.05 for a loss of 5 %, and its interval."""

    relative: float
    interval: tuple[float, float] | None  # None: too few prompts have accepted drafts
    num_prompts: int
    error: float | None = None  # standard error of the logarithm of the ratio of the rates

    def seen_loss(self, rate: float, level: float, margin: float) -> float | None:
        """The smallest loss, as a share of an acceptance rate, that a comparison with this scatter
        calls a regression in 19 of 20 runs: the interval at that level must not hold 0, and the
        loss must be larger than the margin. None if the scatter is not known."""
        if self.error is None or not 0 < rate < 1:
            return None
        freedom = self.num_prompts - 1
        loss = 0.0
        reach = quantile(freedom, level)
        # The error is itself estimated, and is larger where the rate is lower.
        room = NormalDist().inv_cdf(SEEN) * math.sqrt(1 + reach**2 / (2 * freedom))
        for _ in range(20):
            lower = rate * (1 - loss)
            error = self.error * math.sqrt((1 + (1 / lower - 1) / (1 / rate - 1)) / 2)
            bar = max(error * reach, -math.log1p(-margin))
            loss = min(-math.expm1(-bar - error * room), 1 - 1e-6)
        return loss

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 0."""
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]

    def __str__(self) -> str:
        text = f"{100 * self.relative:+.1f} %"
        if self.interval is not None:
            text += " [{:+.1f}, {:+.1f}]".format(*(100 * end for end in self.interval))
        return text


def pair_of(new: DraftedPass, old: DraftedPass) -> PairedCounts:
    pairs = zip(old.output_hashes, new.output_hashes, strict=True)
    is_other = np.array([one != other for one, other in pairs])
    before = old.counts
    after = new.counts
    # Another text may be easier or harder to draft for, as another prompt may be.
    between = float(np.nanvar(before.rates, ddof=1)) if len(is_other) > 1 else 0.0
    errors = np.sqrt(rate_variances(old) + rate_variances(new) + is_other * between)
    return PairedCounts(before, after, int(is_other.sum()), errors)


def rate_variances(drafted: DraftedPass) -> Array:
    """[P] the variance of each prompt's acceptance rate, if its verifications are independent and
    scatter about its rate as those of all prompts do."""
    counts = drafted.counts
    by_prompt = drafted.verifications.by_request
    prompts, judged, accepted, _ = columns_of(by_prompt, counts.num_prompts)
    rests = accepted - counts.rates[prompts] * judged
    scatter = (rests**2).sum() / max(1, len(rests) - counts.num_prompts)
    return scatter * counts.verifications / np.maximum(counts.drafted, 1) ** 2


def drafted_of(record: JudgedRecord, name: str) -> DraftedPass:
    """What a record says of drafts; `name` stands for it in the error. Raises ValueError if it says
    nothing."""
    try:
        return DraftedPass.of(record)
    except ValueError as error:
        raise ValueError(f"the {name} {error}") from None


def change_of(pair: PairedCounts, level: float = LEVEL) -> Change:
    """The change of a pair, with its interval at that level."""
    ratios = pair.log_ratios()  # the first is of all prompts
    mean = float(ratios[0])
    num_prompts = len(ratios) - 1
    interval = None
    error = None
    if num_prompts >= FEWEST_PROMPTS and np.isfinite(ratios).all():
        error = jackknife_error(ratios)
        reach = error * quantile(num_prompts - 1, level)
        interval = (math.expm1(mean - reach), math.expm1(mean + reach))
    return Change(math.expm1(mean), interval, num_prompts, error)


REGRESSION = "regression"
CHANGED = "changed"
INCOMPARABLE = "not comparable"
TOLERATED = "tolerated"
GAIN = "gain"
SAME = "same"
MISSING = "missing"
VERDICTS = (REGRESSION, CHANGED, INCOMPARABLE, TOLERATED, GAIN, SAME, MISSING)  # the worst first
DEFAULT_MARGIN = 0.02
READS_TOLERANCE = 0.02  # of the tokens that a draft forward reads
FALSE_ALARMS = 0.01
SEEN = 0.95  # share of the runs in which a loss is seen that a comparison says it would have seen
EXIT_CODES = {REGRESSION: 1, CHANGED: 1, INCOMPARABLE: 3}
EXACT = "exact"


@dataclass(frozen=True)
class Rule:
    """What the user may choose."""

    margin: float | None = setting(
        None,
        "Share of the acceptance rate whose loss is tolerated where statistics decide, in place of "
        f"the margins of the baselines; 0: any loss is a regression. Default: {DEFAULT_MARGIN} "
        "unless a baseline has its own.",
        least=0,
        below=1,
    )

    def margin_of(self, baseline: JudgedRecord) -> float:
        margin = baseline.margin if self.margin is None else self.margin
        return DEFAULT_MARGIN if margin is None else margin


@dataclass(frozen=True)
class Comparison:
    """What was found out about one record, in one line."""

    name: str
    verdict: str
    text: str
    rates: tuple[float, float] | None = None  # acceptance rate: baseline, new
    change: Change | None = None
    rule: str | None = None  # which rule was applied and, of statistics, why

    @property
    def severity(self) -> int:
        """Its place among the verdicts, of which the first is the worst."""
        return VERDICTS.index(self.verdict)

    def __str__(self) -> str:
        return f"{self.name}: {self.finding}"

    @property
    def finding(self) -> str:
        return self.text if self.rule is None else f"{self.text} [{self.rule}]"


@dataclass(frozen=True)
class Match:
    """A new record and a baseline of the same thing under the same conditions."""

    name: str
    pair: PairedCounts
    new: JudgedRecord
    old: JudgedRecord
    after: DraftedPass
    before: DraftedPass

    @cached_property
    def why_not_exact(self) -> str | None:
        """Why the two may differ although the code is the same; None if they may not."""
        return why_not_exact(self.new, self.old)

    @property
    def is_certain(self) -> bool:
        """Whether only a change of the code explains other counts: the outputs agree, in float32.
        Otherwise rounding may, which differs between machines."""
        dtype = self.new.config["model"]["dtype"]
        return self.pair.is_equal or (dtype == "float32" and self.pair.num_different == 0)


def compare(
    new: Sequence[JudgedRecord], baselines: Sequence[JudgedRecord], rule: Rule = Rule()
) -> list[Comparison]:
    """What was found out about each new record, in order. A record is compared with every baseline
    of the same thing under the same conditions, and the worst counts: none of them may hide a
    regression from another."""
    results = [match(record, baselines) for record in new]
    matches = [m for matched in results if not isinstance(matched, Comparison) for m in matched]
    level = level_for(matches)
    comparisons = []
    for group in results:
        if isinstance(group, Comparison):
            comparisons.append(group)
            continue
        verdicts = [judge(m, rule, level) for m in group]
        comparisons.append(min(verdicts, key=lambda c: c.severity))
    return comparisons


def match(record: JudgedRecord, baselines: Sequence[JudgedRecord]) -> list[Match] | Comparison:
    """The baselines of the same thing under the same conditions, or why there is none."""
    name = describe(record)
    if record.status == Status.VERIFIED_WITH_TIES:
        name += f" [{record.status}]"
    if isinstance(record, PassRecord) and not record.passed:
        return Comparison(name, REGRESSION, f"the new pass: {verdict_of(record)}")
    try:
        alike = alike_baselines(record, baselines)
        if not any(has_drafted(one) for one in (record, *alike)):
            return Comparison(name, SAME, "nothing was drafted, as before")
        if record.is_logged and not has_drafted(record):
            return Comparison(name, REGRESSION, "regression: nothing is drafted any more")
        return [match_of(name, record, b) for b in alike]
    except ValueError as error:
        return Comparison(name, INCOMPARABLE, f"not comparable: {error}")


def match_of(name: str, new: JudgedRecord, old: JudgedRecord) -> Match:
    before = drafted_of(old, "baseline")
    after = drafted_of(new, "new record")
    return Match(name, pair_of(after, before), new, old, after, before)


def has_drafted(record: JudgedRecord) -> bool:
    """Whether it has drafted, or had no drafter that could have done so."""
    return record.draft_acceptance_rate is not None or not record.is_drafting


def alike_baselines(record: JudgedRecord, baselines: Sequence[JudgedRecord]) -> list[JudgedRecord]:
    """Raises ValueError, naming the first cause, if there is none."""
    if record.is_uncompared:
        raise ValueError("its tokens were compared with nothing")
    same = [b for b in baselines if measured_thing(b) == measured_thing(record)]
    if not same:
        raise ValueError("the baseline has no such record")
    passed = [b for b in same if b.passed]
    if not passed:
        raise ValueError(f"the baseline's status is {same[0].status}")
    alike = [b for b in passed if first_difference(record, b) is None]
    if not alike:
        raise ValueError(first_difference(record, passed[0]))
    # Ranks change no token, but where there is a baseline of the same ranks, it is the one.
    on_same_ranks = [b for b in alike if placement(b) == placement(record)]
    return on_same_ranks or alike


def level_for(matches: Sequence[Match]) -> float:
    """The level of the intervals of rows whose counts rounding may have changed: all of them
    together hold with 99 %, so that each has a share of the 1 % (Bonferroni)."""
    num_tests = sum(not (m.is_certain or m.why_not_exact is None) for m in matches)
    return 1 - FALSE_ALARMS / max(1, num_tests)


def other_reads(new: JudgedRecord, old: JudgedRecord) -> str | None:
    """What a draft forward reads, if it is no longer what it was: then it is not the same policy or
    budget, whatever the records say."""
    after = new.kv_tokens_read
    before = old.kv_tokens_read
    if after is None or before is None or abs(after - before) <= READS_TOLERANCE * before:
        return None
    return f"regression: a draft forward reads {after:.1f} tokens of a row's KV, was {before:.1f}"


def judge(m: Match, rule: Rule, level: float) -> Comparison:
    """The verdict on a record and a baseline. `level` is that of the interval where rounding may
    have changed the counts."""
    if m.why_not_exact is None:
        return judge_exactly(m)
    found = judge_by_statistics(m, rule, level)
    return dataclasses.replace(found, rule=f"statistics: {m.why_not_exact}")


def judge_exactly(m: Match) -> Comparison:
    """The verdict where unchanged code repeats every step."""
    rates = m.pair.rates()
    if are_compared_by_place(m.new, m.old):
        change, num_places = find_other_verdict(m.after, m.before)
        if num_places == 0:
            return Comparison(m.name, INCOMPARABLE, "no draft was judged in both", rates)
        same = f"drafts at the {num_places} places that were judged in both as before"
    else:
        change = find_change(m.after, m.before)
        same = "every step as before"
    if change is None:
        text = f"acceptance rate {rates[1]:.4f}, {same}"
        unchanged = Change(0.0, None, m.pair.after.num_prompts)
        return Comparison(m.name, SAME, text, rates, unchanged, EXACT)
    relative = rates[1] / rates[0] - 1 if rates[0] else 0.0
    text = f"{change}; acceptance rate {rates[0]:.4f} -> {rates[1]:.4f}, {100 * relative:+.1f} %"
    rate_change = Change(relative, None, m.pair.after.num_prompts)
    text += f": {CHANGED}; if it was meant, {RENEW}"
    return Comparison(m.name, CHANGED, text, rates, rate_change, EXACT)


def judge_by_statistics(m: Match, rule: Rule, level: float) -> Comparison:
    """The verdict where rounding may have changed the counts."""
    pair = m.pair
    reads = other_reads(m.new, m.old)
    if reads is not None:
        return Comparison(m.name, REGRESSION, reads, pair.rates())
    forks = f"; {pair.num_different} outputs differ" if pair.num_different else ""
    if are_compared_by_place(m.new, m.old):
        pair = pair_of(*at_the_same_places(m.after, m.before))
        num_places = int(pair.after.verifications.sum())
        if num_places == 0:
            return Comparison(m.name, INCOMPARABLE, "no draft was judged in both", m.pair.rates())
        forks = f" at the {num_places} places that were judged in both{forks}"
    rates = pair.rates()
    if pair.is_equal:
        text = f"acceptance rate {rates[1]:.4f}, all counts as before{forks}"
        unchanged = Change(0.0, None, pair.after.num_prompts)
        return Comparison(m.name, SAME, text, rates, unchanged)
    level = LEVEL if m.is_certain else level
    margin = rule.margin_of(m.old)
    change = change_of(pair, level)
    worst = pair.worst_prompt()
    verdict, why = decide(rates, change, margin)
    if worst is not None:
        forks += f"; {worst}"
        is_beyond = worst.rates[1] < (1 - margin) * worst.rates[0]
        if verdict != REGRESSION and is_beyond and worst.is_loss((1 - level) / 2):
            verdict = REGRESSION
            why = f"prompt {worst.number} lost more than its noise"
    text = f"acceptance rate {rates[0]:.4f} -> {rates[1]:.4f}, {change}{forks}: {verdict}, {why}"
    if (seen := change.seen_loss(rates[0], level, margin)) is not None:
        text += f"; a loss of {100 * seen:.1f} % would be seen in 19 of 20 runs"
    return Comparison(m.name, verdict, text, rates, change)


def decide(rates: tuple[float, float], change: Change, margin: float) -> tuple[str, str]:
    is_lost = rates[1] == 0
    if change.relative < -margin and (margin == 0 or is_lost):
        return REGRESSION, "any loss is one" if margin == 0 else "no draft is accepted any more"
    if change.is_noise:
        return TOLERATED, "inside the noise"
    if abs(change.relative) <= margin:
        return TOLERATED, f"within the margin of {100 * margin:g} %"
    if change.num_prompts < FEWEST_PROMPTS:
        return INCOMPARABLE, f"{change.num_prompts} prompts; {FEWEST_PROMPTS} are needed"
    if change.interval is None:
        return INCOMPARABLE, "without one of the prompts nothing is accepted, so it has no interval"
    verdict = REGRESSION if change.relative < 0 else GAIN
    return verdict, f"beyond the margin of {100 * margin:g} % and the noise"


def case_failed(baseline: JudgedRecord, error: str) -> Comparison:
    """The case of a baseline that left no record."""
    return Comparison(describe(baseline), REGRESSION, f"the case failed: {error}")


def uncovered(new: Sequence[JudgedRecord], baselines: Sequence[JudgedRecord]) -> list[JudgedRecord]:
    """The baselines with which no new record can be compared."""
    matches = [match(record, baselines) for record in new]
    covered = {
        id(m.old) for matched in matches if not isinstance(matched, Comparison) for m in matched
    }
    return [b for b in baselines if id(b) not in covered]


def exit_code(comparisons: Sequence[Comparison]) -> int:
    """0: all is well; 1: a regression; 3: something could not be compared."""
    codes = {EXIT_CODES.get(c.verdict, 0) for c in comparisons}
    return 1 if 1 in codes else max(codes, default=0)


def summarize(comparisons: Sequence[Comparison]) -> str:
    """How many comparisons had each verdict, the worst first."""
    counts = [(sum(c.verdict == v for c in comparisons), v) for v in VERDICTS]
    return ", ".join(f"{count} {verdict}" for count, verdict in counts if count)


TITLE = "Acceptance gate"
# What JUnit calls a test case with that verdict, and its number.
KINDS = {
    REGRESSION: ("failure", "failures"),
    CHANGED: ("failure", "failures"),
    INCOMPARABLE: ("error", "errors"),
    MISSING: ("skipped", "skipped"),
}


def junit(
    comparisons: Sequence[Comparison], title: str = TITLE, room: str = "magicdec.bench.gate"
) -> str:
    """One test case for each comparison: a regression or a change is a failure, and what could not
    be compared is an error."""
    suite = ElementTree.Element("testsuite", name=title, tests=str(len(comparisons)))
    counts = Counter(KINDS[c.verdict][1] for c in comparisons if c.verdict in KINDS)
    for _, attribute in KINDS.values():
        suite.set(attribute, str(counts[attribute]))
    for comparison in comparisons:
        case = ElementTree.SubElement(suite, "testcase", classname=room, name=comparison.name)
        if comparison.verdict in KINDS:
            kind, _ = KINDS[comparison.verdict]
            ElementTree.SubElement(case, kind, message=comparison.finding)
        else:
            ElementTree.SubElement(case, "system-out").text = comparison.finding
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def markdown(comparisons: Sequence[Comparison]) -> str:
    """A heading with the outcome, and a table with the worst verdicts first."""
    columns = [Column(label, is_text=True) for label in ("verdict", "case", "what was found")]
    ordered = sorted(comparisons, key=lambda c: c.severity)
    table = Table(columns, [(c.verdict, c.name, c.finding) for c in ordered])
    return f"## {TITLE}: {summarize(comparisons)}\n\n{table.markdown()}"
