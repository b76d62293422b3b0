"""Runs a scheduler on a simulated machine, in virtual time: the actions of the scheduler in, the
times of what they cause out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from magicdec.pipelined_speculation.messages import (
    Action,
    Cancel,
    Candidates,
    Commit,
    Draft,
    Launch,
    Stop,
)
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.simulator.machine import Flight, Machine, Pipeline


class Models(Protocol):
    """The target and the draft of the simulated run."""

    def home(self, flight: Flight) -> Sequence[int] | None:
        """The predictions of a run that has come home; None if a stage skipped it."""

    def propose(self, draft: Draft, output: Sequence[int]) -> list[Candidates]:
        """The candidates after each path. `output` is what is committed of the request."""


@dataclass
class Trace:
    """What happened, in order of time."""

    flights: list[Flight] = field(default_factory=list)
    commits: list[tuple[float, Commit]] = field(default_factory=list)
    drafts: list[tuple[float, float]] = field(default_factory=list)  # begin and end of the steps
    cancelled: set[int] = field(default_factory=set)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    end_s: float = 0.0


class Simulation:
    def __init__(
        self, machine: Machine, scheduler: PipelinedScheduler, models: Models, is_ring: bool = False
    ) -> None:
        self.machine, self.scheduler, self.models = machine, scheduler, models
        self.pipeline = Pipeline(machine, is_ring)
        self.trace = Trace()
        self._now_s = 0.0
        self._draft: Draft | None = None
        self._draft_s = math.inf
        self._is_over = False

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: int = -1) -> Trace:
        """All prompts arrive at time 0. Returns when every run has come home."""
        for prompt in prompts:
            _, actions = self.scheduler.submit(prompt, max_new_tokens, (eos,))
            self._do(actions)
        while not self._is_over:
            self._step()
        self.trace.end_s = self._now_s
        return self.trace

    def cancel_delays(self) -> Sequence[float]:
        """Seconds until each stage knows of a cancellation."""
        return [self.machine.cancel_s] * self.machine.num_stages

    def _step(self) -> None:
        """Results go before drafts, and the drafter begins a step only when no result waits."""
        if self.pipeline.next_s <= self._now_s:
            flight = self.pipeline.collect()
            self.trace.flights.append(flight)
            self._do(self.scheduler.result(flight.launch.run, self.models.home(flight)))
        elif self._draft is not None and self._draft_s <= self._now_s:
            draft, self._draft, self._draft_s = self._draft, None, math.inf
            self._do(self.scheduler.drafted(draft.draft, self._proposed))
        elif self._draft is None and (actions := self.scheduler.idle()):
            self._do(actions)
        else:
            self._now_s = min(self.pipeline.next_s, self._draft_s)
            assert self._now_s < math.inf, "something is always under way"

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                is_prompt = action.request not in self.trace.outputs
                self.pipeline.launch(self._now_s, action, is_prompt)
            elif isinstance(action, Cancel):
                delays = self.cancel_delays()
                self.trace.cancelled.update(action.runs)
                self.pipeline.cancel(action.runs, [self._now_s + delay for delay in delays])
            elif isinstance(action, Commit):
                self.trace.commits.append((self._now_s, action))
                self.trace.outputs.setdefault(action.request, []).extend(action.tokens)
            elif isinstance(action, Draft):
                self._begin(action)
            elif isinstance(action, Stop):
                self._is_over = True

    def _begin(self, draft: Draft) -> None:
        self._draft, self._draft_s = draft, self._now_s + self.machine.draft_s
        self._proposed = self.models.propose(draft, self.trace.outputs[draft.request])
        self.trace.drafts.append((self._now_s, self._draft_s))
