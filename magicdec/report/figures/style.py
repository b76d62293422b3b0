"""How every figure looks: colours that colour-blind readers can tell apart (Okabe and Ito 2008),
each with a marker and a line style of its own, so that figures can be read in grey print too. A
figure is drawn, with the numbers it shows, or left out for a reason.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.report.panels import Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES: tuple[Any, ...] = (
    "-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)),
)  # fmt: skip
GREY = "#666666"
WIDTH = 7.4  # inches: the text width of a printed page
TITLE_LETTERS = 84  # bold letters that fit beside each other into a figure
MOST_SERIES = len(COLOURS)
SETTINGS: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "figure.dpi": 100,
    "svg.fonttype": "path",
}

FORMATS = (".png", ".svg", ".pdf")


def check_picture(flag: str, path: Path) -> None:
    """Raises ValueError, naming the flag, if the name of `path` says no format of pictures."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{flag} {path}: the name must end in {' or '.join(FORMATS)}")


@dataclass(frozen=True)
class Look:
    """The colour, marker and line style of one series."""

    colour: str
    marker: str
    line: Any


def look(index: int) -> Look:
    return Look(
        COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], LINES[index % len(LINES)]
    )


@contextmanager
def styled(salt: str = "magicdec") -> Iterator[None]:
    """The settings of every figure, while it is drawn and saved. The same figure with the same
    `salt` makes the same SVG."""
    import matplotlib

    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": salt}):
        yield


def make_axes(
    count: int, height: float = 2.9, columns: int = 2, **more: Any
) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, at most `columns` beside each other, each `height` inches
    high."""
    from matplotlib.figure import Figure

    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **more)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def put_title(ax: Axes, text: str) -> None:
    """The title of a panel, in as many lines as keep it within the panel."""
    place = ax.get_subplotspec()
    assert place is not None, "panels are in a grid"
    ax.set_title("\n".join(textwrap.wrap(text, TITLE_LETTERS // place.get_gridspec().ncols)))


def legend_below(figure: Figure, handles: list[Any], labels: list[str], columns: int = 3) -> None:
    """One legend for all panels, under them, where it covers no data."""
    widest = max(map(len, labels), default=0)
    fitting = 1 if widest > 60 else 2 if widest > 34 else columns
    figure.legend(handles, labels, loc="outside lower center", ncols=min(fitting, len(labels)))


def plot_values(ax: Axes, places: Sequence[float], values: Sequence[Value], style: Look) -> Any:
    """A line through values with a bar around each. Returns the handle for a legend."""
    errors = [[v.middle - v.low for v in values], [v.high - v.middle for v in values]]
    return ax.errorbar(
        list(places), [v.middle for v in values], yerr=errors, color=style.colour,
        marker=style.marker, linestyle=style.line, capsize=2, elinewidth=1,
    )  # fmt: skip


def plain_ticks(axis: Any, values: list[Any]) -> None:
    """Ticks at these values alone, written as plain numbers: for log axes with few values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


Cell = str | int | float | bool | None


@dataclass
class Drawn:
    """A figure. `name` names its files, `title` says what is seen, and `caption` how to read it and
    what is not shown. `rows` are the numbers that it shows, under `columns`."""

    name: str
    title: str
    caption: str
    figure: Figure
    columns: tuple[str, ...]
    rows: list[list[Cell]] = field(default_factory=list)


@dataclass(frozen=True)
class LeftOut:
    """A figure that the records cannot feed, and why not."""

    name: str
    title: str
    reason: str


def sentences(*parts: str) -> str:
    """The parts that are not empty, each as a sentence."""
    ended = (part if part.endswith((".", ":")) else f"{part}." for part in parts if part)
    return " ".join(part[0].upper() + part[1:] for part in ended)


def shown_of(shown: int, total: int, what: str) -> str:
    """Says what was not drawn; empty if everything was."""
    return f"Shown are {shown} of {total} {what}" if shown < total else ""
