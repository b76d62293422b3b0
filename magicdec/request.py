"""The state of a request and what passes between scheduler and strategy. Imports nothing of ours
and no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """When a request ends. Decoding is greedy."""

    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()

    def ends(self, num_output: int, token: int) -> bool:
        return num_output >= self.max_new_tokens or token in self.eos_token_ids


@dataclass
class Request:
    """One prompt on its way. Only `Scheduler.commit` and `Scheduler.rewind` change it."""

    request_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    row: int | None = None  # its row of the KV cache; set at admission
    arrived_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def last_token(self) -> int:
        return self.output_ids[-1]

    @property
    def num_cached(self) -> int:
        """Tokens whose K and V are committed: all but the newest, which the next forward takes."""
        return len(self.prompt_ids) + max(0, len(self.output_ids) - 1)

    def snapshot(self) -> Request:
        return replace(self, output_ids=list(self.output_ids))


@dataclass(frozen=True)
class Batch:
    """Requests that a step advances, in row order. `is_prefill`: their prompts are not yet in the
    cache."""

    requests: tuple[Request, ...]
    is_prefill: bool

    @property
    def rows(self) -> list[int]:
        rows = [r.row for r in self.requests]
        assert None not in rows, "a scheduled request has a row"
        return [row for row in rows if row is not None]


@dataclass(frozen=True)
class StepOutput:
    """What a step emitted for each request of its batch, in order; `num_accepted` is None where
    nothing was drafted."""

    token_ids: list[list[int]]
    num_drafted: int = 0
    num_accepted: list[int] | None = None
    emitted_s: list[float] | None = None  # prefill only: when each request's first token was there
