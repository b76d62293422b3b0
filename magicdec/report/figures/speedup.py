"""Speedup over batch size and prefix length; and what the plan predicts against what was
measured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from magicdec.figures import GREY
from magicdec.hardware.ceiling_file import MachineFile
from magicdec.report.figures.panels import Drawn, Form, LeftOut, Series, draw_marks, plain_ticks
from magicdec.report.frame import Row, frame_of
from magicdec.report.prediction import NotPredicted, predict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEAR = 0.2  # half the width of the band around equality
HELD = ["model", "draft_model", "drafter", "kv_policy", "dtype", "dataset", "ranks", "device"]
KINDS = ["speedup", "net_speedup"]
PLACE = ["B", "prefix_len"]
MOST = 4.0  # speedup with the darkest colour; 1 / MOST has the darkest of the other side
DARK = 2.5  # from this speedup on, or from 1 / DARK, text is white
STEP, SPEEDUP = "time of a step (ms)", "speedup of decode steps (x)"


def draw_speedup(runs: pd.DataFrame) -> Drawn | LeftOut:
    """A map of the speedups of each method."""
    form = Form(
        name="speedup_map", title="Speedup over batch size and prefix length",
        reason="no method was measured at two batch sizes or two prefix lengths",
        held=HELD, places=PLACE, show=best_by_place, draw=draw_map,
        labels=("batch size (sequences)", "prefix length (tokens)"), series="", what="methods",
        caption=(
            "Of each batch size and prefix length the best budget and gamma (K and g in the "
            "cells). Above 1 speculation is faster than autoregressive decoding of the same "
            "prompts. The colour and the first number are of decode steps alone; the net speedup "
            "counts all time after prefill",
        ),
        axes={"height": 3.2},
    )  # fmt: skip
    kinds = runs[(runs[KINDS].fillna(0) != 0).all(axis=1)]
    places = kinds.assign(place=kinds["B"].astype(str) + " " + kinds["prefix_len"].astype(str))
    num_places = places.groupby(HELD, dropna=False)["place"].transform("nunique")
    return form.of(kinds[num_places > 1])


def best_by_place(runs: pd.DataFrame) -> pd.DataFrame:
    """The run with the fastest steps at each place of the map, and how many runs are there."""
    groups = runs.assign(speedup=runs["speedup"].astype(float)).groupby(PLACE)
    best = runs.loc[groups["speedup"].idxmax(), [*PLACE, "gamma", "budget", *KINDS]]
    return best.assign(runs=groups.size().to_numpy())


def draw_map(ax: Axes, cells: pd.DataFrame, _: Series) -> dict[str, Any]:
    """The map of one method, with its colour bar."""
    from matplotlib.colors import LogNorm

    shades = cells.pivot(index="prefix_len", columns="B", values="speedup").astype(float)
    image = ax.pcolormesh(shades.to_numpy(), cmap="PuOr_r", norm=LogNorm(1 / MOST, MOST),
                          edgecolors="white", linewidth=1)  # fmt: skip
    for cell in cells.to_dict("records"):
        x, y = shades.columns.get_loc(cell["B"]), shades.index.get_loc(cell["prefix_len"])
        is_dark = not 1 / DARK < cell["speedup"] < DARK
        more: dict[str, Any] = {"ha": "center", "color": "white" if is_dark else "black"}
        about = f"net {cell['net_speedup']:.2f}x\ng {cell['gamma']}"
        about += "" if cell["budget"] is None else f", K {cell['budget']}"
        ax.text(x + 0.5, y + 0.55, f"{cell['speedup']:.2f}x", va="bottom", weight="bold", **more)
        ax.text(x + 0.5, y + 0.5, about, va="top", fontsize=6, **more)
    ax.set_xticks(0.5 + np.arange(len(shades.columns)), list(map(str, shades.columns)))
    ax.set_yticks(0.5 + np.arange(len(shades.index)), [f"{S:,}" for S in shades.index])
    ax.grid(False)
    ax.set_facecolor("#f2f2f2")
    bar = ax.figure.colorbar(image, ax=ax, label="speedup (x)", shrink=0.9, extend="both")
    assert bar.solids is not None, "the map has colours"
    bar.solids.set_rasterized(True)  # viewers of SVG show seams between its colours
    plain_ticks(bar.ax.yaxis, [1 / MOST, 0.5, 1, 2, MOST])
    return {}


def draw_predicted(runs: pd.DataFrame, machine: MachineFile | None) -> Drawn | LeftOut:
    """Predicted against measured times of steps and speedups."""
    rows: list[Row] = []
    problems: Counter[str] = Counter()
    for run in runs[runs["speedup"].notna()].to_dict("records"):
        try:
            rows += compare(run, machine)
        except NotPredicted as error:
            problems[str(error)] += 1
    pairs = frame_of(rows)
    notes = [f"{count} run{'s' * (count > 1)}: {reason}" for reason, count in problems.items()]
    caption = [
        "Predicted from the shape of the model, the ceilings of the machine and the acceptance of "
        "the run. Above the line, a step took longer, or the speedup was larger, than predicted"
    ]
    if rows:
        errors = (pairs["measured"].rdiv(pairs["predicted"]) - 1).astype(float).abs()
        medians = errors.groupby(pairs["quantity"], sort=False).median()
        each = ", ".join(f"{quantity} {error:.0%}" for quantity, error in medians.items())
        caption.append(f"Median error: {each}")
    form = Form(
        name="predicted_measured", title="Predicted against measured",
        reason=problems.most_common(1)[0][0] if problems else "no run has a speedup",
        held=["kind"], places=["run"], series="quantity", draw=draw_predictions,
        labels=("predicted", "measured"), axes={"height": 3.5},
        caption=[*caption, f"Not predicted: {'; '.join(notes)}" if notes else ""],
    )  # fmt: skip
    return form.of(pairs)


def compare(run: Row, machine: MachineFile | None) -> list[Row]:
    """The predicted and the measured times and speedup of one run. Raises NotPredicted."""
    p = predict(machine, run)
    times = {
        "autoregressive step": (p.decode_s, run["autoregressive_step_ms"]),
        "drafting of a step": (p.draft_s, run["draft_ms"]),
        "verification of a step": (p.verify_s, run["verify_ms"]),
    }
    head = {"kind": STEP, "run": run["run"], "method": run["method"]}
    rows = [
        head | {"quantity": quantity, "predicted": 1e3 * seconds, "measured": ms}
        for quantity, (seconds, ms) in times.items()
        if seconds and ms
    ]
    ends = {f"measured_interval_{end}": run[f"speedup_interval_{end}"] for end in ("low", "high")}
    speedup = {"quantity": "speedup", "predicted": p.speedup, "measured": run["speedup"]}
    return [*rows, head | {"kind": SPEEDUP} | speedup | ends]


def draw_predictions(ax: Axes, pairs: pd.DataFrame, series: Series) -> dict[str, Any]:
    """The marks, and the line on which both are equal with the band around it, over the range of
    the data."""
    handles = draw_marks(ax, series, "predicted", "measured")
    values = pairs[["predicted", "measured"]].astype(float)
    ends = np.array([values.min(axis=None) / 1.15, values.max(axis=None) * 1.15])
    (line,) = ax.plot(ends, ends, color="black", linewidth=1, zorder=1)
    band = ax.fill_between(ends, ends * (1 - NEAR), ends * (1 + NEAR), color=GREY, alpha=0.15,
                           linewidth=0)  # fmt: skip
    if pairs["kind"].iloc[0] == STEP:
        ax.set(xscale="log", yscale="log")
        plain_ticks(ax.xaxis)
        plain_ticks(ax.yaxis)
    ax.set(xlim=ends, ylim=ends)
    return handles | {"equal": line, "within 20 %": band}
