"""SpeculationRecord: one JSON line for each pass of `magicdec pipeline`. Imports no torch.
docs/pipelined_speculation.md documents the schema and is made from these classes.

Like the record of a run, it has metrics only if its tokens are not known to be wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magicdec.pipeline.record import STATUSES, UNCHECKED
from magicdec.pipelined_run.measured.metrics import SpeculationMetrics
from magicdec.records.environment import Environment
from magicdec.records.fields import recorded
from magicdec.records.workload import WorkloadRecord
from magicdec.serving.record import EXACT_DTYPE, RequestRecord

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SpeculationRecord:
    """The requests of one command, served in one pass."""

    status: str = recorded(
        "`ok`: every request has the tokens that it has in `reference`; `differs`: some have "
        f"others, in a dtype other than {EXACT_DTYPE}, whose rounding may be the reason; "
        f"`diverged`: some have others in {EXACT_DTYPE}; `{UNCHECKED}`: there is no baseline",
        choices=STATUSES,
    )
    name: str = recorded("the pass: `one process`, or a mode")
    config: dict[str, Any] = recorded(
        "the resolved configuration as in a run's record, in which no value is `auto`, of one "
        "rank; `workload` has the flags of this command"
    )
    environment: Environment = recorded("the machine, the software and the launch")
    workload: WorkloadRecord = recorded("the prompts and the models")
    reference: str | None = recorded("the first pass of the command", null="without a baseline")
    num_differing: int | None = recorded(
        "requests with tokens other than those in `reference`", null="without a baseline"
    )
    metrics: SpeculationMetrics | None = recorded("its metrics", null="if `diverged`")
    requests: list[RequestRecord] = recorded("the requests in their order")
    kind: str = recorded("`speculation`", default="speculation")
    schema_version: int = recorded(f"{SCHEMA_VERSION}", default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        assert self.status in STATUSES and (self.status == "ok") == (self.num_differing == 0)
        assert (self.status == UNCHECKED) == (self.num_differing is None)
        assert (self.metrics is None) == (self.status == "diverged")
