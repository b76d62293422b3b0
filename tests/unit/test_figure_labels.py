"""Labels of points in figures: none is on a point or on another label, by the extents that
matplotlib finds when it draws."""

from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from magicdec.bench.report.figures.labels import MARK_SIZE, PointLabel, place_labels
from magicdec.output.figures import COLOURS, GREY


def written(labels: list[PointLabel]) -> tuple[list[Text], list[Bbox], list[Bbox]]:
    """The labels in a figure of 600 x 300 pixels with axes up to 1, and the boxes in pixels of
    their texts and of the points."""
    figure = Figure(figsize=(6, 3), dpi=100)
    ax = figure.add_axes((0, 0, 1, 1))
    figure.draw_without_rendering()
    place_labels(ax, labels)
    figure.draw_without_rendering()
    half = MARK_SIZE / 72 * 100 / 2
    places = [(600 * label.x, 300 * label.y) for label in labels]
    marks = [Bbox([[x - half, y - half], [x + half, y + half]]) for x, y in places]
    texts = list(ax.texts)
    return texts, [Text.get_window_extent(text) for text in texts], marks


def is_clear(one: Bbox, other: Bbox) -> bool:
    common = Bbox.intersection(one, other)
    return common is None or min(common.width, common.height) < 1  # of a pixel


def test_labels_of_a_crowd_are_apart() -> None:
    """Eight lines, each of whose points is a few pixels from those of the others."""
    labels = [
        PointLabel(x + 0.01 * line, y + 0.008 * (line % 3), f"{count}", colour)
        for line, colour in enumerate(COLOURS)
        for x, y, count in [(0.5, 0.5, 1), (0.5, 0.5, 16), (0.52, 0.55, 128)]
    ]
    texts, boxes, marks = written(labels)
    assert {text.get_text() for text in texts} == {"1", "16", "128"}
    assert all(is_clear(*pair) for pair in combinations(boxes, 2))
    assert all(is_clear(box, mark) for box in boxes for mark in marks)
    assert any(text.arrow_patch is not None for text in texts), "a far one has a line"  # type: ignore[attr-defined]


@pytest.mark.parametrize("shift", [0.0, 0.005, 0.1])
def test_equal_labels_of_points_that_overlap_are_one(shift: float) -> None:
    labels = [PointLabel(0.5 + shift * i, 0.5, "4", colour) for i, colour in enumerate("rgb")]
    other = PointLabel(0.5, 0.5, "8", "r")
    texts, _, _ = written([*labels, other])
    found = [(text.get_text(), text.get_color()) for text in texts]
    own = [("4", colour) for colour in "rgb"] if shift == 0.1 else [("4", GREY)]
    assert found == [*own, ("8", "r")]
