"""A rank's sign of life for the ranks of other hosts.

A host that is cut off closes no connection, so that a collective with it would wait until its own
time-out, half an hour for gloo. Each rank therefore counts up a number in the rendezvous store and
reads those of the others. A number that stands still for PATIENCE_S ends the process, and so does
the line of a rank that has noticed a loss before. Must not know what the ranks do. Needed between
hosts only: on one host, `watch` looks at the processes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from magicdec.distributed.groups import Launch

if TYPE_CHECKING:
    from torch.distributed import Store

INTERVAL_S = 2.0
PATIENCE_S = 20.0


class Heartbeat(threading.Thread):
    """`store` must not be used by another thread. `on_lost` gets one line that names what was lost;
    it is called in this thread, while the main thread may wait for the lost rank."""

    def __init__(
        self, store: Store, rank: int, world_size: int, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.store, self.rank, self.on_lost = store, rank, on_lost
        self._keys = {other: f"heartbeat/{other}" for other in range(world_size)}
        self._heard = {other: (b"", time.monotonic()) for other in self._keys if other != rank}
        self._ending = threading.Event()

    def run(self) -> None:
        count, reached = 0, time.monotonic()
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

    def stop(self) -> None:
        self._ending.set()
        self.join()

    def _find_lost(self) -> str:
        if self.store.check([lost_key()]):
            return self.store.get(lost_key()).decode()
        now = time.monotonic()
        for other, (last, when) in self._heard.items():
            key = self._keys[other]
            found = self.store.get(key) if self.store.check([key]) else b""
            if found != last:
                self._heard[other] = found, now
            elif now - when > PATIENCE_S:
                return f"rank {other} has not been heard of for {now - when:.0f} s"
        return ""


def lost_key() -> str:
    """The store's key for the line of the rank that noticed first that another one is lost."""
    return f"lost in attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"


def start_heartbeat(launch: Launch, on_lost: Callable[[str], None]) -> None:
    """Start the heartbeat of this rank. Needs a launcher's rendezvous. Needs torch."""
    Heartbeat(open_store(), launch.rank, launch.world_size, on_lost).start()


def open_store() -> Store:
    """A new connection to the rendezvous store. Raises RuntimeError if that does not answer."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(
        address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
