"""What `magicdec plan` predicts against what was measured."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from magicdec.report.figures.bandwidth import label_sizes
from magicdec.report.figures.style import (
    GREY,
    Cell,
    Drawn,
    LeftOut,
    legend_below,
    look,
    make_axes,
    sentences,
)
from magicdec.report.point import Point
from magicdec.report.prediction import NotPredicted, Predictor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, HEADING = "predicted_measured", "Predicted against measured"
KINDS = {
    "autoregressive step": ("decode_ms", 0),
    "drafting of a step": ("draft_ms", 1),
    "verification of a step": ("verify_ms", 2),
}
NEAR = 0.2  # half the width of the band around equality
Pair = tuple[Point, str, float, float]  # kind, predicted, measured


def draw(points: Sequence[Point], predictor: Predictor) -> Drawn | LeftOut:
    drafted = [p for p in points if p.metrics and p.metrics.speedup is not None]
    if not drafted:
        return LeftOut(NAME, HEADING, "no run has a speedup")
    pairs: list[Pair] = []
    problems: Counter[str] = Counter()
    for point in drafted:
        try:
            pairs += compare(point, predictor)
        except NotPredicted as error:
            problems[str(error)] += 1
    if not pairs:
        return LeftOut(NAME, HEADING, problems.most_common(1)[0][0])
    rows: list[list[Cell]] = [[p.number, p.method, kind, x, y] for p, kind, x, y in pairs]
    columns = ("run", "method", "quantity", "predicted", "measured")
    left = "; ".join(
        f"{count} run{'s' * (count > 1)}: {reason}" for reason, count in problems.items()
    )
    caption = sentences(
        "Predicted from the shape of the model, the ceilings of the machine and the acceptance of "
        "the run. Above the line, the run took longer (left) or gained more (right) than "
        "predicted",
        errors(pairs),
        f"Not predicted: {left}" if left else "",
    )
    return Drawn(NAME, HEADING, caption, draw_sides(pairs), columns, rows)


def draw_sides(pairs: Sequence[Pair]) -> Figure:
    """The times of the steps on the left, the speedups on the right."""
    steps = [pair for pair in pairs if pair[1] != "speedup"]
    speedups = [pair for pair in pairs if pair[1] == "speedup"]
    figure, axes = make_axes(2, height=3.5)
    handles: dict[str, object] = {}
    for kind, (_, index) in KINDS.items():
        of = [pair for pair in steps if pair[1] == kind]
        if of:
            handles[kind] = scatter(axes[0], of, index)
    handles["speedup of decode steps"] = scatter(axes[1], speedups, 3)
    axes[0].set(xscale="log", yscale="log", xlabel="predicted (ms)", ylabel="measured (ms)")
    axes[0].set_title("time of a step")
    axes[1].set(xlabel="predicted (x)", ylabel="measured (x)")
    axes[1].set_title("speedup of decode steps")
    for ax, of in zip(axes, (steps, speedups), strict=True):
        handles["equal"], handles["within 20 %"] = draw_equality(ax, of)
    for axis in (axes[0].xaxis, axes[0].yaxis):
        label_sizes(axis)
    legend_below(figure, list(handles.values()), list(handles))
    return figure


def compare(point: Point, predictor: Predictor) -> list[Pair]:
    """The predicted and the measured times and speedup of one run. Raises NotPredicted."""
    p, m, theirs = predictor.run(point), point.metrics, point.baseline
    assert m is not None
    pairs = [
        ("autoregressive step", 1e3 * p.decode_s, theirs and theirs.mean_step_ms),
        ("drafting of a step", p.draft_s and 1e3 * p.draft_s, m.draft_ms),
        ("verification of a step", p.verify_s and 1e3 * p.verify_s, m.verify_ms),
        ("speedup", p.speedup, m.speedup),
    ]
    return [(point, kind, x, y) for kind, x, y in pairs if x and y]


def scatter(ax: Axes, pairs: Sequence[Pair], index: int) -> object:
    style = look(index)
    x, y = [pair[2] for pair in pairs], [pair[3] for pair in pairs]
    spans = [
        (at, *point.metrics.speedup_interval)
        for point, kind, at, _ in pairs
        if kind == "speedup" and point.metrics and point.metrics.speedup_interval
    ]
    if spans:
        at, low, high = zip(*spans, strict=True)
        ax.vlines(at, low, high, color=style.colour, linewidth=0.8, alpha=0.6)
    return ax.scatter(x, y, color=style.colour, marker=style.marker, s=22, alpha=0.8)


def draw_equality(ax: Axes, pairs: Sequence[Pair]) -> tuple[object, object]:
    """The line on which both are equal, with the band around it, over the range of the data."""
    values = [value for pair in pairs for value in pair[2:]]
    low, high = min(values) / 1.15, max(values) * 1.15
    ends = [low, high]
    (line,) = ax.plot(ends, ends, color="black", linewidth=1, zorder=1)
    lower, upper = [v * (1 - NEAR) for v in ends], [v * (1 + NEAR) for v in ends]
    band = ax.fill_between(ends, lower, upper, color=GREY, alpha=0.15, linewidth=0)
    ax.set(xlim=(low, high), ylim=(low, high))
    return line, band


def errors(pairs: Sequence[Pair]) -> str:
    """The median relative error of each quantity."""
    kinds = dict.fromkeys(pair[1] for pair in pairs)
    said = []
    for kind in kinds:
        of = [abs(x / y - 1) for _, k, x, y in pairs if k == kind]
        said.append(f"{kind} {100 * statistics.median(of):.0f} %")
    return f"Median error: {', '.join(said)}"
