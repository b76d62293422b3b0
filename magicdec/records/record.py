"""RunRecord: one JSON line for each run, which is appended and never rewritten. Imports no torch.
docs/record.md documents the schema and is made from these classes.

A record can have metrics only if the check of the tokens passed, or if it says that nothing was
compared. A run that failed has a record too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.fields import recorded
from magicdec.records.identities.of_samples import unequal_threads
from magicdec.records.memory import MemoryRecord
from magicdec.records.performance import Metrics
from magicdec.records.samples.recorded import LATER, PrefillSamples, SamplesRecord
from magicdec.records.workload import WorkloadRecord
from magicdec.records.writing import append_line, to_json

SCHEMA_VERSION = 1
STATUSES = ("ok", "ok_with_ties", "diverged", "failed", "interrupted")
PASSED = ("ok", "ok_with_ties")
ENDED = ("failed", "interrupted")  # before all batches were done
UNJUDGED = "`interrupted` and the outputs differ"
WITHOUT_METRICS = f"if `diverged` or `failed`; if {UNJUDGED}"


@dataclass(frozen=True)
class RunRecord:
    """One run: its configuration and environment, whether its tokens were correct, and how fast it
    was."""

    status: str = recorded(
        "`ok`: the run finished, and all tokens are identical or were not compared; "
        "`ok_with_ties`: some sequences differ, and the rounding of the run explains it (older "
        "records say `ok`); `diverged`: it does not explain it; `failed`: an error ended the run; "
        "`interrupted`: the user did, and the record is of the batches that were done",
        choices=STATUSES,
    )
    config: dict[str, Any] = recorded("the resolved configuration, in which no value is `auto`")
    environment: Environment = recorded("the machine, the software and the launch")
    error: str | None = recorded(
        "type and message of the error that ended the run, or how much of it was done",
        null="unless `failed` or `interrupted`",
    )
    workload: WorkloadRecord | None = recorded("the prompts and the models", null=LATER)
    correctness: Correctness | None = recorded(
        "the comparison with the baseline's tokens", null=f"if `failed`; if {UNJUDGED}"
    )
    metrics: Metrics | None = recorded(
        "performance of the requested strategy", null=WITHOUT_METRICS
    )
    baseline_metrics: Metrics | None = recorded(
        "performance of autoregressive decoding in the same run, on the same prompts, from the "
        "same prefill",
        null=f"{WITHOUT_METRICS}; if the strategy is itself the baseline; with `--no_baseline`",
    )
    samples: dict[str, SamplesRecord] | None = recorded(
        "raw times and counts of each pass that ran, by its name (`autoregressive`, "
        "`speculative`), the baseline first",
        null=f"if `failed`; if {UNJUDGED}",
    )
    prefill_samples: PrefillSamples | None = recorded(
        "raw times of prefill, which the passes share",
        null=f"if `failed`; if {UNJUDGED}",
        is_later=True,
    )
    memory: MemoryRecord | None = recorded(
        "the planned and the measured memory of all ranks together",
        null=LATER,
        is_later=True,
    )
    margin: float | None = recorded(
        "share of the acceptance rate whose loss `magicdec gate` still tolerates; 0: any loss is a "
        "regression",
        "0 to 1",
        null="except in the baselines of the gate",
        is_later=True,
    )
    schema_version: int = recorded(
        f"{SCHEMA_VERSION}; records of another version are refused", default=SCHEMA_VERSION
    )

    def __post_init__(self) -> None:
        has_metrics = (self.metrics, self.baseline_metrics) != (None, None)
        problem = contradiction(
            self.status, self.error, self.correctness, has_metrics, self.samples
        )
        assert problem is None, problem

    @property
    def passed(self) -> bool:
        return self.status in PASSED

    def to_json(self) -> str:
        return to_json(self)


def contradiction(
    status: str,
    error: str | None,
    correctness: Correctness | None,
    has_metrics: bool,
    samples: Mapping[str, SamplesRecord] | None,
) -> str | None:
    """Why these values cannot be in one record; None if they can. No record has metrics unless the
    check of the tokens passed, or the record says that nothing was compared; and its passes had
    equal resources."""
    if status not in STATUSES:
        return f"status is {status}; choose from {', '.join(STATUSES)}"
    if (error is not None) != (status in ENDED):
        return f"an error belongs to status {' and '.join(ENDED)}, and only to these"
    # Older records say `ok` with ties too.
    by_tokens = None if correctness is None else correctness.status
    possible = {by_tokens, "ok"} if by_tokens == "ok_with_ties" else {by_tokens}
    if status not in ENDED and status not in possible:
        return f"status is {status}, which its correctness contradicts"
    is_identical = status == "interrupted" and by_tokens == "ok"
    if status not in PASSED and not is_identical and has_metrics:
        return "it has metrics, which exist only where correctness passed"
    return unequal_threads(samples or {})


def append_record(path: Path, record: RunRecord) -> None:
    """Append one line, and make sure that it is on disk."""
    append_line(path, record.to_json())
