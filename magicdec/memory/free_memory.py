"""Reads how much memory is still free: on the host, in its container or on a GPU.

Owns the files in which the system gives these numbers. Must not know of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def free_device_memory(kind: str, local_rank: int) -> int | None:
    """Free bytes of this rank's device; on a CPU those of the host. None if they are not known."""
    if kind == "cuda":
        import torch

        from magicdec.hardware.devices import device_of

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
