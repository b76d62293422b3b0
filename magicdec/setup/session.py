"""One rank of a launched command, from its start-up to its clean-up.

Owns what surrounds every measurement on ranks: the number of threads, the device, the process
groups and the description of the machine. Must not know what is measured.
"""

from __future__ import annotations

import datetime
from dataclasses import replace

import torch

from magicdec.config.resolved import ResolvedParallel
from magicdec.distributed.groups import Launch, close_groups, make_groups
from magicdec.hardware.environment import describe_environment
from magicdec.records.environment import Environment


class RankSession:
    """A context manager that all ranks enter and leave in lockstep. `groups` exists inside it;
    `device` is this rank's device, on CUDA that of its local rank."""

    def __init__(
        self,
        launch: Launch,
        parallel: ResolvedParallel,
        draft_ranks: tuple[int, ...] | None = None,
    ) -> None:
        """`draft_ranks` hold a standalone draft; None without one."""
        self.launch, self.parallel, self.draft_ranks = launch, parallel, draft_ranks
        self.started = datetime.datetime.now(datetime.timezone.utc)
        is_cuda = parallel.device == "cuda"
        self.device = torch.device("cuda", launch.local_rank) if is_cuda else torch.device("cpu")

    def __enter__(self) -> RankSession:
        parallel = self.parallel
        torch.set_num_threads(parallel.threads)
        self.groups = make_groups(
            self.launch, parallel.rank_group, self.device, parallel.collectives, self.draft_ranks
        )
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        """Leave the groups after success only: after an error, leaving a group would wait for ranks
        that may have ended already."""
        if error is None:
            close_groups()

    def describe_environment(self, bandwidth: float | None = None) -> Environment:
        """A record's `environment`, with the read bandwidth of all ranks where it was measured."""
        found = describe_environment(self.launch, self.parallel.device, self.started)
        return replace(found, read_bandwidth_bytes_per_s=bandwidth)
