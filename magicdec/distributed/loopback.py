"""A rendezvous store on the loopback address, since torch's own listens on all interfaces. Imports
torch only to make a store."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LOOPBACK = "127.0.0.1"
PATIENCE = timedelta(seconds=300)  # torch's own


def listen() -> socket.socket:
    """A socket at LOOPBACK and a free port."""
    return socket.create_server((LOOPBACK, 0))


def serve_store(listening: socket.socket | None = None) -> TCPStore:
    """A store that this process serves at LOOPBACK, on `listening` if given."""
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
