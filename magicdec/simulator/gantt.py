"""A Gantt chart of simulated runs: what the drafter and every stage computed when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from magicdec import gantt
from magicdec.gantt import Bar, Look, Panel
from magicdec.simulator.pipeline import Flight
from magicdec.simulator.simulation import Trace

DRAFT = "draft step"
LOOKS = {
    DRAFT: Look("#9e9e9e"),
    "prompt": Look("#5c6bc0"),
    "newest token": Look("#2e7d32"),
    "drafted tokens, needed": Look("#80c784"),
    "drafted tokens, cancelled": Look("#e57373"),
}


def draw(flag: str, path: Path, traces: Mapping[str, Trace], until_s: float | None = None) -> None:
    """Draw one panel for each trace, up to a time. Raises ValueError, naming the flag,
    if there are too many stages or the file cannot be written."""
    panels = [panel_of(mode, trace) for mode, trace in traces.items()]
    gantt.draw(flag, path, panels, LOOKS, until_s)


def panel_of(mode: str, trace: Trace) -> Panel:
    stages = len(trace.flights[0].start_s)
    rows = [f"stage {stage}" for stage in range(stages)] + ["draft"] * bool(trace.drafts)
    bars = [*_bars(trace), *(Bar(stages, *span, LOOKS[DRAFT]) for span in trace.drafts)]
    return Panel(mode, rows, bars, trace.end_s, [at_s for at_s, _ in trace.commits])


def _bars(trace: Trace) -> Iterator[Bar]:
    for flight in trace.flights:
        look = LOOKS[_kind(flight.launch.run in trace.cancelled, flight)]
        for stage, span in enumerate(zip(flight.start_s, flight.end_s, strict=True)):
            yield Bar(stage, *span, look)


def _kind(is_cancelled: bool, flight: Flight) -> str:
    if flight.is_prompt:
        return "prompt"
    if is_cancelled:
        return "drafted tokens, cancelled"
    return "drafted tokens, needed" if flight.launch.is_speculative else "newest token"
