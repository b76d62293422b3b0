"""How steady the machine was while the runs were made."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from magicdec.report.figures.style import Cell, Drawn, LeftOut, look, make_axes, sentences, shown_of
from magicdec.report.panels import group, make_panels
from magicdec.report.point import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, HEADING = "drift", "The machine over time"
MACHINE = ("device", "ranks", "threads")
SAME = ("model", "dtype", "target_dtype", "attention", "B", "prefix_len", "gen_len", *MACHINE)


def draw(points: Sequence[Point]) -> Drawn | LeftOut:
    known = [p for p in points if p.environment.read_bandwidth_bytes_per_s is not None]
    panels = make_panels(known, MACHINE)
    panel = max(panels, key=lambda p: len(p.points), default=None)
    if panel is None or len(panel.points) < 2:
        return LeftOut(NAME, HEADING, "fewer than two runs of one machine have a read bandwidth")
    of = sorted(panel.points, key=lambda p: p.environment.time_utc)
    minutes, relative = minutes_of(of), relative_steps(of)
    reads = [(p.environment.read_bandwidth_bytes_per_s or 0) / 1e9 for p in of]
    rows: list[list[Cell]] = [
        [p.number, p.environment.time_utc, t, b, p.environment.host_load, r]
        for p, t, b, r in zip(of, minutes, reads, relative, strict=True)
    ]
    columns = ("run", "time_utc", "minutes", "read_gb_per_s", "host_load", "relative_step_time")
    caption = sentences(
        "Each mark is one run. On a steady machine both sides are flat: what varies here varies in "
        "every time of this report as well, while speedups compare two passes of one run",
        spread(relative),
        shown_of(len(of), len(known), "runs: those of the most used machine"),
    )
    return Drawn(NAME, HEADING, caption, draw_sides(minutes, reads, relative), columns, rows)


def draw_sides(minutes: list[float], reads: list[float], relative: list[float | None]) -> Figure:
    """The read bandwidth of each run on the left, its relative step time on the right."""
    figure, (left, right) = make_axes(2, height=2.6)
    left.plot(minutes, reads, look(0).marker, color=look(0).colour, markersize=4)
    left.set(ylim=(0, None), ylabel="read bandwidth (GB/s)")
    left.set_title("bandwidth, measured in each run")
    repeated = [(t, r) for t, r in zip(minutes, relative, strict=True) if r is not None]
    x, y, style = [t for t, _ in repeated], [r for _, r in repeated], look(1)
    right.axhline(1, color="black", linewidth=1)
    right.plot(x, y, style.marker, color=style.colour, markersize=4)
    right.set_ylabel("step time / median of its settings")
    right.set_title("autoregressive step, where repeated")
    if not repeated:
        right.text(0.5, 0.5, "no settings were repeated", transform=right.transAxes, ha="center")
    for ax in (left, right):
        ax.set_xlabel("minutes after the first run")
    return figure


def minutes_of(points: Sequence[Point]) -> list[float]:
    """The start of each run, in minutes after the first."""
    starts = [datetime.datetime.fromisoformat(p.environment.time_utc) for p in points]
    return [(start - starts[0]).total_seconds() / 60 for start in starts]


def relative_steps(points: Sequence[Point]) -> list[float | None]:
    """The time of the autoregressive step over the median of its settings; None where the settings
    were not repeated."""
    passes = [point.autoregressive for point in points]
    times = [None if metrics is None else metrics.mean_step_ms for metrics in passes]
    keys = [tuple(p.settings[name] for name in SAME) for p in points]
    pairs = [(key, ms) for key, ms in zip(keys, times, strict=True) if ms is not None]
    groups = {key: [ms for _, ms in of] for key, of in group(pairs, lambda pair: pair[0]).items()}
    return [
        None if ms is None or len(groups[key]) < 2 else ms / statistics.median(groups[key])
        for key, ms in zip(keys, times, strict=True)
    ]


def spread(relative: Sequence[float | None]) -> str:
    known = sorted(value for value in relative if value is not None)
    if not known:
        return ""
    return f"Repeated autoregressive steps took {known[0]:.2f} to {known[-1]:.2f} of their median"
