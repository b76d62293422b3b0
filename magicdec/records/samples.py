"""SamplesRecord: the raw times and counts of one pass. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import recorded

UNDRAFTED = "for `autoregressive`; with random weights"


@dataclass(frozen=True, kw_only=True)
class SamplesRecord:
    """The raw times and counts of one pass, by batch."""

    step_ms: list[list[float]] = recorded("time of each step, by batch and step", "ms")
    num_tokens: list[int] = recorded(
        "emitted tokens after the first ones, summed over rows, by batch", "tokens"
    )
    num_drafted: list[list[int]] | None = recorded(
        "draft tokens for each row, by batch and step; 0 in a step without drafts",
        "tokens",
        null=UNDRAFTED,
        is_later=True,
    )
    num_accepted: list[list[list[int]]] | None = recorded(
        "accepted draft tokens by batch, step and row; rows that have ended are left out, and a "
        "step without drafts has no rows",
        "tokens",
        null=UNDRAFTED,
    )
