"""The phases of a decode step, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magicdec.records.performance import Metrics
from magicdec.report.figures.style import (
    COLOURS,
    WIDTH,
    Cell,
    Drawn,
    LeftOut,
    legend_below,
    sentences,
    shown_of,
)
from magicdec.report.panels import common, group, make_panels, rank, richest, said, varying
from magicdec.report.point import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, HEADING = "step_phases", "Phases of a decode step"
HELD = ("model", "draft_model", "dtype", "dataset", "device", "ranks", "threads")
ALONG = ("drafter", "kv_policy", "budget", "gamma", "B", "prefix_len")
PHASES = {"draft": COLOURS[4], "verify": COLOURS[0], "decode": COLOURS[5], "other": COLOURS[7]}
HATCHES = {"draft": "", "verify": "///", "decode": "...", "other": "xxx"}
MOST_BARS = 24


@dataclass(frozen=True)
class Bar:
    """One step: the mean time of each phase over all steps, in ms."""

    point: Point
    phases: dict[str, float]
    step_ms: float
    baseline_ms: float | None


def draw(points: Sequence[Point]) -> Drawn | LeftOut:
    bars = [bar for p in points if (bar := make_bar(p)) is not None]
    if not bars:
        return LeftOut(NAME, HEADING, "no run timed its phases; on CUDA --benchmark does")
    panels = make_panels([bar.point for bar in bars], HELD)
    (panel,) = richest(panels, settings_of, 1)
    inside = {id(p) for p in panel.points}
    same = group((b for b in bars if id(b.point) in inside), lambda b: settings_of(b.point))
    # The middle one of repeated runs.
    middles = [sorted(of, key=lambda b: b.step_ms)[len(of) // 2] for of in same.values()]
    ordered = sorted(middles, key=lambda b: [rank(b.point.settings[k]) for k in reversed(ALONG)])
    count = min(MOST_BARS, len(ordered))
    kept = [ordered[i * len(ordered) // count] for i in range(count)]
    figure = draw_bars(kept)
    rows: list[list[Cell]] = [
        [*(bar.point.settings[k] for k in (*HELD, *ALONG)), bar.point.number,
         *(bar.phases.get(phase) for phase in PHASES), bar.step_ms, bar.baseline_ms]
        for bar in ordered
    ]  # fmt: skip
    columns = (*HELD, *ALONG, "run", *(f"{p}_ms" for p in PHASES), "step_ms",
               "autoregressive_step_ms")  # fmt: skip
    caption = sentences(
        "Mean time of a step by phase. The black tick is the autoregressive step of the same run: "
        "a step pays if it takes less than its tokens times that. At the right end: tokens of a "
        "step and row, and the speedup of the steps",
        f"Everywhere: {common([panel])}" if common([panel]) else "",
        shown_of(len(kept), len(ordered), "settings, evenly chosen"),
        shown_of(1, len(panels), "combinations of model and machine"),
    )
    return Drawn(NAME, HEADING, caption, figure, columns, rows)


def make_bar(point: Point) -> Bar | None:
    m = point.metrics
    if point.is_baseline or m is None or m.mean_step_ms is None or m.other_ms is None:
        return None
    share = drafting_share(m)
    phases = {
        "draft": share * (m.draft_ms or 0.0),
        "verify": share * (m.verify_ms or 0.0),
        "decode": (1 - share) * (m.decode_ms or 0.0),
        "other": m.other_ms,
    }
    theirs = None if point.baseline is None else point.baseline.mean_step_ms
    return Bar(point, {name: ms for name, ms in phases.items() if ms}, m.mean_step_ms, theirs)


def drafting_share(m: Metrics) -> float:
    """The share of the steps that draft. Each phase's time is a mean over the steps that have it,
    and all of them together make the mean step."""
    assert m.mean_step_ms is not None and m.other_ms is not None
    if m.draft_ms is None or m.verify_ms is None:
        return 0.0
    if m.decode_ms is None:
        return 1.0
    both = m.draft_ms + m.verify_ms
    share = (m.mean_step_ms - m.other_ms - m.decode_ms) / (both - m.decode_ms or 1.0)
    return min(1.0, max(0.0, share))


def draw_bars(bars: Sequence[Bar]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.3 + 0.27 * len(bars)), layout="constrained")
    ax = figure.subplots()
    handles: dict[str, object] = {}
    panels = make_panels([bar.point for bar in bars], ALONG)
    keys = varying(panels) or ["B"]
    for place, bar in enumerate(bars):
        handles |= draw_bar(ax, place, bar)
    names = [name_of(bar.point, keys) for bar in bars]
    ax.set_yticks(range(len(bars)), names)
    ax.invert_yaxis()
    ax.margins(x=0.24, y=0.01)
    ax.set_xlabel("time of a step (ms)")
    ax.grid(axis="y", visible=False)
    order = [name for name in (*PHASES, "autoregressive step") if name in handles]
    legend_below(figure, [handles[name] for name in order], order, columns=5)
    return figure


def draw_bar(ax: Axes, place: int, bar: Bar) -> dict[str, object]:
    """One bar with its tick and what stands beside it. Returns the handles for a legend."""
    handles: dict[str, object] = {}
    left = 0.0
    for phase, ms in bar.phases.items():
        handles[phase] = ax.barh(
            place, ms, left=left, height=0.72, color=PHASES[phase], hatch=HATCHES[phase],
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        left += ms
    if bar.baseline_ms is not None:
        handles["autoregressive step"] = ax.vlines(
            bar.baseline_ms, place - 0.42, place + 0.42, color="black", linewidth=2
        )
    text = beside(bar)
    reach = max(left, bar.baseline_ms or 0.0)
    ax.annotate(text, (reach, place), (5, 0), textcoords="offset points", va="center", size=7)
    return handles


def beside(bar: Bar) -> str:
    m = bar.point.metrics
    assert m is not None
    tokens = m.mean_emitted_tokens
    parts = ["" if tokens is None else f"{tokens:.1f} tokens"]
    parts.append("" if m.speedup is None else f"{m.speedup:.2f}x")
    return ", ".join(filter(None, parts))


def name_of(point: Point, keys: Sequence[str]) -> str:
    names = {"gamma": "g", "budget": "K", "prefix_len": "prefix"}
    found = []
    for key in keys:
        value = point.settings[key]
        if value is None or (key == "drafter" and point.settings["kv_policy"] and value == "self"):
            continue
        found.append(f"{names[key]} {value}" if key in names else said(key, value))
    return ", ".join(text.removeprefix("drafter ") for text in found)


def settings_of(point: Point) -> tuple[object, ...]:
    return tuple(point.settings[key] for key in ALONG)
