"""Ends this rank when another one has ended, in every phase of a command, whatever this rank waits
for: for the store, for groups, for a channel that is being connected, for weights that another rank
loads.

Owns from when until when ranks watch each other. Must not know what they do. On its own host a rank
looks at the other processes, and `heartbeat` tells of other hosts. Where the main thread notices
itself that a rank has ended, because a collective fails for example, it has the time to say so.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from magicdec.distributed.groups import Launch, rendezvous_store
from magicdec.distributed.watching.heartbeat import (
    INTERVAL_S,
    PATIENCE_S,
    Heartbeat,
    lost_key,
    open_store,
    start_heartbeat,
)
from magicdec.distributed.watching.processes import (
    NOTICE_S,
    PeerLost,
    Processes,
    describe,
    processes_of,
    report_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable

LOOK_S = 0.5  # between two looks at the processes of this host
MOST_S = 10.0  # until all ranks have stopped to watch
LOST = 1  # the exit code
ENDING = threading.Lock()  # taken by the first thread that ends the process, and never given back


class Watch(threading.Thread):
    """Looks whether the ranks of this host run. One that has ended before the last look, so that
    the main thread has had LOOK_S, is named to `on_lost`, in this thread."""

    def __init__(
        self, launch: Launch, processes: Processes, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.launch, self.processes, self.on_lost = launch, processes, on_lost
        self._ending = threading.Event()

    def run(self) -> None:
        before: list[int] = []
        while not self._ending.wait(LOOK_S):
            if before:
                self.on_lost(describe(self.processes.ended()))
                return
            before = self.processes.ended()

    def stop(self) -> None:
        self._ending.set()
        self.join()


def watch_ranks(launch: Launch) -> None:
    """Watch the other ranks until `leave_ranks`. All ranks must call it, and it returns when all
    have. It does nothing on one rank, or if this rank watches already."""
    if launch.world_size == 1 or find_watch() is not None:
        return
    meet(launch, "begin")
    processes = processes_of(launch)
    on_lost = partial(end_process, launch)
    if launch.local_world_size != launch.world_size:
        start_heartbeat(launch, on_lost)
    Watch(launch, processes, on_lost).start()


def leave_ranks() -> None:
    """This rank needs no other any more. All ranks that watch must call it, and it returns when
    none needs another. It does nothing on a rank that does not watch."""
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
    """Return when all ranks have called it with this place, as often as this one. Works before any
    process group exists. Raises RuntimeError if that takes too long."""
    from torch.distributed import PrefixStore

    store = PrefixStore("meeting", rendezvous_store(launch))
    count = store.add(place, 1)
    met = f"{place} {(count - 1) // launch.world_size}"
    if count % launch.world_size == 0:
        store.set(met, "")
    if patience is None:
        store.get(met)
    else:
        store.wait([met], patience)


def stop_watching() -> None:
    """This rank is about to end, and waits for no other rank."""
    for thread in threading.enumerate():
        if isinstance(thread, Watch | Heartbeat):
            thread.stop()


def find_watch() -> Watch | None:
    """The watch of this rank, if it has one."""
    found = (thread for thread in threading.enumerate() if isinstance(thread, Watch))
    return next(found, None)


@contextmanager
def naming_lost(launch: Launch) -> Iterator[None]:
    """If something fails inside because another rank has ended, end this one, which names it."""
    try:
        try:
            yield
        except RuntimeError as error:
            name_lost(error)
            raise
    except PeerLost as error:
        end_process(launch, str(error))


def name_lost(error: RuntimeError) -> None:
    """Raise PeerLost if the main thread's `error` came, in a collective for example, because a rank
    of this host has ended. If it is a connection's, another host may be the reason: the heartbeat
    then has the time to name it, and ends this process."""
    watch = find_watch()
    if isinstance(error, PeerLost) or watch is None:
        return
    time.sleep(NOTICE_S)
    watch.processes.check()
    for thread in threading.enumerate():
        if isinstance(thread, Heartbeat) and is_of_connection(error):
            thread.join(PATIENCE_S + 4 * INTERVAL_S)


def is_of_connection(error: RuntimeError) -> bool:
    """Whether it comes from torch.distributed, whose gloo has no exceptions of its own."""
    from torch.distributed import DistError

    return isinstance(error, DistError) or "gloo" in str(error)


def end_process(launch: Launch, line: str) -> NoReturn:
    """End this rank at once, whatever it waits for: what it shares with other ranks cannot be
    closed without them. Leave the line, which says what was lost, to the launcher and the user."""
    with ENDING:
        has_other_hosts = launch.local_world_size != launch.world_size
        line = f"rank {launch.rank}: {first_word(line) if has_other_hosts else line}"
        report_error(line)
        print(f"{line}\n", end="", file=sys.stderr, flush=True)  # in one piece: all say it now
        if has_other_hosts and launch.rank == launch.local_rank:
            time.sleep(2 * INTERVAL_S)  # the store ends with this host; the others read it first
        os._exit(LOST)


def first_word(line: str) -> str:
    """What that rank says was lost which noticed it first. It ends, too, and a rank of another host
    that sees no more than that would name the wrong one."""
    try:
        return str(open_store().compare_set(lost_key(), "", line), "utf-8")
    except RuntimeError:  # the store's host does not answer
        return line
