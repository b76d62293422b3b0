"""Whether the metrics of a run follow from its samples, as those of every record do that was not
edited by hand.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from magicdec.names import BASELINE
from magicdec.records.acceptance import GroupAcceptance
from magicdec.records.metrics import run_metrics
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord

ROUNDING = 1e-6  # of numbers that another machine adds up


def unfounded_metric(record: RunRecord) -> str | None:
    """The name of the first metric of a pass that is not what the samples of the record give; None
    if there is none. Raises ValueError if samples that metrics need are missing."""
    stated = {
        BASELINE: record.baseline_metrics,
        record.config["decoding"]["strategy"]: record.metrics,
    }
    if not any(stated.values()):
        return None
    bandwidth = record.environment.read_bandwidth_bytes_per_s
    prefill = record.prefill_samples
    if not record.samples or prefill is None or bandwidth is None or record.workload is None:
        raise ValueError("it has metrics without the samples that they follow from")
    passes = {name: samples.restored() for name, samples in record.samples.items()}
    workload = record.workload
    found = run_metrics(passes, prefill, bandwidth, workload.is_random, workload.categories)
    for name, metrics in stated.items():
        for each in fields(Metrics) if metrics is not None else ():
            if name not in found:
                raise ValueError(f"it has metrics of a pass {name} without samples of it")
            if not _equal(getattr(metrics, each.name), getattr(found[name], each.name)):
                return each.name
    return None


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, GroupAcceptance) and isinstance(other, GroupAcceptance):
        return _equal(asdict(one), asdict(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=1e-12)
