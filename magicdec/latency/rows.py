"""The rows of `magicdec latency`: what each is about, and how ranks' times become one.

Owns the keys of a row (docs/latency.md is made from them). Must not know how anything is timed;
imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import recorded
from magicdec.records.metrics import percentile


@dataclass(frozen=True)
class Cell:
    """What a row of the result is about."""

    phase: str = recorded(
        "`decode`, `verify`, `first_draft` or `draft`, as above",
        choices=("decode", "verify", "first_draft", "draft"),
    )
    B: int = recorded("rows of the forward")
    context: int = recorded("tokens that each row's cache holds before the forward", "tokens")
    T: int = recorded("new tokens a row", "tokens")
    budget: int | None = recorded(
        "KV entries that a draft reads of the context, at most",
        "tokens",
        null="unless a draft; under `full`",
    )
    kv_policy: str | None = recorded(
        "what a draft reads; of a `verify`, the policy that it tells where the attention went",
        null="`decode`; `verify` that tells no policy",
    )


@dataclass(frozen=True, kw_only=True)
class Row(Cell):
    """What one forward took. Each repeat lasts as long as its slowest rank."""

    tokens: int = recorded("new tokens of the forward: B x T", "tokens")
    ms_median: float = recorded("median over the repeats", "ms")
    ms_p10: float = recorded("10th percentile", "ms")
    ms_p90: float = recorded("90th percentile", "ms")
    bytes: int = recorded(
        "least bytes that all ranks together had to read: weights once, K and V of every visible "
        "token, new ones included",
        "bytes",
    )
    roofline_fraction: float = recorded(
        "`bytes` over the read bandwidth of the same run (`environment`) and the median; above 1 "
        "where a cache, not memory, held them",
        "ratio",
    )


Timing = tuple[Cell, list[float], int]
"""A cell, this rank's seconds of each repeat, the bytes that this rank had to read each time."""


def summarise(ranks: list[list[Timing]], bandwidth: float) -> list[Row]:
    """A row a cell, from every rank's timings: each repeat lasts as long as its slowest rank;
    bytes are those of all ranks, and `bandwidth` what they read together."""
    rows = []
    for parts in zip(*ranks, strict=True):
        cell = parts[0][0]
        assert all(part[0] == cell for part in parts), "ranks go in lockstep"
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
