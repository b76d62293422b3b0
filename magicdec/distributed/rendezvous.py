"""The rendezvous of torch's launcher for ranks of one host, unreachable for others."""

from __future__ import annotations

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from magicdec.distributed.loopback import LOOPBACK, serve_store

BACKEND = "magicdec-loopback"  # its name for torch's launcher


class LoopbackRendezvous(RendezvousHandler):
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.store = serve_store()

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(LOOPBACK, self.store.port)
        return RendezvousInfo(PrefixStore(self.run_id, self.store), 0, 1, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def register_rendezvous() -> str:
    rendezvous_handler_registry.register(BACKEND, make_rendezvous)
    return BACKEND
