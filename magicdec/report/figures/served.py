"""What served requests: batchings and rates of requests in flight, and the modes and stages of
rings and of pipelined speculation. Each command is a panel or a series.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.figures import COLOURS, styled
from magicdec.report.figures.panels import (
    Drawn,
    Form,
    LeftOut,
    Series,
    draw_marks,
    legend_below,
    make_axes,
    shown_of,
)
from magicdec.report.frame import Row, frame_of
from magicdec.report.tables import PageTable
from magicdec.serving import bars
from magicdec.serving import showing as serving
from magicdec.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND_TABLES: dict[str, Callable[[list[Any]], list[Table]]] = {
    "serving": serving.tables,
}
ABOUT = ["workload.num_requests", "workload.draft", "workload.layer_split"]
MOST_TIMELINES = 6  # batchings in the picture of requests over time


def draw_kind(kind: str, passes: pd.DataFrame) -> list[Drawn | LeftOut]:
    """The figures of all passes of one kind of record, of which each is a row."""
    passes = passes[passes["has_result"].astype(bool)]
    with styled():
        return [
            draw_batchings(passes, "output_throughput", "output (tokens/s)"),
            draw_batchings(passes, "request_goodput", "goodput (requests/s)"),
            over_time(passes),
            by_rate(passes),
            draw_modes(kind, passes, bars.PANELS),
            draw_stages(passes, "ring"),
            draw_stages(passes, "speculation"),
        ]


def commands_of(passes: pd.DataFrame) -> list[pd.DataFrame]:
    """The passes of each command."""
    groups = passes.groupby(["file", "environment.time_utc", "command"], sort=False)
    return [of for _, of in groups]


def about(passes: pd.DataFrame) -> str:
    """A command in a few words."""
    first, num_rates = passes.iloc[0], passes["arrival"].nunique()
    arrival = f"{num_rates} rates" if num_rates > 1 else first["arrival"]
    requests, *drafts = first.reindex(ABOUT)
    parts = first["model"], f"{requests} requests", arrival, *drafts
    return ", ".join(part for part in parts if isinstance(part, str))


def by_command(passes: pd.DataFrame) -> pd.DataFrame:
    """The passes with the numbers of their commands, in words, in a column `command`."""
    commands = [
        of.assign(command=f"{number}: {about(of)}")
        for number, of in enumerate(commands_of(passes), 1)
    ]
    return pd.concat(commands) if commands else passes


def draw_batchings(passes: pd.DataFrame, metric: str, label: str) -> Drawn | LeftOut:
    def show(of: pd.DataFrame) -> pd.DataFrame:
        return of[["series", "run", "arrival", "p90_ttft_ms", metric]]

    def draw(ax: Axes, table: pd.DataFrame, series: Series) -> dict[str, Any]:
        handles = draw_marks(ax, series, "p90_ttft_ms", metric)
        ax.margins(0.12)
        ax.set(xlim=(0, None), ylim=(0, None))
        return handles

    form = Form(
        held=["command"], places=["series"], show=show, draw=draw, axes={"height": 3.1},
        labels=("p90 TTFT (ms)", label), what="commands",
        caption=(
            "Each mark is one pass of a command over the same requests; up and to the left is "
            "better",
        ),
    )  # fmt: skip
    what = "Goodput" if metric == "request_goodput" else "Throughput"
    known = by_command(passes[passes[metric].notna()]) if metric in passes else passes[:0]
    heading, reason = f"{what} against p90 TTFT, by batching", f"no pass has {metric}"
    passes = known.assign(series=known["pass"])
    return form.of(f"serving_{what.lower()}", heading, passes, reason)


def over_time(passes: pd.DataFrame) -> Drawn | LeftOut:
    name, heading = "serving_timeline", "Requests over time"
    commands = [of for of in commands_of(passes) if of["arrival"].nunique() == 1]
    if not commands:
        return LeftOut(name, heading, "no command served requests at a single rate")
    of = max(commands, key=len)[:MOST_TIMELINES]
    table = frame_of(
        {"pass": row["pass"], "run": row["run"], "request": number} | vars(request)
        for row in of.to_dict("records")
        for number, request in enumerate(row["object"].requests)
    )
    left_out = shown_of(1, len(commands), "commands")
    caption = f"When each request waited, was prefilled and decoded: {about(of)}. {left_out}"
    return Drawn(name, heading, caption.strip(), partial(draw_requests, list(of["object"])), table)


def draw_requests(records: list[Any], path: Path) -> None:
    serving.draw_timeline(records, [None] * len(records), path)


def by_rate(passes: pd.DataFrame) -> Drawn | LeftOut:
    name, heading = "serving_rates", "Rate of requests served, and time to first token, by rate"
    commands = [of for of in commands_of(passes) if of["arrival"].nunique() > 1]
    if not commands:
        return LeftOut(name, heading, "no command measured several rates (--sweep_rate)")
    of = max(commands, key=len)
    columns = ["run", "arrival", "arrival_rate", "served_rate", "request_goodput",
               "p50_ttft_ms", "p99_ttft_ms"]  # fmt: skip
    left_out = shown_of(1, len(commands), "commands with several rates")
    caption = f"The rates of one command: {about(of)}. {left_out}".strip()
    return Drawn(
        name, heading, caption, partial(serving.draw_rates, list(of["object"])), of[columns]
    )


def draw_modes(
    kind: str, passes: pd.DataFrame, panels: tuple[tuple[str, str, str], ...]
) -> Drawn | LeftOut:
    name, heading = f"{kind}_modes", "Speed by mode"
    commands = commands_of(passes)
    if not commands:
        return LeftOut(name, heading, "no pass has metrics")
    records, labels = [list(of["object"]) for of in commands], list[str]()
    if len(commands) > 1:
        labels = bars.labels_of(records)
    figure, axes = make_axes(len(panels), bars.HEIGHT, columns=len(panels))
    for ax, (metric, title, unit) in zip(axes, panels, strict=True):
        bars.draw_panel(ax, metric, records)
        ax.set(title=title, ylabel=unit)
    if labels:
        handles = [container[0] for container in axes[0].containers]
        legend_below(figure, dict(zip(labels, handles, strict=True)))
    columns = ["command", "pass", "run", *(metric for metric, *_ in panels)]
    caption = "The modes of each command served the same requests."
    return Drawn(name, heading, caption, figure, by_command(passes)[columns])


def draw_stages(passes: pd.DataFrame, key: str) -> Drawn | LeftOut:
    """The stages of rings or of pipelined speculation: `key` is the part of a record."""

    def show(of: pd.DataFrame) -> pd.DataFrame:
        """A row for each stage, with its shares of the time."""
        stages = of[["pass", "run", "busy", "drafting"]].explode("busy")
        numbers = stages.groupby("run").cumcount()
        idle = 1 - stages["busy"].astype(float)
        return stages.assign(stage=numbers.to_numpy(object), idle=idle)

    def draw(ax: Axes, table: pd.DataFrame, series: Series) -> dict[str, Any]:
        places, busy = range(len(table)), table["busy"].astype(float)
        handles = {
            "busy": ax.barh(places, busy, color=COLOURS[0], height=0.76),
            "idle": ax.barh(places, table["idle"], left=busy, color="#dddddd", hatch="///",
                            edgecolor="white", linewidth=0.5, height=0.76),
        }  # fmt: skip
        labels = [f"{share:.0%}" if share > 0.05 else "" for share in busy]
        ax.bar_label(handles["busy"], labels, label_type="center", color="white", fontsize=7)
        ax.set_yticks(places, [label_of(row, key) for row in table.to_dict("records")])
        ax.invert_yaxis()
        ax.set_xlim(0, 1)
        ax.grid(axis="y", visible=False)
        return handles

    columns = {f"{key}.busy": "busy", f"{key}.draft_ranks": "drafting"}
    known = passes.assign(**{name: passes.get(column) for column, name in columns.items()})
    known = by_command(known[known["busy"].notna()])
    most = known["busy"].map(len).groupby(known["command"]).sum().max()
    form = Form(
        held=["command"], places=["pass"], series="pass", show=show, draw=draw, what="commands",
        labels=("share of the time", ""), axes={"height": 0.9 + 0.22 * most, "columns": 1},
        caption=("Share of the time in which a stage computed or drafted; the rest it waited",),
    )  # fmt: skip
    heading = "Occupancy of the stages" + (" of rings" if key == "ring" else "")
    return form.of(f"{key}_stages", heading, known, f"no pass has stages of {key}")


def label_of(stage: Row, key: str) -> str:
    """The name of a bar; the ranks that draft say so."""
    word = "rank" if key == "speculation" else "stage"
    is_draft = stage["stage"] in (stage["drafting"] or ())
    return f"{stage['pass']}, {word} {stage['stage']}{' (drafts)' if is_draft else ''}"


def tables_of(kind: str, passes: pd.DataFrame) -> list[PageTable]:
    """The tables that the commands themselves print, with a column for each pass."""
    return [
        PageTable(
            table.columns, table.rows, f"Command {number}", name=f"{kind}_{number}_{place}",
            note=" ".join(f"{text}." for text in filter(None, texts_of(table))),
        )
        for number, of in enumerate(commands_of(passes), 1)
        for place, table in enumerate(COMMAND_TABLES[kind](list(of["object"])), 1)
        if table.rows
    ]  # fmt: skip


def texts_of(table: Table) -> list[str]:
    """The title of a table, and the lines of text around it."""
    above = [line if isinstance(line, str) else line.text for line in table.above]
    return [table.title, *above, *table.below]
