"""Labels of points that keep clear of each other and of the points. Imports matplotlib only to
draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from magicdec.output.figures import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FONT_SIZE = 7  # points, as are all lengths below
DIGIT_WIDTH = 0.65 * FONT_SIZE
GAP = 3.0  # between labels beside each other
MARK_SIZE = 6.0
NEAR = 8.0  # from a point to the middle of its label
FARTHER = 7.0  # from each ring of places to the next
RINGS = 5
DIRECTIONS = 16  # in a ring, from the upper right one on


@dataclass(frozen=True)
class PointLabel:
    """The label of a point, whose place is in data coordinates."""

    x: float
    y: float
    text: str
    colour: str


@dataclass(frozen=True)
class Box:
    """A rectangle around its middle."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        return (
            2 * abs(self.x - other.x) < self.width + other.width
            and 2 * abs(self.y - other.y) < self.height + other.height
        )


def place_labels(ax: Axes, labels: Sequence[PointLabel]) -> None:
    """Writes each label beside its point, at the nearest place that meets no point and no other
    label, with a line to its point where that is not next to it. Equal labels of points that
    overlap are written once, in grey. The layout of the figure must be final."""
    from matplotlib.patheffects import withStroke

    points_per_pixel = 72 / ax.figure.dpi
    spots = ax.transData.transform([(label.x, label.y) for label in labels]) * points_per_pixel
    marks = [Box(x, y, MARK_SIZE, MARK_SIZE) for x, y in spots.tolist()]
    taken = list(marks)
    for label, mark in joined(labels, marks):
        box = next(
            (box for box in places(mark, label.text) if not any(map(box.meets, taken))),
            next(places(mark, label.text)),
        )
        taken.append(box)
        is_far = math.dist((box.x, box.y), (mark.x, mark.y)) > NEAR + FARTHER / 2
        text = ax.annotate(
            label.text,
            (label.x, label.y),
            (box.x - mark.x, box.y - mark.y),
            textcoords="offset points",
            ha="center",
            va="center_baseline",
            fontsize=FONT_SIZE,
            color=label.colour,
            arrowprops={"arrowstyle": "-", "color": label.colour, "linewidth": 0.5}
            if is_far
            else None,
        )
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])
        text.set_in_layout(False)


def joined(labels: Sequence[PointLabel], marks: Sequence[Box]) -> Iterator[tuple[PointLabel, Box]]:
    """The labels with their marks, those of equal text and marks that meet as one."""
    rest = list(zip(labels, marks, strict=True))
    while rest:
        label, mark = rest.pop(0)
        same = [placed for placed in rest if placed[0].text == label.text and placed[1].meets(mark)]
        rest = [placed for placed in rest if placed not in same]
        is_shared = any(other.colour != label.colour for other, _ in same)
        yield (replace(label, colour=GREY) if is_shared else label), mark


def places(mark: Box, text: str) -> Iterator[Box]:
    """Where the label of a mark may be, the nearest places first."""
    for ring in range(RINGS):
        distance = NEAR + ring * FARTHER
        for turn in range(DIRECTIONS):
            angle = math.pi / 4 + turn * 2 * math.pi / DIRECTIONS
            x = mark.x + distance * math.cos(angle)
            y = mark.y + distance * math.sin(angle)
            yield Box(x, y, len(text) * DIGIT_WIDTH + GAP, FONT_SIZE)
