"""All figures of a report, in their order, and how they become files."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from magicdec.figures import styled
from magicdec.report.figures import (
    acceptance,
    bandwidth,
    latency,
    phases,
    predicted,
    speedup,
    throughput,
)
from magicdec.report.figures.panels import Drawn, LeftOut
from magicdec.report.prediction import Predictor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 160
MOST_MARKS = 2000  # a cloud of more marks is drawn as an image inside the SVG
ID = re.compile(r'(\bid="|xlink:href="#|url\(#)')


def draw_runs(frame: pd.DataFrame, predictor: Predictor) -> list[Drawn | LeftOut]:
    """Draw every figure that the passes of runs can feed. `frame` has the rows of all records."""
    frame = frame[frame["has_result"].astype(bool)]
    passes = frame[frame["kind"] == "run"]
    runs = passes[passes["is_run"].astype(bool)]
    with styled():
        return [
            speedup.draw(runs, predictor),
            throughput.draw(passes),
            throughput.draw_pareto(frame[frame["kind"].isin(("run", "serving"))]),
            acceptance.draw_by_budget(runs),
            acceptance.draw_by_position(runs),
            acceptance.draw_lengths(runs),
            phases.draw(runs),
            bandwidth.draw_roofline(passes),
            latency.draw_ttft(passes),
            latency.draw_tpot(passes),
            predicted.draw(runs, predictor),
            bandwidth.draw_drift(passes),
        ]


def save(drawn: Drawn, directory: Path | None) -> str:
    """Write the figure as PNG and as SVG into the directory, if there is one, and return the SVG
    for a page. Raises OSError."""
    with TemporaryDirectory() as folder:
        png, svg = (Path(directory or folder, f"{drawn.name}{end}") for end in (".png", ".svg"))
        if callable(drawn.figure):
            drawn.figure(png)
            drawn.figure(svg)
        else:
            write(drawn.figure, drawn.title, png, svg)
        return inline(svg.read_text(encoding="utf-8"), drawn.name)


def write(figure: Figure, title: str, png: Path, svg: Path) -> None:
    """Write both files. Large clouds of marks are images inside the SVG."""
    for ax in figure.axes:
        for marks in ax.collections:
            if len(marks.get_offsets()) > MOST_MARKS:  # type: ignore[arg-type]
                marks.set_rasterized(True)
        for line in ax.lines:
            line.set_rasterized(np.size(line.get_xdata()) > MOST_MARKS)
    with styled(svg.stem):
        figure.savefig(png, dpi=DOTS_PER_INCH)  # this finds the places, too
        figure.set_layout_engine("none")
        figure.savefig(svg, dpi=DOTS_PER_INCH, metadata={"Title": title, "Date": None})


def inline(svg: str, name: str) -> str:
    """An SVG document as an element of a page: without its head, as wide as the page lets it be,
    and with ids of its own, because a page has one space of ids."""
    element = svg[svg.index("<svg") :]
    head, rest = element.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return ID.sub(rf"\g<1>{name}-", f'{head} aria-hidden="true">{rest}')
