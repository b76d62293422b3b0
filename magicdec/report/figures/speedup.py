"""Speedup over batch size and prefix length, with the break-even line of `magicdec plan`; and what
the plan predicts against what was measured."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from magicdec.figures import GREY, look
from magicdec.report.figures.panels import (
    WIDTH,
    Drawn,
    LeftOut,
    caption_of,
    in_words,
    legend_below,
    make_axes,
    plain_ticks,
    richest,
    sentences,
    varying,
)
from magicdec.report.frame import Row, frame_of
from magicdec.report.prediction import NotPredicted, Predictor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NEAR = 0.2  # half the width of the band around equality
HELD = ["model", "draft_model", "drafter", "kv_policy", "dtype", "dataset", "ranks", "device"]
KINDS = {"speedup": "decode steps", "net_speedup": "net, from the end of prefill"}
PLACE = ["B", "prefix_len"]
BreakEvens = dict[int, int | None] | str
"""The predicted break-even context by batch size, or why there is none."""


def draw_speedup(runs: pd.DataFrame, predictor: Predictor) -> Drawn | LeftOut:
    name, heading = "speedup_map", "Speedup over batch size and prefix length"
    known = runs[(runs[[*KINDS]].fillna(0) != 0).all(axis=1)]
    places = known.assign(place=known["B"].astype(str) + " " + known["prefix_len"].astype(str))
    known = known[places.groupby(HELD, dropna=False)["place"].transform("nunique") > 1]
    if known.empty:
        reason = "no method was measured at two batch sizes or two prefix lengths"
        return LeftOut(name, heading, reason)
    panels, total = richest(known, HELD, PLACE, 3)
    for panel in panels:
        panel.table = best_by_place(panel.runs)
    lines = [break_evens(panel.runs, predictor) for panel in panels]
    titles = [in_words(panel.held, varying(panels)) for panel in panels]
    caption = caption_of(
        panels, total, "methods",
        "Of each batch size and prefix length the best budget and gamma (K and g in the cells). "
        "Above 1 speculation is faster than autoregressive decoding of the same prompts. The left "
        "side counts decode steps alone; the net speedup counts all time after prefill",
        line_caption([line if isinstance(line, str) else "" for line in lines]),
    )  # fmt: skip
    figure = draw_panels([panel.table for panel in panels], lines, titles)
    table = frame_of(
        panel.held
        | row
        | {"predicted_break_even_prefix_len": None if isinstance(line, str) else line[row["B"]]}
        for panel, line in zip(panels, lines, strict=True)
        for row in panel.table.to_dict("records")
    )
    return Drawn(name, heading, caption, figure, table)


def best_by_place(runs: pd.DataFrame) -> pd.DataFrame:
    """The run with the fastest steps at each place of the map, and how many runs are there."""
    groups = runs.assign(speedup=runs["speedup"].astype(float)).groupby(PLACE)
    best = runs.loc[groups["speedup"].idxmax()]
    return best[[*PLACE, "gamma", "budget", *KINDS]].assign(runs=groups.size().to_numpy())


def draw_panels(cells: list[pd.DataFrame], lines: list[BreakEvens], titles: list[str]) -> Figure:
    """A row of two maps for each panel, with a colour bar."""
    from matplotlib.figure import Figure

    heights = [1.45 + 0.45 * of["prefix_len"].nunique() for of in cells]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    ratios = {"height_ratios": heights}
    grid = figure.subplots(len(cells), 2, squeeze=False, gridspec_kw=ratios)
    # The largest distance from 1 of any speedup that is shown, on a log scale.
    logs = np.log(pd.concat(cells)[[*KINDS]].astype(float))
    span = max(math.log(1.1), logs.abs().max(axis=None))
    for head, of, line, axes in zip(titles, cells, lines, grid, strict=True):
        for ax, (kind, label) in zip(axes, KINDS.items(), strict=True):
            image = draw_map(ax, of, kind, span)
            # The plan's line is of decode steps. The name of the panel stands above both maps, so
            # that it has room.
            if kind == "speedup" and not isinstance(line, str):
                draw_line(ax, of, line)
            ax.set_title(f"{head}\n{label}" if head and kind == "speedup" else label)
        bar = figure.colorbar(image, ax=list(axes), label="speedup (x)", shrink=0.9, pad=0.02)
        assert bar.solids is not None, "the maps have colours"
        bar.solids.set_rasterized(True)  # viewers of SVG show seams between its colours
        plain_ticks(bar.ax.yaxis, [round(math.exp(span * at), 2) for at in (-1, -0.5, 0, 0.5, 1)])
    return figure


def line_caption(problems: list[str]) -> str:
    drawn = "The dashed line is the shortest prefix from which magicdec plan predicts that steps "
    drawn += "pay; an arrow means that it lies beyond the map"
    without = sorted(set(filter(None, problems)))
    missing = f"Its break-even line is left out: {'; '.join(without)}" if without else ""
    return missing if all(problems) else sentences(drawn, missing)


def draw_map(ax: Axes, cells: pd.DataFrame, kind: str, span: float) -> Any:
    """The map of one kind of speedup. Returns what a colour bar describes."""
    from matplotlib.colors import LogNorm

    shades = cells.pivot(index="prefix_len", columns="B", values=kind).astype(float)
    small = 7 if len(shades.columns) < 4 else 5  # the text of a cell must fit into it
    norm = LogNorm(math.exp(-span), math.exp(span))
    image = ax.pcolormesh(shades.to_numpy(), cmap="PuOr_r", norm=norm, edgecolors="white",
                          linewidth=1)  # fmt: skip
    for cell in cells.to_dict("records"):
        x, y = shades.columns.get_loc(cell["B"]), shades.index.get_loc(cell["prefix_len"])
        of = f"g {cell['gamma']}" + ("" if cell["budget"] is None else f", K {cell['budget']}")
        colour = "white" if abs(math.log(cell[kind])) > 0.62 * span else "black"
        more: dict[str, Any] = {"ha": "center", "color": colour}
        ax.text(x + 0.5, y + 0.5, f"{cell[kind]:.2f}x", va="bottom", weight="bold", **more)
        ax.text(x + 0.5, y + 0.5, of, va="top", fontsize=small, **more)
    ax.set_xticks([i + 0.5 for i, _ in enumerate(shades.columns)], [str(B) for B in shades])
    ax.set_yticks([i + 0.5 for i, _ in enumerate(shades.index)], [f"{S:,}" for S in shades.index])
    ax.set(xlabel="batch size (sequences)", ylabel="prefix length (tokens)")
    ax.grid(False)
    ax.set_facecolor("#f2f2f2")
    return image


def break_evens(runs: pd.DataFrame, predictor: Predictor) -> BreakEvens:
    """The break-even context by batch size, or why there is none."""
    fixed = runs[runs["gamma"] != "auto"]
    latest = (runs if fixed.empty else fixed).drop_duplicates(["budget", "gamma"], keep="last")
    rows = latest.to_dict("records")
    try:
        return {B: predictor.break_even(rows, B) for B in runs["B"].unique()}
    except NotPredicted as error:
        return str(error)


def draw_line(ax: Axes, cells: pd.DataFrame, contexts: dict[int, int | None]) -> None:
    """The predicted line through the columns of the map, and an arrow where it leaves it."""
    prefixes = sorted(cells["prefix_len"].unique())
    heights = [position(contexts[B], prefixes) for B in sorted(cells["B"].unique())]
    edges = [edge for i, _ in enumerate(heights) for edge in (i, i + 1)]
    ax.plot(edges, [h for h in heights for _ in (0, 1)], color="black", linestyle="--", zorder=5)
    for i, height in enumerate(heights):
        if height in (0, len(prefixes)):
            up = height > 0
            y = height - 0.06 if up else 0.06
            ax.plot(i + 0.12, y, marker="^" if up else "v", color="black", zorder=6)


def position(context: int | None, prefixes: list[int]) -> float:
    """Where a context lies on the axis of the map: at the middle of the cell of its prefix, and in
    between on a log scale. Beyond the map it is at its edge."""
    if context is None or context > prefixes[-1]:
        return float(len(prefixes))
    if context < prefixes[0]:
        return 0.0
    middles = [0.5 + i for i, _ in enumerate(prefixes)]
    return float(np.interp(math.log(context), np.log(prefixes), middles))


def draw_predicted(runs: pd.DataFrame, predictor: Predictor) -> Drawn | LeftOut:
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
    return Drawn(name, heading, caption, draw_predictions(pairs), table)


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


def draw_predictions(pairs: pd.DataFrame) -> Figure:
    """The times of the steps on the left, the speedups on the right."""
    figure, (left, right) = make_axes(2, height=3.5)
    left.set(xscale="log", yscale="log", xlabel="predicted (ms)", ylabel="measured (ms)",
             title="time of a step")  # fmt: skip
    title = "speedup of decode steps"
    right.set(xlabel="predicted (x)", ylabel="measured (x)", title=title)
    handles: dict[str, Any] = {}
    for index, (quantity, of) in enumerate(pairs.groupby("quantity", sort=False)):
        is_speedup, style = quantity == "speedup", look(index)
        ax, label = (right, title) if is_speedup else (left, str(quantity))
        spans = of.dropna(subset=["low", "high"])
        ax.vlines(spans["predicted"], spans["low"].astype(float), spans["high"].astype(float),
                  color=style.colour, linewidth=0.8, alpha=0.6)  # fmt: skip
        handles[label] = ax.scatter(of["predicted"], of["measured"], color=style.colour,
                                    marker=style.marker, s=22, alpha=0.8)  # fmt: skip
    is_step = pairs["quantity"] != "speedup"
    for ax, of in ((left, pairs[is_step]), (right, pairs[~is_step])):
        handles |= draw_equality(ax, of[["predicted", "measured"]])
    plain_ticks(left.xaxis)
    plain_ticks(left.yaxis)
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
