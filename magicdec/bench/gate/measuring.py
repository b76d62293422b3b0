"""Runs the cases of the gate, in several processes of one rank side by side. Cases of the same
prompts that a process runs share the loaded models and one prefill.

Must not know what the cases are nor how their records are judged. Imports torch only in the
processes that it starts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import end_with_parent, interrupting_no_child
from magicdec.output.console import make_progress
from magicdec.records.record import RunRecord

if TYPE_CHECKING:
    from magicdec.setup.prepare import Prepared

Case = tuple[int, RunConfig]
Result = RunRecord | str
"""The record of a case, or why it has none."""
NO_RESULT = "no result came back: its process has skipped it, or ended before it"
PREFILL = 4  # cases that take as long as a prefill
ENDS_S = 5.0  # until a process that has closed its connection has ended


@dataclass
class Worker:
    """A process that runs its share of the cases, one after the other, so that it can reuse what it
    has prefilled. `left` are the numbers of those without a result."""

    process: BaseProcess
    connection: Connection
    left: list[int]

    @classmethod
    def start(cls, share: Sequence[Case]) -> Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(share, theirs, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, [number for number, _ in share])

    def receive(self) -> tuple[int, Result] | None:
        """The next result; None if no more will come."""
        try:
            number, result = self.connection.recv()
        except (EOFError, OSError):  # also in the middle of a result
            return None
        self.left.remove(number)
        return number, result

    def loss(self) -> str:
        """How it was lost; empty if it has ended by itself."""
        self.process.join(ENDS_S)
        code, name = self.process.exitcode, f"process {self.process.pid} of the gate"
        if code is None:
            return f"{name} does not answer"
        if code < 0:
            return f"{name} was ended by {signal.Signals(-code).name}"
        return f"{name} has ended with {code}" if code else ""


def measure(
    configs: Sequence[RunConfig], num_processes: int, finished: Callable[[Result], None]
) -> list[Result]:
    """The result of each case; `finished` is called with it when the case has ended. Each process
    has a share of the cases. If one is lost, the gate has failed: the others are ended, and
    every case that is left says which process was lost."""
    cases, results = list(enumerate(configs)), list[Result]([NO_RESULT] * len(configs))
    workers = list[Worker]()
    try:
        # Before the workers, because its start lets Ctrl-C through again.
        resource_tracker.ensure_running()
        with interrupting_no_child():
            workers += map(Worker.start, shares_of(cases, num_processes))
        for number, result in _receive_all(workers):
            results[number] = result
            finished(result)
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()
    return results


def shares_of(cases: Sequence[Case], num_processes: int) -> list[list[Case]]:
    """The cases of each process, so that all end at about the same time. The first case of a
    process with some prompts costs as much more as PREFILL others, so that few cases with prompts
    of their own stay together."""
    with_prompts: dict[str, list[Case]] = {}
    for case in cases:
        config = case[1]
        key = repr((config.model, config.sampling, config.workload))
        with_prompts.setdefault(key, []).append(case)
    shares = [list[Case]() for _ in range(num_processes)]
    costs = [0] * num_processes
    for alike in sorted(with_prompts.values(), key=len):
        prefills = [PREFILL] * num_processes
        for case in alike:
            after = [cost + prefill for cost, prefill in zip(costs, prefills, strict=True)]
            chosen = after.index(min(after))
            shares[chosen].append(case)
            costs[chosen] = after[chosen] + 1
            prefills[chosen] = 0
    return [share for share in shares if share]


def _receive_all(workers: Sequence[Worker]) -> Iterator[tuple[int, Result]]:
    """The results of all workers, as they come; if one is lost, how, for each case that is left."""
    running = {worker.connection: worker for worker in workers}
    while running:  # until every process has closed its own
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            worker = running[ready]
            if (found := worker.receive()) is not None:
                yield found
                continue
            del running[ready]
            # One that has given all its results may take its time to end.
            if worker.left and (loss := worker.loss()):
                yield from ((number, loss) for each in workers for number in each.left)
                return


def work(cases: Sequence[Case], connection: Any, parent: int) -> None:
    """Run cases in this process, whose parent is the gate, and send the number and the result of
    each. It ends with the gate, however that ends."""
    end_with_parent(parent)
    try:
        for number, result in run_cases(cases):
            connection.send((number, result))
    finally:
        connection.close()


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[int, Result]]:
    """Run cases in this process, those with the same prompts one after the other."""
    from magicdec.bench.run.resident import prefill_key
    from magicdec.setup.prepare import prepare

    groups: dict[object, list[tuple[int, Prepared]]] = {}
    for number, config in cases:
        try:
            config.check(world_size=1)
            prepared = prepare(config, Launch())
        except ValueError as error:
            yield number, str(error)
        except Exception as error:  # such as a value of another type, in a file that was edited
            yield number, f"{type(error).__name__}: {error}"
        else:
            groups.setdefault(repr(prefill_key(prepared.config)), []).append((number, prepared))
    for group in groups.values():
        yield from _run_group(group)


def _run_group(group: Sequence[tuple[int, Prepared]]) -> Iterator[tuple[int, Result]]:
    """The results of cases that share their prompts."""
    from magicdec.bench.run.resident import Resident, Room
    from magicdec.bench.run.run import execute_in
    from magicdec.setup.session import session_of

    progress = make_progress(False)
    room = Room.of([prepared.config for _, prepared in group], is_kept=True)
    resident: Resident | None = None
    for number, prepared in group:
        with session_of(prepared) as session:
            resident = resident or Resident(session.device, progress, is_counted=True)
            resident.models.drop_others(group[0][1].source, prepared.draft_source)
            try:
                record = execute_in(session, prepared, progress, resident, room).record
                yield number, replace(record, seal="")  # its line gets the one of its content
            except Exception as error:  # so that it costs this case only
                yield number, f"{type(error).__name__}: {error}"
                resident = None


def with_threads(config: RunConfig, threads: int) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, threads=threads))
