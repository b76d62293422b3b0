"""MemoryRecord: the planned and the measured memory of all ranks together. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.records.fields import Part, recorded


@dataclass(frozen=True, kw_only=True)
class MemoryRecord(Part):
    """The planned and the measured memory, summed over all ranks."""

    weights_bytes: int = recorded("planned: the target's weights", "bytes")
    kv_bytes: int = recorded("planned: the target's KV cache", "bytes")
    draft_weights_bytes: int = recorded(
        "planned: a standalone draft's weights; 0 if there is none", "bytes"
    )
    draft_kv_bytes: int = recorded(
        "planned: a standalone draft's KV cache, and the draft KV or attention that a KV "
        "policy keeps",
        "bytes",
    )
    working_bytes: int = recorded(
        "planned: the largest amount of temporary memory in addition to these; an estimate",
        "bytes",
    )
    total_bytes: int = recorded("the sum of the above", "bytes")
    free_bytes: int | None = recorded(
        "free memory when the plan was made: of the leading rank's host, on CUDA of its GPU",
        "bytes",
        null="if unknown",
    )
    process_bytes: int | None = recorded(
        "memory in use before anything was loaded: Python and its libraries; on CUDA allocated "
        "device memory",
        "bytes",
        null="unless `ok`; in a study, where earlier runs have left models in memory",
    )
    peak_bytes: int | None = recorded(
        "largest memory use of each rank from then to the end of the last pass, summed over ranks "
        "and counted like `peak_memory_bytes`",
        "bytes",
        null="unless `ok`",
    )
