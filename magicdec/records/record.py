"""RunRecord: one JSON line a run, appended and never rewritten. Imports no torch. The schema is in
docs/record.md, which is made from these classes.

A record with metrics but without a passed check (or a stated absence of one) cannot be made;
failures are records too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.fields import recorded
from magicdec.records.memory import MemoryRecord
from magicdec.records.performance import Metrics
from magicdec.records.samples import SamplesRecord
from magicdec.records.workload import WorkloadRecord
from magicdec.records.writing import append_line, to_json

SCHEMA_VERSION = 1
STATUSES = ("ok", "diverged", "failed")


@dataclass(frozen=True)
class RunRecord:
    """One run: what was asked for and where, whether its tokens were right, how fast it was."""

    status: str = recorded(
        "`ok`: done and correct; `diverged`: done, and the outputs differ by more than ties; "
        "`failed`: an error ended the run",
        choices=STATUSES,
    )
    config: dict[str, Any] = recorded("the resolved configuration: what ran, with no `auto` left")
    environment: Environment = recorded("machine, software and launch")
    error: str | None = recorded(
        "type and message of the error that ended the run", null="unless `failed`"
    )
    workload: WorkloadRecord | None = recorded("what was decoded", null="never in a run's record")
    correctness: Correctness | None = recorded(
        "the comparison with the baseline's tokens", null="if `failed`"
    )
    metrics: Metrics | None = recorded(
        "performance of the strategy that was asked for", null="unless `ok`"
    )
    baseline_metrics: Metrics | None = recorded(
        "performance of autoregressive decoding in the same run, on the same prompts, from the "
        "same prefill",
        null="unless `ok`; if the strategy is itself the baseline; with `--no_baseline`",
    )
    samples: dict[str, SamplesRecord] | None = recorded(
        "raw times and counts of each pass that ran, by its name (`autoregressive`, "
        "`speculative`), the baseline first",
        null="if `failed`; in committed baselines (`results/baselines/`)",
    )
    memory: MemoryRecord | None = recorded(
        "what all ranks together were planned to hold, and what they took",
        null="never in a run's record",
        is_later=True,
    )
    tolerance: dict[str, float] | None = recorded(
        "metric: how far it may fall before `magicdec compare` calls it a regression",
        null="except in committed baselines (`results/baselines/`)",
        is_later=True,
    )
    schema_version: int = recorded(
        f"{SCHEMA_VERSION}; a program refuses records of another version", default=SCHEMA_VERSION
    )

    def __post_init__(self) -> None:
        has_metrics = (self.metrics, self.baseline_metrics) != (None, None)
        problem = contradiction(self.status, self.error, self.correctness, has_metrics)
        assert problem is None, problem

    def to_json(self) -> str:
        return to_json(self)


def contradiction(
    status: str, error: str | None, correctness: Correctness | None, has_metrics: bool
) -> str | None:
    """What keeps these from being one record; None if nothing does. No record has metrics unless
    its tokens were checked, or it says that nothing was compared."""
    if status not in STATUSES:
        return f"status is {status}; choose from {', '.join(STATUSES)}"
    if (error is not None) != (status == "failed"):
        return "an error belongs to status failed, and only to it"
    passed = correctness is not None and correctness.passed
    if status != "failed" and (status == "ok") != passed:
        return f"status is {status}, which its correctness contradicts"
    if status != "ok" and has_metrics:
        return "it has metrics, which exist only where correctness passed"
    return None


def append_record(path: Path, record: RunRecord) -> None:
    """Append one line, and make sure that it is on disk."""
    append_line(path, record.to_json())
