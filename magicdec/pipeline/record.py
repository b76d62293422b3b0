"""PipelineRecord: one JSON line for each pass of `magicdec recurrent`. Imports no torch.
docs/pipeline.md documents the schema and is made from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from magicdec.pipeline.metrics import RingMetrics
from magicdec.records.fields import recorded
from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.record import PassRecord


@dataclass(frozen=True, kw_only=True)
class PipelineRecord(PassRecord):
    """A pass of `magicdec recurrent`: a name of `--modes`, or `ring_speculative`."""

    kind: Literal["pipeline"] = recorded("`pipeline`", default="pipeline")
    metrics: ServingMetrics | None = recorded(
        "its metrics, as `magicdec inflight` defines them (serving.md)", null="if `diverged`"
    )
    ring: RingMetrics | None = recorded(
        "how the stages spent their time", null="of a baseline, or if `diverged`"
    )
