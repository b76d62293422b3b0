"""The comparisons of the gate as JUnit XML, which CI servers show as tests, and as Markdown, which
they show on a page. Imports no torch."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from magicdec.records.comparison.compare import summarize
from magicdec.records.comparison.judge import INCOMPARABLE, MISSING, REGRESSION, Comparison

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
