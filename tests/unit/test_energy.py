"""Meters of energy: made-up zones of powercap, with their overflow, and a stand-in for NVML."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from magicdec.hardware.energy import find_meter

RANGE = 262_143_328_850  # of a server's package


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages, the first with its cores and its memory, and the whole board."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    zones = {
        "intel-rapl:0": "package-0",
        "intel-rapl:0:0": "core",
        "intel-rapl:0:1": "dram",
        "intel-rapl:1": "package-1",
        "intel-rapl:2": "psys",
        "intel-rapl-mmio:0": "package-0",
    }
    for folder, name in zones.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "name").write_text(f"{name}\n")
        (tmp_path / folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
        write(tmp_path, folder, 1_000_000)
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def write(powercap: Path, folder: str, energy_uj: int) -> None:
    (powercap / folder / "energy_uj").write_text(f"{energy_uj}\n")


def test_packages_and_their_memory_are_summed(powercap: Path) -> None:
    """Cores and the board have no energy that packages do not have."""
    meter = find_meter(powercap)
    names = "RAPL package-0, RAPL dram, RAPL package-1"
    assert str(meter) == f"{names} (nvidia-ml-py is not installed)"
    before = meter.read()
    write(powercap, "intel-rapl:0", 3_000_000)
    write(powercap, "intel-rapl:0:0", 2_000_000)
    write(powercap, "intel-rapl:0:1", 1_500_000)
    write(powercap, "intel-rapl:1", 1_250_000)
    write(powercap, "intel-rapl:2", 9_000_000)
    assert meter.joules(before, meter.read()) == pytest.approx(2.0 + 0.5 + 0.25)


def test_a_counter_that_starts_again(powercap: Path) -> None:
    write(powercap, "intel-rapl:1", RANGE - 500_000)
    meter = find_meter(powercap)
    before = meter.read()
    write(powercap, "intel-rapl:1", 700_000)
    assert meter.joules(before, meter.read()) == pytest.approx(1.2)


def test_files_that_cannot_be_read_are_no_meter(powercap: Path, tmp_path: Path) -> None:
    for folder in ("intel-rapl:0", "intel-rapl:0:1", "intel-rapl:1"):
        (powercap / folder / "energy_uj").unlink()
        (powercap / folder / "energy_uj").mkdir()  # as one without permission, also for root
    meter = find_meter(powercap)
    assert meter.read() is None and meter.joules(None, None) is None
    assert str(meter).startswith(f"no meter ({powercap}/intel-rapl:0: Is a directory; ")
    nothing = find_meter(tmp_path / "nowhere")
    assert str(nothing) == (
        f"no meter ({tmp_path}/nowhere has no package of RAPL; nvidia-ml-py is not installed)"
    )


def test_a_meter_that_fails_later_says_nothing(powercap: Path) -> None:
    meter = find_meter(powercap)
    before = meter.read()
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.joules(before, meter.read()) is None


class EnergyNvml(ModuleType):
    """A fake NVML with GPUs of which the last has no counter of energy."""

    class NVMLError(Exception):
        """What a driver's refusal raises."""

    def __init__(self, num_gpus: int, num_metered: int) -> None:
        super().__init__("pynvml")
        self.__spec__ = ModuleSpec("pynvml", None)
        self.num_gpus = num_gpus
        self.num_metered = num_metered
        self.energy_mj = 5_000

    def nvmlInit(self) -> None:
        self.ready = True

    def nvmlDeviceGetCount(self) -> int:
        assert self.ready
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle >= self.num_metered:
            raise self.NVMLError("Not Supported")
        return self.energy_mj * (1 + handle)


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = EnergyNvml(2, 2)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = find_meter(tmp_path)
    assert str(meter) == f"NVML GPU 0, NVML GPU 1 ({tmp_path} has no package of RAPL)"
    before = meter.read()
    nvml.energy_mj = 6_000
    assert meter.joules(before, meter.read()) == pytest.approx(3.0)
    monkeypatch.setitem(sys.modules, "pynvml", EnergyNvml(1, 0))
    assert str(find_meter(tmp_path)).endswith("; NVML: Not Supported)")
