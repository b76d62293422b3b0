"""Scheduler: which requests the next step advances, and the only writer of their state. Imports no
torch.

Static batching: up to `num_rows` requests are admitted together and decoded until each has ended;
rows end alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.request import Batch, Request, Status, StepOutput


class Scheduler:
    """Admits waiting requests to rows of the KV cache and commits what steps emit."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.requests: list[Request] = []

    def add(self, requests: Sequence[Request], now: float) -> None:
        """Admit `requests`, one a row. At most `num_rows`, and only when none is running."""
        assert len(requests) <= self.num_rows and not self.running
        self.requests = list(requests)
        for row, request in enumerate(self.requests):
            request.row, request.status, request.arrived_s = row, Status.RUNNING, now

    @property
    def running(self) -> list[Request]:
        return [r for r in self.requests if r.status is Status.RUNNING]

    def schedule(self) -> Batch | None:
        """The next batch: prompts first, then every running request; None when all have ended."""
        running = self.running
        if not running:
            return None
        new = tuple(r for r in running if not r.output_ids)
        return Batch(new or tuple(running), is_prefill=bool(new))

    def commit(self, batch: Batch, output: StepOutput, now: float) -> None:
        """Append emitted tokens, each request up to its own end token or length."""
        for i, (request, tokens) in enumerate(zip(batch.requests, output.token_ids, strict=True)):
            time = now if output.emitted_s is None else output.emitted_s[i]
            for token in tokens:
                request.output_ids.append(token)
                if request.first_token_s is None:
                    request.first_token_s = time
                if request.sampling.ends(len(request.output_ids), token):
                    request.status, request.finished_s = Status.FINISHED, time
                    break

    def rewind(self, snapshots: Sequence[Request]) -> None:
        """Go back to an earlier state of the same requests (a second pass over one prefill)."""
        self.requests = [snapshot.snapshot() for snapshot in snapshots]
