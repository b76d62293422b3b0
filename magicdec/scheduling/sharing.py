"""PlanSharing: the first rank of a group decides what each step does, and the others follow.

Owns how a plan is sent: as one tensor of a fixed size, with a hash of it and of the state of the
running batch. Ranks that disagree stop at the next step with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from magicdec.distributed.groups import Group
from magicdec.kv.cache import upload
from magicdec.request import Request
from magicdec.scheduling.plan import NUMBERS_PER_ROW, Plan
from magicdec.scheduling.scheduler import Scheduler

END = -1  # in place of the hash: no step follows


class PlanSharing:
    """`scheduler` is that of this rank, and `requests` are all that may be served. All ranks of
    the group make their own, and call `next` equally often."""

    def __init__(
        self,
        group: Group,
        device: torch.device,
        scheduler: Scheduler,
        requests: Sequence[Request],
    ) -> None:
        self.group, self.device, self.scheduler = group, device, scheduler
        self.by_id = {request.request_id: request for request in requests}
        assert len(self.by_id) == len(requests), "ids of requests are distinct"
        if group.index:
            scheduler.waiting.add(requests)

    def next(self, decide: Callable[[], Plan | None]) -> Plan | None:
        """The next step, the same on every rank; None at the end. Only the first rank calls
        `decide`."""
        if self.group.size == 1:
            return decide()
        digest, plan = self.scheduler.digest(), None
        numbers = [END] + [0] * (1 + NUMBERS_PER_ROW * self.scheduler.num_rows)
        if self.group.index == 0 and (plan := decide()) is not None:
            numbers = plan.to_numbers(self.scheduler.num_rows, digest)
        received = self.group.broadcast(upload(numbers, self.device), 0).tolist()
        if self.group.index and received[0] != END:
            plan = Plan.from_numbers(received, digest, self.by_id.__getitem__, self.scheduler.rows)
            self.scheduler.apply(plan)
        return plan
