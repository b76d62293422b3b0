"""Point: what a report keeps of one record, which is all but its samples. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from magicdec.names import BASELINE
from magicdec.records.environment import Environment
from magicdec.records.performance import Metrics
from magicdec.records.record import RunRecord
from magicdec.records.samples.recorded import SamplesRecord
from magicdec.records.table import method
from magicdec.report.commands import command_of
from magicdec.report.settings import Setting, settings


@dataclass(frozen=True)
class Point:
    """One run. `number` counts the runs of a report from 1."""

    number: int
    source: str  # the file that holds the record
    status: str
    error: str | None
    settings: dict[str, Setting]
    method: str  # how it decoded, in a few words
    command: str
    environment: Environment
    metrics: Metrics | None
    baseline: Metrics | None  # of the autoregressive pass of the same run
    ttft_ms: tuple[float, ...]  # of each sequence, over all batches
    tpot_ms: dict[str, tuple[float, ...]]  # of each sequence that decoded a token, by pass

    @property
    def is_baseline(self) -> bool:
        return self.method == BASELINE

    @property
    def autoregressive(self) -> Metrics | None:
        """The metrics of autoregressive decoding, whether it is the run or in the run."""
        return self.metrics if self.is_baseline else self.baseline


def make_point(number: int, source: str, record: RunRecord) -> Point:
    prefill, samples = record.prefill_samples, record.samples or {}
    is_kept = record.passed  # the times of a run that diverged are no result
    return Point(
        number=number,
        source=source,
        status=record.status,
        error=record.error,
        settings=settings(record),
        method=method(record),
        command=command_of(record.environment),
        environment=record.environment,
        metrics=record.metrics,
        baseline=record.baseline_metrics,
        ttft_ms=tuple(chain.from_iterable(prefill.ttft_ms)) if prefill and is_kept else (),
        tpot_ms={name: _tpots(s) for name, s in samples.items()} if is_kept else {},
    )


def _tpots(samples: SamplesRecord) -> tuple[float, ...]:
    """TPOT of each sequence that decoded a token after its first, in ms."""
    times = chain.from_iterable(samples.sequence_ms or ())
    tokens = chain.from_iterable(samples.sequence_tokens or ())
    return tuple(ms / count for ms, count in zip(times, tokens, strict=True) if count)
