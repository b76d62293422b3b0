"""Runs the cases of the gate, in several processes of one rank side by side. Cases of the same
prompts that a process runs share the loaded models and one prefill.

Must not know what the cases are nor how their records are judged. Imports torch only in the
processes that it starts.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from magicdec.config.run_config import RunConfig
from magicdec.console import make_progress
from magicdec.distributed.groups import Launch
from magicdec.records.record import RunRecord

if TYPE_CHECKING:
    from magicdec.setup.prepare import Prepared

Case = tuple[int, RunConfig]
Result = RunRecord | str
"""The record of a case, or why it has none."""
NO_RESULT = "no result came back: its process has skipped it, or ended before it"


def measure(
    configs: Sequence[RunConfig], num_processes: int, finished: Callable[[Result], None]
) -> list[Result]:
    """The result of each case; `finished` is called with it when the case has ended. Each process
    has an equal share of the cases, one after the other, so that it can reuse what it has
    prefilled. A process that ends early leaves the rest of its share without a result."""
    context = multiprocessing.get_context("spawn")
    cases, results = list(enumerate(configs)), list[Result]([NO_RESULT] * len(configs))
    processes, connections = [], list[Connection]()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for them: Ctrl-C is this process's
    for first in range(min(num_processes, len(cases))):
        ours, theirs = context.Pipe(duplex=False)
        share = cases[first::num_processes]
        processes.append(context.Process(target=work, args=(share, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        connections.append(ours)
    signal.signal(signal.SIGINT, handler)
    try:
        while connections:  # until every process has closed its own
            for ready in wait(connections):
                assert isinstance(ready, Connection)
                try:
                    number, result = ready.recv()
                except EOFError:
                    connections.remove(ready)
                    continue
                results[number] = result
                finished(result)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return results


def work(cases: Sequence[Case], connection: Any) -> None:
    """Run cases in this process, and send the number and the result of each."""
    try:
        for number, result in run_cases(cases):
            connection.send((number, result))
    finally:
        connection.close()


def run_cases(cases: Sequence[Case]) -> Iterator[tuple[int, Result]]:
    """Run cases in this process, those with the same prompts one after the other."""
    from magicdec.run.resident import prefill_key
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
    from magicdec.run.resident import Resident, Room
    from magicdec.run.run import execute_in
    from magicdec.setup.session import session_of

    progress = make_progress(False)
    room = Room.of([prepared.config for _, prepared in group], is_kept=True)
    resident: Resident | None = None
    for number, prepared in group:
        with session_of(prepared) as session:
            resident = resident or Resident(session.device, progress)
            resident.models.drop_others(group[0][1].source, prepared.draft_source)
            try:
                yield number, execute_in(session, prepared, progress, resident, room).record
            except Exception as error:  # so that it costs this case only
                yield number, f"{type(error).__name__}: {error}"
                resident = None


def with_threads(config: RunConfig, threads: int) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, threads=threads))
