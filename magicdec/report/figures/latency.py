"""Distributions of TTFT and TPOT over sequences."""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.names import BASELINE
from magicdec.report.figures.style import (
    GREY,
    MOST_SERIES,
    Cell,
    Drawn,
    LeftOut,
    Look,
    legend_below,
    look,
    make_axes,
    put_title,
    sentences,
    shown_of,
)
from magicdec.report.panels import Panel, choose, common, make_panels, richest, title, varying
from magicdec.report.point import Point

MACHINE = ("model", "draft_model", "dtype", "dataset", "device", "ranks", "threads")
PERCENTS = (5, 25, 50, 75, 90, 95, 99)
MOST_PANELS = 4
Times = dict[str, list[float]]  # by series, in ms


def draw_ttft(points: Sequence[Point]) -> Drawn | LeftOut:
    name, heading = "ttft", "Time to first token"
    known = [p for p in points if p.ttft_ms]
    if not known:
        return LeftOut(name, heading, "no record has the times of its sequences")
    held = MACHINE[:1] + MACHINE[2:]
    panels = make_panels(known, (*held, "prefix_len"))
    kept = richest(panels, lambda p: p.settings["B"], MOST_PANELS)
    found = []
    for panel in kept:
        times: Times = {}
        for point in sorted(panel.points, key=lambda p: int(p.settings["B"] or 0)):
            times.setdefault(f"B {point.settings['B']}", []).extend(point.ttft_ms)
        found.append(times)
    caption = (
        "Share of sequences whose first token came within this time after their batch was "
        "submitted. The prompts of a batch are prefilled one after the other, so that later ones "
        "wait: a batch of B makes B groups of times. Both passes of a run share one prefill"
    )
    drawn = _draw(name, heading, kept, found, "TTFT (ms)")
    drawn.caption = sentences(caption, *_notes(kept, panels))
    return drawn


def draw_tpot(points: Sequence[Point]) -> Drawn | LeftOut:
    name, heading = "tpot", "Time per output token"
    known = [p for p in points if any(p.tpot_ms.values())]
    if not known:
        return LeftOut(name, heading, "no record has the times of its sequences")
    panels = make_panels(known, (*MACHINE, "B", "prefix_len"))
    kept = richest(panels, lambda p: p.method, MOST_PANELS)
    found = []
    for panel in kept:
        times: Times = {BASELINE: []}
        for point in panel.points:
            for of, values in point.tpot_ms.items():
                series = BASELINE if of == BASELINE else point.method
                times.setdefault(series, []).extend(values)
        found.append({series: values for series, values in times.items() if values})
    caption = (
        "Share of sequences whose mean time per token after their first was at most this. The "
        "autoregressive curve is of the baselines in the same runs"
    )
    drawn = _draw(name, heading, kept, found, "TPOT (ms)")
    drawn.caption = sentences(caption, *_notes(kept, panels))
    return drawn


def _notes(kept: Sequence[Panel], panels: Sequence[Panel]) -> list[str]:
    return [
        f"Everywhere: {common(kept)}" if common(kept) else "",
        "The table beside it has the percentiles and the number of sequences",
        shown_of(len(kept), len(panels), "combinations of settings"),
        f"A panel shows at most {MOST_SERIES} curves",
    ]


def _draw(
    name: str, heading: str, kept: Sequence[Panel], found: Sequence[Times], label: str
) -> Drawn:
    """A panel for each of `kept` with a curve for each of its series."""
    ours = choose([[s for s in times if s != BASELINE] for times in found], MOST_SERIES - 1)
    looks = {series: look(index) for index, series in enumerate(ours)}
    looks[BASELINE] = Look(GREY, "", (0, (4, 2)))
    figure, axes = make_axes(len(kept), height=2.7, sharey=True)
    rows: list[list[Cell]] = []
    handles: dict[str, object] = {}
    for panel, times, ax in zip(kept, found, axes, strict=True):
        for series, values in times.items():
            if series in looks:
                style = looks[series]
                curve = ax.ecdf(values, color=style.colour, linestyle=style.line)
                handles[series] = curve
            cuts = _percentiles(values)
            rows.append([*panel.held.values(), series, len(values), *cuts])
        ax.set(xlabel=label, ylim=(0, 1.02))
        ax.margins(x=0.03)
        put_title(ax, title(panel, varying(kept)))
    for ax in axes[::2]:
        ax.set_ylabel("share of sequences")
    order = sorted(handles, key=lambda series: (series != BASELINE, len(series), series))
    legend_below(figure, [handles[series] for series in order], order)
    columns = (*kept[0].held, "series", "sequences", *(f"p{percent}_ms" for percent in PERCENTS))
    return Drawn(name, heading, "", figure, columns, rows)


def _percentiles(values: Sequence[float]) -> list[float]:
    import numpy as np

    return [float(cut) for cut in np.percentile(values, PERCENTS)]
