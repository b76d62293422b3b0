"""Ends this rank when another one has ended, whatever this rank waits for.

A rank watches the processes of its host, and also ends if one is stopped for PATIENCE_S. When ranks
have ended, no rank watches any more, and the launcher does (`LauncherWatch`).

A host that is cut off closes no connection, and gloo would wait for half an hour. Between hosts
each rank therefore counts up a number in the rendezvous store (`Heartbeat`): one that stands still
for PATIENCE_S ends the process, as does another rank's report.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from magicdec.distributed.groups import Launch, rendezvous_store
from magicdec.distributed.watching.processes import (
    NOTICE_S,
    PeerLost,
    Processes,
    describe,
    processes_of,
    report_error,
    started_ranks,
)

if TYPE_CHECKING:
    from torch.distributed import Store


LOOK_S = 0.5  # between two looks at the processes of this host
CLOSING_S = 5.0  # from the end of a rank's connections to the end of its process, which frees much
NAMING_S = 1.5  # until all ranks have named one that is stopped; they look at other times
MOST_S = 10.0  # until all ranks have stopped to watch
LOST = 1  # the exit code
ENDING = threading.Lock()  # taken by the first thread that ends the process, and never given back


class Watcher(threading.Thread):
    """A thread that calls `on_lost` with one line about a loss."""

    def __init__(self, name: str, on_lost: Callable[[str], None]) -> None:
        super().__init__(name=name, daemon=True)
        self.on_lost = on_lost
        self._ending = threading.Event()

    def stop(self) -> None:
        self._ending.set()
        self.join()


class RankWatch(Watcher):
    """The watcher of this host's processes. It reports a rank that ended before its last look, so
    that the main thread had LOOK_S, or was stopped at all looks of PATIENCE_S. Looks are counted
    because ranks may all be stopped and continued."""

    def __init__(
        self, launch: Launch, processes: Processes, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__("watch", on_lost)
        self.launch = launch
        self.processes = processes
        self._stopped = Counter[int]()  # at how many looks in a row, by rank

    def run(self) -> None:
        before: list[int] = []
        while not self._ending.wait(LOOK_S):
            lost = describe(self.processes.ended()) if before else self._find_stopped()
            if lost:
                self.on_lost(lost)
                return
            before = self.processes.ended()

    def _find_stopped(self) -> str:
        self._stopped = counted_looks(self._stopped, self.processes)
        return next(iter(stopped_for(PATIENCE_S, self._stopped).values()), "")


def counted_looks(before: Counter[int], processes: Processes) -> Counter[int]:
    """At how many looks in a row, with this one, each rank was stopped."""
    return Counter({rank: before[rank] + 1 for rank in processes.stopped()})


def stopped_for(seconds: float, looks: Counter[int]) -> dict[int, str]:
    """A line for each rank that was stopped at all looks of so many seconds."""
    return {
        rank: f"rank {rank} has been stopped by a signal for {count * LOOK_S:.0f} s"
        for rank, count in looks.items()
        if count * LOOK_S > seconds
    }


class LauncherWatch(Watcher):
    """The launcher's watcher of the ranks that it has started. A rank that is stopped when another
    has ended, in the last steps of a command, would hold it until it is continued; after MOST_S it
    is killed."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__("launcher's watch", partial(print, file=sys.stderr, flush=True))
        self.num_ranks = num_ranks

    def run(self) -> None:
        pids = dict[int, int]()
        looks = Counter[int]()
        has_ended = False
        while not self._ending.wait(LOOK_S):
            if len(pids) < self.num_ranks:
                pids |= started_ranks()
                continue
            processes = Processes(tuple(pids[rank] for rank in sorted(pids)))
            looks = counted_looks(looks, processes)
            has_ended = has_ended or bool(processes.ended())
            for rank, line in stopped_for(MOST_S, looks).items() if has_ended else ():
                self.on_lost(line)
                with suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)


def watch_ranks(launch: Launch) -> None:
    """Watch the other ranks until `leave_ranks`. All ranks must call it; waits for all."""
    if launch.world_size == 1 or find_watch() is not None:
        return
    meet(launch, "begin")
    processes = processes_of(launch)
    on_lost = partial(end_process, launch)
    if launch.local_world_size != launch.world_size:
        Heartbeat(open_store(), launch.rank, launch.world_size, on_lost).start()
    RankWatch(launch, processes, on_lost).start()


def leave_ranks() -> None:
    """Stop watching. All ranks that watch must call it; waits until none needs another."""
    if (watch := find_watch()) is None:
        return
    meet(watch.launch, "leave")
    stop_watching()
    # Only now may a rank end. If one is killed meanwhile, no other needs it.
    try:
        meet(watch.launch, "stopped", timedelta(seconds=MOST_S))
    except RuntimeError:  # the rank that serves the store has ended before
        return


def meet(launch: Launch, place: str, patience: timedelta | None = None) -> None:
    """Wait until all ranks have called it equally often with this place. Needs no process group.
    Raises RuntimeError beyond `patience`."""
    from torch.distributed import PrefixStore

    store = PrefixStore("meeting", rendezvous_store(launch))
    count = store.add(place, 1)
    key = f"{place} {(count - 1) // launch.world_size}"
    if count % launch.world_size == 0:
        store.set(key, "")
    if patience is None:
        store.get(key)
    else:
        store.wait([key], patience)


def stop_watching() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, Watcher):
            thread.stop()


def find_watch() -> RankWatch | None:
    watches = (thread for thread in threading.enumerate() if isinstance(thread, RankWatch))
    return next(watches, None)


@contextmanager
def naming_lost(launch: Launch) -> Iterator[None]:
    """A context that ends this rank with the name of the rank whose end made it fail."""
    try:
        try:
            yield
        except RuntimeError as error:
            name_lost(error)
            raise
    except PeerLost as error:
        end_process(launch, str(error))


def name_lost(error: RuntimeError) -> None:
    """Raises PeerLost if `error` of the main thread came from an ended rank of this host. After a
    lost connection it waits: the rank may still be ending, or the heartbeat names another host."""
    watch = find_watch()
    if isinstance(error, PeerLost) or watch is None:
        return
    give_up = time.monotonic() + (CLOSING_S if is_of_connection(error) else 0.0)
    time.sleep(NOTICE_S)
    watch.processes.check()
    while time.monotonic() < give_up:
        time.sleep(NOTICE_S)
        watch.processes.check()
    for thread in threading.enumerate():
        if isinstance(thread, Heartbeat) and is_of_connection(error):
            thread.join(PATIENCE_S + 4 * INTERVAL_S)


def is_of_connection(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it; gloo has no exceptions of its own."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)


def end_process(launch: Launch, line: str) -> NoReturn:
    """End this rank at once, since shared resources cannot be closed without the others. Leave the
    line about the loss to launcher and user."""
    with ENDING:
        has_other_hosts = launch.local_world_size != launch.world_size
        line = f"rank {launch.rank}: {first_word(line) if has_other_hosts else line}"
        report_error(line)
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one piece: all say it now
        if has_other_hosts and launch.rank == launch.local_rank:
            time.sleep(2 * INTERVAL_S)  # the store ends with this host; the others read it first
        end_stopped()
        os._exit(LOST)


def end_stopped() -> None:
    """Kill the stopped ranks of this host, once the others have named them: the launcher's request
    reaches them only when continued."""
    watch = find_watch()
    if watch is not None and watch.processes.stopped():
        time.sleep(NAMING_S)
        for rank in watch.processes.stopped():
            pid = watch.processes.pids[rank]
            assert pid is not None, "it was seen here"
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def first_word(line: str) -> str:
    """The line of the rank that noticed the loss first; later ranks would name the wrong one."""
    try:
        return str(open_store().compare_set(lost_key(), "", line), "utf-8")
    except RuntimeError:  # the store's host does not answer
        return line


INTERVAL_S = 2.0
PATIENCE_S = 20.0


class Heartbeat(Watcher):
    """The watcher of ranks on other hosts. No other thread may use `store`."""

    def __init__(
        self, store: Store, rank: int, world_size: int, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__("heartbeat", on_lost)
        self.store = store
        self.rank = rank
        self._keys = {other: f"heartbeat/{other}" for other in range(world_size)}
        self._heard = {other: (b"", time.monotonic()) for other in self._keys if other != rank}

    def run(self) -> None:
        count = 0
        reached = time.monotonic()
        while not self._ending.is_set():
            try:
                self.store.set(self._keys[self.rank], str(count))
                lost = self._find_lost()
                reached = time.monotonic()
            except RuntimeError:  # the store's host does not answer
                away = time.monotonic() - reached
                lost = f"the host of rank 0 has not answered for {away:.0f} s"
                lost = lost if away > PATIENCE_S else ""
            if lost:
                self.on_lost(lost)
                return
            count += 1
            self._ending.wait(INTERVAL_S)

    def _find_lost(self) -> str:
        if self.store.check([lost_key()]):
            return self.store.get(lost_key()).decode()
        now = time.monotonic()
        for other, (last, when) in self._heard.items():
            key = self._keys[other]
            count = self.store.get(key) if self.store.check([key]) else b""
            if count != last:
                self._heard[other] = count, now
            elif now - when > PATIENCE_S:
                return f"rank {other} has not been heard of for {now - when:.0f} s"
        return ""


def lost_key() -> str:
    return f"lost in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def open_store() -> Store:
    """A new connection to the rendezvous store. Raises RuntimeError without an answer."""
    from torch.distributed import TCPStore

    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    return TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
