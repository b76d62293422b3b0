"""Helpers of the benchmark scripts: interleaved timing, and the ceilings of this machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from magicdec.distributed.groups import Group, read_launch
from magicdec.hardware.environment import probe_machine
from magicdec.hardware.timing import read_bandwidth
from magicdec.predict.probe import gemm_rates
from magicdec.records.computing import percentile
from peers import timed_dtypes


def dtypes_here() -> dict[str, str]:
    """The dtype in which each peer is timed on this machine."""
    machine = probe_machine(read_launch())
    return timed_dtypes(machine.has_bfloat16_products, machine.widens_bfloat16)


@dataclass(frozen=True)
class CallTiming:
    """Milliseconds of a call: median, 10th and 90th percentile."""

    ms: float
    ms_p10: float
    ms_p90: float

    def as_json(self) -> dict[str, float]:
        return {"ms": self.ms, "ms_p10": self.ms_p10, "ms_p90": self.ms_p90}


def interleaved(
    ways: dict[str, Callable[[], Any]], seconds: float, at_least: int = 5
) -> dict[str, CallTiming]:
    """Time `ways` in turn, round after round, for about `seconds` in total, so that other load on
    the machine affects all of them equally. An untimed round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        call()
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds or len(samples[next(iter(ways))]) < at_least:
        for name, call in ways.items():
            started = time.perf_counter()
            call()
            samples[name].append(time.perf_counter() - started)
    return {name: timing_of(values) for name, values in samples.items()}


def timing_of(seconds: list[float]) -> CallTiming:
    """The CallTiming of at least two samples."""
    values = [1e3 * value for value in seconds]
    p10, median, p90 = (percentile(values, percent) for percent in (10, 50, 90))
    assert p10 is not None and median is not None and p90 is not None, "there are samples"
    return CallTiming(median, p10, p90)


def describe_machine() -> dict[str, Any]:
    """CPU, threads, torch version, and the measured ceilings for bandwidth and GEMMs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    cpu = torch.device("cpu")
    return {
        "cpu": model or platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "read_bytes_per_s": read_bandwidth(Group((0,), 0), cpu),
        "float32_flops": max(gemm_rates(torch.float32, cpu)),
        "bfloat16_flops": max(gemm_rates(torch.bfloat16, cpu)),
    }
