"""Scheduler: decides which requests the next step advances. No other code changes the state of a
request. Imports no torch.

It uses static batching: up to `num_rows` requests are admitted together, and no new ones until all
of them have ended. Each request may end at a different step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from magicdec.request import Batch, Request, Status, StepOutput


class Scheduler:
    """Admits waiting requests to rows of the KV cache, and appends the tokens that steps emit."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.requests: list[Request] = []

    def add(self, requests: Sequence[Request], now: float) -> None:
        """Admit at most `num_rows` requests, one for each row. No request may be running."""
        assert len(requests) <= self.num_rows and not self.running
        self.requests = list(requests)
        for row, request in enumerate(self.requests):
            request.row, request.status, request.arrived_s = row, Status.RUNNING, now

    @property
    def running(self) -> list[Request]:
        return [r for r in self.requests if r.status is Status.RUNNING]

    def schedule(self) -> Batch | None:
        """The next batch: first the requests that need prefill, then all running requests. None if
        all have ended."""
        running = self.running
        if not running:
            return None
        new = tuple(r for r in running if not r.output_ids)
        return Batch(new or tuple(running), is_prefill=bool(new))

    def commit(self, batch: Batch, output: StepOutput, now: float) -> StepOutput:
        """Append the emitted tokens to each request, up to its own end token or length limit.
        Returns the output with the tokens that were appended."""
        before = [len(request.output_ids) for request in batch.requests]
        for i, (request, tokens) in enumerate(zip(batch.requests, output.token_ids, strict=True)):
            time = now if output.emitted_s is None else output.emitted_s[i]
            for token in tokens:
                request.output_ids.append(token)
                if request.first_token_s is None:
                    request.first_token_s = time
                if request.sampling.ends(len(request.output_ids), token):
                    request.status, request.finished_s = Status.FINISHED, time
                    break
        appended = zip(batch.requests, before, strict=True)
        return replace(output, token_ids=[r.output_ids[count:] for r, count in appended])

    def rewind(self, snapshots: Sequence[Request]) -> None:
        """Go back to an earlier state of the same requests, for a second pass after one prefill."""
        self.requests = [snapshot.snapshot() for snapshot in snapshots]
