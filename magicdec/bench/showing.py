"""The tables of the passes of one command, side by side: in brief, as commands print them, or all
that was measured. Which rows a table has follows from what the passes have. Imports no torch.

Must not know how a metric is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from magicdec.output.tables import RULE, Column, Heading, Shown, Table, text_of
from magicdec.records.describe import (
    methods_of,
    pays_of,
    stalls_of,
    title_of,
    verdicts_of,
    winner,
)
from magicdec.records.fields import Recorded
from magicdec.records.metric_tables import (
    OVER_PROMPTS,
    break_even_length,
    category_tables,
    fixed,
    group_tables,
    has_enough,
    metric_columns,
    metric_rows,
)
from magicdec.records.metrics import ContextAcceptance, PassMetrics, TurnTimes
from magicdec.records.pass_record import AFTER_HIT, COLD, PassRecord
from magicdec.systems.details import Details
from magicdec.systems.modes import AT_ONCE, Pass

TableRow = list[Any]

WIDTH = 80  # characters that passes beside each other take, unless a table has only
FEWEST_COLUMNS = 2
GAP = 1  # characters between columns, where they have no room for a frame
# What the table of a mode a row says of each pass.
SUMMARY = (
    "output_throughput",
    "request_goodput",
    "mean_ttft_ms",
    "mean_tpot_ms",
    "mean_e2el_ms",
    "mean_acceptance_length",
)
# What the brief table of passes that share a prefill says of each.
BRIEF = (
    "decode_tokens_per_s",
    "speedup",
    "total_speedup",
    "net_speedup",
    "mean_ttft_ms",
    "answer_score",
    "draft_acceptance_rate",
    "tokens_per_verification",
    "mean_draft_tokens",
    "median_step_ms",
    "roofline_fraction",
    "peak_memory_bytes",
)
# All metrics that have a row, in groups.
GROUPS = {
    "Throughput": (
        "duration_s",
        "request_throughput",
        "output_throughput",
        "throughput_ratio",
        "steady_output_throughput",
        "request_goodput",
        "sessions_per_hour",
        "arrival_rate",
    ),
    "Decoding": (
        "decode_tokens_per_s",
        "speedup",
        "total_speedup",
        "net_speedup",
        "break_even_gen_len",
    ),
    "Time to first token": ("mean_ttft_ms", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms"),
    "Time per output token": ("mean_tpot_ms", "p50_tpot_ms", "p90_tpot_ms", "p99_tpot_ms"),
    "Inter-token latency": ("mean_itl_ms", "p50_itl_ms", "p90_itl_ms", "p99_itl_ms"),
    "End-to-end latency": ("mean_e2el_ms", "p50_e2el_ms", "p90_e2el_ms", "p99_e2el_ms"),
    "Sessions": ("mean_session_ms", "p50_session_ms", "p90_session_ms", "p99_session_ms"),
    "Answers": ("answer_score",),
    "Drafts": (
        "draft_acceptance_rate",
        "mean_acceptance_length",
        "tokens_per_verification",
        "acceptance_per_position",
        "num_cancelled_draft_tokens",
        "mean_draft_tokens",
        "kv_tokens_read",
    ),
    "Speed of one request": ("request_tokens_per_s", "request_prefill_tokens_per_s"),
    "Before the first step": (
        "prefill_tokens_per_s",
        "begin_ms",
        "draft_prefill_ms",
        "calibration_ms",
        "warmup_calibration_ms",
    ),
    "Steps": (
        "num_steps",
        "num_decode_steps",
        "mean_in_flight",
        "median_step_ms",
        "mean_step_ms",
        "decode_ms",
        "draft_ms",
        "verify_ms",
        "other_ms",
        "stalled_steps",
        "stalled_ms",
        "num_preemptions",
        "prefix_hit_rate",
        "theoretical_hit_rate",
        "host_hit_rate",
    ),
    "Memory": ("bytes_read", "roofline_fraction", "peak_memory_bytes"),
}
# Rows where a step stalled.
STALL_METRICS = ("steady_output_throughput", "total_speedup", "stalled_steps", "stalled_ms")
RATIOS = ("throughput_ratio", "speedup", "total_speedup", "net_speedup")  # medians over groups
POSITION = Recorded("", digits=2)  # how the share of a draft position is shown


def tables(records: Sequence[PassRecord], is_verbose: bool = True) -> list[Table]:
    """What the passes of one command have to show: in brief, or all of it. More passes than a table
    has room for are in several tables."""
    head = Table(
        title=title_of(records),
        above=[*verdicts_of(records, is_verbose), *methods_of(records)],
        below=below(records),
    )
    shares_prefill = any(record.shares_prefill for record in records)
    turns = [*session_tables(records), *turn_tables(records)]
    acceptance = [
        table
        for record in records
        for table in (
            *grown_tables(record),
            *category_tables(record.name, record.metrics),
        )
    ]
    if not shares_prefill:
        head = with_summary(head, records)
    if not is_verbose:
        return [with_brief(head, records) if shares_prefill else head, *turns, *acceptance]
    rows = rows_of(records)
    parts = parts_of(records, rows)
    shown = [[records[place] for place in places] for places in parts]
    main = [modes_table(part, rows, places) for part, places in zip(shown, parts, strict=True)]
    if shares_prefill:  # the metrics stand between what is above and what is below
        if main:
            main[-1] = replace(main[-1], below=[*head.below, *main[-1].below])
        head = replace(head, below=())
    return [
        head,
        *main,
        *turns,
        *(table for part in shown for table in context_tables(part)),
        *acceptance,
        *(table for record in records for table in detail_tables(record)),
    ]


def with_brief(head: Table, records: Sequence[PassRecord]) -> Table:
    """What matters most of passes that share a prefill, a column each."""
    if not any(record.metrics for record in records):
        return Table(above=head.above)
    rows = [row for row in rows_of(records, {"": BRIEF}) if not isinstance(row[0], Heading)]
    columns = [Column("", is_text=True, key="metric"), *columns_of(records)]
    return replace(head, columns=columns, rows=rows)


def below(records: Sequence[PassRecord]) -> list[str]:
    """Sentences about what the passes have shown."""
    workload = records[-1].workload
    paying = [line for record in records for line in pays_of(record, break_even(record, records))]
    return [
        *(paying or winner(records)),
        *stalls_of(records),
        *reported_lines(records),
        *([] if workload is None else workload.left_out_lines),
    ]


def rows_of(
    records: Sequence[PassRecord], groups: dict[str, tuple[str, ...]] = GROUPS
) -> list[TableRow]:
    """The rows of a table with a column for each pass, each group below its heading. A percentile
    has one only where the requests are enough for it."""
    rows = list[TableRow]()
    metrics = [record.metrics for record in records]
    counts = [len(record.requests) for record in records if record.requests]
    count = min(counts, default=0)
    has_stalls = any(metric is not None and metric.stalled_steps for metric in metrics)
    for heading, keys in groups.items():
        shown = [
            key
            for key in keys
            if has_enough(key, count) and (has_stalls or key not in STALL_METRICS)
        ]
        group = list[TableRow]()
        for row in metric_rows(PassMetrics, metrics, shown):
            group.append(completed(row, records))
            if row[0].value == "tokens_per_verification":
                group += break_even_rows(records)
        rows += [[Heading(heading), *[None] * len(records)], *group] if group else []
    return rows + (detail_rows(records) if groups is GROUPS else [])


def completed(row: TableRow, records: Sequence[PassRecord]) -> TableRow:
    """The row with what its label and its cells say beside their metric."""
    label, *cells = row
    key = label.value
    if key == "throughput_ratio":
        references = {record.reference for record in records if record.metrics} - {None}
        label = label._replace(text=f"  times {' '.join(map(str, references))}")
    if key in RATIOS:
        ratios = [getattr(record.metrics, f"{key}_per_group", None) or () for record in records]
        count = max(map(len, ratios))
        if count > 1:
            label = label._replace(text=f"{label.text}, median of {count}")
    if key == "acceptance_per_position":
        has_room = len(records) <= FEWEST_COLUMNS
        texts = [record.metrics and positions_of(record.metrics, has_room) for record in records]
        cells = [cell and cell._replace(text=text) for cell, text in zip(cells, texts, strict=True)]
    return [label, *cells]


def positions_of(metrics: PassMetrics, has_room: bool) -> str:
    """The share of each draft position in a line, and if there is room, its interval and how often
    it was judged."""
    shares = metrics.acceptance_per_position or []
    if not has_room:
        return "\n".join(map(POSITION.show, shares))
    ends = metrics.acceptance_per_position_interval or [[]] * len(shares)
    judged: Sequence[int | None] = metrics.judged_per_position or [None] * len(shares)
    described = POSITION.show_between
    return "\n".join(
        described(share, both) + ("" if count is None else f", {count} judged")
        for share, both, count in zip(shares, ends, judged, strict=True)
    )


def break_even_rows(records: Sequence[PassRecord]) -> list[TableRow]:
    lengths = [break_even(record, records) for record in records]
    label = Shown("  of them that pay (break-even)", "break_even_length")
    return [[label, *(fixed(length, 2) for length in lengths)]] if any(lengths) else []


def break_even(record: PassRecord, records: Sequence[PassRecord]) -> float | None:
    """`break_even_length` beside the pass without drafts of the same mode, or of a server of the
    same program: by the time of steps where both decode from one prefill, otherwise by TPOT. None
    without such a pass."""
    metrics = record.metrics
    if metrics is None or not has_drafts(record):
        return None
    num_tokens = sum(request.output_len - 1 for request in record.requests)
    speedup = metrics.speedup
    if speedup is None:
        plain = next((candidate for candidate in records if is_plain_of(candidate, record)), None)
        theirs = None if plain is None else plain.metrics
        if theirs is None or not metrics.mean_tpot_ms or not theirs.mean_tpot_ms:
            return None
        speedup = theirs.mean_tpot_ms / metrics.mean_tpot_ms
    length = metrics.tokens_per_verification or metrics.mean_acceptance_length
    return break_even_length(num_tokens, num_tokens / speedup, metrics.num_spec_steps, length)


def is_plain_of(plain: PassRecord, record: PassRecord) -> bool:
    """Whether the first pass is the second without its drafts, with as many requests in flight."""
    mode = Pass.named(record.name)
    other = Pass.named(plain.name)
    if other.concurrency != mode.concurrency:
        return False
    program = program_of(record)
    if program is not None:
        is_same = program_of(plain) == program
        return is_same and plain.metrics is not None and not has_drafts(plain)
    return mode.drafts_in_turns and other == replace(mode, is_drafting=False)


def has_drafts(record: PassRecord) -> bool:
    metrics = record.metrics
    return metrics is not None and bool(metrics.num_draft_tokens or metrics.num_spec_steps)


def context_tables(records: Sequence[PassRecord]) -> list[Table]:
    """A table of acceptance by context, if the prompts have several lengths."""
    shown = [record for record in records if record.acceptance_by_context]
    groups = {
        record.name: {group.most_context: group for group in record.acceptance_by_context or ()}
        for record in shown
    }
    contexts = sorted({most for group in groups.values() for most in group})
    if len(contexts) < 2:
        return []
    keys = ("draft_acceptance_rate", "mean_acceptance_length")
    rows = list[list[object]]()
    for most in contexts:
        parts = [group.get(most) for group in groups.values()]
        count = next(part.num_requests for part in parts if part is not None)
        noun = "request" if count == 1 else "requests"
        heading = f"up to {most:,} tokens: {count} {noun}"
        rows.append([Heading(heading), *[None] * len(shown)])
        for (label, key), *cells in metric_rows(ContextAcceptance, parts, keys):
            rows.append([Shown(label, f"{key}_{most}"), *cells])  # CSV lacks the heading
    label = Column("", is_text=True, key="metric")
    title = "; ".join([*mode_of(shown), "Acceptance by length of the prompt"])
    return [Table([label, *columns_of(shown)], rows, title=title)]


def grown_tables(record: PassRecord) -> list[Table]:
    """A table of acceptance by grown context, if a text became twice as long as its prompt."""
    if all(request.output_len < request.prompt_len for request in record.requests):
        return []
    title = (
        f"{record.name}: acceptance by the length of the text before the drafts, prompt included; "
        f"{OVER_PROMPTS}"
    )
    groups = record.acceptance_by_grown_context
    return group_tables(title, "tokens", groups, record.metrics)


# What the table of sessions says of each pass, beside the acceptance of groups.
SESSIONS = (
    "sessions_per_hour",
    "mean_session_ms",
    "p90_session_ms",
    "prefix_hit_rate",
    "theoretical_hit_rate",
)


def session_tables(records: Sequence[PassRecord]) -> list[Table]:
    """A table with a row for each pass about the sessions of a trace: how many end in an hour, what
    a cache has of their prompts, and how many drafts are accepted after that and without it."""
    shown = [record for record in records if record.has_sessions and record.metrics is not None]
    if not shown:
        return []
    count = min(len({request.conversation for request in record.requests}) for record in shown)
    keys = [key for key in SESSIONS if has_enough(key, count)]
    columns, rows = metric_columns(PassMetrics, [record.metrics for record in shown], keys)
    for name in (COLD, AFTER_HIT):
        groups = [(record.acceptance_by_hit or {}).get(name) for record in shown]
        if any(group is not None for group in groups):
            columns.append(Column(f"acceptance {name}", key=f"draft_acceptance_rate_{name}"))
            rates = [None if group is None else group.draft_acceptance_rate for group in groups]
            rows = [[*row, fixed(rate, 3)] for row, rate in zip(rows, rates, strict=True)]
    return [
        Table(
            [Column("mode", is_text=True), *columns],
            [[record.name, *row] for record, row in zip(shown, rows, strict=True)],
            title="Sessions, each served once and to its end; the clock stops with the last one",
        )
    ]


TURN_ROWS = ("mean_prompt_len", "mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "prefix_hit_rate")
MOST_TURNS = 8  # that have a column; of more, 1, 2, 4, 8, ... and the last


def turns_shown(num_turns: int) -> list[int]:
    if num_turns <= MOST_TURNS:
        return list(range(1, num_turns + 1))
    return sorted({*(1 << power for power in range(num_turns.bit_length())), num_turns})


def turn_tables(records: Sequence[PassRecord]) -> list[Table]:
    """A table with a column for each turn of the conversations, if there are several."""
    shown = [record for record in records if record.times_by_turn]
    most = max((len(record.times_by_turn or ()) for record in shown), default=0)
    if most < 2:
        return []
    turns = turns_shown(most)
    num_turns = len(turns)
    rows = list[list[object]]()
    times_of = {
        record.name: [t for t in record.times_by_turn or () if t.turn in turns] for record in shown
    }
    count = min(times.num_requests for own in times_of.values() for times in own)
    for key in TURN_ROWS:
        group = dict[str, list[object]]()
        for record in shown if has_enough(key, count) else ():
            for (label, _), *cells in metric_rows(TurnTimes, times_of[record.name], [key]):
                heading = Heading(label)
                group[record.name] = cells
        if len(group) > 1 and len(set(map(str, group.values()))) == 1:
            group = {"every mode": next(iter(group.values()))}
        rows += [[heading, *[None] * num_turns]] if group else []
        rows += [[Shown(f"  {name}", f"{name} {key}"), *cells] for name, cells in group.items()]
    columns = [Column("", is_text=True, key="metric")]
    columns += [Column(f"turn {turn}", key=f"turn_{turn}") for turn in turns]
    workload = shown[-1].workload
    left_out = None if workload is None else workload.num_later_turns
    below = []
    if left_out:
        noun = "question is" if left_out == 1 else "questions are"
        most = shown[-1].turns
        below = [
            f"{left_out} later {noun} not asked: beyond --turns {most}, or the prompt could be "
            "longer than --prefix_len"
        ]
    title = "Conversations by turn; a later turn arrives after the answer before it"
    return [Table(columns, rows, title=title, below=below)]


def parts_of(records: Sequence[PassRecord], rows: Sequence[TableRow]) -> list[list[int]]:
    """The places of the passes that a table has beside each other. With several concurrencies they
    are those of one mode."""
    has_several = len({record.concurrency for record in records}) > 1
    width = width_of(row[0] for row in rows)
    found = list[list[int]]()
    mode = None
    taken = width
    for place, record in enumerate(records if rows else ()):
        label = f"{record.concurrency}{AT_ONCE}" if has_several else record.name
        own = max(len(label), width_of(row[1 + place] for row in rows)) + GAP
        is_full = taken + own > WIDTH and len(found[-1]) >= FEWEST_COLUMNS if found else True
        if is_full or (has_several and record.mode != mode):
            found.append([])
            taken = width
        found[-1].append(place)
        taken += own
        mode = record.mode
    return found


def width_of(cells: Iterable[object]) -> int:
    """The characters of a column of these cells."""
    return max((len(line) for cell in cells for line in text_of(cell).split("\n")), default=0)


def mode_of(records: Sequence[PassRecord]) -> list[str]:
    """The mode that passes of several concurrencies in one table share; none otherwise."""
    return [records[0].mode] if len({record.concurrency for record in records}) > 1 else []


def columns_of(records: Sequence[PassRecord]) -> list[Column]:
    """A column for each pass, whose heading has no mode if the title has it."""
    is_short = bool(mode_of(records))
    labels = [f"{r.concurrency}{AT_ONCE}" if is_short else r.name for r in records]
    return [Column(label, key=r.name) for label, r in zip(labels, records, strict=True)]


def rows_in(rows: Sequence[TableRow], places: Sequence[int]) -> list[TableRow]:
    """The rows in some of their columns, without those that are empty there."""
    kept = list[TableRow]()
    for label, *cells in rows:
        own = [cells[place] for place in places]
        if isinstance(label, Heading) or any(cell is not None for cell in own):
            while isinstance(label, Heading) and kept and isinstance(kept[-1][0], Heading):
                kept.pop()
            kept.append([label, *own])
    return kept[:-1] if kept and isinstance(kept[-1][0], Heading) else kept


def modes_table(
    shown: Sequence[PassRecord], rows: Sequence[TableRow], places: Sequence[int]
) -> Table:
    """A table with a column for each pass of `shown`, at `places` of all rows."""
    return Table(
        [Column("", is_text=True, key="metric"), *columns_of(shown)],
        rows_in(rows, places),
        title="; ".join(mode_of(shown)),
        below=detail_notes(shown),
    )


def with_summary(head: Table, records: Sequence[PassRecord]) -> Table:
    """A row for each pass, with the metrics of `SUMMARY` that one has."""
    rows = rows_of(records, {"": SUMMARY})
    chosen = {str(row[0].value): row for row in rows if isinstance(row[0], Shown)}
    is_closed = records[0].concurrency is not None
    has_groups = len({record.concurrency for record in records}) > 1
    lines = list[Sequence[object]]()
    for place, record in enumerate(records):
        if place and has_groups and record.mode != records[place - 1].mode:
            lines.append(RULE)
        at_once = [record.concurrency] if is_closed else []
        cells = [without_interval(row[1 + place]) for row in chosen.values()]
        lines.append([record.mode, *at_once, *cells, record.status])
    columns = [
        Column("mode", is_text=True),
        *([Column("at\nonce", key="concurrency")] if is_closed else []),
        *(Column(text_of(row[0]).replace(" ", "\n", 1), key=key) for key, row in chosen.items()),
        Column("verdict", is_text=True, key="status"),
    ]
    return replace(head, columns=columns, rows=lines)


def without_interval(cell: object) -> object:
    return Shown(cell.text.partition(" [")[0], cell.value) if isinstance(cell, Shown) else cell


# What systems measured beside the requests.


def kinds_of(records: Sequence[PassRecord]) -> list[type[Details]]:
    """The kinds of details of these records."""
    return list(
        dict.fromkeys(type(record.details) for record in records if record.details is not None)
    )


def detail_rows(records: Sequence[PassRecord]) -> list[TableRow]:
    """The rows of what systems measured, those of each below its heading."""
    rows = list[TableRow]()
    for kind in kinds_of(records):
        details = [record.details if type(record.details) is kind else None for record in records]
        own = metric_rows(kind, details)
        rows += [[Heading(kind.heading), *[None] * len(records)], *own] if own else []
    return rows


def detail_tables(record: PassRecord) -> list[Table]:
    return [] if record.details is None else list(record.details.tables(record.name))


def detail_notes(records: Sequence[PassRecord]) -> list[str]:
    return [note for kind in kinds_of(records) for note in kind.notes]


def program_of(record: PassRecord) -> str | None:
    """The other program that served, if it is known."""
    return None if record.details is None else record.details.program


def reported_lines(records: Sequence[PassRecord]) -> list[str]:
    """What systems say of their passes in a line."""
    return [
        line
        for record in records
        if record.details is not None
        for line in record.details.lines(record.name, has_drafts(record))
    ]
