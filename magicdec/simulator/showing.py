"""What `magicdec simulate` shows: tables of modes and of clusters, and a Gantt chart of what the
drafter and every stage computed when. Imports no torch, and matplotlib only to draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from magicdec import gantt
from magicdec.gantt import Bar, Look, Panel
from magicdec.records.metric_tables import fixed, metric_columns
from magicdec.simulator.run import SimulatedMetrics, SimulationRecord
from magicdec.simulator.simulation import Trace
from magicdec.tables import Column, Table

MOST_LINES = 40
NOTES = (
    "ratio: tok/s over those of iterative. TTFT, ITL and p99 (of the ITL) are in ms.",
    "busy: share of time in which a stage computes; useful: without cancelled runs.",
    "accept: accepted / launched draft tokens.",
)


def tables(records: Sequence[SimulationRecord]) -> list[Table]:
    """Of the modes on one machine, or of several machines."""
    machines = {str(_machine(record)): _machine(record) for record in records}
    return [_modes(records) if len(machines) == 1 else _clusters(records)]


def _machine(record: SimulationRecord) -> tuple[int | None, dict[str, Any]]:
    return record.config["nodes"], record.config["machine"]


def _modes(records: Sequence[SimulationRecord]) -> Table:
    """A row for each mode."""
    machine = records[0].config["machine"]
    metrics = {record.config["mode"]: record.metrics for record in records}
    stage_ms = sorted({round(1e3 * time, 3) for time in machine["stage_s"]})
    times = " to ".join(f"{ms:g}" for ms in dict.fromkeys((stage_ms[0], stage_ms[-1])))
    columns, rows = metric_columns(SimulatedMetrics, list(metrics.values()))
    base = metrics.get("iterative")
    notes = list(NOTES)
    if (m := metrics.get("async")) is not None:
        notes += [
            f"async: {m.invalid_runs} runs invalid, {m.mean_in_flight:.1f} in flight;",
            f"{m.layers_skipped} of {m.layers_skipped + m.layers_computed} layers skipped.",
        ]
    if "ring" in metrics:
        notes.append("ring: tok/s of all its requests together.")
    ratios = [base and fixed(m.tokens_per_s / base.tokens_per_s, 2) for m in metrics.values()]
    return Table(
        [Column("mode", is_text=True), columns[0], "ratio", *columns[1:]],
        [
            (mode, row[0], ratio, *row[1:])
            for mode, row, ratio in zip(metrics, rows, ratios, strict=True)
        ],
        f"{len(machine['stage_s'])} stages of {times} ms, links {1e3 * machine['link_s']:g} ms, "
        f"draft {1e3 * machine['draft_s']:g} ms a step",
        below=notes,
        is_framed=False,
    )


def _clusters(records: Sequence[SimulationRecord]) -> Table:
    """A row for each cluster; if these are many, the best of each number of nodes by the mode that
    speculates asynchronously, or else by the first mode."""
    modes = list(dict.fromkeys(record.config["mode"] for record in records))
    ranked = "async" if "async" in modes else modes[0]
    clusters: dict[str, dict[str, SimulationRecord]] = {}
    for record in records:
        clusters.setdefault(str(_machine(record)), {})[record.config["mode"]] = record
    rows = [_cluster(modes, members) for members in clusters.values()]
    above = []
    if len(rows) > MOST_LINES:
        place = 3 + modes.index(ranked)
        above = [f"Of {len(rows)} clusters, the fastest {ranked} one of each size; --out has all."]
        groups = groupby(rows, key=lambda row: row[0])
        rows = [max(group, key=lambda row: row[place].value) for _, group in groups]
    return Table(
        ["nodes", "stages", "stage ms", *modes],
        rows,
        above=above,
        is_framed=False,
        below=["Tokens a second; of the ring, those of all its requests together."],
    )


def _cluster(modes: Sequence[str], members: dict[str, SimulationRecord]) -> list[Any]:
    nodes, machine = _machine(next(iter(members.values())))
    num_stages = len(machine["stage_s"])
    rates = [fixed(members[mode].metrics.tokens_per_s, 2) for mode in modes]
    return [nodes or num_stages, num_stages, fixed(max(machine["stage_s"]), 2, scale=1e3), *rates]


DRAFT = "draft step"
LOOKS = {
    DRAFT: Look("#9e9e9e"),
    "prompt": Look("#5c6bc0"),
    "newest token": Look("#2e7d32"),
    "drafted tokens, needed": Look("#80c784"),
    "drafted tokens, cancelled": Look("#e57373"),
}


def draw_chart(
    flag: str, path: Path, traces: Mapping[str, Trace], until_s: float | None = None
) -> None:
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
        kind = "drafted tokens, needed" if flight.launch.is_speculative else "newest token"
        if flight.is_prompt:
            kind = "prompt"
        elif flight.launch.run in trace.cancelled:
            kind = "drafted tokens, cancelled"
        for stage, span in enumerate(zip(flight.start_s, flight.end_s, strict=True)):
            yield Bar(stage, *span, LOOKS[kind])
