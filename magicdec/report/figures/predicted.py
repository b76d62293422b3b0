"""What `magicdec plan` predicts against what was measured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.figures import GREY, look
from magicdec.report.figures.panels import (
    Drawn,
    LeftOut,
    legend_below,
    log_ticks,
    make_axes,
    sentences,
)
from magicdec.report.frame import Row
from magicdec.report.prediction import NotPredicted, Predictor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR = 0.2  # half the width of the band around equality


def draw(runs: pd.DataFrame, predictor: Predictor) -> Drawn | LeftOut:
    name, heading = "predicted_measured", "Predicted against measured"
    drafted = runs[runs["speedup"].notna()]
    if drafted.empty:
        return LeftOut(name, heading, "no run has a speedup")
    rows: list[Row] = []
    problems: Counter[str] = Counter()
    for run in drafted.to_dict("records"):
        try:
            rows += compare(run, predictor)
        except NotPredicted as error:
            problems[str(error)] += 1
    if not rows:
        return LeftOut(name, heading, problems.most_common(1)[0][0])
    pairs = pd.DataFrame(rows)
    errors = (pairs["predicted"] / pairs["measured"] - 1).abs()
    medians = errors.groupby(pairs["quantity"], sort=False).median()
    left = (f"{count} run{'s' * (count > 1)}: {reason}" for reason, count in problems.items())
    caption = sentences(
        "Predicted from the shape of the model, the ceilings of the machine and the acceptance of "
        "the run. Above the line, the run took longer (left) or gained more (right) than "
        "predicted",
        "Median error: " + ", ".join(f"{k} {100 * error:.0f} %" for k, error in medians.items()),
        f"Not predicted: {'; '.join(left)}" if problems else "",
    )
    table = pairs[["run", "method", "quantity", "predicted", "measured"]]
    return Drawn(name, heading, caption, draw_sides(pairs), table)


def compare(run: Row, predictor: Predictor) -> list[Row]:
    """The predicted and the measured times and speedup of one run. Raises NotPredicted."""
    p = predictor.run(run)
    ends = run["speedup_interval_low"], run["speedup_interval_high"]
    quantities = {
        "autoregressive step": (1e3 * p.decode_s, run["autoregressive_step_ms"], None, None),
        "drafting of a step": (p.draft_s and 1e3 * p.draft_s, run["draft_ms"], None, None),
        "verification of a step": (p.verify_s and 1e3 * p.verify_s, run["verify_ms"], None, None),
        "speedup": (p.speedup, run["speedup"], *ends),
    }
    return [
        {"run": run["run"], "method": run["method"], "quantity": quantity, "predicted": predicted,
         "measured": measured, "low": low, "high": high}
        for quantity, (predicted, measured, low, high) in quantities.items()
        if predicted and measured
    ]  # fmt: skip


def draw_sides(pairs: pd.DataFrame) -> Figure:
    """The times of the steps on the left, the speedups on the right."""
    figure, (left, right) = make_axes(2, height=3.5)
    left.set(xscale="log", yscale="log", xlabel="predicted (ms)", ylabel="measured (ms)")
    left.set_title("time of a step")
    right.set(xlabel="predicted (x)", ylabel="measured (x)")
    right.set_title("speedup of decode steps")
    handles: dict[str, Any] = {}
    for index, (quantity, of) in enumerate(pairs.groupby("quantity", sort=False)):
        is_speedup, style = quantity == "speedup", look(index)
        ax, label = (right, "speedup of decode steps") if is_speedup else (left, str(quantity))
        spans = of.dropna(subset=["low", "high"])
        ax.vlines(spans["predicted"], spans["low"].astype(float), spans["high"].astype(float),
                  color=style.colour, linewidth=0.8, alpha=0.6)  # fmt: skip
        handles[label] = ax.scatter(of["predicted"], of["measured"], color=style.colour,
                                    marker=style.marker, s=22, alpha=0.8)  # fmt: skip
    is_step = pairs["quantity"] != "speedup"
    for ax, of in ((left, pairs[is_step]), (right, pairs[~is_step])):
        handles |= draw_equality(ax, of[["predicted", "measured"]])
    for axis in (left.xaxis, left.yaxis):
        log_ticks(axis)
    legend_below(figure, handles)
    return figure


def draw_equality(ax: Axes, values: pd.DataFrame) -> dict[str, Any]:
    """The line on which both are equal, with the band around it, over the range of the data."""
    ends = [values.min(axis=None) / 1.15, values.max(axis=None) * 1.15]
    (line,) = ax.plot(ends, ends, color="black", linewidth=1, zorder=1)
    lower, upper = [v * (1 - NEAR) for v in ends], [v * (1 + NEAR) for v in ends]
    band = ax.fill_between(ends, lower, upper, color=GREY, alpha=0.15, linewidth=0)
    ax.set(xlim=ends, ylim=ends)
    return {"equal": line, "within 20 %": band}
