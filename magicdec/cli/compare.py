"""`magicdec compare NEW BASELINE`: compares new records with a baseline's. The exit code says
whether the acceptance of runs has fallen. Of files with passes of commands that serve requests and
no runs, it prints the metrics beside each other.

Owns the command line; `records/comparison/` and `serving/compared.py` compare.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.cli.parsing.parser import Parser, Values
from magicdec.cli.parsing.record_files import FilesSection
from magicdec.config.setting import same, setting
from magicdec.records.comparison.compare import (
    INCOMPARABLE,
    MISSING,
    Comparison,
    Rule,
    compare,
    exit_code,
    junit,
    markdown,
    summarize,
    uncovered,
)
from magicdec.records.comparison.conditions import describe
from magicdec.records.reading import load_records, read_records
from magicdec.records.record import RunRecord
from magicdec.records.writing import write_text
from magicdec.serving.compared import read_passes, tables
from magicdec.tables import Table, print_tables

NOT_COMPARABLE = 3
EXIT_CODES = "exit codes: 0 passed, 1 regression, 2 wrong usage, 3 not comparable"


@dataclass(frozen=True)
class RuleSection(Rule):
    """The rule of a comparison, and its reports."""

    junit: Path | None = setting(None, "Write the comparisons as JUnit XML.")
    summary: Path | None = setting(None, "Write the comparisons as Markdown.")


@dataclass(frozen=True)
class CompareSection:
    """The files that are compared."""

    new: Path = setting(..., "File with the records of new runs, as JSON lines.", "new")
    baseline: Path = setting(
        ..., "File with baseline records, such as results/baselines/acceptance.jsonl.", "baseline"
    )
    require_all: bool = setting(False, "Also exit with code 3 if a baseline has no new record.")
    strict: bool = same(FilesSection, "strict")


def build_parser() -> Parser:
    return Parser(
        "Compare the acceptance of new records with a baseline's, prompt by prompt. Of files that "
        "have passes of inflight, recurrent or pipeline in place of runs, print the metrics beside "
        "each other.",
        {"compare": CompareSection, "rule": RuleSection()},
        epilog=EXIT_CODES,
    )


def main() -> None:
    """`magicdec compare NEW BASELINE`"""
    try:
        values = build_parser().read(sys.argv[1:])
        args, rule = values[CompareSection], values[RuleSection]
        if not any(has_runs(path) for path in (args.new, args.baseline)):
            sys.exit(compare_metrics(values))
        new, old = (load_records(path, args.strict) for path in (args.new, args.baseline))
        if not new:
            raise ValueError(f"{args.new} holds no records")
        code = conclude(rule, compare_all(new, old, rule, args.require_all))
    except ValueError as error:
        print(f"magicdec compare: {error}", file=sys.stderr)
        sys.exit(2)
    missing = len(uncovered(new, old))
    print(f"{len(old) - missing} of {len(old)} baselines covered, {missing} not covered")
    sys.exit(code)


def has_runs(path: Path) -> bool:
    """Whether a file has a record of a run, or nothing that could be compared otherwise. Raises
    ValueError as `read_records` does."""
    others = Counter[str]()
    runs = read_records(path, RunRecord, others=others)
    return next(runs, None) is not None or "serving" not in others


def compare_metrics(values: Values) -> int:
    """Print the metrics of the passes that both files have. Returns the exit code. Raises
    ValueError for a flag that only runs have."""
    args, rule = values[CompareSection], values[RuleSection]
    of_runs = ("compare.require_all", "rule.margin", "rule.exact", "rule.performance", "rule.junit")
    values.refuse_given(of_runs, "it is for records of runs, and there are none")
    new, old = (read_passes(path, args.strict) for path in (args.new, args.baseline))
    comparisons = tables(new, old)
    print_tables(comparisons)
    print(f"{len(comparisons)} of {len(old)} passes are in both files, with the same workload")
    if rule.summary is not None:
        write_text("--summary", rule.summary, "\n".join(map(Table.markdown, comparisons)))
    return 0 if comparisons else NOT_COMPARABLE


def compare_all(
    new: Sequence[RunRecord], old: Sequence[RunRecord], rule: Rule, is_complete: bool
) -> list[Comparison]:
    """The comparisons, and one for each baseline that no new record covers. If the new records are
    to be complete, it says that this could not be compared."""
    comparisons = compare(new, old, rule)
    text, verdict = "no new record covers this baseline", INCOMPARABLE if is_complete else MISSING
    return comparisons + [Comparison(describe(b), verdict, text) for b in uncovered(new, old)]


def conclude(rule: RuleSection, comparisons: Sequence[Comparison]) -> int:
    """Print the comparisons, write the files that were asked for and return the exit code. Raises
    ValueError if a file cannot be written."""
    for comparison in comparisons:
        print(comparison)
    print(summarize(comparisons))
    if rule.junit is not None:
        write_text("--junit", rule.junit, junit(comparisons))
    if rule.summary is not None:
        write_text("--summary", rule.summary, markdown(comparisons))
    return exit_code(comparisons)
