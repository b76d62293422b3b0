"""MemoryRecord: what all ranks together were planned to hold, and what they took. Imports no
torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import recorded


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Of all ranks together."""

    weights_bytes: int = recorded("planned: the target's weights", "bytes")
    kv_bytes: int = recorded("planned: the target's KV cache", "bytes")
    draft_weights_bytes: int = recorded(
        "planned: a standalone draft's weights; 0 without one", "bytes"
    )
    draft_kv_bytes: int = recorded(
        "planned: a standalone draft's KV cache, what SnapKV gathers, and what `verified` keeps of "
        "the attention",
        "bytes",
    )
    working_bytes: int = recorded(
        "planned: the largest amount held for moments beside these; an estimate", "bytes"
    )
    total_bytes: int = recorded("the sum of the above", "bytes")
    free_bytes: int | None = recorded(
        "free when the plan was made: on the host of the leading rank, on CUDA on its GPU",
        "bytes",
        null="if unknown",
    )
    process_bytes: int | None = recorded(
        "taken before anything was loaded: Python and its libraries; on CUDA allocated device "
        "memory",
        "bytes",
        null="unless `ok`",
    )
    peak_bytes: int | None = recorded(
        "sum over ranks of the most that each took from then to the end of the last pass, counted "
        "like `peak_memory_bytes`",
        "bytes",
        null="unless `ok`",
    )
