"""Pictures of passes: when requests waited, were prefilled and decoded, and what stages computed
when; as figures, and as events of the Chrome trace format. Imports no torch, and matplotlib only to
draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.output import gantt
from magicdec.output.gantt import BarStyle, GanttBar, Panel
from magicdec.records.pass_record import PassRecord, RequestRecord

if TYPE_CHECKING:
    from magicdec.systems.system import PassTrace

WAITING = "waiting"
PREFILL = "prefill"
DECODE = "decode"
LOOKS = {WAITING: BarStyle("#cccccc"), PREFILL: BarStyle("#D55E00"), DECODE: BarStyle("#0072B2")}
RequestSpan = tuple[str, float, float]  # the kind, its begin and its length in seconds
DECODING = "decoding run"
PROMPT = "prompt"
HEAD = "head"
DRAFT = "drafting"
SPAN_LOOKS = {"HEAD": HEAD, "DRAFT": DRAFT}
STAGE_LOOKS = {
    DECODING: BarStyle("#d9d9d9"),
    PROMPT: BarStyle("#d9d9d9", hatch="////"),
    HEAD: BarStyle("#555555", height=0.3),
    DRAFT: BarStyle("#999999", height=0.5),
}
# Light, so that the text on a bar can be read.
LIGHT = (
    "#8ecae6",
    "#ffb703",
    "#95d5b2",
    "#f4a6a0",
    "#c8b6ff",
    "#d4a373",
    "#ffd6a5",
    "#a3cef1",
    "#e9c46a",
    "#b5e48c",
)
SHOWN_SPANS = 60  # of the slowest stage, of runs that decode: what a chart shows
SHOWN_BEFORE = 0.25  # of that is shown before the last stage computes the first of these
NUM_NAMES = 10  # rows of the picture whose request is named, at least


@dataclass(frozen=True)
class ServedGroup:
    """The requests of a pass that were served together, and what its stages did meanwhile."""

    name: str
    repeat: int  # counted from 0
    requests: Sequence[RequestRecord]
    trace: PassTrace | None = None


def served_groups(
    records: Sequence[PassRecord], traces: Sequence[Sequence[PassTrace | None]]
) -> list[ServedGroup]:
    """The groups of each record, whose traces are in the same order."""
    found = list[ServedGroup]()
    for record, own_traces in zip(records, traces, strict=True):
        groups = zip(record.groups_of_requests, own_traces, strict=True)
        for repeat, ((_, requests), trace) in enumerate(groups):
            name = record.name if len(own_traces) == 1 else f"{record.name}, repeat {repeat + 1}"
            found.append(ServedGroup(name, repeat, requests, trace))
    return found


def spans_of(request: RequestRecord) -> list[RequestSpan]:
    """What happened to a request from its arrival to its end. After a preemption it waits again,
    and its text is prefilled again."""
    spans = list[RequestSpan]()
    left_ms = request.arrival_ms
    ends = [*request.preempted_ms, request.finished_ms]
    for joined, prefilled, end in zip(request.joined_ms, request.prefilled_ms, ends, strict=True):
        ready = min(prefilled, end)
        parts = ((WAITING, left_ms, joined), (PREFILL, joined, ready), (DECODE, ready, end))
        spans += [(kind, a / 1e3, (b - a) / 1e3) for kind, a, b in parts if b > a]
        left_ms = end
    return spans


def timeline(group: ServedGroup, end_s: float) -> Panel:
    """The panel of a group, with a row for each request."""
    count = len(group.requests)
    own_end_s = max(r.finished_ms for r in group.requests) / 1e3
    every = max(1, count // NUM_NAMES)
    return Panel(
        f"{group.name}: {own_end_s:.2f} s",
        [f"request {row}" if row % every == 0 else "" for row in range(count)],
        [
            GanttBar(row, begin_s, begin_s + length_s, LOOKS[kind])
            for row, request in enumerate(group.requests)
            for kind, begin_s, length_s in spans_of(request)
        ],
        end_s,
        marks_s=[own_end_s],
        row_inches=min(4.0, max(1.4, 0.07 * count + 0.6)) / (count + gantt.TITLE_ROWS),
    )


def draw_timeline(groups: Sequence[ServedGroup], path: Path, plot_ms: float | None = None) -> None:
    """Draw when each request waited, was prefilled and decoded, with a panel for each pass, which
    shows its first repeat; below that of a mode with stages, which of them computed what when, for
    `plot_ms` from its first token on. The format is that which the name of `path` ends in."""
    shown = [group for group in groups if group.repeat == 0]
    end_s = max(request.finished_ms for group in shown for request in group.requests) / 1e3
    panels = []
    for group in shown:
        panels.append(timeline(group, end_s))
        if group.trace is not None:
            panels.append(stages_panel(group.name, group.trace, plot_ms))
    legend = LOOKS if all(group.trace is None for group in shown) else LOOKS | STAGE_LOOKS
    gantt.draw("--plot", path, panels, legend)


def stages_panel(name: str, trace: PassTrace, plot_ms: float | None) -> Panel:
    """What the stages did in the time that is shown, each message or run in the colour of its first
    request, where that is known, or of its number."""
    origin_s = origin_of(trace)
    begin_s, until_s = decoding_window(trace, plot_ms)
    error = f" (clocks within {1e3 * trace.clock_error_s:.2f} ms)" if trace.clock_error_s else ""
    return Panel(
        f"{name}: stages{error}",
        trace.rows,
        [
            bar
            for bar in bars_of(trace, origin_s)
            if bar.begin_s < until_s - origin_s and bar.end_s > begin_s - origin_s
        ],
        until_s - origin_s,
        begin_s=begin_s - origin_s,
    )


def bars_of(trace: PassTrace, origin_s: float) -> Iterator[GanttBar]:
    for row, spans in enumerate(trace.spans):
        for span in spans:
            requests = trace.requests.get(span.run, ())
            run_kind = PROMPT if span.run in trace.prompts else DECODING
            kind = SPAN_LOOKS.get(span.what.name, run_kind)
            look = STAGE_LOOKS[kind]
            if kind == run_kind:
                place = requests[0] if requests else span.run
                look = replace(look, colour=LIGHT[place % len(LIGHT)])
            text = ",".join(map(str, requests)) if kind != HEAD else ""
            if span.end_s > span.begin_s:
                yield GanttBar(row, span.begin_s - origin_s, span.end_s - origin_s, look, text)


def decoding_window(trace: PassTrace, plot_ms: float | None) -> tuple[float, float]:
    """When the time that is shown begins and ends: from a little before the last stage computes the
    first run that decodes, for some rounds of the slowest stage or for `plot_ms`."""
    stages = [[span for span in spans if span.what.name == "STAGE"] for spans in trace.spans]
    stages = [spans for spans in stages if spans]
    decoding = [[s for s in spans if s.run not in trace.prompts] or spans for spans in stages]
    mean_s = max(sum(span.seconds for span in spans) / len(spans) for spans in decoding)
    length_s = SHOWN_SPANS * mean_s if plot_ms is None else plot_ms / 1e3
    first_s = min(spans[0].begin_s for spans in stages)
    begin_s = max(first_s, decoding[-1][0].begin_s - SHOWN_BEFORE * length_s)
    end_s = max(span.end_s for spans in trace.spans for span in spans)
    return begin_s, min(begin_s + length_s, end_s)


def trace_events(groups: Sequence[ServedGroup]) -> list[dict[str, object]]:
    """The requests of each group and what its stages did, as events of the Chrome trace format. The
    requests of a group, and each of its stages, are a process, whose time begins at 0."""
    processes: dict[str, list[tuple[int, str, float, float]]] = {}  # thread, name, begin, length
    for group in groups:
        processes[f"{group.name}: requests"] = [
            (row, *span) for row, request in enumerate(group.requests) for span in spans_of(request)
        ]
        trace = group.trace
        if trace is not None:
            origin_s = origin_of(trace)
            for name, spans in zip(trace.rows, trace.spans, strict=True):
                processes[f"{group.name}: {name}"] = [
                    (int(s.what), f"{s.what.name.lower()} {s.run}", s.begin_s - origin_s, s.seconds)
                    for s in spans
                ]
    events: list[dict[str, object]] = []
    for number, (name, spans_of_process) in enumerate(processes.items()):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}})
        events += [
            {"ph": "X", "name": what, "pid": number, "tid": thread, "ts": 1e6 * at, "dur": 1e6 * s}
            for thread, what, at, s in spans_of_process
        ]
    return events


def origin_of(trace: PassTrace) -> float:
    return min(span.begin_s for spans in trace.spans for span in spans)
