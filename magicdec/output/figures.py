"""How figures look and how they are written: colours that colour-blind readers can tell apart
(Okabe and Ito 2008), each with a marker, a line style and a hatch of its own, so that
figures can be read in grey print too. Imports matplotlib only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.output.files import complete_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#666666"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES: tuple[Any, ...] = (
    "-",
    "--",
    "-.",
    ":",
    (0, (5, 1)),
    (0, (3, 1, 1, 1)),
    (0, (1, 1)),
    (0, (8, 2)),
)
HATCHES = ("", "//", "\\\\", "xx", "--", "||", "++", "/")
STYLE = Path(__file__).with_name("figures.mplstyle")
DOTS_PER_INCH = 150
FORMATS = (".png", ".svg", ".pdf")


def check_picture(flag: str, path: Path) -> None:
    """Raises ValueError, naming the flag, if the name of `path` says no format of pictures."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{flag} {path}: the name must end in {' or '.join(FORMATS)}")


@dataclass(frozen=True)
class SeriesStyle:
    """The colour, marker, line style and hatch of one series, and whether its marks are filled."""

    colour: str
    marker: str
    line: Any
    hatch: str = ""
    is_filled: bool = True


def look(index: int) -> SeriesStyle:
    """The look of a series. From the ninth on, marks are hollow."""
    each = index % len(COLOURS)
    is_first = index < len(COLOURS)
    return SeriesStyle(COLOURS[each], MARKERS[each], LINES[each], HATCHES[each], is_filled=is_first)


@contextmanager
def styled(salt: str = "magicdec") -> Iterator[None]:
    """The settings of every figure, while it is drawn and saved. The same figure with the same
    `salt` makes the same SVG."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": salt}, STYLE):
        yield


@contextmanager
def saved_figure(
    flag: str, path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **more: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yields a figure of `size` (width and height in inches) and its panels, row by row, to draw
    on. When the block ends, the figure is written in the format that the name of `path` ends in.
    `more` goes to `Figure.subplots`. Raises ValueError, naming the flag, if the file cannot be
    written."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=size, layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False, **more).flat)
        with complete_file(flag, path) as partial:
            figure.savefig(partial, dpi=DOTS_PER_INCH)
