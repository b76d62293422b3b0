"""Throughput against TPOT, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from magicdec.names import BASELINE
from magicdec.records.performance import Metrics
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
from magicdec.report.panels import (
    Panel,
    choose,
    common,
    group,
    make_panels,
    richest,
    title,
    varying,
)
from magicdec.report.point import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, HEADING = "throughput_tpot", "Throughput against time per output token"
HELD = ("model", "dtype", "dataset", "device", "ranks", "threads", "prefix_len")
COLUMNS = (*HELD, "series", "run", "B", "gamma", "mean_tpot_ms", "decode_tokens_per_s", "on_front")
MOST_PANELS = 4
Place = tuple[float, float, Point]  # mean TPOT in ms, tokens/s


def draw(points: Sequence[Point]) -> Drawn | LeftOut:
    known = [p for p in points if _place(p, p.metrics) is not None]
    if not known:
        return LeftOut(NAME, HEADING, "no run has both a throughput and a TPOT")
    panels = make_panels(known, HELD)
    kept = richest(panels, lambda p: (p.settings["B"], series(p)), MOST_PANELS)
    looks, names = looks_of(kept)
    rows = [row for panel in kept for row in rows_of(panel)]
    caption = sentences(
        "Each mark is one run; up and to the left is better. A run is on the front if no other run "
        "of its kind has both more tokens/s and a shorter TPOT. Numbers are the batch sizes on the "
        "fronts. The autoregressive marks are the baselines in the same runs. Upright lines are "
        "95 % intervals over batches",
        f"Everywhere: {common(kept)}" if common(kept) else "",
        shown_of(len(kept), len(panels), "combinations of settings"),
        shown_of(len(looks), len(names), "ways to draft; all are on the front"),
    )
    return Drawn(NAME, HEADING, caption, draw_panels(kept, looks), COLUMNS, rows)


def places_of(panel: Panel) -> tuple[list[Place], list[Place]]:
    """The places of the baselines, and those of the runs that draft."""
    theirs = [f for p in panel.points if (f := _place(p, p.autoregressive))]
    ours = [f for p in panel.points if not p.is_baseline and (f := _place(p, p.metrics))]
    return theirs, ours


def rows_of(panel: Panel) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for label, places in zip((BASELINE, ""), places_of(panel), strict=True):
        on_front = {id(place) for place in pareto(places)}
        rows += [
            [*panel.held.values(), label or series(p), p.number, p.settings["B"],
             None if label else p.settings["gamma"], x, y, id(place) in on_front]
            for place in places
            for x, y, p in [place]
        ]  # fmt: skip
    return rows


def draw_panels(panels: list[Panel], looks: dict[str, Look]) -> Figure:
    figure, axes = make_axes(len(panels), height=3.1)
    handles: dict[str, object] = {}
    for panel, ax in zip(panels, axes, strict=True):
        theirs, ours = places_of(panel)
        if theirs:
            x, y = [p[0] for p in theirs], [p[1] for p in theirs]
            handles[BASELINE] = ax.scatter(x, y, facecolors="none", edgecolors=GREY, s=28)
        for name, of in group(ours, lambda found: series(found[2])).items():
            if name in looks:
                handles[name] = draw_marks(ax, of, looks[name])
        handles |= draw_fronts(ax, theirs, ours)
        ax.set(xlabel="mean TPOT (ms)", ylabel="decoding (tokens/s)")
        put_title(ax, title(panel, varying(panels)))
        ax.margins(0.1, 0.14)
    legend_below(figure, list(handles.values()), list(handles))
    return figure


def draw_marks(ax: Axes, places: list[Place], style: Look) -> object:
    """A mark for each run, with its interval. Returns the handle for a legend."""
    x, y = [p[0] for p in places], [p[1] for p in places]
    handle = ax.scatter(x, y, color=style.colour, marker=style.marker, s=28)
    spans = [
        (at, *m.decode_tokens_per_s_interval)
        for at, _, point in places
        if (m := point.metrics) and m.decode_tokens_per_s_interval
    ]
    if spans:
        at, low, high = zip(*spans, strict=True)
        ax.vlines(at, low, high, color=style.colour, linewidth=0.8)
    return handle


def draw_fronts(ax: Axes, theirs: list[Place], ours: list[Place]) -> dict[str, object]:
    handles: dict[str, object] = {}
    for label, places, line, colour in (
        ("Pareto front, autoregressive", theirs, ":", GREY),
        ("Pareto front, speculative", ours, "-", "black"),
    ):
        front = pareto(places)
        if front:
            x, y = [p[0] for p in front], [p[1] for p in front]
            (handles[label],) = ax.plot(x, y, line, color=colour, linewidth=1, zorder=1)
            name_batches(ax, front, is_below=colour == GREY)
    return handles


def looks_of(panels: Sequence[Panel]) -> tuple[dict[str, Look], set[str]]:
    """The look of each series that is drawn, and the names of all."""
    inside = [[name for name in p.series(series) if name != BASELINE] for p in panels]
    chosen = sorted(choose(inside, MOST_SERIES - 1))
    return {name: look(i) for i, name in enumerate(chosen)}, set(chain.from_iterable(inside))


def series(point: Point) -> str:
    """How a run drafts, without budget and gamma."""
    if point.is_baseline:
        return BASELINE
    drafter, policy = point.settings["drafter"], point.settings["kv_policy"]
    return f"{drafter}" if policy is None else f"{drafter}, {policy}"


def _place(point: Point, metrics: Metrics | None) -> Place | None:
    if metrics is None or metrics.mean_tpot_ms is None or metrics.decode_tokens_per_s is None:
        return None
    return metrics.mean_tpot_ms, metrics.decode_tokens_per_s, point


def pareto(places: list[Place]) -> list[Place]:
    """Those that no other one beats in both, by rising TPOT."""
    front: list[Place] = []
    for place in sorted(places, key=lambda p: (p[0], -p[1])):
        if not front or place[1] > front[-1][1]:
            front.append(place)
    return front


def name_batches(ax: Axes, front: list[Place], is_below: bool) -> None:
    """Write the batch size beside each mark of a front where it differs from the last one."""
    before = None
    for x, y, point in front:
        B = point.settings["B"]
        if before != B:
            offset = (4, -10) if is_below else (-4, 5)
            side = "left" if is_below else "right"
            ax.annotate(
                f"B {B}",
                (x, y),
                offset,
                textcoords="offset points",
                ha=side,
                fontsize=7,
                color=GREY if is_below else "black",
            )
        before = B
