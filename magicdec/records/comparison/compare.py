"""Compares new records with a baseline's, under one rule (`judge.py`), and shows the comparisons as
JUnit XML, which CI servers show as tests, and as Markdown. Imports no torch.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicdec.records.comparison.change import Pair, pair_of
from magicdec.records.comparison.conditions import (
    compared_with_nothing,
    describe,
    first_difference,
    measured_thing,
    method_of,
)
from magicdec.records.comparison.judge import (
    CHANGED,
    GAIN,
    INCOMPARABLE,
    MISSING,
    REGRESSION,
    VERDICTS,
    Comparison,
    Rule,
    contradiction_of,
    judge,
    judge_ratios,
    judge_together,
    other_reads,
)
from magicdec.records.record import RunRecord
from magicdec.records.statistics.intervals import LEVEL

FALSE_ALARMS = 0.01
EXIT_CODES = {REGRESSION: 1, INCOMPARABLE: 3}


@dataclass(frozen=True)
class Match:
    """A new record and a baseline of the same thing under the same conditions."""

    name: str
    method: str
    pair: Pair
    new: RunRecord
    old: RunRecord

    @property
    def is_certain(self) -> bool:
        """Whether only a change of the code explains other counts: the outputs agree, in float32.
        Otherwise rounding may, which differs between machines."""
        dtype = self.new.config["model"]["dtype"]
        return self.pair.is_equal or (dtype == "float32" and self.pair.num_different == 0)


def compare(
    new: Sequence[RunRecord], baselines: Sequence[RunRecord], rule: Rule = Rule()
) -> list[Comparison]:
    """What was found out about each new record, in order, then about the methods that have several
    records. A record is compared with every baseline of the same thing under the same conditions,
    and the worst counts: none of them may hide a regression from another."""
    found = [match(record, baselines) for record in new]
    matches = [m for each in found if not isinstance(each, Comparison) for m in each]
    level = level_for(matches)
    comparisons = []
    for each in found:
        if isinstance(each, Comparison):
            comparisons.append(each)
            continue
        judged = [judge_match(m, rule, level) for m in each]
        comparisons.append(min(judged, key=lambda c: c.severity))
        if rule.performance is not None:
            m = each[-1]
            comparisons += judge_ratios(m.name, m.new, m.old, rule.performance)
    comparisons += compare_methods(matches, rule, level)
    return [exactly(c) for c in comparisons] if rule.is_exact else comparisons


def match(record: RunRecord, baselines: Sequence[RunRecord]) -> list[Match] | Comparison:
    """The baselines of the same thing under the same conditions, or why there is none."""
    name = describe(record)
    if record.status == "ok_with_ties":
        name += f" [{record.status}]"
    if not record.passed:
        text = f"the new run {record.status}: {record.error or 'outputs differ'}"
        verdict = INCOMPARABLE if record.status == "interrupted" else REGRESSION
        return Comparison(name, verdict, text)
    if (problem := contradiction_of(record)) is not None:
        return Comparison(name, REGRESSION, f"the new record {problem}")
    try:
        alike = alike_baselines(record, baselines)
        return [Match(name, method_of(record), pair_of(record, b), record, b) for b in alike]
    except ValueError as error:
        return Comparison(name, INCOMPARABLE, f"not comparable: {error}")


def alike_baselines(record: RunRecord, baselines: Sequence[RunRecord]) -> list[RunRecord]:
    """Raises ValueError, naming the first cause, if there is none."""
    if compared_with_nothing(record):
        raise ValueError("its tokens were compared with nothing")
    same = [b for b in baselines if measured_thing(b) == measured_thing(record)]
    if not same:
        raise ValueError("the baseline has no such record")
    passed = [b for b in same if b.passed]
    if not passed:
        raise ValueError(f"the baseline's run {same[0].status}")
    alike = [b for b in passed if first_difference(record, b) is None]
    if not alike:
        raise ValueError(first_difference(record, passed[0]))
    for baseline in alike:
        if (problem := contradiction_of(baseline)) is not None:
            raise ValueError(f"the baseline {problem}")
    return alike


def level_for(matches: Sequence[Match]) -> float:
    """The level of the intervals of rows whose counts rounding may have changed: all of them
    together hold with 99 %, so that each has a share of the 1 % (Bonferroni)."""
    num_tests = sum(not m.is_certain for m in matches)
    return 1 - FALSE_ALARMS / max(1, num_tests)


def judge_match(m: Match, rule: Rule, level: float) -> Comparison:
    reads = other_reads(m.new, m.old)
    if reads is not None:
        return Comparison(m.name, REGRESSION, reads, m.pair.rates())
    return judge(m.name, m.pair, rule.margin_of(m.old), LEVEL if m.is_certain else level)


def compare_methods(matches: Sequence[Match], rule: Rule, level: float) -> list[Comparison]:
    """The verdict on each method with several rows of which one has changed, rows without a margin
    aside."""
    methods: dict[str, list[Match]] = {}
    for m in matches:
        if rule.margin_of(m.old) > 0 and all(m.pair.rates()):
            methods.setdefault(m.method, []).append(m)
    return [
        judge_together(
            f"{method}, all rows", [m.pair for m in of_method],
            max(rule.margin_of(m.old) for m in of_method),
            LEVEL if all(m.is_certain for m in of_method) else level,
        )
        for method, of_method in methods.items()
        if len(of_method) > 1 and not all(m.pair.is_equal for m in of_method)
    ]  # fmt: skip


def exactly(comparison: Comparison) -> Comparison:
    """With `--exact`, a change of the counts is a regression."""
    if comparison.verdict not in (CHANGED, GAIN) or comparison.rates is None:
        return comparison
    return replace(
        comparison, verdict=REGRESSION, text=f"{comparison.text}; --exact lets no change pass"
    )


def case_failed(baseline: RunRecord, error: str) -> Comparison:
    """The case of a baseline that left no record."""
    return Comparison(describe(baseline), REGRESSION, f"the case failed: {error}")


def uncovered(new: Sequence[RunRecord], baselines: Sequence[RunRecord]) -> list[RunRecord]:
    """The baselines with which no new record can be compared."""
    found = [match(record, baselines) for record in new]
    covered = {id(m.old) for each in found if not isinstance(each, Comparison) for m in each}
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
    INCOMPARABLE: ("error", "errors"),
    MISSING: ("skipped", "skipped"),
}


def junit(comparisons: Sequence[Comparison]) -> str:
    """One test case for each comparison: a regression is a failure, and what could not be compared
    is an error."""
    suite = ElementTree.Element("testsuite", name=TITLE, tests=str(len(comparisons)))
    for verdict, (_, attribute) in KINDS.items():
        suite.set(attribute, str(sum(c.verdict == verdict for c in comparisons)))
    for comparison in comparisons:
        case = ElementTree.SubElement(
            suite, "testcase", classname="magicdec.gate", name=comparison.name
        )
        if comparison.verdict in KINDS:
            kind, _ = KINDS[comparison.verdict]
            ElementTree.SubElement(case, kind, message=comparison.text)
        else:
            ElementTree.SubElement(case, "system-out").text = comparison.text
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def markdown(comparisons: Sequence[Comparison]) -> str:
    """A heading with the outcome, and a table with the worst verdicts first."""
    lines = [f"## {TITLE}: {summarize(comparisons)}", "", "| verdict | case | what was found |"]
    lines.append("|---|---|---|")
    for comparison in sorted(comparisons, key=lambda c: c.severity):
        cells = (comparison.verdict, comparison.name, comparison.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
