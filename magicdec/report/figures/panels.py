"""The form of a figure: panels, each with the runs that are equal in all settings but the ones that
the figure is about. A figure is drawn, with the numbers that it shows, or left out for a reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.figures import COLOURS, GREY, Look, look
from magicdec.names import BASELINE
from magicdec.report.frame import Row, frame_of
from magicdec.report.listing import LABELS
from magicdec.report.settings import Setting, rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = {"prefix_len": " tokens", "gen_len": " tokens"}
WIDTH = 7.4  # inches: the text width of a printed page
MOST_SERIES = len(COLOURS)
TITLE_LETTERS = 84  # bold letters that fit beside each other into a figure
MOST_PANELS = 4
Draw = Callable[[Path], None]
"""Writes a figure in the format that the name of the file ends in."""


@dataclass
class Drawn:
    """A figure. `name` names its files, `title` says what is seen, and `caption` how to read it and
    what is not shown. `table` has the numbers that it shows. What a command draws is written by its
    function."""

    name: str
    title: str
    caption: str
    figure: Figure | Draw
    table: pd.DataFrame


@dataclass(frozen=True)
class LeftOut:
    """A figure that the records cannot feed, and why not."""

    name: str
    title: str
    reason: str


@dataclass
class Panel:
    """Runs that are equal in the settings `held`, and what is shown of them."""

    held: dict[str, Setting]
    runs: pd.DataFrame
    table: pd.DataFrame = field(default_factory=pd.DataFrame)


Series = list[tuple[str, pd.DataFrame, Look]]
"""Each series that is drawn in a panel, with its rows and its look."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of a figure with panels. `held` are the settings that are equal in a panel; panels
    whose runs differ most in the columns `places` are shown. `show` makes the numbers of a panel of
    its runs; those with equal values in the column `series` have one look. `draw` draws the numbers
    and the series among them on the axes of a panel, and returns the handles of the legend.
    `labels` are those of the axes. `caption` says how to read the figure, and then what else is to
    be known. `axes` goes to `make_axes`."""

    held: Sequence[str]
    places: Sequence[str]
    show: Callable[[pd.DataFrame], pd.DataFrame]
    draw: Callable[[Axes, pd.DataFrame, Series], Mapping[str, Any]]
    labels: tuple[str, str]
    caption: Sequence[str]
    series: str = "series"
    what: str = "combinations of settings"  # that panels are
    most_panels: int = MOST_PANELS
    most_series: int = MOST_SERIES
    axes: Mapping[str, Any] = field(default_factory=dict)

    def of(self, name: str, title: str, runs: pd.DataFrame, reason: str) -> Drawn | LeftOut:
        """The figure of these runs, which is left out for this reason if there are none."""
        if runs.empty:
            return LeftOut(name, title, reason)
        panels, total = richest(runs, self.held, self.places, self.most_panels)
        for panel in panels:
            panel.table = self.show(panel.runs)
        inside = [panel.table[self.series].unique() for panel in panels]
        looks = looks_of(inside, self.most_series)
        num_series = len({series for names in inside for series in names})
        parts = (*self.caption, shown_of(len(looks), num_series, "series"))
        caption = caption_of(panels, total, self.what, *parts)
        figure, axes = make_axes(len(panels), **self.axes)
        handles: dict[str, Any] = {}
        for number, (panel, ax) in enumerate(zip(panels, axes, strict=True)):
            of_series = panel.table.groupby(self.series, sort=False)
            series = [(str(name), of, looks[name]) for name, of in of_series if name in looks]
            handles |= self.draw(ax, panel.table, series)
            ax.set_xlabel(self.labels[0])
            if number % 2 == 0 or not self.axes.get("sharey"):
                ax.set_ylabel(self.labels[1])
            put_title(ax, in_words(panel.held, varying(panels)))
        legend_below(figure, handles)
        rows = (panel.held | row for panel in panels for row in panel.table.to_dict("records"))
        return Drawn(name, title, caption, figure, frame_of(rows))


def richest(
    frame: pd.DataFrame, held: Sequence[str], places: Sequence[str], most: int = MOST_PANELS
) -> tuple[list[Panel], int]:
    """At most `most` panels for the combinations of the settings `held`, and how many there are:
    those whose runs differ most in the columns `places`, then those with the most runs. They are
    ordered by their settings."""
    panels = [
        Panel(dict(runs.iloc[0][list(held)]), runs)
        for _, runs in frame.groupby(list(held), dropna=False, sort=False)
    ]
    counts = [-len(panel.runs[list(places)].drop_duplicates()) for panel in panels]
    ranked = sorted(zip(counts, panels, strict=True), key=lambda x: (x[0], -len(x[1].runs)))
    chosen = [panel for _, panel in ranked[:most]]
    return sorted(chosen, key=lambda p: [rank(v) for v in p.held.values()]), len(panels)


def varying(panels: Sequence[Panel]) -> list[str]:
    """The held settings that differ between the panels."""
    held = [panel.held for panel in panels]
    return [key for key in held[0] if len({values[key] for values in held}) > 1]


def caption_of(panels: Sequence[Panel], total: int, what: str, first: str, *rest: str) -> str:
    """The sentences, with what is the same in all panels, and how many of `what` are shown."""
    same = [key for key in panels[0].held if key not in varying(panels)]
    common = in_words(panels[0].held, same)
    everywhere = f"Everywhere: {common}" if common else ""
    return sentences(first, everywhere, *rest, shown_of(len(panels), total, what))


def looks_of(inside: Sequence[Iterable[str]], most: int = MOST_SERIES) -> dict[str, Look]:
    """The look of each series that is drawn, of those inside each panel. The baseline is grey."""
    drafting = [sorted(name for name in names if name != BASELINE) for names in inside]
    looks = {name: look(i) for i, name in enumerate(sorted(choose(drafting, most)))}
    has_baseline = any(BASELINE in names for names in inside)
    grey = {BASELINE: Look(GREY, "o", (0, (4, 2)), is_filled=False)}
    return grey | looks if has_baseline else looks


def choose(series: Sequence[Iterable[str]], limit: int) -> list[str]:
    """At most `limit` series of several panels, in turn one of each, so that no panel is left
    empty."""
    turns = chain.from_iterable(zip_longest(*series))
    return list(dict.fromkeys(name for name in turns if name is not None))[:limit]


def in_words(held: Mapping[str, Setting], keys: Iterable[str]) -> str:
    return ", ".join(said(key, held[key]) for key in keys if held[key] is not None)


def said(key: str, value: Setting) -> str:
    """A setting in words, such as `prefix 2048 tokens`."""
    name = LABELS.get(key, key).replace("_", " ")
    if key in ("model", "kv_policy", "device", "dtype"):
        return str(value)
    return f"{name} {value}{UNITS.get(key, '')}"


def sentences(*parts: str) -> str:
    """The parts that are not empty, each as a sentence."""
    ended = (part if part.endswith((".", ":")) else f"{part}." for part in parts if part)
    return " ".join(part[0].upper() + part[1:] for part in ended)


def shown_of(shown: int, total: int, what: str) -> str:
    """Says what was not drawn; empty if everything was."""
    return f"Shown are {shown} of {total} {what}" if shown < total else ""


def make_axes(
    count: int, height: float = 2.9, columns: int = 2, **more: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, at most `columns` beside each other, each `height` inches
    high."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **more).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def put_title(ax: Axes, text: str) -> None:
    """The title of a panel, in as many lines as keep it within the panel."""
    place = ax.get_subplotspec()
    assert place is not None, "panels are in a grid"
    ax.set_title("\n".join(textwrap.wrap(text, TITLE_LETTERS // place.get_gridspec().ncols)))


def legend_below(figure: Figure, handles: Mapping[str, Any], columns: int = 4) -> None:
    """One legend for all panels, under them, where it covers no data."""
    widest = max(map(len, handles), default=0)
    columns = min(
        1 if widest > 60 else 2 if widest > 34 else 3 if widest > 20 else columns, len(handles)
    )
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=columns)


def draw_marks(ax: Axes, series: Series, x: str, y: str, scale: float = 1.0) -> dict[str, Any]:
    """A mark for each row of each series. Returns the handles of the legend."""
    return {
        name: ax.scatter(
            of[x].astype(float) / scale, of[y].astype(float) / scale, s=28, marker=style.marker,
            edgecolors=style.colour, facecolors=style.colour if style.is_filled else "none",
        )
        for name, of, style in series
    }  # fmt: skip


def plot_values(ax: Axes, rows: pd.DataFrame, x: str, y: str, style: Look) -> Any:
    """A line through the column `y` with a bar from `low` to `high` around each of its values.
    Returns the handle for a legend."""
    middle, low, high = (rows[name].astype(float) for name in (y, "low", "high"))
    return ax.errorbar(
        rows[x], middle, yerr=[middle - low, high - middle], color=style.colour,
        marker=style.marker, linestyle=style.line, capsize=2, elinewidth=1,
    )  # fmt: skip


def summarize(runs: pd.DataFrame, metric: str) -> Row:
    """The median of repeated runs with their range; one run alone with its interval, if it has
    one."""
    values, ends = runs[metric].astype(float), [f"{metric}_interval_low", f"{metric}_interval_high"]
    low, high = values.min(), values.max()
    if len(runs) == 1 and runs[ends].notna().all(axis=None):
        low, high = runs.iloc[0][ends]
    return {metric: values.median(), "low": low, "high": high, "runs": len(runs)}


def plain_ticks(axis: Any, values: Sequence[Any] | None = None) -> None:
    """Plain numbers on an axis, at these values alone. Without values, the axis is logarithmic and
    may span less than a decade."""
    from matplotlib import ticker

    of_log = ticker.LogLocator(subs=(1.0, 2.0, 5.0))
    axis.set_major_locator(of_log if values is None else ticker.FixedLocator(values))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
    if values is not None:
        axis.set_minor_locator(ticker.NullLocator())
