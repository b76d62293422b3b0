"""Gantt charts, with a bar for each span of time. Imports matplotlib only to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.output.figures import saved_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ROWS = 64  # with names that can be read in a panel
ROW_INCHES = 0.22
WIDTH_INCHES = 10.0
TITLE_ROWS = 3  # rows that the title and the axis of a panel take
TEXT_SHARE = 0.011  # of the width of a panel, for each character of a bar's text
EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}


@dataclass(frozen=True)
class BarStyle:
    """The look of bars of one kind. `height` is a share of the row."""

    colour: str
    height: float = 0.84
    hatch: str = ""


@dataclass(frozen=True)
class GanttBar:
    """A bar of a row. `text` is written on it if there is room."""

    row: int
    begin_s: float
    end_s: float
    look: BarStyle
    text: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel of `rows` (names from the top, `row_inches` high), with upright lines at
    `marks_s`."""

    title: str
    rows: Sequence[str]
    bars: Sequence[GanttBar]
    end_s: float
    marks_s: Sequence[float] = ()
    begin_s: float = 0.0
    row_inches: float = ROW_INCHES


def draw(
    flag: str,
    path: Path,
    panels: Sequence[Panel],
    legend: Mapping[str, BarStyle],
    until_s: float | None = None,
) -> None:
    """Write a picture of the panels, up to `until_s`, in the format of `path`. Raises ValueError,
    naming the flag, for too many rows in a panel, or if writing fails."""
    from matplotlib.patches import Patch

    most = max(sum(map(bool, panel.rows)) for panel in panels)
    if most > MOST_ROWS:
        raise ValueError(f"{flag}: {most} rows are too many to draw; at most {MOST_ROWS}")
    heights = [panel.row_inches * (len(panel.rows) + TITLE_ROWS) for panel in panels]
    size = WIDTH_INCHES, sum(heights) + 1
    has_one_time = len({(panel.begin_s, panel.end_s) for panel in panels}) == 1
    with saved_figure(
        flag, path, size, len(panels), sharex=has_one_time, height_ratios=heights
    ) as (figure, axes):
        for ax, panel in zip(axes, panels, strict=True):
            _draw_panel(ax, panel, until_s)
        axes[-1].set_xlabel("time, ms")
        handles = [
            Patch(facecolor=look.colour, label=name, hatch=look.hatch, **EDGE)
            for name, look in legend.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)


def _draw_panel(ax: Axes, panel: Panel, until_s: float | None) -> None:
    end_s = until_s or panel.end_s
    for (look, row), spans in _together(panel.bars, end_s).items():
        ax.broken_barh(
            spans,
            (row - look.height / 2, look.height),
            facecolor=look.colour,
            hatch=look.hatch,
            **EDGE,
        )
    for bar in panel.bars:
        left_s = max(bar.begin_s, panel.begin_s)
        width_s = min(bar.end_s, end_s) - left_s
        if bar.text and width_s > TEXT_SHARE * len(bar.text) * (end_s - panel.begin_s):
            ax.text(
                1e3 * (left_s + width_s / 2),
                bar.row,
                bar.text,
                fontsize=6,
                ha="center",
                va="center_baseline",
            )
    for at_s in panel.marks_s:
        if panel.begin_s <= at_s <= end_s:
            ax.axvline(1e3 * at_s, color="black", linewidth=0.4, alpha=0.5)
    ax.set_yticks(range(len(panel.rows)), panel.rows, fontsize=7)
    ax.set_ylim(len(panel.rows) - 0.5, -0.5)
    ax.set_xlim(1e3 * panel.begin_s, 1e3 * end_s)
    ax.set_title(panel.title)
    ax.grid(visible=False)


def _together(bars: Sequence[GanttBar], end_s: float) -> dict[tuple[BarStyle, int], list[Any]]:
    """(begin, length) in ms of the bars that begin before the end, by look and row."""
    spans: dict[tuple[BarStyle, int], list[Any]] = {}
    for bar in bars:
        if bar.end_s > bar.begin_s and bar.begin_s < end_s:
            span = 1e3 * bar.begin_s, 1e3 * (bar.end_s - bar.begin_s)
            spans.setdefault((bar.look, bar.row), []).append(span)
    return spans
