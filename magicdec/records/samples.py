"""SamplesRecord: the raw times and counts of one pass. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import recorded

UNDRAFTED = "for `autoregressive`; with random weights"


@dataclass(frozen=True, kw_only=True)
class SamplesRecord:
    """One pass, by batch."""

    step_ms: list[list[float]] = recorded("time of each step, a list a batch", "ms")
    num_tokens: list[int] = recorded(
        "tokens kept after the first ones, summed over rows, a number a batch", "tokens"
    )
    num_drafted: list[list[int]] | None = recorded(
        "draft tokens a row by batch and step; 0: a step without drafts",
        "tokens",
        null=UNDRAFTED,
        is_later=True,
    )
    num_accepted: list[list[list[int]]] | None = recorded(
        "accepted draft tokens by batch, step and row still running; no rows for a step without "
        "drafts",
        "tokens",
        null=UNDRAFTED,
    )
