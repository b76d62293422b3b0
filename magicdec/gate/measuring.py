"""Runs the cases of the gate, in several processes side by side. Cases of the same prompts that a
process runs share the loaded models and one prefill.

Must not know what the cases are nor how their records are judged.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from typing import Any

from magicdec.config.run_config import RunConfig
from magicdec.records.record import RunRecord

Result = RunRecord | str
"""The record of a case, or why it has none."""
Arrival = tuple[int, Result]
"""The number of a case and its result, as a process has sent them."""
Finished = Callable[[int, Result], None]
"""Called with the number of a case and its result, when it has ended."""


def measure(configs: Sequence[RunConfig], num_processes: int, finished: Finished) -> list[Arrival]:
    """All results, in the order in which they came. Each process has an equal share of the cases,
    one after the other, so that it can reuse what it has prefilled. A process that ends early sends
    no result for the rest of its share."""
    context = multiprocessing.get_context("spawn")
    arrivals: list[Arrival] = []
    shares = [range(i, len(configs), num_processes) for i in range(num_processes)]
    processes, connections = [], []
    for share in filter(len, shares):
        ours, theirs = context.Pipe(duplex=False)
        cases = [(number, configs[number]) for number in share]
        process = context.Process(target=work, args=(cases, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    try:
        _collect(connections, arrivals, finished)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return arrivals


def _collect(connections: list[Connection], arrivals: list[Arrival], finished: Finished) -> None:
    """Take the results as they come, until every process has closed its connection."""
    while connections:
        for ready in wait(connections):
            assert isinstance(ready, Connection)
            try:
                number, result = ready.recv()
            except EOFError:
                connections.remove(ready)
                continue
            arrivals.append((number, result))
            finished(number, result)


def work(cases: list[tuple[int, RunConfig]], connection: Any) -> None:
    """Run cases in this process, and send the number and the result of each."""
    from magicdec.gate.sharing import run_cases

    try:
        for number, result in run_cases(cases):
            connection.send((number, result))
    except KeyboardInterrupt:
        pass
    finally:
        connection.close()


def with_threads(config: RunConfig, threads: int) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, threads=threads))
