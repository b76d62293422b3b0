"""Writes a report: one HTML page with its figures inside, which needs no network, figures as PNG
and SVG, and tables as CSV. `page.html` is the template.

A record may be a stranger's: nothing of it is trusted to be of the right type, or to be what was
measured.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.bench.report.figures.panels import Drawn, LeftOut, quiet
from magicdec.bench.report.figures.passes import (
    READ,
    best_last,
    draw_by_acceptance,
    draw_by_budget,
    draw_by_context,
    draw_by_position,
    draw_pareto,
    draw_phases,
    draw_roofline,
    draw_speedup,
)
from magicdec.bench.report.figures.served import draw_served, tables_of
from magicdec.bench.report.frame import ENVIRONMENT, FrameRow, columns_of, report_row
from magicdec.bench.report.listing import DESCRIBED, LABELS, TAKEN
from magicdec.bench.report.tables import (
    MISSING,
    PageTable,
    categories_table,
    commands_table,
    environments_table,
    extent,
    frame_csv,
    metric_cell,
    passes_table,
)
from magicdec.hardware.other_load import load_text
from magicdec.names import BASELINE
from magicdec.output.console import printable
from magicdec.output.figures import styled
from magicdec.records.pass_record import PassRecord, reference_of
from magicdec.records.recomputing import unfounded_metric
from magicdec.records.record import commands_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
PAGE = "index.html"  # the file that the page is written to
ABOUT = ("run", "command", "file")  # columns of every record, beside its environment
DOTS_PER_INCH = 160
NET = "net_speedup"
ID = re.compile(r'(\bid="|xlink:href="#|url\(#)')
MOST_REASON = 200  # characters of an error about a record
RERUN = "rerun.sh"
RERUN_HEAD = """#!/usr/bin/env bash
# Runs every command of the report again, from the root of the repository.
set -u
"""


@dataclass(frozen=True)
class PageSection:
    title: str
    summary: list[str]
    outcomes: list[Drawn | LeftOut]
    tables: list[PageTable]

    @property
    def figures(self) -> list[Drawn]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Drawn)]

    @property
    def left_out(self) -> list[LeftOut]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, LeftOut)]


@dataclass(frozen=True)
class Report:
    """The content of the page, which `command` wrote. `has_figure_files`: as PNG and SVG beside
    it."""

    command: str
    has_figure_files: bool
    sections: list[PageSection]
    tables: list[PageTable]  # of all sections together
    commands: list[str]  # of the records
    revisions: list[str]  # the commits that they were made with
    num_runs: int  # of commands
    left_out: list[str]  # records, each with the reason


def rows_of(records: Iterable[tuple[Path, PassRecord]], left_out: list[str]) -> Iterator[FrameRow]:
    """The rows of passes, whose commands are numbered from 1. A record that contradicts itself is
    named in `left_out` instead. Raises ValueError if there is no other."""
    number = 0
    for path, file_records in groupby(records, key=itemgetter(0)):
        for command in commands_of(record for _, record in file_records):
            rows = list(rows_of_command(number + 1, path, command, left_out))
            number += bool(rows)
            yield from rows
    if number == 0:
        raise ValueError("; ".join(left_out[:1]))


def rows_of_command(
    number: int, path: Path, command: Sequence[PassRecord], left_out: list[str]
) -> Iterator[FrameRow]:
    """The rows of the passes of a command, but for those that are named in `left_out` because they,
    or the passes that they were compared with, contradict themselves."""
    reasons = {record.name: contradiction_in(record, command) for record in command}
    for record in command:
        reason = reasons[record.name]
        reference = reference_of(record, command)
        if not reason and reference is not None and reasons[reference.name]:
            reason = f"it was compared with {reference.name}, which is left out"
        if not reason:
            try:
                yield report_row(number, str(path), record, reference)
            except UNREADABLE as error:
                reason = unreadable(error)
        if reason:
            place = f"{path}, the pass {record.name} of {record.environment.time_utc}"
            left_out.append(" ".join(printable(f"{place}: {reason}").split()))


# A config has no schema, and requests and groups may not fit each other.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
    TypeError,
    ValueError,
)


def unreadable(error: Exception) -> str:
    what = f"{type(error).__name__}: {error}"[:MOST_REASON]
    return f"its config or its requests are not those of a record ({what})"


def contradiction_in(record: PassRecord, command: Sequence[PassRecord]) -> str:
    """What in a record says that somebody has edited it; empty if nothing does."""
    try:
        name = unfounded_metric(record, command)
    except UNREADABLE as error:
        return unreadable(error)
    return f"its {name} does not follow from its requests" if name else ""


def make_report(
    command: Sequence[str],
    has_figure_files: bool,
    rows: Iterable[FrameRow],
    left_out: list[str],
) -> Report:
    """The report of `rows`, which names the records that they lack."""
    passes = pd.DataFrame(columns_of(rows), dtype=object)  # records have no NaN
    lines = [*summary(passes), *stalls_line(passes)]
    tables = [passes_table(passes), categories_table(passes)]
    sections = [PageSection("Passes", lines, draw_passes(for_figures(passes)), tables)]
    served = passes[passes["run"].isin(passes.loc[passes["is_served"].astype(bool), "run"])]
    if not served.empty:
        lines = [f"{len(served):,} passes served requests: {', '.join(served['mode'].unique())}."]
        outcomes = draw_served(for_figures(served))
        sections.append(
            PageSection("Requests that were served", lines, outcomes, tables_of(served))
        )
    about = [name for name in passes if name.startswith(ENVIRONMENT) or name in ABOUT]
    tables = [environments_table(passes[about]), commands_table(passes[about])]
    machines = machines_table(passes)
    if len(machines.rows) > 1:
        tables.insert(0, machines)
    return Report(
        shlex.join(command),
        has_figure_files,
        sections,
        tables,
        commands=list(passes["command"].unique()),
        revisions=sorted(passes["environment.revision"].dropna().unique()),
        num_runs=int(passes["run"].max()),
        left_out=left_out,
    )


MACHINE = ("machine", "ranks x threads", "model", "dtype")


def machines_table(every: pd.DataFrame) -> PageTable:
    """A row for each machine, ranks and model, with its best run: of a quiet host where there is
    one, the run whose interval of the net speedup begins highest."""
    labels = [*MACHINE, "passes", "read, GB/s", f"largest {DESCRIBED[NET].label}", "way"]
    labels += ["B", LABELS["prefix_len"], "run"]
    rows = []
    for names, alike in every.groupby(list(MACHINE), sort=True):
        known = quiet(alike[alike[NET].notna()]) if NET in alike else alike[:0]
        best = [MISSING, *[None] * 4]
        if not known.empty:
            run = best_last(known, NET).iloc[-1]
            best = [metric_cell(run, NET, DESCRIBED[NET])]
            best += [run[name] for name in ("method", "B", "prefix_len", "run")]
        read = alike[f"{ENVIRONMENT}read_bandwidth_bytes_per_s"].dropna().astype(float)
        rows.append([*names, len(alike), extent(read / 1e9), *best])
    return PageTable(labels, rows, "Machines and models", name="machines")


def for_figures(passes: pd.DataFrame) -> pd.DataFrame:
    """The passes with a result, and of all columns those that figures need, because they are copied
    for each of them."""
    columns = [name for name in passes if "." not in name or name == READ]
    return passes.loc[passes["has_result"].astype(bool), columns]


def draw_passes(passes: pd.DataFrame) -> list[Drawn | LeftOut]:
    with styled():
        return [
            draw_speedup(passes),
            draw_pareto(passes),
            draw_by_acceptance(passes),
            draw_by_budget(passes),
            *draw_by_context(passes),
            draw_by_position(passes),
            draw_phases(passes),
            draw_roofline(passes),
        ]


def write_report(out: Path, report: Report) -> None:
    """Writes all files into the directory `out`. Raises ValueError, naming the file, if one cannot
    be written."""
    figures = [figure for section in report.sections for figure in section.figures]
    tables = [table for section in report.sections for table in section.tables]
    files = {f"{table.name}.csv": table.csv() for table in (*tables, *report.tables) if table.rows}
    for figure in figures:
        files[f"{figure.name}.csv"] = frame_csv(figure.table)
    files[RERUN] = "\n".join([RERUN_HEAD, *report.commands, ""])
    try:
        out.mkdir(parents=True, exist_ok=True)
        svg = {f.name: save_figure(f, out if report.has_figure_files else None) for f in figures}
        files[PAGE] = render(report, svg)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        place = error.filename or out
        raise ValueError(f"--out {place}: {error.strerror}; name a directory to write to") from None


def render(report: Report, svg: Mapping[str, str]) -> str:
    """The page, in which all texts are escaped and which has its style and script inside. `svg` are
    the figures by name."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    engine = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = {
        name: (HERE / file).read_text(encoding="utf-8").rstrip("\n")
        for name, file in (("style", "page.css"), ("script", "page.js"))
    }
    return engine.get_template("page.html").render(report=report, svg=svg, rerun=RERUN, **parts)


def save_figure(drawn: Drawn, directory: Path | None) -> str:
    """Writes PNG and SVG into the directory, if any, and returns the SVG for a page. Raises
    OSError."""
    with TemporaryDirectory() as folder:
        png, svg = (Path(directory or folder, f"{drawn.name}{end}") for end in (".png", ".svg"))
        with styled(drawn.name):
            draw_once(drawn.figure, png, svg, {"Title": drawn.title, "Date": None})
        return inline(svg.read_text(encoding="utf-8"), drawn.name)


def draw_once(figure: Figure, png: Path, svg: Path, about: dict[str, Any]) -> None:
    """Writes both formats. `Figure.savefig` would draw twice for each, to find the places of its
    parts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    figure.set_dpi(DOTS_PER_INCH)
    FigureCanvasAgg(figure).print_png(png)  # this finds the places, too
    figure.set_layout_engine("none")
    FigureCanvasSVG(figure).print_svg(svg, metadata=about)


def inline(svg: str, name: str) -> str:
    """An SVG element of a page, without head and size, and with ids of its own."""
    element = svg[svg.index("<svg") :]
    head, rest = element.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return ID.sub(rf"\g<1>{name}-", f'{head} aria-hidden="true">{rest}')


def stalls_line(passes: pd.DataFrame) -> list[str]:
    stalled = passes[passes["stalled_steps"].fillna(0).astype(int) > 0]
    if stalled.empty:
        return []
    ms, median = (stalled[f"longest_stall_{name}ms"].astype(float) for name in ("", "median_"))
    worst = (ms - median).idxmax()
    num_steps = passes["num_decode_steps"].dropna().sum()
    return [
        f"{stalled['stalled_steps'].sum():,} of {num_steps:,} decode steps stalled, which count as "
        "the median of their kind in the speedup of decode steps. "
        f"The longest took {ms[worst]:.3g} ms where the median is {median[worst]:.2g}: run "
        f"{stalled.loc[worst, 'run']}, {stalled.loc[worst, 'pass']}."
    ]


def load_line(rows: pd.DataFrame, what: str) -> list[str]:
    """A line about busy hosts, if there was one."""
    text = load_text(rows[f"{ENVIRONMENT}{TAKEN}"].tolist(), what)
    return [f"{text}."] if text else []


def summary(passes: pd.DataFrame) -> list[str]:
    """The lines on top of a page. Speedups are those of a quiet host, if there are any."""
    states = ", ".join(f"{n} {status}" for status, n in passes["status"].value_counts().items())
    models = sorted(map(str, passes["model"].unique()))
    num_runs = passes["run"].nunique()
    lines = [
        f"{num_runs:,} runs with {len(passes):,} passes ({states}) of {', '.join(models)}.",
        *load_line(passes, "passes"),
    ]
    kinds = {"net_speedup": "all the time after prefill (net)", "speedup": "decode steps"}
    quiet_note = ", in the passes on a quiet host" if len(quiet(passes)) < len(passes) else ""
    for name, kind_text in kinds.items():
        known = quiet(passes[passes[name].notna()])
        if known.empty:
            continue
        values = known[name].astype(float)
        best = best_last(known, name).iloc[-1]
        ends = [best[f"{name}_interval_{end}"] for end in ("low", "high")]
        which = "largest value" if None in ends else "interval that begins highest"
        lines.append(
            f"Speedup over {BASELINE} decoding, of {kind_text}: {values.min():.2f}x to "
            f"{values.max():.2f}x{quiet_note}. The {which} is that of run {best['run']}, "
            f"{metric_cell(best, name, DESCRIBED[name]).text}: {best['method']}, B {best['B']}, "
            f"prefix {best['prefix_len']}."
        )
    return lines
