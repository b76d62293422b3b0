"""SpeculationRecord: one JSON line for each pass of `magicdec pipeline`. Imports no torch.
docs/pipelined_speculation.md documents the schema and is made from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from magicdec.pipelined_run.measured.metrics import SpeculationMetrics
from magicdec.records.fields import recorded
from magicdec.serving.record import PassRecord


@dataclass(frozen=True, kw_only=True)
class SpeculationRecord(PassRecord):
    """A pass of `magicdec pipeline`: a name of `--modes`."""

    kind: Literal["speculation"] = recorded("`speculation`", default="speculation")
    metrics: SpeculationMetrics | None = recorded("its metrics", null="if `diverged`")
