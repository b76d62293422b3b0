"""A Gantt chart of simulated runs: what the drafter and every stage computed when.

Imports matplotlib only when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magicdec.simulator.simulation import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "draft step": "#9e9e9e",
    "prompt": "#5c6bc0",
    "newest token": "#2e7d32",
    "drafted tokens, needed": "#80c784",
    "drafted tokens, cancelled": "#e57373",
}
EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.4}
MOST_STAGES = 64  # that can be told apart in a chart
ROW_INCHES, WIDTH_INCHES = 0.22, 10.0


def draw(flag: str, path: Path, traces: Mapping[str, Trace], until_s: float | None = None) -> None:
    """Write a PNG with one panel for each trace, up to a time. Raises ValueError, naming the flag,
    if there are too many stages or the file cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = len(next(iter(traces.values())).flights[0].start_s)
    if stages > MOST_STAGES:
        raise ValueError(f"{flag}: {stages} stages are too many to draw; at most {MOST_STAGES}")
    heights = [stages + bool(trace.drafts) + 3 for trace in traces.values()]
    size = (WIDTH_INCHES, ROW_INCHES * sum(heights) + 1)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(traces), 1, squeeze=False, sharex=True, height_ratios=heights)
    for ax, (mode, trace) in zip(panels.flat, traces.items(), strict=True):
        _draw_panel(ax, trace, stages, until_s)
        ax.set_title(mode, loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("time, ms")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None


def _draw_panel(ax: Axes, trace: Trace, stages: int, until_s: float | None) -> None:
    for kind, by_row in _bars(trace, until_s).items():
        for row, spans in by_row.items():
            ax.broken_barh(spans, (row - 0.42, 0.84), facecolor=COLOURS[kind], **EDGE)
    for at, _ in trace.commits:
        if until_s is None or at <= until_s:
            ax.axvline(1e3 * at, color="black", linewidth=0.4, alpha=0.5)
    rows = range(stages + bool(trace.drafts))
    names = [f"stage {stage}" for stage in range(stages)]
    ax.set_yticks(list(rows), [*names, *["draft"] * bool(trace.drafts)], fontsize=7)
    ax.invert_yaxis()
    ax.set_xlim(0, 1e3 * (until_s or trace.end_s))


def _bars(trace: Trace, until_s: float | None) -> dict[str, dict[int, list[Any]]]:
    """(begin, length) in ms of every span, by its kind and its row."""
    found: dict[str, dict[int, list[Any]]] = {kind: {} for kind in COLOURS}

    def add(kind: str, row: int, begin: float, end: float) -> None:
        if end > begin and (until_s is None or begin < until_s):
            found[kind].setdefault(row, []).append((1e3 * begin, 1e3 * (end - begin)))

    for flight in trace.flights:
        spans = zip(flight.start_s, flight.end_s, strict=True)
        for stage, (begin, end) in enumerate(spans):
            add(_kind(flight.launch.run in trace.cancelled, flight), stage, begin, end)
    stages = len(trace.flights[0].start_s)
    for begin, end in trace.drafts:
        add("draft step", stages, begin, end)
    return found


def _kind(is_cancelled: bool, flight: Any) -> str:
    if flight.is_prompt:
        return "prompt"
    if is_cancelled:
        return "drafted tokens, cancelled"
    return "drafted tokens, needed" if flight.launch.is_speculative else "newest token"
