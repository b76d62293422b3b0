"""Throughput against the speed of one request, with the Pareto fronts: runs against TPOT, and
everything that was measured in one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.figures import GREY
from magicdec.names import BASELINE
from magicdec.report.figures.panels import (
    MOST_SERIES,
    Drawn,
    Form,
    LeftOut,
    Looks,
    each_series,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELD = ("model", "dtype", "dataset", "device", "ranks", "threads", "prefix_len")
X, Y, REQUEST = "mean_tpot_ms", "decode_tokens_per_s", "request_tokens_per_s"
ENDS = (f"{Y}_interval_low", f"{Y}_interval_high")
NO_PLACE = "no record has both a throughput and a TPOT"


def draw(passes: pd.DataFrame) -> Drawn | LeftOut:
    def show(of: pd.DataFrame) -> pd.DataFrame:
        """The baselines, and then the runs that draft."""
        parts = [of[of["series"] == BASELINE].assign(gamma=None), of[of["series"] != BASELINE]]
        marked = [part.assign(on_front=part.index.isin(pareto(part, X, Y).index)) for part in parts]
        return pd.concat(marked)[["series", "run", "B", "gamma", X, Y, "on_front", *ENDS]]

    def draw_panel(ax: Axes, table: pd.DataFrame, looks: Looks) -> dict[str, Any]:
        handles = draw_marks(ax, table, looks, X, Y)
        for series, of, style in each_series(table, looks):
            spans = of[[X, *ENDS]].dropna().astype(float).to_numpy().T
            if series != BASELINE and spans.size:
                ax.vlines(*spans, color=style.colour, linewidth=0.8)
        is_baseline = table["series"] == BASELINE
        for label, of in ((BASELINE, table[is_baseline]), ("speculative", table[~is_baseline])):
            front, is_below = pareto(of, X, Y), label == BASELINE
            if not front.empty:
                shape, colour = (":", GREY) if is_below else ("-", "black")
                line = ax.plot(front[X], front[Y], shape, color=colour, linewidth=1, zorder=1)
                handles[f"Pareto front, {label}"] = line[0]
                name_batches(ax, front, is_below)
        ax.margins(0.1, 0.14)
        return handles

    known = passes[passes[X].notna() & passes[Y].notna()]
    form = Form(
        held=HELD, places=["B", "series"], show=show, draw=draw_panel, axes={"height": 3.1},
        labels=("mean TPOT (ms)", "decoding (tokens/s)"),
        caption=(
            "Each mark is one run; up and to the left is better. A run is on the front if no other "
            "run of its kind has both more tokens/s and a shorter TPOT. Numbers are the batch "
            "sizes on the fronts. The autoregressive marks are the baselines in the same runs. "
            "Upright lines are 95 % intervals over batches",
        ),
    )  # fmt: skip
    known = known[known["run"].isin(known.loc[known["is_run"].astype(bool), "run"])]
    heading = "Throughput against time per output token"
    return form.of("throughput_tpot", heading, known, NO_PLACE)


def draw_marks(
    ax: Axes, table: pd.DataFrame, looks: Looks, x: str, y: str, scale: float = 1.0
) -> dict[str, Any]:
    """A mark for each pass of a series that is drawn. Returns the handles of the legend."""
    return {
        name: ax.scatter(
            of[x].astype(float) / scale, of[y].astype(float) / scale, s=28, marker=style.marker,
            edgecolors=style.colour, facecolors=style.colour if style.is_filled else "none",
        )
        for name, of, style in each_series(table, looks)
    }  # fmt: skip


def pareto(frame: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The rows that no other one beats by both a smaller `x` and a larger `y`, by rising `x`."""
    values = frame[[x, y]].astype(float).sort_values([x, y], ascending=[True, False])
    best_before = values[y].cummax().shift(fill_value=float("-inf"))
    return frame.loc[values.index[values[y] > best_before]]


def name_batches(ax: Axes, front: pd.DataFrame, is_below: bool) -> None:
    """Write the batch size beside each mark of a front where it differs from the last one."""
    changed = front[front["B"] != front["B"].shift()]
    for x, y, B in changed[[X, Y, "B"]].itertuples(index=False):
        ax.annotate(
            f"B {B}", (x, y), (4, -10) if is_below else (-4, 5), textcoords="offset points",
            ha="left" if is_below else "right", fontsize=7, color=GREY if is_below else "black",
        )  # fmt: skip


def draw_pareto(passes: pd.DataFrame) -> Drawn | LeftOut:
    """Of the passes of runs, and of those that served requests in flight."""

    def show(of: pd.DataFrame) -> pd.DataFrame:
        on_front = of.index.isin(pareto(of, X, Y).index)
        table = of.assign(**{REQUEST: 1e3 / of[X].astype(float)}, on_front=on_front)
        return table[["series", "run", "B", REQUEST, Y, "on_front"]]

    def draw_panel(ax: Axes, table: pd.DataFrame, looks: Looks) -> dict[str, Any]:
        handles = draw_marks(ax, table, looks, REQUEST, Y)
        front = table[table["on_front"]].sort_values(REQUEST)
        line = ax.plot(front[REQUEST], front[Y], "-", color="black", linewidth=1, zorder=1)
        ax.margins(0.08)
        ax.set(xlim=(0, None), ylim=(0, None))
        return handles | {"Pareto front": line[0]}

    served = passes.get("output_throughput", pd.Series(dtype=object))
    known = passes.assign(**{Y: passes[Y].combine_first(served)})
    form = Form(
        held=("model", "dtype", "device"), places=["series"], show=show, draw=draw_panel,
        labels=("one request (tokens/s)", "all rows (tokens/s)"), axes={"height": 3.4},
        caption=(
            "Each mark is one pass; up and to the right is better. One request decodes at 1 / "
            "TPOT. All rows together count decode steps in a run; where requests were served in "
            "flight, they count the whole time from the first arrival to the last token",
            "Marks of all batch sizes, prefixes, ranks and threads are in one panel",
        ),
        what="combinations of model and machine", most_series=2 * MOST_SERIES,
    )  # fmt: skip
    known = known[known[X].notna() & known[Y].notna()]
    heading = "Tokens/s of all rows against tokens/s of one request"
    return form.of("pareto_front", heading, known, NO_PLACE)
