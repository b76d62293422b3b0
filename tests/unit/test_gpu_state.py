"""What is asked of a GPU before and after a run, with stand-ins: whether it serves, how much memory
is free, clocks and slowdown reasons by NVML; and the installed versions of flash-attn."""

from __future__ import annotations

import datetime
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from magicdec.config.resolve import choose_device
from magicdec.distributed.groups import Launch
from magicdec.hardware.environment import (
    GpuState,
    describe_environment,
    flash_attn_versions,
    probe_machine,
    watch_gpu,
)
from magicdec.setup.memory_check import free_device_memory

NOTHING = {"gpu_sm_mhz": None, "gpu_most_sm_mhz": None, "gpu_slowed_by": None}

READ = {
    "gpu_sm_mhz": [1755, 1980],
    "gpu_most_sm_mhz": 2100,
    "gpu_slowed_by": ["software power cap", "software thermal slowdown"],
}


class Nvml(ModuleType):
    """A fake NVML with one GPU whose clock falls, because of heat and because it is idle."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        """What a driver's refusal raises."""

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
    started = datetime.datetime.now(datetime.UTC)
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
    assert read_by(state) == READ


def test_a_gpu_that_only_idles_is_not_slowed(nvml: Nvml) -> None:
    state = watch_gpu(torch.device("cuda", 0))
    state.read()
    assert read_by(state)["gpu_slowed_by"] == []


@pytest.mark.parametrize(
    ("function", "nulls"),
    [
        ("nvmlInit", list(NOTHING)),
        ("nvmlDeviceGetHandleByUUID", list(NOTHING)),
        ("nvmlDeviceGetClockInfo", ["gpu_sm_mhz", "gpu_most_sm_mhz"]),
        ("nvmlDeviceGetMaxClockInfo", ["gpu_most_sm_mhz"]),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", ["gpu_slowed_by"]),
    ],
)
def test_what_the_driver_refuses_is_null_and_said_once(
    function: str,
    nulls: list[str],
    nvml: Nvml,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*arguments: object) -> None:
        raise nvml.NVMLError("Insufficient Permissions")

    monkeypatch.setattr(nvml, function, refuse)
    state = watch_gpu(torch.device("cuda", 0))
    for _ in range(3):
        state.read()
    assert read_by(state) == READ | dict.fromkeys(nulls)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"NVML: {function}: Insufficient Permissions; what it does not read is null"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_nvml_or_a_gpu_there_is_nothing(
    device: str, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    state = watch_gpu(torch.device(device))
    state.read()
    assert read_by(state) == NOTHING


@pytest.mark.parametrize(
    ("folders", "versions"),
    [
        ((), []),
        (("flash_attn_4-4.0.0b9",), ["4.0.0b9"]),
        (("flash_attn-2.8.3", "flash_attn_3-3.0.0", "flash_attn_4-4.1"), ["2.8.3", "3.0.0", "4.1"]),
    ],
)
def test_every_version_of_flash_attn_is_recorded(
    folders: tuple[str, ...],
    versions: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder in folders:
        name, _, number = folder.partition("-")
        (tmp_path / f"{folder}.dist-info").mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n"
        (tmp_path / f"{folder}.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_attn_versions() == versions


@pytest.mark.parametrize(
    ("capabilities", "serves"), [([(9, 0)], True), ([(8, 0)] * 2, True), ([(9, 0), (7, 5)], False)]
)
def test_a_gpu_of_an_old_capability_is_refused(
    capabilities: list[tuple[int, int]], serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: len(capabilities),
        "get_device_capability": capabilities.__getitem__,
        "get_device_name": "GPU {}".format,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    machine = probe_machine(Launch())
    assert machine.has_cuda == serves
    assert choose_device("auto", machine) == ("cuda" if serves else "cpu")
    if not serves:
        reason = "GPU 1 has compute capability 7.5, 8.0 is needed for bfloat16; choose from auto, "
        with pytest.raises(ValueError, match=f"^--device cuda: {reason}cpu$"):
            choose_device("cuda", machine)


def test_a_gpu_without_room_for_a_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    message = "^--device cuda: CUDA error: out of memory; free the GPU, or choose cpu$"
    with pytest.raises(ValueError, match=message):
        free_device_memory("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    assert free_device_memory("cuda", 0) == 3 << 30
