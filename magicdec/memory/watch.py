"""The memory that a run took, held against what was planned: the record's `memory`.

Owns the readings of one rank. Knows nothing of what is allocated, nor when.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from magicdec.distributed.groups import Group
from magicdec.hardware.timing import peak_memory_bytes, reset_peak_memory
from magicdec.memory.plan import MemoryPlan


class MemoryWatch:
    """Made before anything is loaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        reset_peak_memory(device)
        self.before = self.most = peak_memory_bytes(device)  # bytes of this rank

    def note(self) -> None:
        """Take the peak so far into account. Before each reset of it, and at the end."""
        self.most = max(self.most, peak_memory_bytes(self.device))

    def measured(self, group: Group) -> dict[str, int]:
        """Of all ranks together, for `describe_memory`."""
        found = group.all_gather_object((self.before, self.most))
        return {"process_bytes": sum(f[0] for f in found), "peak_bytes": sum(f[1] for f in found)}


def describe_memory(
    plan: MemoryPlan, free: int | None, measured: dict[str, int] | None = None
) -> dict[str, Any]:
    """For the record: a plan of all ranks together, by part, and what was measured of it."""
    parts = {f"{name}_bytes": size for name, size in asdict(plan).items()}
    absent = {"process_bytes": None, "peak_bytes": None}
    return {**parts, "total_bytes": plan.total, "free_bytes": free, **(measured or absent)}
