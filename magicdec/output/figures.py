"""The style and writing of figures: colours for colour-blind readers (Okabe and Ito 2008), with
markers, lines and hatches for grey print. Imports matplotlib only to draw."""

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
    """Raises ValueError, naming the flag, if `path` ends in no format of pictures."""
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
    place = index % len(COLOURS)
    is_first = index < len(COLOURS)
    return SeriesStyle(
        COLOURS[place], MARKERS[place], LINES[place], HATCHES[place], is_filled=is_first
    )


@contextmanager
def styled(salt: str = "magicdec") -> Iterator[None]:
    """The settings of every figure while it is drawn and saved. Equal figures with equal `salt`
    make equal SVGs."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": salt}, STYLE):
        yield


@contextmanager
def saved_figure(
    flag: str, path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, **more: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of `size` (width and height in inches) and its panels, row by row, written at the
    end in the format of `path`. `more` goes to `Figure.subplots`. Raises ValueError, naming the
    flag."""
    from matplotlib.figure import Figure

    with styled():
        figure = Figure(figsize=size, layout="constrained")
        yield figure, list(figure.subplots(rows, columns, squeeze=False, **more).flat)
        with complete_file(flag, path) as partial:
            figure.savefig(partial, dpi=DOTS_PER_INCH)
