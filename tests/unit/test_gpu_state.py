"""Clocks and slowdown reasons, read from a fake NVML."""

from __future__ import annotations

import datetime
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from magicdec.distributed.groups import Launch
from magicdec.hardware.environment import GpuState, describe_environment, watch_gpu

NOTHING = {"gpu_sm_mhz": None, "gpu_most_sm_mhz": None, "gpu_slowed_by": None}


class Nvml(ModuleType):
    """A fake NVML with one GPU whose clock falls, because of heat and because it is idle."""

    NVML_CLOCK_SM = 1

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.clocks = [1980, 1755, 1905]
        self.reasons = [0x01, 0x21, 0x04]

    def nvmlInit(self) -> None:
        self.ready = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.ready and uuid == "GPU-12-34"
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle", 1)
        return self.clocks.pop(0)

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 2100

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.reasons.pop(0)


def read_by(state: GpuState) -> dict[str, Any]:
    """What `state` adds to a record's environment."""
    started = datetime.datetime.now(datetime.timezone.utc)
    found = state.add_to(describe_environment(Launch(0, 1, 0, 1), "cpu", started))
    return {name: getattr(found, name) for name in NOTHING}


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    module = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = SimpleNamespace(uuid="12-34")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    return module


def test_the_range_of_clocks_and_every_slowdown_is_kept(nvml: Nvml) -> None:
    state = watch_gpu(torch.device("cuda", 0))
    assert read_by(state) == NOTHING, "nothing was read"
    for _ in range(3):
        state.read()
    assert read_by(state) == {
        "gpu_sm_mhz": [1755, 1980],
        "gpu_most_sm_mhz": 2100,
        "gpu_slowed_by": ["software power cap", "software thermal slowdown"],
    }


def test_a_gpu_that_only_idles_is_not_slowed(nvml: Nvml) -> None:
    state = watch_gpu(torch.device("cuda", 0))
    state.read()
    assert read_by(state)["gpu_slowed_by"] == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_nvml_or_a_gpu_there_is_nothing(
    device: str, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    state = watch_gpu(torch.device(device))
    state.read()
    assert read_by(state) == NOTHING
