"""Speedup over batch size and prefix length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from magicdec.report.figures.panels import Drawn, Form, LeftOut, Series, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HELD = ["model", "draft_model", "drafter", "kv_policy", "dtype", "dataset", "ranks", "device"]
KINDS = ["speedup", "net_speedup"]
PLACE = ["B", "prefix_len"]
MOST = 4.0  # speedup with the darkest colour; 1 / MOST has the darkest of the other side
DARK = 2.5  # from this speedup on, or from 1 / DARK, text is white


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
