"""PipelineRecord: one JSON line for each pass of `magicdec recurrent`, and what it has in common
with the records of other passes over stages. Imports no torch. docs/pipeline.md documents the
schema and is made from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from magicdec.pipeline.metrics import RingMetrics
from magicdec.records.environment import Environment
from magicdec.records.fields import recorded
from magicdec.records.workload import WorkloadRecord
from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.record import EXACT_DTYPE, RequestRecord

SCHEMA_VERSION = 1
UNCHECKED = "unchecked"
STATUSES = ("ok", "differs", "diverged", UNCHECKED)


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """The requests of one command, served in one pass, and how their tokens compare with those of
    the command's first pass. It has metrics only if its tokens are not known to be wrong."""

    status: str = recorded(
        "`ok`: every request has the tokens that it has in `reference`; `differs`: some have "
        f"others, in a dtype other than {EXACT_DTYPE}, whose rounding may be the reason; "
        f"`diverged`: some have others in {EXACT_DTYPE}; `{UNCHECKED}`: there is no other pass, or "
        "drafts were sampled, which keeps only the distribution",
        choices=STATUSES,
    )
    name: str = recorded("the pass: a baseline, or a way to decode")
    config: dict[str, Any] = recorded(
        "the resolved configuration as in a run's record, in which no value is `auto`; of stages, "
        "that of the first; `workload` has the flags of this command; `draft` and `kv` are there "
        "with drafts only"
    )
    environment: Environment = recorded("the machine, the software and the launch")
    threads: list[int] | None = recorded(
        "CPU threads as measured in this pass, in the order of all ranks; 0 for a rank that waited",
        null="in older records",
        is_later=True,
    )
    workload: WorkloadRecord = recorded("the prompts and the models")
    reference: str | None = recorded("the first pass of the command", null="if it is the only one")
    num_differing: int | None = recorded(
        "requests with tokens other than those in `reference`", null="if `unchecked`"
    )
    metrics: Any
    requests: list[RequestRecord] = recorded("the requests in their order")

    def __post_init__(self) -> None:
        assert self.status in STATUSES and (self.status == "ok") == (self.num_differing == 0)
        assert (self.status == UNCHECKED) == (self.num_differing is None)
        assert (self.metrics is None) == (self.status == "diverged")


@dataclass(frozen=True, kw_only=True)
class PipelineRecord(PassRecord):
    """A pass of `magicdec recurrent`: a name of `--modes`, or `ring_speculative`."""

    metrics: ServingMetrics | None = recorded(
        "its metrics, as `magicdec inflight` defines them (serving.md)", null="if `diverged`"
    )
    ring: RingMetrics | None = recorded(
        "how the stages spent their time", null="of a baseline, or if `diverged`"
    )
    kind: str = recorded("`pipeline`", default="pipeline")
    schema_version: int = recorded(f"{SCHEMA_VERSION}", default=SCHEMA_VERSION)
