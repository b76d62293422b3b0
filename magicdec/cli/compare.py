"""`magicdec compare NEW BASELINE`: compares new records with a baseline. Exit code 1 if there is a
regression.

Owns the command line; `records/compare.py` compares.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.records.compare import compare, covers, describe
from magicdec.records.reading import load_records


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="magicdec compare",
        description="Compare the acceptance of new records with a baseline. The exit code is 1 if "
        "it fell.",
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
        help="also exit with code 1 if a baseline has no new record",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a file with a line that is not a record; otherwise the line is skipped with a "
        "warning",
    )
    return parser


def main() -> None:
    """`magicdec compare NEW BASELINE`"""
    args = make_parser().parse_args()
    try:
        new, old = (load_records(path, args.strict) for path in (args.new, args.baseline))
        if not new:
            raise ValueError(f"{args.new} holds no records")
    except ValueError as error:
        print(f"magicdec compare: {error}", file=sys.stderr)
        sys.exit(2)
    comparisons = [compare(record, old) for record in new]
    for c in comparisons:
        for metric, (before, after) in c.differences.items():
            print(f"{c.name}: {metric} {before:.4f} -> {after:.4f} ({after - before:+.4f})")
        if c.problem:
            print(f"{c.name}: {c.problem}")
    missing = [baseline for baseline in old if not any(covers(r, baseline) for r in new)]
    for baseline in missing:
        print(f"{describe(baseline)}: no new record covers this baseline")
    print(f"{len(old) - len(missing)} of {len(old)} baselines covered, {len(missing)} not covered")
    sys.exit(any(c.problem for c in comparisons) or (args.require_all and bool(missing)))
