"""SpeculationRecord: one JSON line for each pass of `magicdec pipeline`. Imports no torch.
docs/pipelined_speculation.md documents the schema and is made from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.pipeline.record import PassRecord
from magicdec.pipelined_run.measured.metrics import SpeculationMetrics
from magicdec.records.fields import recorded

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SpeculationRecord(PassRecord):
    """A pass of `magicdec pipeline`: `one process`, or a mode."""

    metrics: SpeculationMetrics | None = recorded("its metrics", null="if `diverged`")
    kind: str = recorded("`speculation`", default="speculation")
    schema_version: int = recorded(f"{SCHEMA_VERSION}", default=SCHEMA_VERSION)
