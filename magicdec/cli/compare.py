"""`magicdec compare NEW BASELINE`: compares new records with a baseline's. The exit code says
whether the acceptance of runs has fallen or a prediction has changed; what else was measured is
printed beside each other.

Owns the command line; `records/comparison/` compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.cli.parsing.record_files import RecordFilesSection
from magicdec.config.setting import same, setting
from magicdec.output.console import printable
from magicdec.output.tables import Table, print_tables
from magicdec.output.writing import write_text
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
from magicdec.records.comparison.conditions import describe, is_judged
from magicdec.records.comparison.values import compare_predictions, tables_of_measured
from magicdec.records.drafted import JudgedRecord
from magicdec.records.reading import read_records
from magicdec.records.record import Record

NOT_COMPARABLE = 3
DRAFT_SETTINGS = ("compare.require_all", "rule.margin")
EXIT_CODES = "exit codes: 0 passed, 1 regression or change, 2 wrong usage, 3 not comparable"


@dataclass(frozen=True)
class RuleSection(Rule):
    junit: Path | None = setting(None, "Write the comparisons as JUnit XML.")
    summary: Path | None = setting(None, "Write the comparisons as Markdown.")


@dataclass(frozen=True)
class CompareSection:
    new: Path = setting(..., "File with the records of new runs, as JSON lines.", "new")
    baseline: Path = setting(
        ..., "File with baseline records, such as results/baselines/acceptance.jsonl.", "baseline"
    )
    require_all: bool = setting(False, "Also exit with code 3 if a baseline has no new record.")
    strict: bool = same(RecordFilesSection, "strict")


def compare_files(values: ParsedValues) -> int:
    """Compare all records of both files. Returns the exit code. Raises ValueError for a file that
    cannot be read or written, and for a flag that only other kinds of records have."""
    args = values[CompareSection]
    rule = values[RuleSection]
    files = [list(read_records(path, Record, args.strict)) for path in (args.new, args.baseline)]
    if not files[0]:
        raise ValueError(f"{args.new} holds no records")
    new, old = ([r for r in records if is_judged(r)] for records in files)
    comparisons = [] if not new else compare_all(new, old, rule, args.require_all)
    if not (new and old):
        values.refuse_given(DRAFT_SETTINGS, "it is for drafts of runs, and there are none")
    comparisons += compare_predictions(*files)
    tables = tables_of_measured(*files)
    if not comparisons:
        values.refuse_given(["rule.junit"], "nothing is judged")
    print_tables(tables)
    code = conclude(rule, comparisons, tables)
    if new:
        missing = len(uncovered(new, old))
        print(f"{len(old) - missing} of {len(old)} baselines covered, {missing} not covered")
    is_compared = tables or any(c.verdict != MISSING for c in comparisons)
    return code if is_compared else NOT_COMPARABLE


def compare_all(
    new: Sequence[JudgedRecord], old: Sequence[JudgedRecord], rule: Rule, is_complete: bool
) -> list[Comparison]:
    """The comparisons, and one for each baseline that no new record covers. If the new records are
    to be complete, it says that this could not be compared."""
    comparisons = compare(new, old, rule)
    text = "no new record covers this baseline"
    verdict = INCOMPARABLE if is_complete else MISSING
    return comparisons + [Comparison(describe(b), verdict, text) for b in uncovered(new, old)]


def conclude(
    rule: RuleSection, comparisons: Sequence[Comparison], tables: Sequence[Table] = ()
) -> int:
    """Print the comparisons, write the files that were asked for and return the exit code. Raises
    ValueError if a file cannot be written."""
    for comparison in comparisons:
        print(printable(str(comparison)))
    print(summarize(comparisons) or "nothing is judged")
    if rule.junit is not None:
        write_text("--junit", rule.junit, junit(comparisons))
    if rule.summary is not None:
        parts = [markdown(comparisons)] if comparisons else []
        write_text("--summary", rule.summary, "\n".join([*parts, *map(Table.markdown, tables)]))
    return exit_code(comparisons)


main = LoneCommand(
    compare_files,
    "Compare new records with a baseline's: the acceptance of runs, prompt by prompt, and "
    "predictions value by value. Of passes that served requests and of single forwards, print what "
    "was measured beside each other.",
    {"compare": CompareSection, "rule": RuleSection()},
    epilog=EXIT_CODES,
)
