"""The form of a figure: panels of runs that are equal in all settings but those that the figure is
about.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.bench.report.frame import FrameRow
from magicdec.bench.report.listing import LABELS, SettingValue, rank
from magicdec.names import BASELINE
from magicdec.output.figures import COLOURS, GREY, SeriesStyle, look

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNITS = {"prefix_len": " tokens", "gen_len": " tokens"}
# Columns whose value says what it is.
SELF_EVIDENT = (
    "model",
    "kv_policy",
    "device",
    "dtype",
    "kind",
    "about",
    "metric",
    "kind_of_draft",
    "mode",
)
MOST_TICKS = 12  # that have room beside each other
WIDTH = 7.4  # inches: the text width of a printed page
MOST_SERIES = len(COLOURS)
MANY_MARKS = 1000  # of a panel, from which on they are pixels in SVG, too
CLEAR = (0.0, 0.0, 0.0, 0.0)
TITLE_LETTERS = 84  # bold letters that fit beside each other into a figure


@dataclass
class Drawn:
    """A figure, with the stem of its files, its title, a caption with what is not shown, and its
    numbers."""

    name: str
    title: str
    caption: str
    figure: Figure
    table: pd.DataFrame


@dataclass(frozen=True)
class LeftOut:
    """A figure that the records cannot feed, with the reason."""

    name: str
    title: str
    reason: str


Series = list[tuple[str, pd.DataFrame, SeriesStyle]]
"""Each series that is drawn in a panel, with its rows and its look."""


def itself(passes: pd.DataFrame) -> pd.DataFrame:
    return passes


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form of a figure, left out for `reason` without runs. Panels share the settings `held`;
    those whose runs differ most in `places` are shown. `show` makes the numbers of a panel, whose
    equal values in the column `series` share a look. `draw` draws them and returns the legend's
    handles. `intervals` explains the bars around marks; `axes` goes to `make_axes`."""

    name: str
    title: str
    reason: str
    held: Sequence[str]
    places: Sequence[str]
    draw: Callable[[Axes, pd.DataFrame, Series], Mapping[str, Any]]
    labels: tuple[str, str]
    caption: Sequence[str]
    intervals: str = ""
    show: Callable[[pd.DataFrame], pd.DataFrame] = itself
    series: str = "series"
    what: str = "combinations of settings"  # that panels are
    most_panels: int = 4
    most_series: int = MOST_SERIES
    axes: Mapping[str, Any] = field(default_factory=dict)

    def of(self, passes: pd.DataFrame) -> Drawn | LeftOut:
        if passes.empty:
            return LeftOut(self.name, self.title, self.reason)
        groups = list(grouped(passes, self.held))
        places = values_of(passes, self.places)
        groups.sort(key=lambda rows: (-len({places[row] for row in rows}), -len(rows)))
        shown = [passes.iloc[rows] for rows in groups[: self.most_panels]]
        panels = [(dict(rows.iloc[0][[*self.held]]), rows) for rows in shown]
        panels.sort(key=lambda panel: [rank(value) for value in panel[0].values()])
        tables = [self.show(rows) for _, rows in panels]
        names = [rows[self.series].unique() if self.series else [] for rows in tables]
        looks = looks_of(names, self.most_series)
        num_series = len(set(chain(*names)))
        figure, axes = make_axes(len(panels), **self.axes)
        varying = [key for key in self.held if len({held[key] for held, _ in panels}) > 1]
        handles: dict[str, Any] = {}
        for number, ((held, _), table, ax) in enumerate(zip(panels, tables, axes, strict=True)):
            series_groups = table.groupby(self.series, sort=False) if looks else ()
            series = [
                (str(name), rows, looks[name]) for name, rows in series_groups if name in looks
            ]
            handles |= self.draw(ax, table, series)
            ax.set_xlabel(self.labels[0])
            if number % self.axes.get("columns", 2) == 0 or not self.axes.get("sharey"):
                ax.set_ylabel(self.labels[1])
            put_title(ax, in_words(held, varying))
        legend_below(figure, handles)
        put_head(figure, self.title, about(pd.concat([rows for _, rows in panels])))
        common = in_words(panels[0][0], [key for key in self.held if key not in varying])
        first, *rest = self.caption
        caption = sentences(
            first,
            f"Everywhere: {common}" if common else "",
            *rest,
            self.intervals if any(has_intervals(rows, looks) for rows in tables) else "",
            busy_of(pd.concat(shown)),
            shown_of(len(looks), num_series, "series"),
            shown_of(len(panels), len(groups), self.what),
        )
        numbers = pd.concat(
            [with_settings(held, rows) for (held, _), rows in zip(panels, tables, strict=True)],
            ignore_index=True,
        )
        return Drawn(self.name, self.title, caption, figure, numbers.where(numbers.notna(), None))


def values_of(frame: pd.DataFrame, keys: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(zip(*(frame[key].tolist() for key in keys), strict=True))


def grouped(frame: pd.DataFrame, keys: Sequence[str]) -> Iterable[list[int]]:
    """The indices of rows with equal values in `keys`, by their first. pandas, which would group
    each column by itself, takes ten times as long."""
    groups = defaultdict[tuple[Any, ...], list[int]](list)
    for place, values in enumerate(values_of(frame, keys)):
        groups[values].append(place)
    return groups.values()


def num_different(frame: pd.DataFrame, held: Sequence[str], keys: Sequence[str]) -> list[int]:
    """For each row, the number of different values in `keys` among rows that are equal in
    `held`."""
    values = values_of(frame, keys)
    counts = [0] * len(frame)
    for rows in grouped(frame, held):
        count = len({values[row] for row in rows})
        for row in rows:
            counts[row] = count
    return counts


def with_settings(held: FrameRow, table: pd.DataFrame) -> pd.DataFrame:
    columns = {name: [value] * len(table) for name, value in held.items()}
    columns |= {str(name): table[name].tolist() for name in table}
    return pd.DataFrame(columns, dtype=object)


def has_intervals(table: pd.DataFrame, looks: Mapping[str, SeriesStyle]) -> bool:
    """Whether a number of a drawn series has an interval or a range."""
    drawn = table[table["series"].isin([*looks])] if "series" in table and looks else table
    if {"low", "high"} <= {*drawn}:
        return bool((drawn["low"].astype(float) < drawn["high"].astype(float)).any())
    methods = drawn[drawn["series"] != BASELINE] if "series" in drawn else drawn
    return any(bool(methods[name].notna().any()) for name in methods if f"{name}".endswith("_low"))


ABOUT = ("model", "draft_model", "prefix_len", "gamma")  # what every picture says


def about(passes: pd.DataFrame) -> str:
    parts = [
        setting_text(key, several([value for value in passes[key].unique() if value is not None]))
        for key in ABOUT
        if key in passes and passes[key].notna().any()
    ]
    return ", ".join(parts)


def several(values: Sequence[Any]) -> str:
    """A few values one by one; of more numbers the smallest and the largest."""
    ordered = sorted(values, key=rank)
    numbers = [str(value) for value in ordered if not isinstance(value, str)]
    words = [str(value) for value in ordered if isinstance(value, str)]
    shown = numbers if len(numbers) <= 4 else [f"{numbers[0]} to {numbers[-1]}"]
    return "/".join([*shown, *words])


def put_head(figure: Figure, title: str, text: str) -> None:
    """The title and subject of a figure, so that a picture says them without its page."""
    lines = "\n".join(textwrap.wrap(text, TITLE_LETTERS))
    figure.suptitle(f"{title}\n{lines}" if text else title, fontsize=9, x=0.01, ha="left")


def looks_of(inside: Sequence[Iterable[str]], most: int = MOST_SERIES) -> dict[str, SeriesStyle]:
    """The look of each drawn series, of those in each panel. The baseline is grey."""
    drafting = [sorted(name for name in names if name != BASELINE) for names in inside]
    looks = {name: look(i) for i, name in enumerate(sorted(choose(drafting, most)))}
    has_baseline = any(BASELINE in names for names in inside)
    grey = {BASELINE: SeriesStyle(GREY, "o", (0, (4, 2)), is_filled=False)}
    return grey | looks if has_baseline else looks


def choose(series: Sequence[Iterable[str]], limit: int) -> list[str]:
    """At most `limit` series, taken from the panels in turn, so that no panel is left empty."""
    turns = chain.from_iterable(zip_longest(*series))
    return list(dict.fromkeys(name for name in turns if name is not None))[:limit]


def in_words(held: Mapping[str, SettingValue], keys: Iterable[str]) -> str:
    return ", ".join(setting_text(key, held[key]) for key in keys if held[key] is not None)


def setting_text(key: str, value: SettingValue) -> str:
    """A setting in words, such as `prefix 2048 tokens`."""
    name = LABELS.get(key, key).replace("_", " ")
    return str(value) if key in SELF_EVIDENT else f"{name} {value}{UNITS.get(key, '')}"


def sentences(*parts: str) -> str:
    ended = (part if part.endswith((".", ":")) else f"{part}." for part in parts if part)
    return " ".join(part[0].upper() + part[1:] for part in ended)


def shown_of(shown: int, total: int, what: str) -> str:
    return f"Shown are {shown} of {total} {what}" if shown < total else ""


def quiet(passes: pd.DataFrame) -> pd.DataFrame:
    """The runs during which no other load took cores, or all if there is no such run."""
    is_quiet = ~passes["is_busy"].astype(bool)
    return passes[is_quiet] if is_quiet.any() else passes


def busy_of(shown: pd.DataFrame) -> str:
    """A sentence about the drawn runs during which another load took cores, if any."""
    busy = shown[shown["is_busy"].astype(bool)]["run"].nunique()
    share_text = f"{busy} of the {shown['run'].nunique()} runs shown here"
    return f"Another load took cores while {share_text} were measured" if busy else ""


def make_axes(
    count: int, height: float = 2.9, columns: int = 2, **more: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, `height` inches high, at most `columns` beside each other."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **more).flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def put_title(ax: Axes, text: str) -> None:
    place = ax.get_subplotspec()
    assert place is not None, "panels are in a grid"
    ax.set_title("\n".join(textwrap.wrap(text, TITLE_LETTERS // place.get_gridspec().ncols)))


def legend_below(figure: Figure, handles: Mapping[str, Any]) -> None:
    widest = max(map(len, handles), default=0)
    columns = max(1, min(4, 105 // max(widest, 1), len(handles)))
    figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=columns)


def draw_marks(ax: Axes, series: Series, x: str, y: str, scale: float = 1.0) -> dict[str, Any]:
    """Draws a mark for each row of each series, with its interval as an upright line. Returns the
    legend's handles."""
    handles = {}
    is_many = sum(len(rows) for _, rows, _ in series) > MANY_MARKS
    for name, rows, style in series:
        handles[name] = ax.scatter(
            rows[x].astype(float) / scale,
            rows[y].astype(float) / scale,
            s=28,
            marker=style.marker,
            edgecolors=style.colour,
            # A transparent colour, and not "none", with which matplotlib draws each mark by itself.
            facecolors=style.colour if style.is_filled else CLEAR,
            rasterized=is_many,
        )
        handles[name].set_in_layout(False)  # it is within its axes
        ends = [f"{y}_interval_low", f"{y}_interval_high"]
        spans = rows.reindex(columns=[x, *ends]).dropna().astype(float)
        if name != BASELINE and not spans.empty:
            ax.vlines(*spans.to_numpy().T, color=style.colour, linewidth=0.8, rasterized=is_many)
    return handles


def draw_curves(
    ax: Axes, table: pd.DataFrame, series: Series, x: str, y: str, **axes: Any
) -> dict[str, Any]:
    """Draws a line through the column `y` of each series, with bars from `low` to `high` and ticks
    at each `x`. `axes` goes to `Axes.set`."""
    ax.set(**axes)
    plain_ticks(ax.xaxis, sorted(table[x].unique()))
    handles = {}
    for name, rows, style in series:
        middle, low, high = (rows[column].astype(float) for column in (y, "low", "high"))
        handles[name] = ax.errorbar(
            rows[x],
            middle,
            yerr=[middle - low, high - middle],
            color=style.colour,
            marker=style.marker,
            markerfacecolor=style.colour if style.is_filled else "white",
            linestyle=style.line,
            capsize=2,
            elinewidth=1,
        )
    return handles


def summarize(passes: pd.DataFrame, metric: str) -> FrameRow:
    """The median and range of repeated runs, or one run with its interval, if any."""
    values = passes[metric].astype(float)
    ends = [f"{metric}_interval_low", f"{metric}_interval_high"]
    low = values.min()
    high = values.max()
    if len(passes) == 1 and passes[ends].notna().all(axis=None):
        low, high = passes.iloc[0][ends]
    return {metric: values.median(), "low": low, "high": high, "runs": len(passes)}


def plain_ticks(axis: Any, values: Sequence[Any] | None = None) -> None:
    """Plain numbers on an axis, at these values; without values on a logarithmic axis, which may
    span less than a decade."""
    from matplotlib import ticker

    log_locator = ticker.LogLocator(subs=(1.0, 2.0, 5.0))
    fixed = None if values is None else ticker.FixedLocator(values, nbins=MOST_TICKS)
    axis.set_major_locator(fixed or log_locator)
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
    if values is not None:
        axis.set_minor_locator(ticker.NullLocator())
