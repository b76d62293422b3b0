"""Engine: repeats schedule, step and commit until no request is left.

Owns this loop. Must not know how a strategy decodes or what is measured: the strategy is an
argument, and the time is read around each step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from magicdec.decoding.strategy import DecodingStrategy
from magicdec.prefill import prefill
from magicdec.request import Batch, Request, Status, StepOutput
from magicdec.runner import ModelRunner
from magicdec.scheduler import Scheduler

Observer = Callable[[StepOutput, float], None]
"""A function that is called after every decode step, with the tokens that it appended to the
requests and its time in seconds."""


class Engine:
    def __init__(self, runner: ModelRunner, prefill_chunk: int) -> None:
        self.runner, self.prefill_chunk = runner, prefill_chunk
        self.scheduler = Scheduler(runner.num_rows)

    def prefill(
        self, requests: Sequence[Request], progress: Callable[[int], None] = lambda n: None
    ) -> list[Request]:
        """Admit `requests`, prefill their prompts and emit their first tokens. Returns the state to
        which `rewind` can go back."""
        for row in range(self.runner.num_rows):
            self.runner.cache.release(row)
        self.scheduler.add(requests, time.perf_counter())
        while (batch := self.scheduler.schedule()) is not None and batch.is_prefill:
            output = prefill(self.runner, batch, self.prefill_chunk, progress)
            self.scheduler.commit(batch, output, time.perf_counter())
        return [request.snapshot() for request in self.scheduler.requests]

    def begin(self, strategy: DecodingStrategy) -> None:
        """Let `strategy` prepare for the requests that were just prefilled."""
        running = tuple(self.scheduler.running)
        if running:
            strategy.admit(Batch(running, is_prefill=False))

    def decode(
        self, strategy: DecodingStrategy, observe: Observer = lambda o, s: None
    ) -> list[Request]:
        """Run `strategy`, after `begin`, until every request has ended. Returns the requests."""
        while (batch := self.scheduler.schedule()) is not None:
            started = time.perf_counter()
            output = strategy.step(batch)
            now = time.perf_counter()
            observe(self.scheduler.commit(batch, output, now), now - started)
            ended = [r.row for r in batch.requests if r.status is Status.FINISHED]
            if ended:
                strategy.release([row for row in ended if row is not None])
        return self.scheduler.requests

    def rewind(self, snapshots: Sequence[Request]) -> None:
        """Go back to the state just after prefill, so that another strategy can decode the same
        prompts without a second prefill."""
        self.scheduler.rewind(snapshots)
        rows = [r.row for r in snapshots if r.row is not None]
        self.runner.truncate(rows, [len(r.prompt_ids) for r in snapshots])
