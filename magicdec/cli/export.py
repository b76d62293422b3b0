"""`magicdec export FILE... --out TABLE`: records as one flat table for other programs. Owns the
command line; `report/frame.py` makes the rows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import Values
from magicdec.cli.parsing.record_files import FilesSection, read_every_kind
from magicdec.config.sections import WrittenSection
from magicdec.config.setting import same
from magicdec.files import complete_file


@dataclass(frozen=True)
class ExportSection(FilesSection):
    out: Path = same(WrittenSection, "out", ..., metavar="TABLE")


def write_table(values: Values) -> int:
    from magicdec.report.frame import SUFFIXES, flat_rows, frame_of, write_frame

    args = values[ExportSection]
    if args.out.suffix not in SUFFIXES:
        raise ValueError(f"--out {args.out} must end in {' or '.join(SUFFIXES)}")
    frame = frame_of(
        row
        for number, (path, record) in enumerate(read_every_kind(args), 1)
        for row in flat_rows(number, str(path), record)
    )
    with complete_file("--out", args.out) as partial:
        write_frame(partial, frame)
    print(f"{len(frame)} rows written to {args.out}", file=sys.stderr)
    return 0


main = LoneCommand(
    write_table,
    "Write records of every kind as one flat table, with one row for each pass. pandas reads it in "
    "one line: pandas.read_csv(FILE) or pandas.read_parquet(FILE). The name of the table ends in "
    ".csv or .parquet.",
    {"export": ExportSection},
)
