"""Achieved bandwidth against the memory roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from magicdec.names import BASELINE
from magicdec.report.figures.style import (
    GREY,
    Cell,
    Drawn,
    LeftOut,
    legend_below,
    make_axes,
    put_title,
    sentences,
    shown_of,
)
from magicdec.report.figures.throughput import looks_of, series
from magicdec.report.panels import Panel, common, group, make_panels, richest, title, varying
from magicdec.report.point import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, HEADING = "bandwidth", "Achieved bandwidth against the memory roofline"
HELD = ("model", "dtype", "target_dtype", "device", "ranks", "threads")
COLUMNS = (*HELD, "series", "run", "bytes_per_step", "achieved_bytes_per_s",
           "measured_bytes_per_s")  # fmt: skip
MOST_PANELS = 4
GB = 1e9
Place = tuple[Point, float, float]  # bytes of a step, bytes/s


def draw(points: Sequence[Point]) -> Drawn | LeftOut:
    known = [p for p in points if places(p)]
    if not known:
        reason = "no run measured the bandwidth that this machine reads with and its own steps"
        return LeftOut(NAME, HEADING, reason)
    panels = make_panels(known, HELD)
    kept = richest(panels, series, MOST_PANELS)
    rows: list[list[Cell]] = [
        [*panel.held.values(), name, p.number, size, rate, roof(p)]
        for panel in kept
        for name, of in by_series(panel).items()
        for p, size, rate in of
    ]
    caption = sentences(
        "Bytes that the steps of a run must read at least (weights and the visible KV cache) over "
        "the time of the steps. The line is the bandwidth measured in the runs themselves: all "
        "ranks together reading memory. What lies far below it is bound by something else; marks "
        "above it read partly from caches",
        f"Everywhere: {common(kept)}" if common(kept) else "",
        shown_of(len(kept), len(panels), "combinations of model and machine"),
    )
    return Drawn(NAME, HEADING, caption, draw_panels(kept), COLUMNS, rows)


def by_series(panel: Panel) -> dict[str, list[Place]]:
    items = [item for point in panel.points for item in places(point).items()]
    groups = group(items, lambda item: item[0])
    return {name: [place for _, place in of] for name, of in groups.items()}


def draw_panels(panels: list[Panel]) -> Figure:
    looks, _ = looks_of(panels)
    figure, axes = make_axes(len(panels), height=3.2)
    handles: dict[str, object] = {}
    for panel, ax in zip(panels, axes, strict=True):
        for name, of in by_series(panel).items():
            x, y = [size / GB for _, size, _ in of], [rate / GB for _, _, rate in of]
            if name == BASELINE:
                handles[name] = ax.scatter(x, y, facecolors="none", edgecolors=GREY, s=28)
            elif name in looks:
                style = looks[name]
                handles[name] = ax.scatter(x, y, color=style.colour, marker=style.marker, s=28)
        handles |= draw_roof(ax, sorted({roof(p) / GB for p in panel.points}))
        ax.set(xscale="log", ylim=(0, None), xlabel="bytes that a step must read (GB)")
        ax.set_ylabel("achieved (GB/s)")
        put_title(ax, title(panel, varying(panels)))
        label_sizes(ax.xaxis)
    legend_below(figure, list(handles.values()), list(handles))
    return figure


def draw_roof(ax: Axes, roofs: list[float]) -> dict[str, object]:
    """The median of the measured read bandwidths, sorted here, and their range."""
    middle = roofs[len(roofs) // 2]
    line = ax.axhline(middle, color="black", linewidth=1.4)
    handles: dict[str, object] = {"measured read bandwidth (median)": line}
    if len(roofs) > 1:
        span = ax.axhspan(roofs[0], roofs[-1], color="#bbbbbb", alpha=0.4, linewidth=0)
        handles["its range over the runs"] = span
    return handles


def label_sizes(axis: object) -> None:
    """Plain numbers on a log axis, also where it spans less than a decade."""
    from matplotlib.axis import Axis
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    assert isinstance(axis, Axis)
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def roof(point: Point) -> float:
    assert point.environment.read_bandwidth_bytes_per_s is not None
    return point.environment.read_bandwidth_bytes_per_s


def places(point: Point) -> dict[str, Place]:
    """Bytes of a step and achieved bytes/s of each pass of a run, by series."""
    bandwidth = point.environment.read_bandwidth_bytes_per_s
    passes = {series(point): point.metrics, BASELINE: point.autoregressive}
    found = {}
    for name, m in passes.items():
        if m and bandwidth and m.roofline_fraction and m.mean_step_ms:
            rate = m.roofline_fraction * bandwidth
            found[name] = (point, rate * m.mean_step_ms / 1e3, rate)
    return found
