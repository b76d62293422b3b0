"""How fast a GPU's clock ran while a run was measured, and what slowed it: from NVML, where
`nvidia-ml-py` is installed.

Owns the readings. They are made between measured passes, never during one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch

from magicdec.records.environment import Environment

# Bits of NVML's clock event reasons that say that a GPU was held back; idle and set clocks are not.
SLOWDOWNS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@dataclass
class GpuState:
    """Readings of one device; none without NVML or a GPU."""

    nvml: Any = None
    handle: Any = None
    sm_mhz: list[int] = field(default_factory=list)
    reasons: int = 0  # all that were ever seen

    def read(self) -> None:
        """Take a reading."""
        if self.nvml is None:
            return
        self.sm_mhz.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
        self.reasons |= self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)

    def add_to(self, environment: Environment) -> Environment:
        """`environment` with what was read, if anything was."""
        if not self.sm_mhz:
            return environment
        most = self.nvml.nvmlDeviceGetMaxClockInfo(self.handle, self.nvml.NVML_CLOCK_SM)
        return replace(
            environment,
            gpu_sm_mhz=[min(self.sm_mhz), max(self.sm_mhz)],
            gpu_most_sm_mhz=most,
            gpu_slowed_by=[name for bit, name in SLOWDOWNS.items() if self.reasons & bit],
        )


def watch_gpu(device: torch.device) -> GpuState:
    """Ready to read `device`: found by its UUID, since NVML counts GPUs that are hidden from CUDA
    too."""
    if device.type != "cuda" or find_spec("pynvml") is None:
        return GpuState()
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device).uuid
    return GpuState(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
