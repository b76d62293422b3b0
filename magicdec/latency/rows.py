"""The forwards that `magicdec latency` times, the rows that it reports, and how the times of all
ranks become one row.

Owns the keys of a row (docs/latency.md is made from them). Must not know how anything is timed.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.sections import KVSection
from magicdec.records.fields import recorded
from magicdec.records.metrics import percentile


@dataclass(frozen=True)
class Cell:
    """The forward that a row describes."""

    phase: str = recorded(
        "`decode`, `verify`, `first_draft` or `draft`, as above",
        choices=("decode", "verify", "first_draft", "draft"),
    )
    B: int = recorded("rows of the forward")
    context: int = recorded("tokens that each row's cache holds before the forward", "tokens")
    T: int = recorded("new tokens a row", "tokens")
    budget: int | None = recorded(
        "largest number of KV entries of the context that a draft reads",
        "tokens",
        null="unless the forward is a draft; where the policy reads the whole cache",
    )
    kv_policy: str | None = recorded(
        "the KV policy of a draft; of a `verify`, the policy for which it also returns attention "
        "weights",
        null="`decode`; `verify` that returns no attention weights",
    )


@dataclass(frozen=True, kw_only=True)
class Row(Cell):
    """The times of one forward. The time of a repeat is that of its slowest rank."""

    tokens: int = recorded("new tokens of the forward: B x T", "tokens")
    ms_median: float = recorded("median over the repeats", "ms")
    ms_p10: float = recorded("10th percentile", "ms")
    ms_p90: float = recorded("90th percentile", "ms")
    bytes: int = recorded(
        "smallest number of bytes that all ranks together must read: the weights once, and K and V "
        "of every visible token, including new ones",
        "bytes",
    )
    roofline_fraction: float = recorded(
        "`bytes` divided by the median time and by the read bandwidth of the same run "
        "(`environment`); above 1 if they were read from a CPU or GPU cache instead of memory",
        "ratio",
    )


Timing = tuple[Cell, list[float], int]
"""A cell, the seconds of each repeat on this rank, and the bytes that this rank must read in each
repeat."""


def summarise(ranks: list[list[Timing]], bandwidth: float) -> list[Row]:
    """Make one row for each cell from the timings of all ranks. The time of a repeat is that of its
    slowest rank, and the bytes are summed over the ranks. `bandwidth` is the read bandwidth of all
    ranks together, in bytes/s."""
    rows = []
    for parts in zip(*ranks, strict=True):
        cell = parts[0][0]
        assert all(part[0] == cell for part in parts), "all ranks time the same cells"
        slowest = [max(repeat) for repeat in zip(*(part[1] for part in parts), strict=True)]
        rows.append(_row(cell, slowest, sum(part[2] for part in parts), bandwidth))
    return rows


def _row(cell: Cell, seconds: list[float], num_bytes: int, bandwidth: float) -> Row:
    median, p10, p90 = (percentile(seconds, p) for p in (50, 10, 90))
    assert median is not None and p10 is not None and p90 is not None, "at least one repeat"
    return Row(
        cell.phase,
        cell.B,
        cell.context,
        cell.T,
        cell.budget,
        cell.kv_policy,
        tokens=cell.B * cell.T,
        ms_median=1e3 * median,
        ms_p10=1e3 * p10,
        ms_p90=1e3 * p90,
        bytes=num_bytes,
        roofline_fraction=num_bytes / bandwidth / median,
    )


# The parameters of KV policies that decide which budgets are possible or what a forward reads.
KV_FIELDS = ("num_sink_tokens", "window_size", "recent_window")


@dataclass(frozen=True)
class Grid:
    """Which forwards are timed, and how often. Every (B, context) has one decode forward, a verify
    forward for each T above 1, and draft forwards for each of `drafts`."""

    batch_sizes: tuple[int, ...]
    contexts: tuple[int, ...]  # cached tokens in each row
    new_tokens: tuple[int, ...]  # T of the decode forward (1) and of the verify forwards
    drafts: tuple[KVSection, ...]  # a KV policy and a budget each; budget -1: the whole cache
    repeats: int
    warmup: int
