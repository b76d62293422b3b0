"""ServingRecord: one JSON line for each batching, which is appended and never rewritten. Imports no
torch. docs/serving.md documents the schema and is made from these classes.

It is not the record of a run (`records/record.py`): that holds two passes over whole batches, and
this one requests with their arrivals. Like that one, it has metrics only if its tokens are right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.names import COMPACTION
from magicdec.records.environment import Environment
from magicdec.records.fields import recorded
from magicdec.records.workload import WorkloadRecord
from magicdec.request import Request
from magicdec.serving.counts import Moves
from magicdec.serving.metrics import ServingMetrics

SCHEMA_VERSION = 2
STATUSES = ("ok", "differs", "diverged")
EXACT_DTYPE = "float32"  # in which every request emits the same tokens under every batching


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """The lengths and time stamps of one request. Times count from the first arrival."""

    arrival_ms: float = recorded("when the request arrived", "ms")
    joined_ms: list[float] = recorded(
        "when it got a row of the running batch: once, and again after each preemption", "ms"
    )
    preempted_ms: list[float] = recorded("when it gave its row back before its end", "ms")
    prefilled_ms: list[float] = recorded(
        "when the next output token after each of `joined_ms` was known", "ms"
    )
    first_token_ms: float = recorded("when its first output token was known", "ms")
    finished_ms: float = recorded("when its last output token was known", "ms")
    prompt_len: int = recorded("length of its prompt", "tokens")
    output_len: int = recorded("length of its output", "tokens")


@dataclass(frozen=True, kw_only=True)
class ServingRecord:
    """The requests of one command, served under one batching."""

    status: str = recorded(
        "`ok`: every request has the tokens that it has under `reference`, or tokens are not "
        f"compared; `differs`: some have others, in a dtype other than {EXACT_DTYPE}, whose "
        f"rounding may be the reason; `diverged`: some have others in {EXACT_DTYPE}",
        choices=STATUSES,
    )
    config: dict[str, Any] = recorded(
        "the resolved configuration as in a run's record, in which no value is `auto`; `workload` "
        "has `batching`, `compaction` and the flags of this command"
    )
    environment: Environment = recorded("the machine, the software and the launch")
    threads: list[int] | None = recorded(
        "CPU threads as measured in this pass, in the order of ranks",
        null="in older records",
        is_later=True,
    )
    workload: WorkloadRecord = recorded(
        "the prompts and the model; `prefix_len` is the length of the longest prompt"
    )
    reference: str = recorded("the first batching of the command, which drafts nothing")
    num_differing: int | None = recorded(
        "requests with tokens other than those under `reference`",
        null="with a drafter at a temperature above 0, which keeps only the distribution",
    )
    metrics: ServingMetrics | None = recorded("its metrics", null="if `diverged`")
    requests: list[RequestRecord] = recorded("the requests in the order of arrival")
    kind: str = recorded("`serving`", default="serving")
    schema_version: int = recorded(f"{SCHEMA_VERSION}", default=SCHEMA_VERSION)

    def __post_init__(self) -> None:
        assert self.status in STATUSES and (self.status == "ok") == (not self.num_differing)
        assert (self.metrics is None) == (self.status == "diverged")

    @property
    def name(self) -> str:
        """The batching, the drafter if there is one, and a compaction other than the default."""
        drafter, workload = self.config["decoding"]["drafter"], self.config["workload"]
        compaction = workload.get("compaction", COMPACTION)
        parts = workload["batching"], drafter, None if compaction == COMPACTION else compaction
        return ", ".join(str(part) for part in parts if part)


def status_of(num_differing: int, dtype: str) -> str:
    if num_differing == 0:
        return "ok"
    return "diverged" if dtype == EXACT_DTYPE else "differs"


def describe_requests(
    requests: Sequence[Request], moves: Mapping[int, Moves], begin_s: float
) -> list[RequestRecord]:
    """The time stamps of finished requests, of which the first arrived at `begin_s`. `moves` has
    those of each request by its id."""

    def ms(at_s: float | None) -> float:
        assert at_s is not None, "the request has ended"
        return 1e3 * (at_s - begin_s)

    def after(request: Request, at_s: float) -> float:
        return ms(next((t for t in request.token_times_s if t >= at_s), None))

    return [
        RequestRecord(
            arrival_ms=ms(request.arrived_s),
            joined_ms=[ms(at_s) for at_s in moves[request.request_id].joined_s],
            preempted_ms=[ms(at_s) for at_s in moves[request.request_id].preempted_s],
            prefilled_ms=[after(request, at_s) for at_s in moves[request.request_id].joined_s],
            first_token_ms=ms(request.first_token_s),
            finished_ms=ms(request.finished_s),
            prompt_len=len(request.prompt_ids),
            output_len=len(request.output_ids),
        )
        for request in requests
    ]
