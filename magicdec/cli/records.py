"""`magicdec table`, `report` and `export`: records as tables for people, as a page with figures,
and as files for other programs.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from magicdec.bench.report.listing import COLUMNS, NARROW, list_records
from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.cli.parsing.record_files import (
    TABLES,
    RecordFilesSection,
    read_every_kind,
)
from magicdec.config.sections import WrittenSection
from magicdec.config.setting import same, setting
from magicdec.hardware.other_load import load_text
from magicdec.names import EVERY_KIND, EXPORTS, RECORDS, load_named
from magicdec.output.files import complete_file
from magicdec.output.tables import FORMATS, Table, print_tables
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import read_records
from magicdec.records.record import MeasuredRecord, Record, commands_of, records_of_type

if TYPE_CHECKING:
    from magicdec.bench.export.export_format import ExportFormat

NOUNS = {"pass": "serve"}  # of records that are in no listing, where they are not their kinds
ON_PAGES = ("pass",)  # kinds of records that a report shows


@contextmanager
def no_collection() -> Iterator[None]:
    """A context without garbage collection, which would go through all records again and again.
    Records have no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class RecordTableSection(RecordFilesSection):
    kind: str | None = setting(
        None, "Only records of this kind.", choices=tuple(RECORDS), other_defaults="pass in config"
    )
    format: str = setting(
        "text",
        "text fits the terminal; latex needs the package booktabs; csv has unrounded numbers, of "
        "runs every column, and where there are runs no other kind without --kind.",
        choices=("text", *FORMATS),
    )
    columns: tuple[str, ...] = setting(
        (),
        "Columns of the table of runs, in this order: names of settings and metrics. Default: "
        "those in which the runs differ, and the metrics that matter most.",
        choices=COLUMNS,
        metavar="COLUMN",
    )
    sort: tuple[str, ...] = setting(
        (),
        "Columns by which runs are sorted, the first one first; runs without a value come last. "
        "Default: runs as they are in the files, and those of a study in the order of its "
        "settings.",
        choices=COLUMNS,
        metavar="COLUMN",
    )
    descending: bool = setting(False, "Sort from the largest value to the smallest.")


@no_collection()
def show(values: ParsedValues) -> int:
    """Prints the runs as one table, then the records of each other command as that command did, or
    did with `--verbose`."""
    args = values[RecordTableSection]
    commands: list[list[Record]] = []
    kinds = (args.kind,) if args.kind else tuple(RECORDS)
    runs = runs_of(args, kinds, commands)
    listing = list_records(runs, args.columns, args.sort, args.descending)
    refuse_useless(args, bool(listing.rows))
    commands.sort(key=lambda command: kinds.index(command[0].kind))
    tables = [tables_of(command) for command in commands]
    if listing.rows or not commands:
        print_tables([listing.table(args.format)], args.format, NARROW)
        if tables and args.format == "csv":
            counts = Counter(
                NOUNS.get(record.kind, record.kind) for command in commands for record in command
            )
            text = " and ".join(f"{count} of {noun}" for noun, count in counts.items())
            print(
                f"other records are left out, {text}; name files without runs, or see --kind",
                file=sys.stderr,
            )
            return 0
    for number, command_tables in enumerate(tables):
        if number or listing.rows:
            print()
        print_tables(command_tables, args.format)
    return 0


def tables_of(command: Sequence[Any]) -> list[Table]:
    """The tables of the records of a command, below a line about busy hosts."""
    measured = [record for record in command if isinstance(record, MeasuredRecord)]
    taken = [record.environment.cores_taken for record in measured]
    names = [getattr(record, "name", record.kind) for record in measured]
    load = load_text(taken, "passes", names)
    return [*([Table(above=[load])] if load else []), *load_named(TABLES, command[0].kind)(command)]


def refuse_useless(args: RecordTableSection, has_runs: bool) -> None:
    """Raises ValueError for a flag of the table of runs where it does nothing."""
    given = {"--columns": args.columns, "--sort": args.sort, "--descending": args.descending}
    for flag, value in given.items():
        if value and not has_runs:
            raise ValueError(f"{flag} does nothing here: it is for runs, and there are none")
    if args.descending and not args.sort:
        raise ValueError("--descending does nothing here: give --sort COLUMN with it")


def runs_of(
    args: RecordFilesSection, kinds: Sequence[str], others: list[list[Record]]
) -> Iterator[PassRecord]:
    """Yields the passes that runs were asked for: those of commands whose passes share a prefill,
    without the ones that they are compared with. Adds the records of other commands to
    `others`."""
    for path in args.files:
        for command in commands_of(read_records(path, Record, args.strict)):
            if command[0].kind not in kinds:
                continue
            if any(record.is_of_run for record in command):
                passes = records_of_type(command, PassRecord)
                yield from (record for record in passes if not record.is_reference)
            else:
                others.append(command)


table = LoneCommand(
    show,
    "Print records as tables: runs in one, with a line for each, and those of each other command "
    "as the command itself did, of serve as with its --verbose.",
    {"table": RecordTableSection},
)


@dataclass(frozen=True)
class ReportSection(RecordFilesSection):
    out: Path = same(WrittenSection, "out", ..., metavar="DIR")
    no_figure_files: bool = setting(
        False, "Write no PNG and SVG files; the figures are in the page alone."
    )


@no_collection()
def write_page(values: ParsedValues) -> int:
    args = values[ReportSection]
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is not a directory; name one to write to")
    from magicdec.bench.report.page import PAGE, make_report, rows_of, write_report

    left_out: list[str] = []
    passes = cast(Iterator[tuple[Path, PassRecord]], read_every_kind(args, ON_PAGES))
    rows = rows_of(passes, left_out)
    command = ["magicdec", "report", *sys.argv[1:]]
    page = make_report(command, not args.no_figure_files, rows, left_out)
    write_report(args.out, page)
    for reason in page.left_out:
        print(f"left out: {reason}", file=sys.stderr)
    for section in page.sections:
        for figure in section.left_out:
            print(f"left out: {figure.title}: {figure.reason}", file=sys.stderr)
    drawn = sum(len(section.figures) for section in page.sections)
    print(f"{drawn} figures of {page.num_runs} runs: {args.out / PAGE}")
    return 0


report = LoneCommand(
    write_page,
    "Write a page with figures and tables of passes, whatever command has made them. It needs no "
    "network; the figures as PNG and SVG and the tables as CSV are written beside it.",
    {"report": ReportSection},
    gone={"--gallery": "the page of `magicdec report FILES --out DIR` shows several machines"},
)


@dataclass(frozen=True)
class ExportSection(RecordFilesSection):
    out: Path = same(WrittenSection, "out", ..., metavar="FILE")
    format: str = setting(
        EVERY_KIND,
        "table: a row for each pass, forward or prediction, as CSV or Parquet; vllm: passes as "
        "vllm bench serve saves them; pytorch: the same for PyTorch's benchmark database; "
        "llama-bench: prefill and decoding without drafts, as JSON or Markdown; golden: records of "
        "acceptance as InferenceX's golden lengths, by context too if there are several.",
        choices=tuple(EXPORTS),
    )


@dataclass
class Exported:
    """What has become of the records of an export."""

    num_rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)  # records, by kind and status

    @property
    def text(self) -> str:
        return " and ".join(f"{count} of kind {kind}" for kind, count in self.left_out.items())


def rows_of_every(
    args: ExportSection, form: ExportFormat, exported: Exported
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the records that the format can hold, and counts those and the others."""
    for number, (path, record) in enumerate(read_every_kind(args), 1):
        before = exported.num_rows
        rows_of = form.rows.get(record.kind)
        for row in () if rows_of is None else rows_of(number, str(path), record):
            exported.num_rows += 1
            yield row
        if exported.num_rows == before:
            exported.left_out[f"{record.kind} with status {record.status}"] += 1


@no_collection()
def write_export(values: ParsedValues) -> int:
    args = values[ExportSection]
    form: ExportFormat = load_named(EXPORTS, args.format)
    if args.out.suffix not in form.suffixes:
        suffixes = " or ".join(form.suffixes)
        raise ValueError(f"--out {args.out} must end in {suffixes} with --format {args.format}")
    exported = Exported()
    content = form.collect(rows_of_every(args, form, exported))
    holds = f"--format {args.format} holds {form.holds}, of kind {' or '.join(form.rows)}"
    if not exported.num_rows:
        files = ", ".join(map(str, args.files))
        raise ValueError(
            f"{files}: no record has a row, {exported.text}; {holds}; --format {EVERY_KIND} holds "
            "every kind"
        )
    if exported.left_out:
        print(f"records are left out, {exported.text}: {holds}", file=sys.stderr)
    with complete_file("--out", args.out) as partial:
        form.write(partial, content)
    print(f"{exported.num_rows} rows written to {args.out}", file=sys.stderr)
    return 0


export = LoneCommand(
    write_export,
    "Write records for other programs. By default as one flat table of every kind, with one row "
    "for each pass: pandas reads it in one line, pandas.read_csv(FILE) or "
    "pandas.read_parquet(FILE), and its name ends in .csv or .parquet. --format writes what vLLM's "
    "benchmark, PyTorch's benchmark database, llama-bench or InferenceX have.",
    {"export": ExportSection},
)
