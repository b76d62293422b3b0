"""The grid of `magicdec latency`, a row for each of its forwards from the timings of all ranks, the
record and its table, from which docs/record.md is made. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from magicdec.config.sections import KVSection
from magicdec.model.config import ExpertsConfig
from magicdec.names import WITHOUT_BUDGET
from magicdec.output.tables import RULE, Column, Shown, Table
from magicdec.records.computing import percentile
from magicdec.records.environment import Environment
from magicdec.records.fields import recorded
from magicdec.records.metric_tables import fixed
from magicdec.records.record import MeasuredRecord

if TYPE_CHECKING:
    from magicdec.config.resolved import ResolvedConfig
    from magicdec.model.checkpoint.source import ModelSource


NO_MIXTURE = "unless the model is a mixture of experts; records of before it was measured"
# Why a share that would be above 1 is null.
FROM_A_CACHE = (
    "more than 100 %: the bytes were read from a cache, or the machine was slower when its "
    "bandwidth was measured"
)
SLOWER_ALONE = (
    "more than 100 %: the products by themselves took longer than the forward, as where other "
    "programs compute"
)


@dataclass(frozen=True)
class LatencyCell:
    phase: str = recorded(
        "`decode`, `verify`, `first_draft`, `draft` or `prefill`, as above",
        choices=("decode", "verify", "first_draft", "draft", "prefill"),
    )
    B: int = recorded("rows of the forward")
    context: int = recorded(
        "tokens that each row's cache holds before the forward; of a `prefill`, after it", "tokens"
    )
    T: int = recorded("new tokens a row", "tokens")
    budget: int | None = recorded(
        "largest number of KV entries of the context that a draft reads",
        "tokens",
        null="unless the forward is a draft; where the policy reads the whole cache",
    )
    kv_policy: str | None = recorded(
        "the KV policy of a draft; of a `verify`, the policy for which it also returns attention "
        "weights",
        null="`decode` and `prefill`; `verify` that returns no attention weights",
    )
    draft_weights: str | None = recorded(
        "the matrices of a draft: a copy of the model's own in few bits, as `--draft_weights`",
        null="with the model's own",
        default=None,
    )


@dataclass(frozen=True, kw_only=True)
class LatencyRow(LatencyCell):
    """The times of one forward, for each repeat on its slowest rank."""

    tokens: int = recorded("new tokens of the forward: B x T", "tokens")
    ms_median: float = recorded("median over the repeats", "ms")
    ms_p10: float = recorded("10th percentile", "ms")
    ms_p90: float = recorded("90th percentile", "ms")
    bytes: int = recorded(
        "smallest number of bytes that all ranks together must read: the weights once, and K and V "
        "of every visible token, including new ones",
        "bytes",
    )
    roofline_fraction: float | None = recorded(
        "`bytes` divided by the median time and by the read bandwidth of the same run "
        "(`environment`)",
        "ratio",
        null="if it would be above 1, as for bytes that are read from a cache",
    )
    roofline_reason: str | None = recorded(
        "why `roofline_fraction` is null", null="if it is not", default=None
    )
    products_fraction: float | None = recorded(
        "the time that the products of the forward's linear layers take by themselves, with "
        "weights that are in the processor's cache, divided by the median time: what the "
        "arithmetic alone would leave of it",
        "ratio",
        null="if it would be above 1, as on a busy machine; records of before it was measured",
        default=None,
    )
    products_reason: str | None = recorded(
        "why `products_fraction` is null",
        null="if it is not; records of before it was measured",
        default=None,
    )
    attention_fraction: float | None = recorded(
        "the time that the attention of all layers takes by itself, over the same cache, divided "
        "by the median time. Norms, what waits for memory in the linear layers, all-reduces and "
        "calls are what it and `products_fraction` leave",
        "ratio",
        null="a draft; if it would be above 1, as on a busy machine; records of before it was "
        "measured",
        default=None,
    )
    experts_read: float | None = recorded(
        "experts of a layer that any token of the forward goes to, each of which is read once; on "
        "average over the layers with experts",
        null=NO_MIXTURE,
        default=None,
    )
    experts_by_chance: float | None = recorded(
        "those that `tokens` would read if each went to others at random: E (1 - (1 - k/E)^tokens) "
        "of E experts, k of each token",
        null=NO_MIXTURE,
        default=None,
    )


class TimedCell(NamedTuple):
    """A cell, the seconds of each repeat on this rank, the bytes that this rank must read in each
    repeat, the seconds of its products by themselves, the experts of a layer that are read, and
    the seconds of its attention by itself, None of a draft."""

    cell: LatencyCell
    seconds: list[float]
    num_bytes: int
    products_s: float
    experts_read: float | None
    attention_s: float | None


def summarise(
    ranks: list[list[TimedCell]], bandwidth: float, experts: ExpertsConfig | None = None
) -> list[LatencyRow]:
    """A row for each cell from the timings of all ranks: the times of the slowest rank, the sum of
    bytes, the products and the attention of the rank with the most, and the experts, which all
    ranks read their shares of. `bandwidth`: at which all ranks together read, in bytes/s."""
    rows = []
    for parts in zip(*ranks, strict=True):
        cell = parts[0].cell
        num_bytes = sum(part.num_bytes for part in parts)
        assert all(part.cell == cell for part in parts), "all ranks time the same cells"
        seconds = [max(repeat) for repeat in zip(*(part.seconds for part in parts), strict=True)]
        median, p10, p90 = (percentile(seconds, p) for p in (50, 10, 90))
        assert median is not None and p10 is not None and p90 is not None, "at least one repeat"
        tokens = cell.B * cell.T
        bytes_share = num_bytes / bandwidth / median
        products_share = max(part.products_s for part in parts) / median
        attention_s = [part.attention_s for part in parts if part.attention_s is not None]
        attention_share = max(attention_s) / median if attention_s else None
        row = LatencyRow(
            **vars(cell),
            tokens=tokens,
            ms_median=1e3 * median,
            ms_p10=1e3 * p10,
            ms_p90=1e3 * p90,
            bytes=num_bytes,
            roofline_fraction=bytes_share if bytes_share <= 1 else None,
            roofline_reason=None if bytes_share <= 1 else FROM_A_CACHE,
            products_fraction=products_share if products_share <= 1 else None,
            products_reason=None if products_share <= 1 else SLOWER_ALONE,
            attention_fraction=attention_share if (attention_share or 0) <= 1 else None,
            experts_read=parts[0].experts_read,
            experts_by_chance=None if experts is None else experts.touched(tokens),
        )
        rows.append(row)
    return rows


# The parameters of KV policies that decide which budgets are possible or what a forward reads.
KV_FIELDS = ("num_sink_tokens", "window_size", "recent_window")


@dataclass(frozen=True)
class LatencyGrid:
    """The forwards to time: every (B, context) has one decode forward, a verify forward for each T
    above 1, and draft forwards for each of `drafts`, the first B also the end of a prefill."""

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]  # cached tokens in each row
    new_tokens: tuple[int, ...]  # T of the decode forward (1) and of the verify forwards
    drafts: tuple[KVSection, ...]  # a KV policy and a budget each; budget -1: the whole cache
    repeats: int
    warmup: int
    draft_weights: tuple[str | None, ...] = (None,)  # what each of the drafts drafts with
    prefill_chunk: int | None = None  # tokens of a part of a prompt; None: none is timed


@dataclass(frozen=True, kw_only=True)
class LatencyRecord(MeasuredRecord):
    kind: Literal["latency"] = recorded("`latency`", default="latency")
    status: Literal["ok"] = recorded("`ok`: forwards of random tokens have no others", default="ok")
    rows: list[LatencyRow] = recorded("the forwards, as below")


def make_record(
    config: ResolvedConfig,
    grid: LatencyGrid,
    source: ModelSource,
    environment: Environment,
    rows: list[LatencyRow],
) -> LatencyRecord:
    """A record with the parts of `config` on which a forward depends."""
    from magicdec.setup.prepare import describe_model

    sections = config.to_dict()
    attention, decoding, kv = (sections[name] for name in ("attention", "decoding", "kv"))
    drafts = [
        {
            "kv_policy": kv.policy,
            "budget": None if kv.policy in WITHOUT_BUDGET else kv.budget,
            "recent_window": kv.resolve().recent_window,
        }
        for kv in grid.drafts
    ]
    parts = {
        "model": sections["model"] | asdict(describe_model(source)),
        "parallel": sections["parallel"],
        "attention": {name: attention[name] for name in ("backend", "backend_reason")},
        "decoding": {name: decoding[name] for name in ("cuda_graphs", "cuda_graphs_reason")},
        "kv": {name: kv[name] for name in KV_FIELDS if name != "recent_window"},
        "grid": asdict(grid) | {"drafts": drafts},
    }
    return LatencyRecord(config=parts, environment=environment, rows=rows)


def tables(records: list[LatencyRecord]) -> list[Table]:
    """A table for each record, with a section for each (B, context) and times also as multiples of
    its decode step."""
    return [_table_of(record) for record in records]


Draft = tuple[str | None, int | None, str | None]
"""The KV policy, budget and low-bit weights of a draft."""
LOOKUP: Draft = (None, None, None)


def break_even_table(record: LatencyRecord) -> Table:
    """The emitted tokens of a step from which drafting pays, by the number of draft tokens."""
    lines: list[tuple[Any, ...]] = []
    for rows in by_place(record.rows):
        lines += [RULE] if lines else []
        place: tuple[int | None, int | None] = (rows[0].B, rows[0].context)
        for draft, tokens in break_even(rows).items():
            lines.append((*place, _name(draft), *(fixed(number, 2) for number in tokens.values())))
            place = None, None
    lengths = sorted({row.T - 1 for row in record.rows if row.phase == "verify"})
    columns: list[Column | str] = ["B", "context", Column("drafts", is_text=True)]
    columns += [f"gamma {number}" for number in lengths]
    return Table(columns, lines, title="emitted tokens of a step from which drafting pays")


def break_even(rows: Sequence[LatencyRow]) -> dict[Draft, dict[int, float]]:
    """Of the rows of one (B, context), by draft and number of draft tokens: the time of the drafts
    and of their verification, divided by that of a decode step. Lookups take no time. Drafts of a
    policy that watches verifications choose in the first of a step, and are verified by a forward
    that is watched. NaN without such a forward."""
    lengths = sorted({row.T - 1 for row in rows if row.phase == "verify"})
    verify_ms = {(row.T, row.kv_policy): row.ms_median for row in rows if row.phase == "verify"}
    first_ms = {_drafts(row): row.ms_median for row in rows if row.phase == "first_draft"}
    draft_ms = {_drafts(row): row.ms_median for row in rows if row.phase == "draft"}
    found = dict[Draft, dict[int, float]]()
    for draft, ms in {LOOKUP: 0.0, **draft_ms}.items():
        policy = draft[0] if draft in first_ms else None
        totals = {
            gamma: first_ms.get(draft, ms)
            + (gamma - 1) * ms
            + verify_ms.get((gamma + 1, policy), math.nan)
            for gamma in lengths
        }
        found[draft] = {gamma: total / rows[0].ms_median for gamma, total in totals.items()}
    return found


def by_place(rows: Sequence[LatencyRow]) -> list[list[LatencyRow]]:
    """The rows of each (B, context), whose first is a decode step."""
    places = list[list[LatencyRow]]()
    for row in rows:
        if row.phase == "decode":
            places.append([])
        places[-1].append(row)
    return places


def _drafts(row: LatencyRow) -> Draft:
    return row.kv_policy, row.budget, row.draft_weights


def _table_of(record: LatencyRecord) -> Table:
    lines: list[tuple[Any, ...]] = []
    decode_ms = 0.0
    has_experts = any(row.experts_read is not None for row in record.rows)
    for row in record.rows:
        is_first = row.phase == "decode"  # of its section
        if is_first:
            lines += [RULE] if lines else []
            decode_ms = row.ms_median
        place = (row.B, row.context) if is_first else (None, None)
        in_ms = (_milliseconds(ms) for ms in (row.ms_median, row.ms_p10, row.ms_p90))
        experts = (fixed(row.experts_read, 1), fixed(row.experts_by_chance, 1))
        lines.append(
            (
                *place,
                _label(row),
                *in_ms,
                fixed(row.ms_median / decode_ms, 2, "x"),
                *(experts if has_experts else ()),
                fixed(row.bytes, 1, scale=1e-6),
                _share(row.roofline_fraction, row.roofline_reason),
                _share(row.products_fraction, row.products_reason),
                fixed(row.attention_fraction, 1, " %", 100),
            )
        )
    times = ("p50, ms", "p10", "p90", "of decode")
    limits = ("MB read", "of bytes", "of products", "attention")
    read = ("experts", "by chance") if has_experts else ()
    columns = ("B", "context", Column("forward", is_text=True), *times, *read, *limits)
    reasons = {
        "of bytes": [row.roofline_reason for row in record.rows],
        "of products": [row.products_reason for row in record.rows],
    }
    below = [
        f"{label}, where none is shown: {reason}"
        for label, row_reasons in reasons.items()
        for reason in dict.fromkeys(filter(None, row_reasons))
    ]
    return Table(columns, lines, title=_title(record), below=below)


def _milliseconds(ms: float) -> object:
    """In four digits or more."""
    return fixed(ms, 3 if ms < 10 else 2 if ms < 100 else 1)


def _share(fraction: float | None, reason: str | None) -> object:
    return fixed(fraction, 1, " %", 100) if reason is None else Shown("-", None)


def _label(row: LatencyRow) -> str:
    if row.phase in ("draft", "first_draft"):
        return f"{row.phase.replace('_', ' ')}, {_name(_drafts(row))}"
    if row.phase == "decode":
        return "decode"
    if row.phase == "prefill":
        return f"prefill, last {row.T} of a row"
    watched = f", watched for {row.kv_policy}" if row.kv_policy else ""
    return f"verify, T {row.T}{watched}"


def _name(draft: Draft) -> str:
    policy, budget, weights = draft
    if policy is None:
        return "prompt lookup"
    return f"{policy} {budget or ''}".rstrip() + (f", {weights} weights" if weights else "")


def _title(record: LatencyRecord) -> str:
    c = record.config
    e = record.environment
    assert e.read_bandwidth_bytes_per_s is not None, "measured with the forwards"
    return (
        f"{c['model']['model']} ({c['model']['dtype']}, weights {c['model']['target_dtype']}): "
        f"forwards at fixed cache lengths, "
        f"{c['grid']['repeats']} repeats; ranks {e.world_size} x threads {e.threads}, "
        f"{c['parallel'].get('collectives') or c['parallel']['device']}, "
        f"{c['attention']['backend']}, {e.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s read"
    )
