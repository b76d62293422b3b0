"""Speedup over batch size and prefix length, with the break-even line of `magicdec plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from magicdec.report.figures.style import (
    WIDTH,
    Cell,
    Drawn,
    LeftOut,
    plain_ticks,
    sentences,
    shown_of,
)
from magicdec.report.panels import Panel, common, group, make_panels, richest, title, varying
from magicdec.report.point import Point
from magicdec.report.prediction import NotPredicted, Predictor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, HEADING = "speedup_map", "Speedup over batch size and prefix length"
HELD = ("model", "draft_model", "drafter", "kv_policy", "dtype", "dataset", "ranks", "device")
KINDS = {"speedup": "decode steps", "net_speedup": "net, from the end of prefill"}
MOST_PANELS = 3
BreakEvens = dict[int, int | None] | str
"""The predicted break-even context by batch size, or why there is none."""


@dataclass(frozen=True)
class Best:
    """The best of the runs at one place of the map."""

    speedup: float
    net_speedup: float
    gamma: Cell
    budget: Cell
    runs: int


def draw(points: Sequence[Point], predictor: Predictor) -> Drawn | LeftOut:
    known = [p for p in points if p.metrics and p.metrics.speedup and p.metrics.net_speedup]
    panels = [p for p in make_panels(known, HELD) if len(set(map(place, p.points))) > 1]
    if not panels:
        reason = "no method was measured at two batch sizes or two prefix lengths"
        return LeftOut(NAME, HEADING, reason)
    kept = richest(panels, place, MOST_PANELS)
    contexts = [break_evens(panel, predictor) for panel in kept]
    rows = [row for pair in zip(kept, contexts, strict=True) for row in rows_of(*pair)]
    columns = (*HELD, "B", "prefix_len", "gamma", "budget", "speedup", "net_speedup", "runs",
               "predicted_break_even_prefix_len")  # fmt: skip
    caption = sentences(
        "Of each batch size and prefix length the best budget and gamma (K and g in the cells). "
        "Above 1 speculation is faster than autoregressive decoding of the same prompts. The left "
        "side counts decode steps alone; the net speedup counts all time after prefill",
        f"Everywhere: {common(kept)}" if common(kept) else "",
        line_caption([found if isinstance(found, str) else "" for found in contexts]),
        shown_of(len(kept), len(panels), "methods"),
    )
    return Drawn(NAME, HEADING, caption, draw_panels(kept, contexts), columns, rows)


def rows_of(panel: Panel, contexts: BreakEvens) -> list[list[Cell]]:
    lines = contexts if isinstance(contexts, dict) else {}
    return [
        [*panel.held.values(), B, S, c.gamma, c.budget, c.speedup, c.net_speedup, c.runs,
         lines.get(B)]
        for (B, S), c in sorted(best_by_place(panel).items())
    ]  # fmt: skip


def draw_panels(panels: list[Panel], contexts: list[BreakEvens]) -> Figure:
    """A row of two maps for each panel, with a colour bar."""
    from matplotlib.figure import Figure

    sizes = [len({point.settings["prefix_len"] for point in panel.points}) for panel in panels]
    heights = [1.45 + 0.45 * size for size in sizes]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    ratios = {"height_ratios": heights}
    grid = figure.subplots(len(panels), 2, squeeze=False, gridspec_kw=ratios)
    span = extent(panels)
    for panel, line, axes in zip(panels, contexts, grid, strict=True):
        image = draw_maps(list(axes), panel, line, span, title(panel, varying(panels)))
        bar = figure.colorbar(image, ax=list(axes), label="speedup (x)", shrink=0.9, pad=0.02)
        assert bar.solids is not None, "the maps have colours"
        bar.solids.set_rasterized(True)  # viewers of SVG show seams between its colours
        plain_ticks(bar.ax.yaxis, [round(math.exp(span * at), 2) for at in (-1, -0.5, 0, 0.5, 1)])
    return figure


def draw_maps(axes: list[Axes], panel: Panel, line: BreakEvens, span: float, head: str) -> Any:
    """The map of steps, with the plan's line, which is of decode steps, and the map of net
    speedups. Returns what a colour bar describes."""
    cells = best_by_place(panel)
    for ax, (kind, label) in zip(axes, KINDS.items(), strict=True):
        image = draw_map(ax, cells, kind, span)
        if kind == "speedup" and not isinstance(line, str):
            draw_line(ax, cells, line)
        # The name of the panel stands above both maps, so that it has room.
        ax.set_title(f"{head}\n{label}" if head and kind == "speedup" else label)
    return image


def line_caption(problems: list[str]) -> str:
    drawn = "The dashed line is the shortest prefix from which magicdec plan predicts that steps "
    drawn += "pay; an arrow means that it lies beyond the map"
    without = sorted(set(filter(None, problems)))
    missing = f"Its break-even line is left out: {'; '.join(without)}" if without else ""
    return missing if all(problems) else sentences(drawn, missing)


def place(point: Point) -> tuple[int, int]:
    return int(point.settings["B"] or 0), int(point.settings["prefix_len"] or 0)


def best_by_place(panel: Panel) -> dict[tuple[int, int], Best]:
    """The run with the fastest steps at each place of the map."""
    found = {}
    for at, of in group(panel.points, place).items():
        best = max(of, key=lambda p: _speedups(p)[0])
        steps, net = _speedups(best)
        gamma, budget = best.settings["gamma"], best.settings["budget"]
        found[at] = Best(steps, net, gamma, budget, len(of))
    return found


def _speedups(point: Point) -> tuple[float, float]:
    m = point.metrics
    assert m is not None and m.speedup is not None and m.net_speedup is not None
    return m.speedup, m.net_speedup


def extent(panels: Sequence[Panel]) -> float:
    """The largest distance from 1 of any speedup that is shown, on a log scale."""
    cells = [cell for panel in panels for cell in best_by_place(panel).values()]
    logs = [abs(math.log(s)) for c in cells for s in (c.speedup, c.net_speedup)]
    return max(math.log(1.1), *logs)


def draw_map(ax: Axes, cells: dict[tuple[int, int], Best], kind: str, span: float) -> Any:
    import numpy as np
    from matplotlib.colors import LogNorm

    batches, prefixes = axis_values(cells)
    small = 7 if len(batches) < 4 else 5  # the text of a cell must fit into it
    shades = np.full((len(prefixes), len(batches)), np.nan)
    for (B, S), cell in cells.items():
        shades[prefixes.index(S), batches.index(B)] = getattr(cell, kind)
    norm = LogNorm(math.exp(-span), math.exp(span))
    image = ax.pcolormesh(shades, cmap="PuOr_r", norm=norm, edgecolors="white", linewidth=1)
    for (B, S), cell in cells.items():
        value = getattr(cell, kind)
        is_dark = abs(math.log(value)) > 0.62 * span
        of = f"g {cell.gamma}" + ("" if cell.budget is None else f", K {cell.budget}")
        at = batches.index(B) + 0.5, prefixes.index(S) + 0.5
        colour = "white" if is_dark else "black"
        ax.text(*at, f"{value:.2f}x", ha="center", va="bottom", color=colour, weight="bold")
        ax.text(*at, of, ha="center", va="top", color=colour, fontsize=small)
    ax.set_xticks([i + 0.5 for i in range(len(batches))], [str(B) for B in batches])
    ax.set_yticks([i + 0.5 for i in range(len(prefixes))], [f"{S:,}" for S in prefixes])
    ax.set(xlabel="batch size (sequences)", ylabel="prefix length (tokens)")
    ax.grid(False)
    ax.set_facecolor("#f2f2f2")
    return image


def axis_values(cells: dict[tuple[int, int], Best]) -> tuple[list[int], list[int]]:
    return sorted({B for B, _ in cells}), sorted({S for _, S in cells})


def break_evens(panel: Panel, predictor: Predictor) -> BreakEvens:
    """The break-even context by batch size, or why there is none."""
    try:
        fixed = [p for p in panel.points if p.settings["gamma"] != "auto"] or panel.points
        batches = sorted({place(p)[0] for p in panel.points})
        return {B: predictor.break_even(fixed, B) for B in batches}
    except NotPredicted as error:
        return str(error)


def draw_line(
    ax: Axes, cells: dict[tuple[int, int], Best], contexts: dict[int, int | None]
) -> None:
    """The predicted line through the columns of the map, and an arrow where it leaves it."""
    batches, prefixes = axis_values(cells)
    heights = [position(contexts[B], prefixes) for B in batches]
    edges = [edge for i, _ in enumerate(batches) for edge in (i, i + 1)]
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
    if context <= prefixes[0]:
        return 0.5 if context == prefixes[0] else 0.0
    high = next(i for i, S in enumerate(prefixes) if context <= S)
    low, top = math.log(prefixes[high - 1]), math.log(prefixes[high])
    return high - 0.5 + (math.log(context) - low) / (top - low)
