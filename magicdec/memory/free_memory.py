"""How much memory is still free: on the host, in its container or on a GPU; and the ranks that
share it.

Owns the files in which the system gives these numbers. Must not know of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.groups import Launch
from magicdec.memory.check import describe_place
from magicdec.memory.plan import MemoryPlan

ROOT = Path("/")


def free_device_memory(kind: str, local_rank: int) -> int | None:
    """Free bytes of this rank's device; on a CPU those of the host. None if they are not known."""
    if kind == "cuda":
        import torch

        from magicdec.hardware.environment import device_of

        return int(torch.cuda.mem_get_info(device_of(kind, local_rank))[0])
    return free_host_memory()


def free_host_memory(root: Path = ROOT) -> int | None:
    """Bytes that can be allocated without swapping; the file cache counts as free. This is the
    smallest of the host's free memory and of what the memory limits of the enclosing control groups
    leave. None if /proc/meminfo does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    if "MemAvailable" not in fields:
        return None
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """Free bytes under the memory limit of each control group (version 2 or 1) that has one, from
    this process's group up to the root. In a container, the path that the kernel names may not be
    mounted, but the root of the container's groups is."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            mount, limit, used = "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, used = (
                *("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
            )
        else:
            continue
        top = root / mount
        directory = top / place.strip("/")
        while directory.is_relative_to(top):
            left = _left(directory, limit, used)
            if left is not None:
                yield left
            directory = directory.parent


def _left(directory: Path, limit_file: str, used_file: str) -> int | None:
    """The limit minus the memory in use. File cache that can be dropped does not count as in
    use."""
    try:
        limit = (directory / limit_file).read_text().strip()
        used = int((directory / used_file).read_text())
        stat = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max":
        return None
    counts = dict(line.split() for line in stat)
    cache = int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))
    return int(limit) - used + cache


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
