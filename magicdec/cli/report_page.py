"""`magicdec report FILE... --out DIR`: records as a page with figures and tables. Owns the command
line; `report/` makes the page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import Values
from magicdec.cli.parsing.record_files import RUN, FilesSection, read_every_kind
from magicdec.config.sections import WrittenSection
from magicdec.config.setting import same, setting

KINDS = (RUN, "serving")  # of records


@dataclass(frozen=True)
class ReportSection(FilesSection):
    """The page, and what is on it."""

    out: Path = same(WrittenSection, "out", ..., metavar="DIR")
    no_figure_files: bool = setting(
        False, "Write no PNG and SVG files; the figures are in the page alone."
    )


def write_page(values: Values) -> int:
    args = values[ReportSection]
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is not a directory; name one to write to")
    from magicdec.report.frame import report_rows
    from magicdec.report.page import PAGE, make_report, write_report

    rows = [
        row
        for number, (path, record) in enumerate(read_every_kind(args, KINDS), 1)
        for row in report_rows(number, str(path), record)
    ]
    command = ["magicdec", "report", *sys.argv[1:]]
    report = make_report(command, not args.no_figure_files, rows)
    write_report(args.out, report)
    for section in report.sections:
        for figure in section.left_out:
            print(f"left out: {figure.title}: {figure.reason}", file=sys.stderr)
    drawn = sum(len(section.figures) for section in report.sections)
    print(f"{drawn} figures of {rows[-1]['run']} runs: {args.out / PAGE}")
    return 0


main = LoneCommand(
    write_page,
    "Write a page with figures and tables of records of every kind. It needs no network; the "
    "figures as PNG and SVG and the tables as CSV are written beside it.",
    {"report": ReportSection},
)
