"""`magicdec table FILE...`: prints records as a table, or checks their metrics. Owns the command
line; `records/table.py` prints, `records/metrics.py` checks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from magicdec.records.compare import describe
from magicdec.records.metrics import check_metrics
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.table import print_records


def main() -> None:
    """`magicdec table FILE...`"""
    args = make_parser().parse_args()
    try:
        files = {path: load_records(path, args.strict or args.check) for path in args.files}
    except ValueError as error:
        print(f"magicdec table: {error}", file=sys.stderr)
        sys.exit(2)
    if args.check:
        sys.exit(check(files))
    print_records([record for records in files.values() for record in records])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="magicdec table", description="Print records as a table, with one line for each run."
    )
    parser.add_argument("files", nargs="+", type=Path, help="files of records, as JSON lines")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compute every metric again from the samples in its record, in place of the table; "
        "the exit code is 1 if one differs or a record has no samples",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="refuse a file with a line that is not JSON, as --check does; otherwise it is skipped "
        "with a warning",
    )
    return parser


def check(files: dict[Path, list[RunRecord]]) -> int:
    """Check the metrics of all records. Returns the exit code."""
    num_records = num_wrong = 0
    for path, records in files.items():
        for number, record in enumerate(records, 1):
            try:
                problems = [f"{name} differs from its samples" for name in check_metrics(record)]
            except ValueError as error:
                problems = [f"its metrics cannot be computed again, {error}"]
            for problem in problems:
                print(f"{path}: record {number} ({describe(record)}): {problem}")
            num_records, num_wrong = num_records + 1, num_wrong + bool(problems)
    print(f"{num_records - num_wrong} of {num_records} records have the metrics of their samples")
    return int(num_wrong > 0)
