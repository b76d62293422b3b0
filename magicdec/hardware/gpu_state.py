"""The GPU's clock frequency during a run and the reasons for lower clocks, read from NVML if
`nvidia-ml-py` is installed.

Owns the readings. They are taken between measured passes, never during one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch

from magicdec.records.environment import Environment

# NVML's clock event reasons that mean the GPU was slowed down. Idling and user-set clocks are not
# among them.
SLOWDOWNS = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


@dataclass
class GpuState:
    """Readings of one device; empty without NVML or without a GPU."""

    nvml: Any = None
    handle: Any = None
    sm_mhz: list[int] = field(default_factory=list)
    reasons: int = 0  # bitwise or of all readings

    def read(self) -> None:
        """Read the clock and the reasons once."""
        if self.nvml is None:
            return
        self.sm_mhz.append(self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM))
        self.reasons |= self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self.handle)

    def add_to(self, environment: Environment) -> Environment:
        """`environment` with the readings; unchanged if nothing was read."""
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
    """A GpuState for `device`, which is found by its UUID: NVML's indices include GPUs that are
    hidden from CUDA."""
    if device.type != "cuda" or find_spec("pynvml") is None:
        return GpuState()
    import pynvml

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device).uuid
    return GpuState(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
