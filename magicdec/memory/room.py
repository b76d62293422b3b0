"""Room: the memory in which a rank allocates, and the ranks that share it with it.

Must not know what is planned there.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Launch
from magicdec.memory.check import describe_place
from magicdec.memory.free_memory import free_device_memory
from magicdec.memory.plan import MemoryPlan


@dataclass(frozen=True)
class Room:
    """`free` bytes are free for all `ranks` together; None if it is not known."""

    ranks: tuple[int, ...]
    place: str
    free: int | None

    def describe(self, plan: MemoryPlan, what: str = "") -> str:
        """The line to print about a plan of all `ranks`. `what` says of what, as ` for NAME`."""
        needed = f"{plan.describe()} {self.place}{what}"
        if self.free is None:
            return f"{needed}; how much is free is not known here"
        return f"{needed}; {self.free / 1e9:.2f} GB free"

    def refusal(self, plan: MemoryPlan) -> str | None:
        """How much the plan needs and how much is free; None if it fits or that is not known."""
        if self.free is None or plan.total <= self.free:
            return None
        return f"{plan.describe()} {self.place}, {self.free / 1e9:.2f} GB are free"


def find_room(config: ResolvedConfig, launch: Launch, num_gpus: int) -> Room:
    """The room of this rank, on a host with `num_gpus` GPUs."""
    ranks = sharing_ranks(config.parallel.device, launch, num_gpus)
    place = describe_place(config, launch)
    free = free_device_memory(config.parallel.device, launch.local_rank)
    if config.parallel.device != "cpu" and len(ranks) > 1:
        place = f"on the GPU that {len(ranks)} ranks share"
    return Room(ranks, place, free)


def sharing_ranks(kind: str, launch: Launch, num_gpus: int) -> tuple[int, ...]:
    """The ranks of this host that share this rank's memory: all of them on a CPU, on CUDA those
    with the same GPU."""
    ranks = tuple(launch.local_ranks)
    if kind == "cpu":
        return ranks
    return tuple(rank for rank in ranks if (rank - launch.rank) % max(1, num_gpus) == 0)
