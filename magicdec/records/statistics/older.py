"""The intervals of records that are older than intervals, computed from their samples. Imports no
torch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from magicdec.names import BASELINE
from magicdec.records.metrics import run_metrics
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord
from magicdec.records.statistics.uncertainty import Uncertainty


def with_intervals(record: RunRecord) -> RunRecord:
    """The record with the intervals of its metrics, as a run writes them today. A record that has
    them already, or whose samples are too old for it, is returned as it is."""
    samples, prefill = record.samples, record.prefill_samples
    if record.metrics is None or samples is None or prefill is None or _has_any(record.metrics):
        return record
    try:
        passes = {name: each.restored() for name, each in samples.items()}
    except ValueError:
        return record
    is_random = record.workload is not None and record.workload.is_random
    found = run_metrics(passes, prefill, 1.0, is_random)  # intervals need no bandwidth
    asked = record.config["decoding"]["strategy"]
    metrics = _taken(record.metrics, found[asked])
    baseline = record.baseline_metrics
    if baseline is not None and BASELINE in found:
        baseline = _taken(baseline, found[BASELINE])
    return replace(record, metrics=metrics, baseline_metrics=baseline)


def _has_any(metrics: Metrics) -> bool:
    return any(getattr(metrics, item.name) is not None for item in fields(Uncertainty))


def _taken(metrics: Metrics, computed: Metrics) -> Metrics:
    values: dict[str, Any] = {f.name: getattr(computed, f.name) for f in fields(Uncertainty)}
    return replace(metrics, **values)
