"""The energy that this machine uses, by its own meters: RAPL of CPU packages and their memory,
which Linux shows as powercap zones (also of AMD), and NVML (`nvidia-ml-py`) of GPUs. Imports no
torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
PACKAGES = "intel-rapl:[0-9]*"  # and the zones inside them, such as intel-rapl:0:1
# A package has the cores and all that is on the chip in it, and the memory of servers not. `psys`
# is the whole board, packages included.
COUNTED = ("package", "dram")
MICRO = 1e-6
MILLI = 1e-3


@dataclass(frozen=True)
class EnergyCounter:
    """A counter that grows with energy: one count is `unit_j` joules. It starts from 0 again after
    `most` counts; 0 if it does not. `read` raises OSError or ValueError if it cannot be read."""

    name: str
    read: Callable[[], int]
    unit_j: float
    most: int = 0

    def joules(self, before: int, after: int) -> float:
        """The energy between two readings, between which it started again once at most."""
        return self.unit_j * (after - before + (self.most if after < before else 0))


@dataclass
class EnergyMeter:
    """All counters of a machine that can be read, and why others cannot."""

    counters: list[EnergyCounter] = field(default_factory=list)
    obstacles: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = ", ".join(counter.name for counter in self.counters) or "no meter"
        return f"{names} ({'; '.join(self.obstacles)})" if self.obstacles else names

    def read(self) -> list[int] | None:
        """The counters now; None if there is none, or if one of them cannot be read any more."""
        try:
            return [counter.read() for counter in self.counters] or None
        except (OSError, ValueError):
            return None

    def joules(self, before: list[int] | None, after: list[int] | None) -> float | None:
        """The energy between two readings; None without them."""
        if before is None or after is None:
            return None
        triples = zip(self.counters, before, after, strict=True)
        return sum(counter.joules(first, last) for counter, first, last in triples)


def find_meter(folder: Path = POWERCAP) -> EnergyMeter:
    """The meters of this machine."""
    meter = EnergyMeter()
    _add_rapl(meter, folder)
    _add_nvml(meter)
    return meter


def _add_rapl(meter: EnergyMeter, folder: Path) -> None:
    num_zones = 0
    for zone in sorted(folder.glob(PACKAGES)):
        try:
            name = (zone / "name").read_text().strip()
            if not name.startswith(COUNTED):
                continue
            num_zones += 1
            read = partial(_number_in, zone / "energy_uj")
            read()
            most = _number_in(zone / "max_energy_range_uj")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            meter.obstacles.append(f"{zone}: {reason}")
            continue
        meter.counters.append(EnergyCounter(f"RAPL {name}", read, MICRO, most))
    if not num_zones and not meter.obstacles:
        meter.obstacles.append(f"{folder} has no package of RAPL")


def _number_in(path: Path) -> int:
    return int(path.read_text())


def _add_nvml(meter: EnergyMeter) -> None:
    if find_spec("pynvml") is None:
        meter.obstacles.append("nvidia-ml-py is not installed")
        return
    import pynvml

    def read(handle: object) -> int:
        try:
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except pynvml.NVMLError as error:
            raise OSError(0, str(error)) from None

    try:
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            read_gpu = partial(read, pynvml.nvmlDeviceGetHandleByIndex(index))
            read_gpu()
            meter.counters.append(EnergyCounter(f"NVML GPU {index}", read_gpu, MILLI))
    except (pynvml.NVMLError, OSError) as error:
        meter.obstacles.append(f"NVML: {error.strerror if isinstance(error, OSError) else error}")
