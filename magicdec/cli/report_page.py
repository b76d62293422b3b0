"""`magicdec report FILE... --out DIR`: records as a page with figures and tables. Owns the command
line; `report/` makes the page."""

from __future__ import annotations

import sys
from pathlib import Path

from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.record_files import add_record_files, read_files
from magicdec.report.page import PAGE, write_report
from magicdec.report.point import make_point
from magicdec.report.prediction import load_predictor


def main() -> None:
    """`magicdec report FILE... --out DIR`"""
    try:
        args, _ = make_parser().read(sys.argv[1:])
        if args.out.exists() and not args.out.is_dir():
            raise ValueError(f"--out {args.out} is not a directory; name one to write to")
        predictor = load_predictor(args.machine)
        points = [
            make_point(number, str(path), record)
            for number, (path, record) in enumerate(read_files(args), 1)
        ]
        command = ["magicdec", "report", *sys.argv[1:]]
        place = args.out, args.title, points, predictor, command
        report = write_report(*place, has_figure_files=not args.no_figure_files)
    except ValueError as error:
        print(f"magicdec report: {error}", file=sys.stderr)
        sys.exit(2)
    for figure in report.left_out:
        print(f"left out: {figure.title}: {figure.reason}", file=sys.stderr)
    drawn, runs = len(report.figures), len(points)
    print(f"{drawn} figures of {runs} runs: {args.out / PAGE}")


def make_parser() -> Parser:
    parser = Parser(
        prog="magicdec report",
        description="Write a page with figures and tables of records. It needs no network; the "
        "figures as PNG and SVG and the tables as CSV are written beside it.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR",
        help="the directory to write to; it is made if it is missing")  # fmt: skip
    add("--machine", type=Path, metavar="FILE",
        help="the file that `magicdec probe` wrote on the machine of the runs, for the predictions "
        "of `magicdec plan`; default: the page has none")  # fmt: skip
    add("--no_figure_files", action="store_true",
        help="write no PNG and SVG files; the figures are in the page alone")  # fmt: skip
    add("--title", default="MagicDec report", metavar="TEXT", help="the title [MagicDec report]")
    add_record_files(parser)
    return parser
