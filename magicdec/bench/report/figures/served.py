"""Figures of the passes of open and closed loops: batchings in flight, and modes and stages of
rings and of pipelined speculation. Each command is a panel or a series.
"""

from __future__ import annotations

from dataclasses import replace
from math import floor, log10
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.bench.report.figures.labels import PointLabel, place_labels
from magicdec.bench.report.figures.panels import (
    MOST_SERIES,
    Drawn,
    Form,
    LeftOut,
    Series,
    draw_marks,
)
from magicdec.bench.report.frame import ENVIRONMENT, frame_of
from magicdec.bench.report.listing import TAKEN
from magicdec.bench.report.tables import PageTable
from magicdec.bench.showing import tables
from magicdec.hardware.other_load import load_text
from magicdec.names import load_object
from magicdec.output.figures import styled
from magicdec.output.tables import Table
from magicdec.records.pass_record import PassRecord
from magicdec.systems.details import Details
from magicdec.systems.modes import SYSTEMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

USER_SPEED = "user_tokens_per_s"
# The metrics that compare modes, with their units.
SPEEDS = {
    "request_tokens_per_s": "speed of a request, tokens/s",
    "mean_ttft_ms": "mean time to first token, ms",
    "mean_itl_ms": "mean time between two commits, ms",
}


def draw_served(passes: pd.DataFrame) -> list[Drawn | LeftOut]:
    passes = passes[passes["is_served"].astype(bool)]
    is_open = passes["concurrency"].isna()
    opened = passes[is_open]
    with styled():
        return [
            draw_concurrency(passes[~is_open]),
            draw_batchings(opened, "Throughput", "output_throughput", "output (tokens/s)"),
            draw_batchings(opened, "Goodput", "request_goodput", "goodput (requests/s)"),
            draw_modes(opened),
            *(draw_stages(passes, kind) for kind in staged_kinds()),
        ]


def draw_concurrency(passes: pd.DataFrame) -> Drawn | LeftOut:
    """Output tokens/s of all requests against tokens/s of one, a line for each mode of a closed
    loop through its concurrencies."""
    panels: list[tuple[Axes, list[PointLabel]]] = []

    def draw(ax: Axes, _: pd.DataFrame, series: Series) -> dict[str, Any]:
        handles = {}
        labels = list[PointLabel]()
        for name, rows, style in series:
            ordered = rows.sort_values("concurrency")
            x = ordered[USER_SPEED].astype(float)
            y = ordered["output_throughput"].astype(float)
            (handles[name],) = ax.plot(
                x,
                y,
                color=style.colour,
                marker=style.marker,
                markerfacecolor=style.colour if style.is_filled else "white",
                linestyle=style.line,
            )
            labels += [
                PointLabel(user, everyone, str(count), style.colour)
                for user, everyone, count in zip(x, y, ordered["concurrency"], strict=True)
            ]
        panels.append((ax, labels))
        ax.margins(0.12)
        ax.set(xlim=(0, None), ylim=(0, None))
        return handles

    form = Form(
        name="serving_concurrency",
        title="Tokens/s of all users against tokens/s of one, by requests in flight",
        reason="no pass of a closed loop has a TPOT; see --concurrency",
        held=["about"],
        places=["mode", "concurrency"],
        series="mode",
        show=lambda rows: rows[["mode", "run", "concurrency", USER_SPEED, "output_throughput"]],
        draw=draw,
        labels=("one user: 1 / median TPOT (tokens/s)", "all users (tokens/s)"),
        what="commands",
        axes={"height": 3.1},
        caption=(
            "Each line is a mode, and each number the requests that were in flight together; up "
            "and to the right is better; a grey number is that of several modes",
            "One user decodes at 1 / TPOT. All users together count the whole time from the first "
            "arrival to the last token, with prefill, and with the end, when fewer are in flight",
        ),
    )
    if "p50_tpot_ms" not in passes:
        return form.of(passes[:0])
    known = passes[passes["p50_tpot_ms"].notna()]
    drawn = form.of(known.assign(**{USER_SPEED: 1e3 / known["p50_tpot_ms"].astype(float)}))
    if isinstance(drawn, Drawn):
        drawn.figure.draw_without_rendering()  # which lays it out
        for ax, labels in panels:
            place_labels(ax, labels)
    return drawn


def draw_batchings(passes: pd.DataFrame, what: str, metric: str, label: str) -> Drawn | LeftOut:

    def draw(ax: Axes, _: pd.DataFrame, series: Series) -> dict[str, Any]:
        handles = draw_marks(ax, series, "p90_ttft_ms", metric)
        ax.margins(0.12)
        ax.set(xlim=(0, None), ylim=(0, None))
        return handles

    form = Form(
        name=f"serving_{what.lower()}",
        title=f"{what} against p90 TTFT, by batching",
        reason=f"no pass of an open loop has {metric}",
        held=["about"],
        places=["pass"],
        series="pass",
        show=lambda rows: rows[["pass", "run", "arrival", "p90_ttft_ms", metric]],
        draw=draw,
        labels=("p90 TTFT (ms)", label),
        what="commands",
        axes={"height": 3.1},
        caption=(
            "Each mark is one pass of a command over the same requests; up and to the left is "
            "better",
        ),
    )
    return form.of(passes[passes[metric].notna()] if metric in passes else passes[:0])


def draw_modes(passes: pd.DataFrame) -> Drawn | LeftOut:
    """A panel for each speed metric beside the others, with a row for each mode, and in it a bar
    for each command."""

    def draw(ax: Axes, _: pd.DataFrame, series: Series) -> dict[str, Any]:
        from matplotlib.ticker import MaxNLocator

        height = 0.8 / len(series)
        handles = {}
        for index, (name, rows, style) in enumerate(series):
            places = rows["pass"].map(modes.index) + (index - (len(series) - 1) / 2) * height
            handles[name] = ax.barh(
                places,
                rows["value"].astype(float),
                0.9 * height,
                color=style.colour,
                hatch=style.hatch,
                edgecolor="white",
                linewidth=0.5,
            )
            texts = [three_digits(value) for value in rows["value"]]
            ax.bar_label(handles[name], texts, fontsize=6, padding=2)
        ax.margins(x=0.2)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.set_yticks(range(len(modes)), modes)
        ax.set_ylim(len(modes) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        return handles

    values = frame_of(
        {key: row[key] for key in ("about", "pass", "run", "is_busy")}
        | {"metric": label, "value": row[metric]}
        for row in passes.to_dict("records")
        for metric, label in SPEEDS.items()
    )
    modes = list(dict.fromkeys(passes["pass"]))
    row_height = max(0.2, 0.13 * min(MOST_SERIES, passes["about"].nunique()))
    form = Form(
        name="serving_modes",
        title="Speed by mode",
        reason="no pass of an open loop has metrics",
        held=["metric"],
        places=["pass"],
        series="about",
        draw=draw,
        labels=("", ""),
        axes={"columns": len(SPEEDS), "sharey": True, "height": 0.9 + row_height * len(modes)},
        caption=(
            "The modes of each command served the same requests. Of a speed more is better, of a "
            "time less",
        ),
    )
    return form.of(values[values["value"].notna()] if len(values) else values)


def three_digits(value: float) -> str:
    """A number with three digits, or with all before its point."""
    return f"{value:,.{max(0, 2 - floor(log10(value)) if value > 0 else 0)}f}"


def staged_kinds() -> list[type[Details]]:
    """The kinds of details that have stages."""
    places = [system.details for system in SYSTEMS.values() if system.details]
    return [kind for kind in map(load_object, places) if kind.stages_title]


def draw_stages(passes: pd.DataFrame, kind: type[Details]) -> Drawn | LeftOut:
    """The load of each stage of a kind of details over the time of its pass."""

    def draw(ax: Axes, table: pd.DataFrame, _: Series) -> dict[str, Any]:
        """A strip for each stage. Records of earlier versions have one share for all its time."""
        rows = table.to_dict("records")
        for place, row in enumerate(rows):
            image = ax.imshow(
                [row["parts"]],
                cmap="Blues",
                vmin=0,
                vmax=1,
                aspect="auto",
                extent=(0, 1, place + 0.42, place - 0.42),
            )
        ax.set_yticks(range(len(rows)), [f"{row['name']}: {row['busy']:.0%}" for row in rows])
        ax.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))
        ax.grid(visible=False)
        ax.figure.colorbar(image, ax=ax, label="busy")
        return {}

    stages = frame_of(
        {key: row[key] for key in ("about", "pass", "run", "is_busy")} | stage
        for row in passes.to_dict("records")
        for stage in stages_of(row["object"], kind)
    )
    most = stages.groupby("about").size().max() if len(stages) else 0
    form = Form(
        name=f"{kind.name()}_stages",
        title=kind.stages_title,
        reason=f"no pass has stages of {kind.name()}",
        held=["about"],
        places=["pass"],
        series="",
        draw=draw,
        what="commands",
        labels=("share of the time of the pass", ""),
        axes={"height": 0.9 + 0.22 * most, "columns": 1},
        caption=(
            "The darker, the larger the share of that time in which the stage computed or drafted; "
            "in white it waited. The percentage is that of the whole pass",
        ),
    )
    return form.of(stages)


def stages_of(record: PassRecord, kind: type[Details]) -> list[dict[str, Any]]:
    """A row for each stage of a pass: its name and shares of the time; empty without stages."""
    if type(record.details) is not kind:
        return []
    return [
        {
            "name": f"{record.name}, {stage.name}",
            "stage": number,
            "busy": stage.busy,
            "parts": stage.parts,
        }
        for number, stage in enumerate(record.details.stages())
    ]


def lines_above(table: Table) -> list[str]:
    """The lines above a table, without its title."""
    return [line.text for line in replace(table, title="").lead]


def load_of(passes: pd.DataFrame) -> list[str]:
    """A line that names the passes of a command during which another load took cores."""
    text = load_text(passes[f"{ENVIRONMENT}{TAKEN}"].tolist(), "passes", passes["pass"].tolist())
    return [text] if text else []


def tables_of(passes: pd.DataFrame) -> list[PageTable]:
    """The tables that the commands themselves print, with a column for each pass."""
    return [
        PageTable(
            table.columns,
            [row for row in table.rows if row],  # a line between rows has no place in their order
            f"Run {number}: {table.title}",
            name=f"serving_{number}_{place}",
            lines=[*load_of(rows), *lines_above(table), *table.below],
        )
        for number, rows in passes.groupby("run", sort=False)
        for place, table in enumerate(tables(list(rows["object"])), 1)
        if table.rows
    ]
