"""All figures of a report, in their order, and how they become files."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from magicdec.report.figures import (
    acceptance,
    bandwidth,
    drift,
    latency,
    phases,
    predicted,
    speedup,
    throughput,
)
from magicdec.report.figures.style import Drawn, LeftOut, styled
from magicdec.report.point import Point
from magicdec.report.prediction import Predictor

DOTS_PER_INCH = 160
MOST_MARKS = 2000  # a cloud of more marks is drawn as an image inside the SVG
ID = re.compile(r'(\bid="|xlink:href="#|url\(#)')


def draw_all(points: Sequence[Point], predictor: Predictor) -> list[Drawn | LeftOut]:
    """Draw every figure that the points can feed."""
    passed = [point for point in points if point.metrics is not None]
    with styled():
        return [
            speedup.draw(passed, predictor),
            throughput.draw(passed),
            acceptance.draw_by_budget(passed),
            acceptance.draw_by_position(passed),
            phases.draw(passed),
            bandwidth.draw(passed),
            latency.draw_ttft(passed),
            latency.draw_tpot(passed),
            predicted.draw(passed, predictor),
            drift.draw(passed),
        ]


def save(drawn: Drawn, directory: Path | None) -> str:
    """Write the figure as PNG and as SVG into the directory, if there is one, and return the SVG
    for a page. Raises OSError."""
    for ax in drawn.figure.axes:
        for marks in ax.collections:
            if len(marks.get_offsets()) > MOST_MARKS:  # type: ignore[arg-type]
                marks.set_rasterized(True)
        for line in ax.lines:
            line.set_rasterized(np.size(line.get_xdata()) > MOST_MARKS)
    png, svg = io.BytesIO(), io.StringIO()
    about = {"Title": drawn.title, "Date": None}
    with styled(drawn.name):
        drawn.figure.savefig(png, format="png", dpi=DOTS_PER_INCH)  # this finds the places, too
        drawn.figure.set_layout_engine("none")
        drawn.figure.savefig(svg, format="svg", dpi=DOTS_PER_INCH, metadata=about)
    if directory is not None:
        (directory / f"{drawn.name}.png").write_bytes(png.getvalue())
        (directory / f"{drawn.name}.svg").write_text(svg.getvalue(), encoding="utf-8")
    return inline(svg.getvalue(), drawn.name)


def inline(svg: str, name: str) -> str:
    """An SVG document as an element of a page: without its head, as wide as the page lets it be,
    and with ids of its own, because a page has one space of ids."""
    element = svg[svg.index("<svg") :]
    head, rest = element.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return ID.sub(rf"\g<1>{name}-", f'{head} aria-hidden="true">{rest}')
