"""The rows of `magicdec latency`: what each is about, and how ranks' times become one.

Owns the keys of a row (docs/latency.md). Must not know how anything is timed; imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from magicdec.records.metrics import percentile


@dataclass(frozen=True)
class Cell:
    """What a row of the result is about. `budget` is None unless a draft has one; `kv_policy` is
    that of a draft, or of what watches a verify forward."""

    phase: str  # decode, verify, draft, first_draft
    B: int
    context: int
    T: int
    budget: int | None = None
    kv_policy: str | None = None


Timing = tuple[Cell, list[float], int]
"""A cell, this rank's seconds of each repeat, the bytes that this rank had to read each time."""


def summarise(ranks: list[list[Timing]], bandwidth: float) -> list[dict[str, Any]]:
    """A row a cell, from every rank's timings: each repeat lasts as long as its slowest rank;
    bytes are those of all ranks, and `bandwidth` what they read together."""
    rows = []
    for parts in zip(*ranks, strict=True):
        cell = parts[0][0]
        assert all(part[0] == cell for part in parts), "ranks go in lockstep"
        slowest = [max(repeat) for repeat in zip(*(part[1] for part in parts), strict=True)]
        median, p10, p90 = (percentile(slowest, p) for p in (50, 10, 90))
        assert median is not None and p10 is not None and p90 is not None, "at least one repeat"
        num_bytes = sum(part[2] for part in parts)
        rows.append(
            {
                **asdict(cell),
                "tokens": cell.B * cell.T,
                "ms_median": 1e3 * median,
                "ms_p10": 1e3 * p10,
                "ms_p90": 1e3 * p90,
                "bytes": num_bytes,
                "roofline_fraction": num_bytes / bandwidth / median,
            }
        )
    return rows
