"""Metrics that a record of an earlier version lacks, from its samples, so that a number means the
same in every table.
"""

from __future__ import annotations

from dataclasses import replace

from magicdec.names import BASELINE
from magicdec.records.metrics import add_speedup, step_metrics
from magicdec.records.performance import Metrics
from magicdec.records.record import Record, RunRecord


def renewed(record: Record) -> Record:
    """The record with step metrics and a speedup that stalls do not move, if it lacks them."""
    if not isinstance(record, RunRecord) or record.metrics is None or record.samples is None:
        return record
    if record.metrics.num_steps is not None or record.metrics.mean_step_ms is None:
        return record
    passes = {name: samples.restored() for name, samples in record.samples.items()}
    ours = passes[record.config["decoding"]["strategy"]]
    metrics: Metrics = replace(record.metrics, **step_metrics(ours))
    baseline = record.baseline_metrics
    if baseline is not None:
        baseline = replace(baseline, **step_metrics(passes[BASELINE]))
        if metrics.speedup is not None:
            metrics = add_speedup(metrics, passes[BASELINE], ours)
    return replace(record, metrics=metrics, baseline_metrics=baseline)
