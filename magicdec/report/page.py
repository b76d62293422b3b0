"""Writes a report: one HTML page that needs no network, with its figures inside, and beside it the
figures as PNG and SVG and every table as CSV. `page.html` is the template."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.names import BASELINE
from magicdec.report.figures.all import draw_all, save
from magicdec.report.figures.style import Drawn, LeftOut
from magicdec.report.point import Point
from magicdec.report.prediction import Predictor
from magicdec.report.tables import (
    Table,
    commands_table,
    environments_table,
    failures_table,
    runs_table,
    write_runs,
    write_table,
)

PAGE, RERUN = "index.html", "rerun.sh"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Report:
    """What the page shows. `svg` holds each drawn figure as an element of the page, by name."""

    title: str
    points: list[Point]
    figures: list[Drawn]
    left_out: list[LeftOut]
    tables: list[Table]
    svg: dict[str, str]
    command: str  # that wrote this report
    has_figure_files: bool  # beside the page, as PNG and SVG


def write_report(
    out: Path,
    title: str,
    points: list[Point],
    predictor: Predictor,
    command: Sequence[str],
    has_figure_files: bool = True,
) -> Report:
    """Write all files into the directory `out`, which is made if it is missing. Raises ValueError,
    naming the file, if one cannot be written."""
    found = draw_all(points, predictor)
    drawn = [figure for figure in found if isinstance(figure, Drawn)]
    left_out = [figure for figure in found if isinstance(figure, LeftOut)]
    tables = [runs_table(points), failures_table(points), environments_table(points)]
    tables = [table for table in (*tables, commands_table(points)) if table.rows]
    try:
        out.mkdir(parents=True, exist_ok=True)
        svg = {f.name: save(f, out if has_figure_files else None) for f in drawn}
        for figure in drawn:
            write_table(out / f"{figure.name}.csv", figure.columns, figure.rows)
        write_tables(out, points)
        shown = drawn, left_out, tables, svg
        report = Report(title, points, *shown, shlex.join(command), has_figure_files)
        (out / RERUN).write_text(rerun(points), encoding="utf-8")
        (out / PAGE).write_text(render(report), encoding="utf-8")
    except OSError as error:
        name = error.filename or out
        raise ValueError(f"--out {name}: {error.strerror}; name a directory to write to") from None
    return report


def write_tables(out: Path, points: list[Point]) -> None:
    """The tables of the page as CSV, with the rows that the page leaves out. Raises OSError."""
    write_runs(out / "runs.csv", points)
    for table in (failures_table(points), environments_table(points)):
        if table.rows:
            rows = ([cell.text for cell in row] for row in table.rows)
            write_table(out / f"{table.name}.csv", table.columns, rows)
    columns = ("run", "start", "commit", "command", "file")
    commands = (
        (p.number, p.environment.time_utc, p.environment.revision, p.command, p.source)
        for p in points
    )
    write_table(out / "commands.csv", columns, commands)


def render(report: Report) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(HERE)
    engine = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    page = engine.get_template("page.html").render(
        report=report, summary=summary(report.points), rerun=RERUN, revisions=revisions(report),
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
    )  # fmt: skip
    return page


def summary(points: Sequence[Point]) -> list[str]:
    """What the runs are and the range of what they reached, in sentences."""
    statuses = Counter(point.status for point in points)
    states = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    models = sorted({str(p.settings["model"]) for p in points})
    lines = [f"{len(points):,} runs ({states}) of {', '.join(models)}."]
    kinds = {"speedup": "decode steps", "net_speedup": "all the time after prefill (net)"}
    for name, of in kinds.items():
        known = [
            (value, p) for p in points if (value := getattr(p.metrics, name, None)) is not None
        ]
        if known:
            low, high = min(known, key=lambda k: k[0]), max(known, key=lambda k: k[0])
            lines.append(
                f"Speedup over {BASELINE} decoding, of {of}: {low[0]:.2f}x to {high[0]:.2f}x. "
                f"The largest is run {high[1].number}: {high[1].method}, B {high[1].settings['B']},"
                f" prefix {high[1].settings['prefix_len']}."
            )
    return lines


def revisions(report: Report) -> list[str]:
    """The commits that the runs were made with."""
    found = {point.environment.revision for point in report.points}
    return sorted(revision for revision in found if revision is not None)


def rerun(points: Sequence[Point]) -> str:
    """A script that runs every command of the report again, each once, in their order."""
    commands = dict.fromkeys(point.command for point in points)
    head = "#!/usr/bin/env bash\n# Runs every command of the report again, from the root of the "
    return f"{head}repository.\nset -u\n\n" + "".join(f"{command}\n" for command in commands)
