"""`magicdec compare NEW BASELINE`: compares new records with a baseline's. The exit code says
whether acceptance has fallen.

Owns the command line; `records/comparison/` compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from magicdec.cli.parsing.parser import Parser
from magicdec.records.comparison.compare import (
    compare,
    exit_code,
    junit,
    markdown,
    summarize,
    uncovered,
)
from magicdec.records.comparison.conditions import describe
from magicdec.records.comparison.judge import (
    DEFAULT_MARGIN,
    INCOMPARABLE,
    MISSING,
    Comparison,
    Rule,
)
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.writing import write_text

EXIT_CODES = "exit codes: 0 passed, 1 regression, 2 wrong usage, 3 not comparable"


def make_parser() -> Parser:
    parser = Parser(
        prog="magicdec compare",
        description="Compare the acceptance of new records with a baseline's, prompt by prompt.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("new", type=Path, help="file with the records of new runs, as JSON lines")
    parser.add_argument(
        "baseline",
        type=Path,
        help="file with baseline records, such as results/baselines/acceptance.jsonl",
    )
    parser.add_argument(
        "--require_all",
        action="store_true",
        help="also exit with code 3 if a baseline has no new record",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a file with a line that is not a record; otherwise the line is skipped with a "
        "warning",
    )
    add_rule_flags(parser)
    return parser


def add_rule_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the rule and of its reports, which `magicdec gate` has too."""
    parser.add_argument(
        "--margin",
        type=share,
        metavar="X",
        help="share of the acceptance rate whose loss is tolerated, in place of the baselines' own "
        f"margins; 0: any loss is a regression [{DEFAULT_MARGIN} unless a baseline has its own]",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="a change of the accepted counts is a regression, also a gain",
    )
    parser.add_argument(
        "--performance",
        type=share,
        metavar="X",
        help="also compare ratios within one run (speedup, roofline fraction); a loss of more than "
        "this share is a regression [not compared]",
    )
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="write the comparisons as JUnit XML"
    )
    parser.add_argument(
        "--summary", type=Path, metavar="FILE", help="write the comparisons as Markdown"
    )


def share(text: str) -> float:
    """A number from 0 up to, but not including, 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to 1")
    return value


def read_rule(args: argparse.Namespace) -> Rule:
    return Rule(args.margin, args.exact, args.performance)


def main() -> None:
    """`magicdec compare NEW BASELINE`"""
    try:
        args, _ = make_parser().read(sys.argv[1:])
        new, old = (load_records(path, args.strict) for path in (args.new, args.baseline))
        if not new:
            raise ValueError(f"{args.new} holds no records")
        code = conclude(args, compare_all(new, old, read_rule(args), args.require_all))
    except ValueError as error:
        print(f"magicdec compare: {error}", file=sys.stderr)
        sys.exit(2)
    missing = len(uncovered(new, old))
    print(f"{len(old) - missing} of {len(old)} baselines covered, {missing} not covered")
    sys.exit(code)


def compare_all(
    new: Sequence[RunRecord], old: Sequence[RunRecord], rule: Rule, is_complete: bool
) -> list[Comparison]:
    """The comparisons, and one for each baseline that no new record covers. If the new records are
    to be complete, it says that this could not be compared."""
    found = compare(new, old, rule)
    text, verdict = "no new record covers this baseline", INCOMPARABLE if is_complete else MISSING
    return found + [Comparison(describe(b), verdict, text) for b in uncovered(new, old)]


def conclude(args: argparse.Namespace, comparisons: Sequence[Comparison]) -> int:
    """Print the comparisons, write the files that were asked for and return the exit code. Raises
    ValueError if a file cannot be written."""
    for comparison in comparisons:
        print(comparison)
    print(summarize(comparisons))
    if args.junit is not None:
        write_text("--junit", args.junit, junit(comparisons))
    if args.summary is not None:
        write_text("--summary", args.summary, markdown(comparisons))
    return exit_code(comparisons)
