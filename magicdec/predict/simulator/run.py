"""One simulated run with its metrics, record, tables and chart. Tables of docs/record.md
are made from these classes. Imports no torch; matplotlib only to draw.

All modes share one scheduler and one simulated machine:

- `pipeline`: one request, one token after the other.
- `pipeline+draft`: drafts, then one run that verifies them, then drafts again.
- `pipeinfer`: pipelined speculation ([PipeInfer](https://arxiv.org/abs/2407.11798)).
- `ring`: recurrent pipeline parallelism ([MDI-LLM](https://arxiv.org/abs/2505.18164)): at least
  as many requests as stages, without drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

from magicdec.output import gantt
from magicdec.output.gantt import BarStyle, GanttBar, Panel
from magicdec.output.tables import Column, Table
from magicdec.predict.simulator.simulation import (
    SimulatedMachine,
    Simulation,
    SimulationTrace,
    TextModels,
)
from magicdec.records.acceptance import Verifications, acceptance_metrics
from magicdec.records.computing import mean, percentile
from magicdec.records.fields import RecordPart, recorded
from magicdec.records.metric_tables import fixed, metric_columns
from magicdec.records.record import Record
from magicdec.systems.mdi_llm.declaration import RING
from magicdec.systems.pipeinfer.options import MODES as SCHEDULED
from magicdec.systems.pipeinfer.options import (
    PIPEINFER,
    PIPELINE,
    RENAMED,
    Options,
)
from magicdec.systems.pipeinfer.scheduler import Counts, PipelinedScheduler

MODES = (*SCHEDULED, RING)
WITHOUT_DRAFTS = (PIPELINE, RING)  # every token takes as long as the one before
STEADY_TOKENS = 4  # that tell their speed
PROMPT = (0,)  # a stage takes as long for it as for one row


@dataclass(frozen=True)
class Work:
    """The text to decode: at each output position, whether the draft's candidate is right."""

    is_right: Sequence[bool]
    gen_len: int
    num_requests: int = 1  # of all modes but the ring
    ring_requests: int | None = None  # None: as many as stages


def run_mode(
    mode: str, machine: SimulatedMachine, options: Options, work: Work
) -> tuple[SimulationTrace, SimulatedMetrics]:
    is_ring = mode == RING
    requests = (work.ring_requests or machine.num_stages) if is_ring else work.num_requests
    kind = PIPELINE if is_ring else mode
    scheduler = PipelinedScheduler(replace(options, mode=kind, lanes=requests))
    # Every request has another part of `is_right`, which is taken in a circle.
    starts = (index * work.gen_len % len(work.is_right) for index in range(requests))
    models = TextModels([[*work.is_right[start:], *work.is_right[:start]] for start in starts])
    simulation = Simulation(machine, scheduler, models, is_ring)
    trace = simulation.run([PROMPT] * requests, work.gen_len)
    return trace, measure(machine, trace, scheduler.counts)


ONE_TOKEN = "if no request has a token after its first"


@dataclass(frozen=True, kw_only=True)
class SimulatedMetrics(RecordPart):
    """Metrics of all requests together. Shares are of the time from the first to the last token."""

    tokens_per_s: float = recorded(
        "tokens of a request after its first, divided by the time that they took; sum over the "
        "requests",
        "tokens/s",
        label="tok/s",
        digits=2,
    )
    ttft_ms: float = recorded(
        "time to first token; mean over the requests", "ms", label="TTFT", digits=1
    )
    mean_itl_ms: float | None = recorded(
        "time between two commits of a request; mean over all of them",
        "ms",
        label="ITL",
        digits=1,
        null=ONE_TOKEN,
    )
    p99_itl_ms: float | None = recorded(
        "its 99th percentile", "ms", label="p99", digits=1, null=ONE_TOKEN
    )
    busy: float = recorded(
        "share of time in which a stage computes; mean over the stages",
        label="busy",
        digits=1,
        scale=100,
        suffix="%",
    )
    useful: float = recorded(
        "the same, without runs that were cancelled",
        label="useful",
        digits=1,
        scale=100,
        suffix="%",
    )
    draft_busy: float = recorded("share of time in which the drafter computes")
    mean_in_flight: float = recorded("runs that are under way; mean over the time")
    draft_acceptance_rate: float | None = recorded(
        "accepted divided by judged draft tokens", label="accept", digits=2, null="without drafts"
    )
    runs: int = recorded("runs that were launched, prompts included", label="runs")
    invalid_runs: int = recorded("cancelled, because none of their rows could be right any more")
    layers_computed: int = recorded("layers that stages computed for runs")
    layers_skipped: int = recorded("layers that they skipped")


@dataclass(frozen=True, kw_only=True)
class SimulationRecord(Record):
    kind: Literal["simulation"] = recorded("`simulation`", default="simulation")
    status: Literal["simulated"] = recorded("`simulated`: nothing has run", default="simulated")
    config: dict[str, Any] = recorded(
        "`mode`, `nodes` (null where the stages were given by themselves), `machine` in seconds "
        "and bytes, `options` of the scheduler, `work`, and the `flags` of the command"
    )
    metrics: SimulatedMetrics = recorded("what came out")


def measure(machine: SimulatedMachine, trace: SimulationTrace, counts: Counts) -> SimulatedMetrics:
    times: dict[int, list[float]] = {}
    for at, commit in trace.commits:
        times.setdefault(commit.request, []).extend([at] * len(commit.tokens))
    first = min(t[0] for t in times.values())
    last = max(t[-1] for t in times.values())
    # Tokens of one commit came at the same time.
    itl_ms = [
        1e3 * (b - a)
        for token_times in times.values()
        for a, b in pairwise(sorted(set(token_times)))
    ]
    window = (last - first) or math.inf
    rates = [(len(t) - 1) / (t[-1] - t[0]) if t[-1] > t[0] else 0.0 for t in times.values()]
    in_flight = sum(_within(f.launched_s, f.home_s, first, last) for f in trace.flights)
    drafting = sum(_within(begin, end, first, last) for begin, end in trace.drafts)
    busy_s = {
        flight.launch.run: sum(
            _within(begin, end, first, last)
            for begin, end in zip(flight.start_s, flight.end_s, strict=True)
        )
        for flight in trace.flights
    }
    useful_s = sum(s for run, s in busy_s.items() if run not in trace.cancelled)
    computed = sum(sum(flight.layers) for flight in trace.flights)
    total = len(trace.flights) * machine.num_stages * machine.layers
    return SimulatedMetrics(
        tokens_per_s=sum(rates),
        ttft_ms=1e3 * sum(token_times[0] for token_times in times.values()) / len(times),
        mean_itl_ms=mean(itl_ms),
        p99_itl_ms=percentile(itl_ms, 99),
        busy=sum(busy_s.values()) / machine.num_stages / window,
        useful=useful_s / machine.num_stages / window,
        draft_busy=drafting / window,
        mean_in_flight=in_flight / window,
        draft_acceptance_rate=acceptance_rate(trace),
        runs=counts.runs,
        invalid_runs=counts.invalid_runs,
        layers_computed=computed,
        layers_skipped=total - computed,
    )


def acceptance_rate(trace: SimulationTrace) -> float | None:
    """The acceptance rate of the judged drafts; None without drafts."""
    found = Verifications()
    for _, commit in trace.commits:
        for run in commit.judged:
            found.add(commit.request, run.num_drafted, run.num_accepted, len(commit.tokens))
    requests = {commit.request for _, commit in trace.commits}
    rate: float | None = acceptance_metrics(found, len(requests)).get("draft_acceptance_rate")
    return rate


def _within(begin: float, end: float, first: float, last: float) -> float:
    return max(0.0, min(end, last) - max(begin, first))


MOST_LINES = 40
NOTES = (
    f"ratio: tok/s over those of {PIPELINE}. TTFT, ITL and p99 (of the ITL) are in ms.",
    "busy: share of time in which a stage computes; useful: without cancelled runs.",
    "accept: accepted / judged draft tokens, without those cancelled before.",
)


def tables(records: Sequence[SimulationRecord]) -> list[Table]:
    machines = {str(_machine(record)): _machine(record) for record in records}
    return [_modes(records) if len(machines) == 1 else _clusters(records)]


def _machine(record: SimulationRecord) -> tuple[int | None, dict[str, Any]]:
    return record.config["nodes"], record.config["machine"]


def mode_of(record: SimulationRecord) -> str:
    """The mode of a record, one of earlier versions as it is called now."""
    mode: str = record.config["mode"]
    return RENAMED.get(mode, mode)


def _modes(records: Sequence[SimulationRecord]) -> Table:
    machine = records[0].config["machine"]
    metrics = {mode_of(record): record.metrics for record in records}
    stage_ms = sorted({round(1e3 * time, 3) for time in machine["stage_s"]})
    times = " to ".join(f"{ms:g}" for ms in dict.fromkeys((stage_ms[0], stage_ms[-1])))
    columns, rows = metric_columns(SimulatedMetrics, list(metrics.values()))
    base = metrics.get(PIPELINE)
    notes = list(NOTES)
    if (m := metrics.get(PIPEINFER)) is not None:
        notes += [
            f"{PIPEINFER}: {m.invalid_runs} runs invalid, {m.mean_in_flight:.1f} in flight;",
            f"{m.layers_skipped} of {m.layers_skipped + m.layers_computed} layers skipped.",
        ]
    if RING in metrics:
        notes.append(f"{RING}: tok/s of all its requests together.")
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
    """A row for each cluster; of many, the best of each number of nodes in mode `pipeinfer`, or
    else in the first mode."""
    modes = list(dict.fromkeys(map(mode_of, records)))
    ranked = PIPEINFER if PIPEINFER in modes else modes[0]
    clusters: dict[str, dict[str, SimulationRecord]] = {}
    for record in records:
        clusters.setdefault(str(_machine(record)), {})[mode_of(record)] = record
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
    DRAFT: BarStyle("#9e9e9e"),
    "prompt": BarStyle("#5c6bc0"),
    "newest token": BarStyle("#2e7d32"),
    "drafted tokens, needed": BarStyle("#80c784"),
    "drafted tokens, cancelled": BarStyle("#e57373"),
}


def draw_chart(
    flag: str, path: Path, traces: Mapping[str, SimulationTrace], until_s: float | None = None
) -> None:
    """Draws one panel per trace, up to `until_s`. Raises ValueError, naming the flag, if there are
    too many stages or the file cannot be written."""
    panels = [panel_of(mode, trace) for mode, trace in traces.items()]
    gantt.draw(flag, path, panels, LOOKS, until_s)


def panel_of(mode: str, trace: SimulationTrace) -> Panel:
    stages = len(trace.flights[0].start_s)
    rows = [f"stage {stage}" for stage in range(stages)] + ["draft"] * bool(trace.drafts)
    bars = [*_bars(trace), *(GanttBar(stages, *span, LOOKS[DRAFT]) for span in trace.drafts)]
    return Panel(mode, rows, bars, trace.end_s, [at_s for at_s, _ in trace.commits])


def _bars(trace: SimulationTrace) -> Iterator[GanttBar]:
    for flight in trace.flights:
        kind = "drafted tokens, needed" if flight.launch.is_speculative else "newest token"
        if flight.is_prompt:
            kind = "prompt"
        elif flight.launch.run in trace.cancelled:
            kind = "drafted tokens, cancelled"
        for stage, span in enumerate(zip(flight.start_s, flight.end_s, strict=True)):
            yield GanttBar(stage, *span, LOOKS[kind])
