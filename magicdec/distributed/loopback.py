"""The store of ranks that all run on this host.

It answers whoever connects to it. This one listens on the loopback address alone, where torch by
itself listens on all interfaces of the host. Imports torch only when a store is made.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(seconds=300)  # torch's own


def listen() -> socket.socket:
    """Where a store may be served to this host alone: at LOOPBACK and a port that is free."""
    return socket.create_server((LOOPBACK, 0))


def serve_store(listening: socket.socket | None = None) -> TCPStore:
    """A store that this process serves at LOOPBACK and its `port`, to this host alone. `listening`
    is what `listen` gave, which the store takes over; by default it listens itself."""
    from torch.distributed import TCPStore

    listening = listening or listen()
    port = listening.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=PATIENCE,
        master_listen_fd=listening.detach(),  # which the store closes
    )
