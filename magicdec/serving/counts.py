"""StepCounts: what is counted, and which moves of requests are noted, while requests are served.
Imports no torch.

Must not know what is computed from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from magicdec.scheduling.plan import Plan


@dataclass
class Moves:
    """When one request got a row of the running batch, and when it was preempted."""

    joined_s: list[float] = field(default_factory=list)
    preempted_s: list[float] = field(default_factory=list)


@dataclass
class StepCounts:
    """What is counted while requests are served. `now` is the clock of their arrivals."""

    now: Callable[[], float] = field(default=perf_counter, compare=False)
    num_steps: int = 0
    num_preemptions: int = 0
    num_in_flight: int = 0  # summed over the steps
    num_moves: int = 0  # of rows of the KV cache
    moved_bytes: int = 0
    in_flight: int = 0  # in the step that was counted last
    moves: dict[int, Moves] = field(default_factory=lambda: defaultdict(Moves))

    def watch(self, plan: Plan) -> None:
        """Count one step, which begins now. A request is either prefilled or decoded in it."""
        now = self.now()
        decoding = () if plan.decoding is None else plan.decoding.requests
        self.num_steps += 1
        self.num_preemptions += len(plan.preempted)
        self.in_flight = len(decoding) + len(plan.parts)
        self.num_in_flight += self.in_flight
        for request, _ in plan.preempted:
            self.moves[request.request_id].preempted_s.append(now)
        for request, _ in plan.admitted:
            self.moves[request.request_id].joined_s.append(now)
