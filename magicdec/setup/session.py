"""RankSession: the threads, device and process groups of one rank, from start-up to clean-up."""

from __future__ import annotations

import datetime
from dataclasses import replace

import torch

from magicdec.config.resolved import ResolvedParallel
from magicdec.distributed.groups import Launch
from magicdec.distributed.start import close_groups, make_groups
from magicdec.distributed.watching.watch import name_lost, stop_watching
from magicdec.hardware.environment import describe_environment, device_of
from magicdec.records.environment import Environment
from magicdec.setup.prepare import Prepared


def session_of(prepared: Prepared) -> RankSession:
    draft = prepared.config.draft
    draft_ranks = None if draft is None else draft.rank_group
    return RankSession(prepared.launch, prepared.config.parallel, draft_ranks)


class Sessions:
    """The open sessions of a process that makes several runs. Their process group stays open until
    `close_groups`."""

    def __init__(self) -> None:
        self._open: dict[str, RankSession] = {}

    def begin(self, prepared: Prepared) -> RankSession:
        """The session of the run's ranks, opened at its first use, in which a run begins now."""
        parallel = prepared.config.parallel
        draft = prepared.config.draft
        key = repr((parallel, None if draft is None else draft.rank_group))
        if key not in self._open:
            self._open[key] = session_of(prepared)
            self._open[key].open()
        self._open[key].begin()
        return self._open[key]


class RankSession:
    """A context manager that all ranks enter and leave together. `groups` exists inside it."""

    def __init__(
        self,
        launch: Launch,
        parallel: ResolvedParallel,
        draft_ranks: tuple[int, ...] | None = None,
    ) -> None:
        """`draft_ranks` hold a standalone draft; None without one."""
        self.launch = launch
        self.parallel = parallel
        self.draft_ranks = draft_ranks
        self.device = device_of(parallel.device, launch.local_rank)

    def __enter__(self) -> RankSession:
        self.open()
        return self

    def open(self) -> None:
        """Start the session. Several sessions of a process share its process group."""
        parallel = self.parallel
        self.begin()
        self.groups = make_groups(
            self.launch, parallel.rank_group, self.device, parallel.collectives, self.draft_ranks
        )

    def begin(self) -> None:
        """Begin a run: note the time and set the number of threads."""
        self.started = datetime.datetime.now(datetime.UTC)
        torch.set_num_threads(self.parallel.threads)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object
    ) -> None:
        """Close the process groups, but after an error only raise PeerLost if that caused it:
        closing waits for ranks that may have ended."""
        if kind is None:
            close_groups()
            return
        if isinstance(error, RuntimeError):
            name_lost(error)
        stop_watching()

    def describe_environment(self, bandwidth: float | None = None) -> Environment:
        """The record's `environment`. `bandwidth` is the read bandwidth of all ranks, None if not
        measured."""
        environment = describe_environment(self.launch, self.parallel.device, self.started)
        return replace(environment, read_bandwidth_bytes_per_s=bandwidth)
