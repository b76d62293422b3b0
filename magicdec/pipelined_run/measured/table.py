"""Prints the records of one command: a column for each pass. Must not know how a metric is
computed."""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.pipelined_run.measured.metrics import SpeculationMetrics
from magicdec.pipelined_run.measured.record import SpeculationRecord
from magicdec.pipelined_run.measured.use import PipelineUse
from magicdec.serving.showing.passes import print_passes, rows_of


def print_table(records: Sequence[SpeculationRecord]) -> None:
    """Print the records, with the comparison of the tokens above them."""
    metrics = [record.metrics for record in records]
    rows = rows_of(SpeculationMetrics, metrics)
    rows += rows_of(PipelineUse, [None if m is None else m.use for m in metrics])
    print_passes(title(records[-1]), records, rows)


def title(record: SpeculationRecord) -> str:
    model, w = record.config["model"], record.config["workload"]
    return (
        f"{model['model']} ({model['dtype']}), {record.workload.dataset}: {w['num_requests']} "
        f"request{'s' * (w['num_requests'] != 1)}, {w['lanes']} at a time"
    )
