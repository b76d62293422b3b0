"""The measured peak memory of this rank, for comparison with its plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magicdec.distributed.groups import Group
from magicdec.hardware.timing import peak_memory_bytes, reset_peak_memory
from magicdec.records.environment import MemoryRecord
from magicdec.setup.memory_plan import MemoryPlan


@dataclass(frozen=True)
class MemoryTaken:
    """Bytes of all ranks together."""

    process: int | None  # in use before anything was loaded
    peak: int | None  # sum of the largest use of each rank since then


NOT_MEASURED = MemoryTaken(None, None)


class MemoryWatch:
    """The measurement of this rank's peak memory, begun before anything is loaded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        reset_peak_memory(device)
        self.before = self.most = peak_memory_bytes(device)  # bytes of this rank

    def note(self) -> None:
        """Read the peak so far: before each reset of the peak, and at the end."""
        self.most = max(self.most, peak_memory_bytes(self.device))

    def measured(self, group: Group) -> MemoryTaken:
        """The readings of all ranks together. Every rank of the group must call it."""
        readings = group.all_gather_values((self.before, self.most), tuple[int, int])
        return MemoryTaken(sum(f[0] for f in readings), sum(f[1] for f in readings))


def describe_memory(
    plan: MemoryPlan, free: int | None, usage: MemoryTaken = NOT_MEASURED
) -> MemoryRecord:
    return MemoryRecord(
        **{f"{part}_bytes": size for part, size in vars(plan).items()},
        total_bytes=plan.total,
        free_bytes=free,
        process_bytes=usage.process,
        peak_bytes=usage.peak,
    )
