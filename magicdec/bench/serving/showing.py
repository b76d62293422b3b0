"""What `magicdec serve` shows: first a summary with a row for each mode; then, if all is asked for,
tables with a column for each mode and one of the stages of each ring; and pictures of requests and
stages over time. Imports no torch, and matplotlib only to draw.

Must not know how a metric is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.bench.serving.metrics import ContextAcceptance, ServingMetrics, TurnTimes
from magicdec.bench.serving.record import FAILED, WITHOUT_METRICS, RequestRecord, ServingRecord
from magicdec.output import gantt
from magicdec.output.gantt import BarStyle, GanttBar, Panel
from magicdec.output.tables import RULE, Column, Heading, Line, Shown, Table, text_of
from magicdec.records.metric_tables import (
    break_even_length,
    category_tables,
    fixed,
    has_enough,
    metric_rows,
)
from magicdec.records.table import (
    dtypes_of,
    judged_text,
    limits_text,
    measured_text,
    place_text,
    stalls_in,
)
from magicdec.systems.details import Details
from magicdec.systems.modes import AT_ONCE, Pass

if TYPE_CHECKING:
    from magicdec.systems.system import PassTrace


def tables(records: Sequence[ServingRecord]) -> list[Table]:
    """All that the passes of one command have to show, the summary first. More passes than a table
    has room for are in several tables."""
    rows = rows_of(records)
    parts = parts_of(records)
    shown = [[records[place] for place in places] for places in parts]
    return [
        summary_table(records, rows, is_brief=False),
        *(modes_table(records, rows, places) for places in parts),
        *turn_tables(records),
        *(table for part in shown for table in context_tables(part)),
        *(table for record in records for table in category_tables(record.name, record.metrics)),
        *(table for record in records for table in detail_tables(record)),
    ]


def detail_tables(record: ServingRecord) -> list[Table]:
    return [] if record.details is None else record.details.tables(record.name)


def brief_tables(records: Sequence[ServingRecord]) -> list[Table]:
    """A few rows for each pass of one command."""
    return [summary_table(records, rows_of(records), is_brief=True), *turn_tables(records)]


MOST_COLUMNS = 6  # passes beside each other, for which 80 characters have room
# What the summary says of each pass; the tables below it have all metrics.
SUMMARY = (
    *("output_throughput", "request_goodput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"),
    "mean_acceptance_length",
)
DRAFTS = "Drafts"
# The metrics of requests in groups, as serving benchmarks have them.
GROUPS = {
    "Throughput": (
        *("makespan_s", "request_throughput", "output_throughput"),
        *("steady_output_throughput", "request_goodput", "arrival_rate"),
    ),
    "Time to first token": tuple(f"{of}_ttft_ms" for of in ("mean", "p50", "p90", "p99")),
    "Time per output token": tuple(f"{of}_tpot_ms" for of in ("mean", "p50", "p90", "p99")),
    "Inter-token latency": tuple(f"{of}_itl_ms" for of in ("mean", "p50", "p90", "p99")),
    "End-to-end latency": tuple(f"{of}_e2el_ms" for of in ("mean", "p50", "p90", "p99")),
    DRAFTS: (*("draft_acceptance_rate", "mean_acceptance_length", "num_cancelled_draft_tokens"),),
    "Speed of one request": ("request_tokens_per_s", "prefill_tokens_per_s"),
    "Steps and memory": (
        *("mean_in_flight", "num_steps", "median_step_ms", "stalled_steps", "stalled_ms"),
        *("num_preemptions", "prefix_hit_rate", "peak_memory_bytes"),
    ),
}
OF_STALLS = ("steady_output_throughput", "stalled_steps", "stalled_ms")  # where a step stalled


def rows_of(records: Sequence[ServingRecord]) -> list[list[object]]:
    """The rows of the table, each group below its heading. A percentile has one only where the
    requests are enough for it."""
    rows = list[list[object]]()
    count = min(len(record.requests) for record in records)
    metrics = [record.metrics for record in records]
    has_stalls = any(each is not None and each.stalled_steps for each in metrics)
    for heading, keys in GROUPS.items():
        shown = [
            key for key in keys if has_enough(key, count) and (has_stalls or key not in OF_STALLS)
        ]
        group = metric_rows(ServingMetrics, metrics, shown)
        if heading == "Throughput" and len(records) > 1:
            group.insert(3, [times_of(records[0]), *times_first(records)])
        if heading == DRAFTS and any(lengths := [break_even(each, records) for each in records]):
            cells = [fixed(length, 2) for length in lengths]
            group.append([Shown("  that pays (break-even)", "break_even_length"), *cells])
        rows += [[Heading(heading), *[None] * len(records)], *group] if group else []
    return rows + detail_rows(records)


def detail_rows(records: Sequence[ServingRecord]) -> list[list[object]]:
    """The rows of what systems measured, those of each below its heading."""
    rows = list[list[object]]()
    for kind in kinds_of(records):
        details = [each.details if type(each.details) is kind else None for each in records]
        own = metric_rows(kind, details)
        rows += [[Heading(kind.heading), *[None] * len(records)], *own] if own else []
    return rows


def kinds_of(records: Sequence[ServingRecord]) -> list[type[Details]]:
    """The kinds of details of these records."""
    return list(dict.fromkeys(type(each.details) for each in records if each.details is not None))


def break_even(record: ServingRecord, records: Sequence[ServingRecord]) -> float | None:
    """`break_even_length` beside the pass without drafts of the same mode, or of a server of the
    same program. None without such a pass."""
    if not has_drafts(record):
        return None
    plain = next((each for each in records if is_plain_of(each, record)), None)
    mine = record.metrics
    theirs = None if plain is None else plain.metrics
    if mine is None or theirs is None or not mine.mean_tpot_ms or not theirs.mean_tpot_ms:
        return None
    length = mine.mean_emitted_tokens or mine.mean_acceptance_length
    num_tokens = sum(each.output_len - 1 for each in record.requests)
    num_steps = num_tokens * mine.mean_tpot_ms / theirs.mean_tpot_ms
    return break_even_length(num_tokens, num_steps, mine.num_spec_steps, length)


def is_plain_of(plain: ServingRecord, record: ServingRecord) -> bool:
    """Whether the first pass is the second without its drafts, with as many requests in flight."""
    mode = Pass.named(record.name)
    other = Pass.named(plain.name)
    if other.concurrency != mode.concurrency:
        return False
    if record.is_external:
        is_same = plain.is_external and plain.program == record.program
        return is_same and plain.metrics is not None and not has_drafts(plain)
    return mode.drafts_in_turns and other == replace(mode, is_drafting=False)


def has_drafts(record: ServingRecord) -> bool:
    metrics = record.metrics
    return metrics is not None and bool(metrics.num_draft_tokens or metrics.num_spec_steps)


def context_tables(records: Sequence[ServingRecord]) -> list[Table]:
    """A table of acceptance by context, if the prompts have several lengths."""
    shown = [record for record in records if record.acceptance_by_context]
    groups = {
        record.name: {each.most_context: each for each in record.acceptance_by_context or ()}
        for record in shown
    }
    contexts = sorted({most for each in groups.values() for most in each})
    if len(contexts) < 2:
        return []
    keys = ("draft_acceptance_rate", "mean_acceptance_length")
    rows = list[list[object]]()
    for most in contexts:
        parts = [each.get(most) for each in groups.values()]
        count = next(part.num_requests for part in parts if part is not None)
        noun = "request" if count == 1 else "requests"
        heading = f"up to {most:,} tokens: {count} {noun}"
        rows.append([Heading(heading), *[None] * len(shown)])
        for (label, key), *cells in metric_rows(ContextAcceptance, parts, keys):
            rows.append([Shown(label, f"{key}_{most}"), *cells])  # CSV lacks the heading
    label = Column("", is_text=True, key="metric")
    title = "; ".join([*mode_of(shown), "Acceptance by length of the prompt"])
    return [Table([label, *columns_of(shown)], rows, title=title)]


def turn_tables(records: Sequence[ServingRecord]) -> list[Table]:
    """A table with a column for each turn of the conversations, if there are several."""
    shown = [record for record in records if record.times_by_turn]
    num_turns = max((len(record.times_by_turn or ()) for record in shown), default=0)
    if num_turns < 2:
        return []
    rows = list[list[object]]()
    count = min(each.num_requests for r in shown for each in r.times_by_turn or ())
    for key in ("mean_prompt_len", "mean_ttft_ms", "p90_ttft_ms", "prefix_hit_rate"):
        group = dict[str, list[object]]()
        for record in shown if has_enough(key, count) else ():
            for (label, _), *cells in metric_rows(TurnTimes, record.times_by_turn or (), [key]):
                heading = Heading(label)
                group[record.name] = cells
        if len(group) > 1 and len(set(map(str, group.values()))) == 1:
            group = {"every mode": next(iter(group.values()))}
        rows += [[heading, *[None] * num_turns]] if group else []
        rows += [[Shown(f"  {name}", f"{name} {key}"), *cells] for name, cells in group.items()]
    columns = [Column("", is_text=True, key="metric")]
    columns += [Column(f"turn {turn}", key=f"turn_{turn}") for turn in range(1, num_turns + 1)]
    left_out = shown[-1].workload.num_later_turns
    below = []
    if left_out:
        noun = "question is" if left_out == 1 else "questions are"
        most = shown[-1].turns
        below = [
            f"{left_out} later {noun} not asked: beyond --turns {most}, or the prompt could be "
            "longer than --prefix_len"
        ]
    title = "Conversations by turn; a later turn arrives when the answer before it has ended"
    return [Table(columns, rows, title=title, below=below)]


def reported_lines(records: Sequence[ServingRecord]) -> list[str]:
    """What systems say of their passes in a line."""
    found = [(each.details, each) for each in records]
    return [
        line
        for details, each in found
        if details is not None
        for line in details.lines(each.name, has_drafts(each))
    ]


def times_of(first: ServingRecord) -> Shown:
    """The label of the ratios to the first record, and its key."""
    return Shown(f"  times {first.name}", f"times_{first.name}")


def times_first(records: Sequence[ServingRecord]) -> list[Shown | None]:
    """The output tokens/s of each record over those of the first."""
    speeds = [record.metrics and record.metrics.output_throughput for record in records]
    return [fixed(speed / speeds[0], 2, "x") if speed and speeds[0] else None for speed in speeds]


def speed_of(metrics: ServingMetrics, is_steady: bool) -> float:
    steady = metrics.steady_output_throughput
    return steady if is_steady and steady is not None else metrics.output_throughput


def stalls_of(records: Sequence[ServingRecord]) -> list[str]:
    """A line for each mode in which steps stalled."""
    return [
        f"{record.name}: {stalls_in(record.metrics, record.metrics.num_decode_steps)}"
        for record in records
        if record.metrics is not None and record.metrics.stalled_steps
    ]


def winner(records: Sequence[ServingRecord]) -> list[str]:
    """A line that says which mode has the most output tokens/s, beside the first; none if nothing
    can be compared."""
    first = records[0]
    able = [(r.metrics, r.name) for r in records if r.metrics is not None]
    if len(able) < 2 or first.metrics is None:
        return []
    # Of two modes with stalls in one of them alone, the other may be the faster one.
    is_steady = all(metrics.steady_output_throughput for metrics, _ in able)
    has_stalls = is_steady and any(metrics.stalled_steps for metrics, _ in able)
    best, name = max(able, key=lambda each: speed_of(each[0], is_steady))
    noun = "output tokens/s without stalls" if has_stalls else "output tokens/s"
    text = f"{name} has the most {noun}, {speed_of(best, is_steady):,.1f}"
    if best is first.metrics:
        return [text]
    ratios = [
        f"{mine / theirs:.2f} times its {label}"
        for label, mine, theirs in (
            ("mean TTFT", best.mean_ttft_ms, first.metrics.mean_ttft_ms),
            ("mean TPOT", best.mean_tpot_ms, first.metrics.mean_tpot_ms),
        )
        if mine and theirs
    ]
    speed = speed_of(best, is_steady) / speed_of(first.metrics, is_steady)
    return [", ".join([f"{text}: {speed:.2f} times those of {first.name}", *ratios])]


def parts_of(records: Sequence[ServingRecord]) -> list[list[int]]:
    """The places of the passes that a table has beside each other. With several concurrencies they
    are those of one mode."""
    groups = dict[str, list[int]]()
    has_several = len({record.concurrency for record in records}) > 1
    for place, record in enumerate(records):
        groups.setdefault(record.way if has_several else "", []).append(place)
    return [
        places[begin : begin + MOST_COLUMNS]
        for places in groups.values()
        for begin in range(0, len(places), MOST_COLUMNS)
    ]


def mode_of(records: Sequence[ServingRecord]) -> list[str]:
    """The mode that passes of several concurrencies in one table share; none otherwise."""
    return [records[0].way] if len({record.concurrency for record in records}) > 1 else []


def columns_of(records: Sequence[ServingRecord]) -> list[Column]:
    """A column for each pass, whose heading has no mode if the title has it."""
    is_short = bool(mode_of(records))
    labels = [f"{r.concurrency}{AT_ONCE}" if is_short else r.name for r in records]
    return [Column(label, key=r.name) for label, r in zip(labels, records, strict=True)]


def rows_in(rows: Sequence[Sequence[object]], places: Sequence[int]) -> list[list[object]]:
    """The rows in some of their columns, without those that are empty there."""
    kept = list[list[object]]()
    for label, *cells in rows:
        own = [cells[place] for place in places]
        if isinstance(label, Heading) or any(cell is not None for cell in own):
            while isinstance(label, Heading) and kept and isinstance(kept[-1][0], Heading):
                kept.pop()
            kept.append([label, *own])
    return kept[:-1] if kept and isinstance(kept[-1][0], Heading) else kept


def title_of(records: Sequence[ServingRecord]) -> str:
    newest = records[-1]
    model = newest.config["model"]
    workload = newest.config["workload"]
    count = workload["num_requests"]
    noun = "request" if newest.turns == 1 else "conversation"
    sizes = {each.config["workload"].get("batch_size") for each in records} - {None}
    rows = f", --B {' '.join(map(str, sorted(sizes)))}" if sizes else ""
    output = "" if workload["gen_len"] is None else f", output length {workload['gen_len']}"
    return (
        f"{model['model']} ({dtypes_of(model)}), {newest.workload.text}: "
        f"{count} {noun}{'s' * (count != 1)}, arrival {newest.arrival}{output}{rows}"
    )


def modes_table(
    records: Sequence[ServingRecord], rows: Sequence[Sequence[object]], places: Sequence[int]
) -> Table:
    """A table with a column for each pass at `places`."""
    shown = [records[place] for place in places]
    return Table(
        [Column("", is_text=True, key="metric"), *columns_of(shown)],
        rows_in(rows, places),
        title="; ".join(mode_of(shown)),
        below=[*stalls_of(shown), *(note for kind in kinds_of(shown) for note in kind.notes)],
    )


def summary_table(
    records: Sequence[ServingRecord], rows: Sequence[Sequence[object]], is_brief: bool
) -> Table:
    """A row for each pass, with the metrics of `SUMMARY` that one has, above whether its tokens are
    right, and below which has the most tokens/s. With `is_brief` those that are right say so in
    their rows alone."""
    by_key = {str(label.value): row for row in rows if isinstance(label := row[0], Shown)}
    chosen = {key: by_key[key] for key in SUMMARY if key in by_key}
    is_closed = records[0].concurrency is not None
    has_groups = len({record.concurrency for record in records}) > 1
    lines = list[Sequence[object]]()
    for place, record in enumerate(records):
        if place and has_groups and record.way != records[place - 1].way:
            lines.append(RULE)
        at_once = [record.concurrency] if is_closed else []
        cells = [without_interval(row[1 + place]) for row in chosen.values()]
        lines.append([record.way, *at_once, *cells, record.status])
    return Table(
        [
            Column("mode", is_text=True),
            *([Column("at\nonce", key="concurrency")] if is_closed else []),
            *(
                Column(text_of(row[0]).replace(" ", "\n", 1), key=key)
                for key, row in chosen.items()
            ),
            Column("verdict", is_text=True, key="status"),
        ],
        lines,
        title=title_of(records),
        above=brief_verdict(records) if is_brief else [verdict_line(record) for record in records],
        below=[
            *winner(records),
            *reported_lines(records),
            *records[-1].workload.left_out_lines,
        ],
    )


def brief_verdict(records: Sequence[ServingRecord]) -> list[Line]:
    """One line if all tokens are those of the first pass; otherwise one for each pass of which
    there is more to say."""
    odd = [record for record in records if record.status != "ok" or record.emulated_by]
    if odd:
        return [verdict_line(record) for record in odd]
    return [Line(f"in every mode all requests have the tokens of {records[0].name}", "bold")]


def without_interval(cell: object) -> object:
    return Shown(cell.text.partition(" [")[0], cell.value) if isinstance(cell, Shown) else cell


def verdict_line(record: ServingRecord) -> Line:
    return Line(verdict(record), "bold red" if record.status in WITHOUT_METRICS else "bold")


def verdict(record: ServingRecord) -> str:
    """Whether the tokens are those of the reference, and steps right, in a line."""
    name = record.name
    if record.status == FAILED:
        return f"{name}: FAILED, {(record.error or '').removeprefix(f'{name}: ')}"
    found = record.correctness
    checked = ""
    if found is not None:
        measured = measured_text(found.forwards, f"those of {record.reference}")
        checked = f"{judged_text(found.judged_again)}{measured}"
    emulated = ""
    if record.emulated_by and not record.accepts_by_chance:
        emulated = f", EMULATED by {' '.join(record.emulated_by)}"
    return f"{name}: {compared_text(record)}{emulated}{checked}"


def compared_text(record: ServingRecord) -> str:
    total = len(record.requests)
    prefix = f"{record.status.upper()}, " if record.status == "diverged" else ""
    if record.accepts_by_chance:
        return f"{prefix}EMULATED acceptance, so its tokens mean nothing and are not compared"
    if record.reference is None:
        return f"{prefix}its tokens are not checked, because there is no other pass"
    if record.name == record.reference:
        return f"{prefix}the reference of the others"
    if record.num_differing is None and record.config["sampling"]["temperature"] == 0:
        return f"{prefix}not compared, because a server sent no token ids"
    if record.num_differing is None:
        return f"{prefix}sampled, so the tokens of drafts are not compared"
    if record.num_differing == 0:
        subject = "its request has" if total == 1 else f"all {total} requests have"
        return f"{prefix}{subject} the tokens of {record.reference}"
    noun = "request differs" if total == 1 else "requests differ"
    text = f"{record.num_differing} of {total} {noun} from {record.reference}"
    found = record.correctness
    if record.status == "differs":
        return f"DIFFERS, {text}; rounding may be the reason"
    if found is None or found.first_divergence is None:
        return f"{prefix}{text}"
    why = f"{place_text(found.first_divergence)}; {limits_text(found)}"
    return f"{prefix or 'ok with ties, '}{text}, {why}"


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
OF_STAGES = {
    DECODING: BarStyle("#d9d9d9"),
    PROMPT: BarStyle("#d9d9d9", hatch="////"),
    HEAD: BarStyle("#555555", height=0.3),
    DRAFT: BarStyle("#999999", height=0.5),
}
# Light, so that the text on a bar can be read.
LIGHT = (
    *("#8ecae6", "#ffb703", "#95d5b2", "#f4a6a0", "#c8b6ff", "#d4a373", "#ffd6a5", "#a3cef1"),
    *("#e9c46a", "#b5e48c"),
)
SHOWN_SPANS = 60  # of the slowest stage, of runs that decode: what a chart shows
SHOWN_BEFORE = 0.25  # of that is shown before the last stage computes the first of these
NUM_NAMES = 10  # rows of the picture whose request is named, at least


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


def timeline(record: ServingRecord, end_s: float) -> Panel:
    """The panel of a record, with a row for each request."""
    count = len(record.requests)
    own_end_s = max(r.finished_ms for r in record.requests) / 1e3
    every = max(1, count // NUM_NAMES)
    return Panel(
        f"{record.name}: {own_end_s:.2f} s",
        [f"request {row}" if row % every == 0 else "" for row in range(count)],
        [
            GanttBar(row, begin_s, begin_s + length_s, LOOKS[kind])
            for row, request in enumerate(record.requests)
            for kind, begin_s, length_s in spans_of(request)
        ],
        end_s,
        marks_s=[own_end_s],
        row_inches=min(4.0, max(1.4, 0.07 * count + 0.6)) / (count + gantt.TITLE_ROWS),
    )


def draw_timeline(
    records: Sequence[ServingRecord],
    traces: Sequence[PassTrace | None],
    path: Path,
    plot_ms: float | None = None,
) -> None:
    """Draw when each request waited, was prefilled and decoded, with a panel for each record; below
    that of a mode with stages, which of them computed what when, for `plot_ms` from its first token
    on. The format is that which the name of `path` ends in."""
    end_s = max(request.finished_ms for each in records for request in each.requests) / 1e3
    panels = []
    for record, trace in zip(records, traces, strict=True):
        panels.append(timeline(record, end_s))
        if trace is not None:
            panels.append(stages_panel(record.name, trace, plot_ms))
    legend = LOOKS if all(trace is None for trace in traces) else LOOKS | OF_STAGES
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
            of_run = PROMPT if span.run in trace.prompts else DECODING
            kind = SPAN_LOOKS.get(span.what.name, of_run)
            look = OF_STAGES[kind]
            if kind == of_run:
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


def trace_events(
    records: Sequence[ServingRecord], traces: Sequence[PassTrace | None]
) -> list[dict[str, object]]:
    """The requests of each record and what its stages did, as events of the Chrome trace format.
    The requests of a mode, and each of its stages, are a process."""
    processes: dict[str, list[tuple[int, str, float, float]]] = {}  # thread, name, begin, length
    for record, trace in zip(records, traces, strict=True):
        processes[f"{record.name}: requests"] = [
            (row, *span)
            for row, request in enumerate(record.requests)
            for span in spans_of(request)
        ]
        if trace is not None:
            origin_s = origin_of(trace)
            for name, spans in zip(trace.rows, trace.spans, strict=True):
                processes[f"{record.name}: {name}"] = [
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
