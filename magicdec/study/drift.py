"""Drift: how steady the machine was during a study, from the baseline passes of its records.

Every speculative run decodes the baseline too, on the prompts of its group, and a study repeats
baselines. The step times of one setting should be equal whenever they were measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from magicdec.names import BASELINE
from magicdec.records.record import RunRecord
from magicdec.study.cells import config_key

UNSTEADY = 0.10  # a larger difference from the median is pointed out
LEAST_FOR_TREND = 6  # baselines; with fewer there is no first and last third


@dataclass(frozen=True)
class Drift:
    """Of baseline step times over the median of their setting. `trend` is the median of the last
    third of the study over that of the first, minus 1; None if there are too few."""

    num_baselines: int
    num_settings: int
    lowest: float
    highest: float
    trend: float | None
    bandwidth: tuple[float, float] | None  # lowest and highest, bytes per second

    @property
    def is_steady(self) -> bool:
        return max(abs(self.lowest), abs(self.highest)) <= UNSTEADY

    def describe(self) -> str:
        text = (
            f"drift: {self.num_baselines} baselines in {self.num_settings} settings took "
            f"{self.lowest:+.1%} to {self.highest:+.1%} of their setting's median step time"
        )
        if self.trend is not None:
            text += f", the last third {self.trend:+.1%} of the first"
        if self.bandwidth is not None:
            low, high = self.bandwidth
            text += f"; {low / 1e9:.1f} to {high / 1e9:.1f} GB/s read"
        if not self.is_steady:
            text += "; the machine was not steady: compare within a record, not between records"
        return text


def measure_drift(records: Sequence[RunRecord]) -> Drift | None:
    """The drift over records in the order in which they were measured. None if no setting has two
    baselines."""
    settings: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for number, record in enumerate(records):
        step_ms = baseline_step_ms(record)
        if step_ms is not None:
            settings[setting_of(record)].append((number, step_ms))
    ratios, num_settings = list[tuple[int, float]](), 0
    for steps in settings.values():
        if len(steps) > 1:
            middle = median(ms for _, ms in steps)
            ratios += [(number, ms / middle) for number, ms in steps]
            num_settings += 1
    if not ratios:
        return None
    values = [ratio for _, ratio in sorted(ratios)]
    third, trend = len(values) // 3, None
    if len(values) >= LEAST_FOR_TREND:
        trend = median(values[-third:]) / median(values[:third]) - 1
    read = [r.environment.read_bandwidth_bytes_per_s for r in records]
    rates = [rate for rate in read if rate is not None]
    bandwidth = (min(rates), max(rates)) if rates else None
    return Drift(len(values), num_settings, min(values) - 1, max(values) - 1, trend, bandwidth)


def baseline_step_ms(record: RunRecord) -> float | None:
    """The mean time of a baseline step in this run; None if it decoded no baseline."""
    is_baseline = record.config["decoding"]["strategy"] == BASELINE
    metrics = record.metrics if is_baseline else record.baseline_metrics
    return None if metrics is None else metrics.mean_step_ms


def setting_of(record: RunRecord) -> str:
    """Equal for records whose baseline passes do the same work."""
    config = record.config
    decoding = {"ignore_eos": config["decoding"]["ignore_eos"]}
    return config_key({**config, "draft": None, "kv": None, "decoding": decoding})
