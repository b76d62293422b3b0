"""Engine: schedules, executes and commits steps until no request is left.

A batch decoded to its end (`prefill`, `begin`, `decode`) keeps its rows' memory, so that another
strategy can decode the same prompts. With `serve`, requests join a running batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

import torch

from magicdec.engine.arrivals import Arrivals
from magicdec.engine.scheduler import Scheduler
from magicdec.hardware.timing import Clock, GroupClock, RealClock
from magicdec.kv.cache import upload
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.prefill import prefill
from magicdec.runner.request import (
    Batch,
    NotFinite,
    Observer,
    Request,
    RequestStatus,
    StepOutput,
    ignore_step,
    naming,
)
from magicdec.runner.step_plan import BatchLimits, PrefillChunk, StepObserver, StepPlan
from magicdec.speculation.steps.strategy import DecodingStrategy


class Engine:
    """The loop of steps. With `limits`, requests may join a running batch and rows are used
    again. With `shares_prefixes`, they begin with what the runner's caches have of their texts, if
    these keep any."""

    def __init__(
        self,
        runner: ModelRunner,
        prefill_chunk: int,
        limits: BatchLimits | None = None,
        clock: Clock | None = None,
        shares_prefixes: bool = True,
    ) -> None:
        self.runner = runner
        self.prefill_chunk = prefill_chunk
        self.is_in_flight = limits is not None
        self.clock = clock or RealClock()
        self.is_alone = runner.group.size == 1  # no other rank must plan alike
        prefixes = runner.caches.prefixes if shares_prefixes else None
        self.scheduler = Scheduler(runner.num_rows, limits or BatchLimits(), prefixes=prefixes)
        self.requests: list[Request] = []  # of the batch that was prefilled last
        self.clock_of_ends: Clock | GroupClock = self.clock  # by which requests end
        self.num_steps = 0  # decode steps since `begin`

    def with_runner(self, runner: ModelRunner) -> Engine:
        """This engine, with its requests, for another runner of the same caches."""
        other = copy(self)
        other.runner = runner
        return other

    def prefill(
        self, requests: Sequence[Request], progress: Callable[[int], None] = lambda n: None
    ) -> list[Request]:
        """Admit `requests`, prefill their prompts and emit first tokens. Returns the state for
        `rewind`."""
        assert len(requests) <= self.runner.num_rows and not self.scheduler.running
        for row in range(self.runner.num_rows):
            self.runner.release(row)
        self.requests = list(requests)
        self.scheduler.add(requests, self.clock.now())
        if (plan := self.scheduler.schedule()) is not None:
            self._reserve(plan)
            self._prefill(plan.parts, progress)
        return [request.snapshot() for request in self.requests]

    def shorten(self, requests: Sequence[Request], num_again: int) -> list[Request]:
        """Go on with `requests` in the rows whose texts begin with their prompts. Only the last
        `num_again` tokens of each prompt are prefilled again, for what follows from them. Returns
        the state for `rewind`."""
        held = self.requests
        for request, longer in zip(requests, held, strict=True):
            assert longer.prompt_ids[: len(request.prompt_ids)] == request.prompt_ids
            request.row = longer.row
            request.arrived_s = self.clock.now()
            request.status = RequestStatus.RUNNING
        self.requests = list(requests)
        self.scheduler.rewind(self.requests)
        starts = [max(0, len(request.prompt_ids) - num_again) for request in requests]
        rows = Batch(tuple(requests)).rows
        self.runner.truncate(rows, starts)
        parts = [
            PrefillChunk(request, row, start, request.num_cached, start)
            for request, row, start in zip(requests, rows, starts, strict=True)
        ]
        self._prefill(parts)
        return [request.snapshot() for request in self.requests]

    def begin(self, strategy: DecodingStrategy) -> None:
        """Let `strategy` prepare for the requests just prefilled."""
        running = tuple(self.scheduler.running)
        self.num_steps = 0
        if running:
            strategy.admit(Batch(running))

    def decode(self, strategy: DecodingStrategy, observe: Observer = ignore_step) -> list[Request]:
        """Run `strategy`, after `begin`, until every request has ended. Returns the requests."""
        while (plan := self.scheduler.schedule()) is not None:
            self.execute(plan, strategy, observe)
        return self.requests

    def serve(
        self,
        strategy: DecodingStrategy,
        requests: Sequence[Request] | Arrivals,
        observe: Observer = ignore_step,
        watch: StepObserver = lambda plan: None,
    ) -> None:
        """Serve `requests` from their arrivals on until all have ended. `observe` is called
        after every decode step. All ranks need the same requests; the first rank's clock counts.

        Raises:
            ValueError: before the first step, if a request can never be served.
        """
        for request in requests:
            self.scheduler.limits.check(request)
        arrivals = Arrivals.of(requests)
        self.clock_of_ends = self.clock
        if arrivals.is_timed:  # what comes next follows from these times, on all ranks alike
            group = self.runner.group
            self.clock_of_ends = GroupClock(self.clock, group, self.runner.device)
        while (plan := self._next(arrivals)) is not None:
            watch(plan)
            self.execute(plan, strategy, observe)
            self.clock.after_step()

    def execute(
        self, plan: StepPlan, strategy: DecodingStrategy, observe: Observer = ignore_step
    ) -> None:
        """Execute a step. Admission comes before decoding: its measurements append tokens to all
        rows, and rows have room only then."""
        try:
            if plan.preempted or plan.cancelled:
                self._free((*plan.preempted, *plan.cancelled), strategy)
            if plan.admitted or plan.reserved:
                self._reserve(plan)
            if plan.parts:
                new = self._prefill(plan.parts)
                for part in plan.parts:
                    if part.keeps_state:
                        self.runner.keep_state(part.row, part.request.cached_ids[: part.stop])
                ready = tuple(r for r in new if r.status is RequestStatus.RUNNING)
                self._free(
                    [(r, r.row) for r in new if r.status is RequestStatus.FINISHED], strategy
                )
                for request in ready:
                    if request.row is not None:
                        self.runner.keep(request.row, request.cached_ids)
                if ready:
                    strategy.admit(Batch(ready))
            if plan.decoding is not None:
                self._decode(plan.decoding, strategy, observe)
            if self.runner.enqueued:  # prompts, in a step in which nobody decodes
                with torch.inference_mode():
                    self.runner.execute()
        finally:
            self.runner.enqueued.clear()  # of a step that has failed

    def rewind(self, snapshots: Sequence[Request]) -> None:
        """Go back to just after prefill, for another strategy on the same prompts."""
        self.requests = [snapshot.snapshot() for snapshot in snapshots]
        self.scheduler.rewind(self.requests)
        for runner in (self.runner, self.runner.draft_runner):
            if runner is not None:
                runner.has_flaws = False  # what another strategy has found
        rows = [r.row for r in snapshots if r.row is not None]
        self.runner.truncate(rows, [len(r.prompt_ids) for r in snapshots])

    def _next(self, arrivals: Arrivals) -> StepPlan | None:
        """The next step, after a wait for a request if there is none now. All ranks decide
        alike."""
        while True:
            for request in arrivals.take(self._count_arrived(arrivals)):
                self.scheduler.add([request], request.arrived_s)
            plan = self.scheduler.schedule()
            if plan is not None or not arrivals:
                return plan
            if self.runner.group.index == 0:
                self.clock.wait_until(arrivals.next_s)

    def _count_arrived(self, arrivals: Arrivals) -> int:
        """The number of `arrivals` that may wait for a row now, by the first rank's clock.
        Raises RuntimeError if this rank's running batch differs from the first's."""
        count = arrivals.count(self.clock.now())
        if self.is_alone:
            return count
        state = self.scheduler.digest()
        shared = self.runner.group.broadcast(upload([count, state], self.runner.device), 0)
        count, expected = shared.tolist()
        if state != expected:
            raise RuntimeError(
                f"the ranks disagree about the running batch: the first is in state {expected:x}, "
                f"and this rank is in state {state:x}"
            )
        return count

    def _decode(self, batch: Batch, strategy: DecodingStrategy, observe: Observer) -> None:
        started = self.clock.now()
        output = self._step(batch, strategy)
        now = self.clock_of_ends.now()
        observe(batch.ids, self.scheduler.commit(batch, output, now), now - started)
        ended = [(r, r.row) for r in batch.requests if r.status is RequestStatus.FINISHED]
        if ended:
            self._free(ended, strategy)

    def _step(self, batch: Batch, strategy: DecodingStrategy) -> StepOutput:
        self.num_steps += 1
        try:
            return strategy.step(batch)
        except NotFinite as error:
            raise NotFinite(f"decode step {self.num_steps}: {error}") from None

    def _prefill(
        self, parts: Sequence[PrefillChunk], progress: Callable[[int], None] = lambda n: None
    ) -> list[Request]:
        complete = [part.request for part in parts if part.is_last]
        with naming("prefill"):
            output = prefill(self.runner, parts, self.prefill_chunk, progress)
        if self.is_in_flight:  # whose first tokens are known when all parts are prefilled
            output = replace(output, emitted_s=None)
        self.scheduler.commit(Batch(tuple(complete)), output, self.clock_of_ends.now())
        return complete

    def _reserve(self, plan: StepPlan) -> None:
        """Give rows what their texts begin with, and blocks for a step, or for the whole request if
        blocks are not limited."""
        shared = plan.shared or ()
        for row, beginning in shared:
            self.runner.caches.adopt(row, beginning)
        if self.scheduler.limits.num_blocks is None:
            for _, row in plan.admitted:
                self.runner.allocate(row)
        for row, num_tokens in plan.reserved:
            self.runner.caches.allocate(row, num_tokens)
        for row, beginning in shared:
            self.runner.copy_beginning(row, beginning)

    def _free(
        self, leaving: Sequence[tuple[Request, int | None]], strategy: DecodingStrategy
    ) -> None:
        """Free the rows that requests leave, but in a static batch, which others decode again. In a
        prefix cache, blocks of their texts stay for requests that begin alike."""
        taken = [(request, row) for request, row in leaving if row is not None]
        strategy.release([row for _, row in taken])
        if self.is_in_flight:
            for request, row in taken:
                self.runner.release(row, (*request.prompt_ids, *request.output_ids))
