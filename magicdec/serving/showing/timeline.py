"""The picture of requests over time: when each one waited, was prefilled and decoded, with a panel
for each record. Imports matplotlib only when it draws.

Reads records only. Must not know how requests are served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magicdec.files import save_figure
from magicdec.serving.record import RequestRecord, ServingRecord

WAITING, PREFILL, DECODE = "waiting", "prefill", "decode"
COLOURS = {WAITING: "#cccccc", PREFILL: "#D55E00", DECODE: "#0072B2"}  # Okabe and Ito 2008
Span = tuple[str, float, float]  # the kind, its begin and its length in seconds


def spans_of(request: RequestRecord) -> list[Span]:
    """What happened to a request from its arrival to its end. After a preemption it waits again,
    and its text is prefilled again."""
    spans, left_ms = list[Span](), request.arrival_ms
    ends = [*request.preempted_ms, request.finished_ms]
    for joined, prefilled, end in zip(request.joined_ms, request.prefilled_ms, ends, strict=True):
        ready = min(prefilled, end)
        parts = ((WAITING, left_ms, joined), (PREFILL, joined, ready), (DECODE, ready, end))
        spans += [(kind, a / 1e3, (b - a) / 1e3) for kind, a, b in parts if b > a]
        left_ms = end
    return spans


def draw_timeline(records: Sequence[ServingRecord], path: Path) -> None:
    """Write the picture in the format that the name of `path` says."""
    from matplotlib.figure import Figure

    count = len(records[0].requests)
    height = min(4.0, max(1.4, 0.07 * count + 0.6))
    figure = Figure(figsize=(9, height * len(records) + 0.6), layout="constrained")
    panels = figure.subplots(len(records), 1, sharex=True, squeeze=False)
    for axes, record in zip(panels[:, 0], records, strict=True):
        for row, request in enumerate(record.requests):
            for kind, begin, length in spans_of(request):
                axes.broken_barh(
                    [(begin, length)], (row - 0.4, 0.8), color=COLOURS[kind], linewidth=0
                )
        end_s = max(request.finished_ms for request in record.requests) / 1e3
        axes.axvline(end_s, color="#666666", linewidth=0.8, linestyle=":")
        axes.set_title(f"{record.name}: {end_s:.2f} s", loc="left", fontsize=9, fontweight="bold")
        axes.set_ylim(count - 0.4, -0.6)
        axes.set_ylabel("request", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    panels[-1, 0].set_xlim(left=0)
    panels[-1, 0].set_xlabel("seconds after the first arrival", fontsize=8)
    figure.legend(handles=handles(), loc="outside upper right", ncols=3, frameon=False, fontsize=8)
    save_figure("--plot", path, figure)


def handles() -> list[object]:
    from matplotlib.patches import Patch

    return [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
