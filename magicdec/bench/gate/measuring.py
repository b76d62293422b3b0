"""Runs the cases of the gate. Those of one rank run in several processes side by side; those of
several ranks run after them, in a group of as many processes. Cases of the same prompts that a
process or a group runs share the loaded models and one prefill.

Must not know how records are judged. Imports torch only in the processes that it starts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from magicdec.bench.gate.cases import Case, options_of
from magicdec.distributed.groups import Launch, set_launch
from magicdec.distributed.loopback import LOOPBACK, listen, serve_store
from magicdec.distributed.ranks import end_with_parent, interrupting_no_child
from magicdec.output.console import make_progress
from magicdec.records.drafted import JudgedRecord

if TYPE_CHECKING:
    from magicdec.bench.acceptance.record import AcceptanceRecord
    from magicdec.bench.study.cells import StudyCell
    from magicdec.setup.prepare import Prepared
    from magicdec.setup.session import Sessions

Numbered = tuple[int, Case]
Result = JudgedRecord | str
"""The record of a case, or why it has none."""
NO_RESULT = "no result came back: its process has skipped it, or ended before it"
APART = "not run: the ranks of its group may differ since the failure of an earlier case"
DECODED = 5  # a decoded token takes as long as so many prefilled ones
WITH_MODEL = 2  # a draft model, with a prefill of its own, takes as long as so many other drafts
ENDS_S = 60.0  # until a process that has closed its connection has ended, also on a busy host


@dataclass(frozen=True)
class Start:
    """What a process of the gate gets: its cases, which rank of them it is, and at which port of
    this host several ranks meet; the first of them serves the store there."""

    share: Sequence[Numbered]
    launch: Launch = Launch()
    port: int = 0
    listening: socket.socket | None = None


@dataclass
class Worker:
    """A process that is a rank of those that run a share of the cases, one after the other, so that
    they can reuse what they have prefilled. `left` are the numbers of the cases without a result,
    which all ranks of the share have in common."""

    process: BaseProcess
    connection: Connection
    launch: Launch
    left: list[int]

    @classmethod
    def start(cls, start: Start, left: list[int]) -> Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(start, theirs, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, start.launch, left)

    def receive(self) -> list[tuple[int, Result]] | None:
        """The next result, unless there is one of another rank; None if no more will come."""
        try:
            number, result = self.connection.recv()
        except (EOFError, OSError):  # also in the middle of a result
            return None
        if number not in self.left:
            return []
        self.left.remove(number)
        is_of_other = self.launch.rank > 0
        return [(number, f"rank {self.launch.rank}: {result}" if is_of_other else result)]

    def loss(self) -> str:
        """How it was lost; empty if it has ended by itself."""
        self.process.join(ENDS_S)
        code = self.process.exitcode
        name = f"process {self.process.pid} of the gate"
        if self.launch.world_size > 1:
            name = f"rank {self.launch.rank} of {self.launch.world_size} ({name})"
        if code is None:
            return f"{name} does not answer"
        if code < 0:
            return f"{name} was ended by {signal.Signals(-code).name}"
        return f"{name} has ended with {code}" if code else ""


@dataclass(frozen=True)
class Finished:
    """A case that has ended, and the share of all work that is done with it, as it is estimated."""

    number: int
    result: Result
    done: float  # 0 to 1


def measure(
    cases: Sequence[Case], num_processes: int, finished: Callable[[Finished], None]
) -> list[Result]:
    """The result of each case; `finished` is called when one has ended. Each process has a share of
    the cases. If one is lost, the gate has failed: the others that run are ended, and every case
    that these had left says which process was lost."""
    results = list[Result]([NO_RESULT] * len(cases))
    done = 0

    def keep(number: int, result: Result) -> None:
        nonlocal done
        results[number] = result
        done += costs.pop(number, 0)
        finished(Finished(number, result, done / total))

    # What stages serve has process groups of its own, and so processes of its own.
    by_ranks: dict[tuple[int, bool], list[Numbered]] = {}
    for case in enumerate(cases):
        ranks = case[1].num_ranks
        has_stages = ranks > 1 and not case[1].shares_prefill
        by_ranks.setdefault((ranks, has_stages), []).append(case)
    parts = [
        shares_of(alike, groups_of(ranks, num_processes))
        for (ranks, _), alike in sorted(by_ranks.items())
    ]
    costs = {number: cost for part in parts for record in part for number, cost in costs_of(record)}
    total = sum(costs.values())
    for shares in parts:
        _measure_shares(shares, keep)
    return results


def groups_of(ranks: int, num_processes: int) -> int:
    """How many groups of so many ranks run side by side."""
    return max(1, num_processes // ranks)


def _measure_shares(
    shares: Sequence[Sequence[Numbered]], keep: Callable[[int, Result], None]
) -> None:
    """Run these shares side by side; `keep` gets the number and the result of each case."""
    workers = list[Worker]()
    try:
        # Before the workers, because its start lets Ctrl-C through again.
        resource_tracker.ensure_running()
        with interrupting_no_child():
            for share in shares:
                workers += _start_ranks(share)
        for number, result in _receive_all(workers):
            keep(number, result)
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()


def _start_ranks(share: Sequence[Numbered]) -> list[Worker]:
    """Start the processes that run these cases, one for each of their ranks."""
    size = share[0][1].num_ranks
    left = [number for number, _ in share]
    if size == 1:
        return [Worker.start(Start(share), left)]
    with listen() as listening:
        port = listening.getsockname()[1]
        return [
            Worker.start(Start(share, Launch(rank, size, rank, size), port, at), left)
            for rank, at in zip(range(size), chain([listening], [None] * size), strict=False)
        ]


def shares_of(cases: Sequence[Numbered], num_processes: int) -> list[list[Numbered]]:
    """The cases of each process, so that all end at about the same time: the longest first, each to
    the process that would end it first. Every process that has some prompts prefills them once, so
    that few cases with prompts of their own stay together."""
    with_prompts: dict[str, list[Numbered]] = {}
    for case in cases:
        with_prompts.setdefault(prompts_of(case[1]), []).append(case)
    shares = [list[Numbered]() for _ in range(num_processes)]
    costs = [0] * num_processes
    for alike in sorted(with_prompts.values(), key=len):
        prefills = [prompt_tokens_of(alike[0][1])] * num_processes
        for case in sorted(alike, key=cost_of, reverse=True):
            after = [cost + prefill for cost, prefill in zip(costs, prefills, strict=True)]
            chosen = after.index(min(after))
            shares[chosen].append(case)
            costs[chosen] = after[chosen] + cost_of(case)
            prefills[chosen] = 0
    return [share for share in shares if share]


def prompts_of(case: Case) -> str:
    """What two cases have in common that share a prefill."""
    config = case.config
    own = case.load, case.is_at_every_position
    return repr((config.model, config.sampling, config.workload, own))


def costs_of(share: Sequence[Numbered]) -> Iterator[tuple[int, int]]:
    """The number of each case and its cost in prefilled tokens; the prefill of a share's prompts is
    the cost of the first case that has them."""
    prefilled = set[str]()
    for case in share:
        prefill = 0 if prompts_of(case[1]) in prefilled else prompt_tokens_of(case[1])
        prefilled.add(prompts_of(case[1]))
        yield case[0], cost_of(case) + prefill


def prompt_tokens_of(case: Case) -> int:
    return case.num_prompts * case.config.workload.prefix_len


def cost_of(case: Numbered) -> int:
    """Of its decoding, in prefilled tokens."""
    config = case[1].config
    drafts = 1 if config.draft is None else WITH_MODEL
    return case[1].num_prompts * config.workload.num_new_tokens * DECODED * drafts


def _receive_all(workers: Sequence[Worker]) -> Iterator[tuple[int, Result]]:
    """The results of all workers, as they come; if one is lost, how, for each case that is left."""
    running = {worker.connection: worker for worker in workers}
    while running:  # until every process has closed its own
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            worker = running[ready]
            if (found := worker.receive()) is not None:
                yield from found
                continue
            del running[ready]
            # One that has given all its results may take its time to end.
            if worker.left and (loss := worker.loss()):
                yield from ((number, loss) for lost in workers for number in lost.left)
                return


def work(start: Start, connection: Any, parent: int) -> None:
    """Run cases in this process, whose parent is the gate, and send the number and the result of
    each. It ends with the gate, however that ends."""
    end_with_parent(parent)
    store = None if start.listening is None else serve_store(start.listening)
    if start.launch.world_size > 1:
        set_launch(start.launch, LOOPBACK, start.port)
    try:
        for number, result in run_cases(start.share, start.launch):
            connection.send((number, result))
    finally:
        connection.close()
    del store  # which the other ranks have needed until now


def run_cases(cases: Sequence[Numbered], launch: Launch = Launch()) -> Iterator[tuple[int, Result]]:
    """Run cases on this rank, those with the same prompts one after the other. All ranks must call
    it with the same cases. The first gives all results, the others what fails on them."""
    from magicdec.distributed.start import close_groups
    from magicdec.distributed.watching.watch import stop_watching
    from magicdec.setup.prepare import SetupCache, prepare
    from magicdec.setup.session import Sessions
    from magicdec.systems.shared_prefill import prefill_key

    cache = SetupCache()
    groups: dict[object, list[tuple[int, Prepared]]] = {}
    arriving = [(number, case) for number, case in cases if not case.shares_prefill]
    everywhere = [(number, case) for number, case in cases if case.is_at_every_position]
    for number, case in cases:
        if not case.shares_prefill or case.is_at_every_position:
            continue
        try:
            case.config.check(launch.world_size)
            prepared = prepare(case.config, launch, cache)
        except ValueError as error:  # the same on all ranks
            yield from [(number, str(error))] * (launch.rank == 0)
        except Exception as error:  # such as a value of another type, in a file that was edited
            yield number, f"{type(error).__name__}: {error}"
        else:
            groups.setdefault(repr(prefill_key(prepared.config)), []).append((number, prepared))
    sessions = Sessions()
    left = [number for group in groups.values() for number, _ in group]
    for number, result in chain.from_iterable(_run_group(g, sessions) for g in groups.values()):
        left.remove(number)
        if launch.rank == 0 or isinstance(result, str):
            yield number, result
        if launch.world_size > 1 and isinstance(result, str):
            stop_watching()
            yield from (
                (number_apart, APART)
                for number_apart in (*left, *(number for number, _ in arriving))
            )
            return
    yield from judge_positions(everywhere)
    if groups or everywhere:
        close_groups()
    yield from serve_cases(arriving, launch)


def judge_positions(cases: Sequence[Numbered]) -> Iterator[tuple[int, Result]]:
    """As `run_cases`, for drafts at every position of texts, on one rank. Those of the same texts
    share them."""
    with_texts: dict[str, list[Numbered]] = {}
    for case in cases:
        with_texts.setdefault(prompts_of(case[1]), []).append(case)
    for alike in with_texts.values():
        yield from _judge_texts(alike)


def _judge_texts(cases: Sequence[Numbered]) -> list[tuple[int, Result]]:
    from magicdec.bench.acceptance.measuring import groups_of as groups_of_cells
    from magicdec.bench.acceptance.measuring import measure_cells, prepare_cells
    from magicdec.bench.acceptance.memory import check_memory
    from magicdec.bench.study.progress import PassProgress
    from magicdec.setup.prepare import SetupCache

    cache = SetupCache()
    results = list[tuple[int, Result]]()
    cells: list[tuple[int, StudyCell]] = []

    def keep(measured: StudyCell, record: AcceptanceRecord) -> None:
        (number,) = (number for number, cell in cells if cell is measured)
        results.append((number, replace(record, seal="")))  # its line gets the one of its content

    for number, case in cases:
        try:
            (cell,) = prepare_cells([case.config], cache)
            cells.append((number, cell))
        except Exception as wrong:
            results.append((number, reason_of(wrong)))
    todo = [cell for _, cell in cells]
    reason = NO_RESULT
    try:
        if todo:
            check_memory(groups_of_cells(todo))
            measure_cells(todo, PassProgress(make_progress(False), Launch()), keep)
    except Exception as wrong:  # so that it costs these cases only
        reason = reason_of(wrong)
    ended = [number for number, _ in results]
    return results + [(number, reason) for number, _ in cells if number not in ended]


def reason_of(error: Exception) -> str:
    """Why a case has no record: what a user can mend says it itself."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def serve_cases(cases: Sequence[Numbered], launch: Launch) -> Iterator[tuple[int, Result]]:
    """As `run_cases`, for requests that arrive. Modes that serve the same requests are measured one
    after the other, as by one command."""
    alike = list[list[Numbered]]()
    for number, case in cases:
        group = next((g for g in alike if case.joins([other for _, other in g])), None)
        if group is None:
            alike.append([(number, case)])
        else:
            group.append((number, case))
    left = [number for number, _ in cases]
    for group in alike:
        for number, result in _serve_modes(group, launch):
            left.remove(number)
            if launch.rank == 0 or isinstance(result, str):
                yield number, result
            if launch.world_size > 1 and isinstance(result, str):
                yield from ((number_apart, APART) for number_apart in left)
                return


def _serve_modes(cases: Sequence[Numbered], launch: Launch) -> list[tuple[int, Result]]:
    from magicdec.bench.measure import measure_modes
    from magicdec.bench.prepare import prepare

    records = list[JudgedRecord]()
    error = ""
    try:
        served = [case for _, case in cases]
        prepared = prepare(served[0].config, options_of(served), launch)
        measure_modes(prepared, records.append, is_logged=True)
    except Exception as wrong:  # so that it costs these cases only
        error = reason_of(wrong)
    if launch.rank > 0 and not error:
        return []  # the first rank has the records, whose lines get the seal of their content
    results: list[Result] = [replace(record, seal="") for record in records]
    results += [error or NO_RESULT] * (len(cases) - len(results))
    return [(number, result) for (number, _), result in zip(cases, results, strict=True)]


def _run_group(
    group: Sequence[tuple[int, Prepared]], sessions: Sessions
) -> Iterator[tuple[int, Result]]:
    from magicdec.bench.measure import execute_in
    from magicdec.systems.shared_prefill import CacheDemand, SharedPrefill

    progress = make_progress(False)
    room = CacheDemand.of([prepared.config for _, prepared in group], is_kept=True)
    shared: SharedPrefill | None = None
    for number, prepared in group:
        session = sessions.begin(prepared)
        shared = shared or SharedPrefill(session.device, progress, is_counted=True)
        shared.models.drop_others(group[0][1].source, prepared.draft_source)
        try:
            record = execute_in(session, prepared, progress, shared, room).record
            yield number, replace(record, seal="")  # its line gets the one of its content
        except Exception as error:  # so that it costs this case only
            yield number, f"{type(error).__name__}: {error}"
            shared = None
