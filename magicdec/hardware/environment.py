"""The machine and the software for records, without host names; the facts behind `auto`; a rank's
device; and the GPU's clocks, from NVML (`nvidia-ml-py`) between measured passes."""

from __future__ import annotations

import datetime
import gc
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from magicdec.config.capabilities import capabilities_of, list_backends
from magicdec.config.machine import Machine
from magicdec.config.masking import masked_words
from magicdec.distributed.groups import Launch
from magicdec.kernels.build import (
    check_cpu,
    compiler_version,
    find_compiler,
    is_compiled_for,
    loaded_kernels,
    refused_compilers,
    used_instructions,
)
from magicdec.kernels.cpu import cpu_features, cpu_field
from magicdec.records.environment import Environment

GIT_TIMEOUT_S = 10.0
SHARED_MEMORY = Path("/dev/shm")
# Measured with the demo model on a CPU with AVX-512 (docs/log/kernels.md, 2026-11-24).
NO_KERNELS = (
    "no C++ compiler compiles the CPU kernels, without which decoding took 7 to 8 times as long on "
    "one CPU with AVX-512"
)
LEAST_CAPABILITY = (8, 0)  # of GPUs that multiply bfloat16, for which our kernels are compiled
FP8_CAPABILITY = (8, 9)  # of GPUs that multiply FP8


def probe_machine(launch: Launch) -> Machine:
    """The facts that decide what `auto` means on this machine. Raises ValueError if MAGICDEC_MARCH
    names a CPU whose code this one cannot execute."""
    check_cpu()
    flags = cpu_features()
    if (refusal := refused_compilers()) and launch.rank == 0:
        print(f"{NO_KERNELS}: {refusal}", file=sys.stderr)
    obstacle = gpu_obstacle(LEAST_CAPABILITY, "bfloat16")
    has_compiler = find_compiler() is not None
    has_cuda = torch.cuda.is_available() and obstacle is None
    has_wide_vectors = platform.machine() == "aarch64"
    has_wide_vectors |= "avx2" in flags and is_compiled_for("__AVX2__")
    return Machine(
        num_cpus=len(os.sched_getaffinity(0)),
        world_size=launch.world_size,
        local_world_size=launch.local_world_size,
        first_rank=launch.local_ranks[0],
        has_cuda=has_cuda,
        gpu_obstacle=obstacle,
        num_gpus=torch.cuda.device_count(),
        fp8_obstacle=gpu_obstacle(FP8_CAPABILITY, "FP8"),
        avoids_native_steps=os.environ.get("MAGICDEC_NATIVE_STEPS") == "off",
        has_compiler=has_compiler,
        shared_memory_obstacle=shared_memory_obstacle(SHARED_MEMORY),
        shared_memory_bytes=free_bytes(SHARED_MEMORY),
        has_bfloat16_products=any(f in flags for f in ("avx512_bf16", "amx_bf16"))
        and is_compiled_for("__AVX512BF16__"),
        widens_bfloat16=has_compiler and has_wide_vectors,
        missing_backends=missing_backends(list_backends(lambda c: has_cuda or "cpu" in c.devices)),
    )


def shared_memory_obstacle(folder: Path) -> str | None:
    """The reason why no file can be made in `folder`, the host's shared memory, or None."""
    if not folder.is_dir():
        return f"no {folder}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror}"


def free_bytes(folder: Path) -> int | None:
    """The bytes that files in `folder` may still take; None without a known limit."""
    try:
        space = os.statvfs(folder)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize if space.f_blocks else None


def gpu_obstacle(least: tuple[int, int], dtype: str) -> str | None:
    """Why a GPU, of capability below `least`, does not multiply `dtype`; None if all do."""
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < least:
            found, needed = (".".join(map(str, pair)) for pair in (capability, least))
            name = torch.cuda.get_device_name(index)
            return f"{name} has compute capability {found}, {needed} is needed for {dtype}"
    return None


def missing_backends(names: Sequence[str]) -> dict[str, str]:
    """The missing parts, by name, of attention backends that cannot run. Imports no library of
    theirs."""
    obstacles = {name: capabilities_of(name).missing_parts() for name in names}
    return {name: obstacle for name, obstacle in obstacles.items() if obstacle}


def describe_environment(launch: Launch, device: str, started: datetime.datetime) -> Environment:
    return Environment(
        time_utc=started.isoformat(timespec="seconds"),
        argv=[Path(sys.argv[0]).name, *masked_words(sys.argv[1:])],
        magicdec=version("magicdec"),
        revision=find_revision(),
        python=platform.python_version(),
        torch=torch.__version__,
        system=f"{platform.system()} {platform.machine()}",
        cpu=cpu_field("model name"),
        num_cpus=os.cpu_count(),
        host_load=os.getloadavg()[0],
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        compiler=compiler_version(),
        instructions=used_instructions(),
        kernels=loaded_kernels(),
        gpu=torch.cuda.get_device_name() if device == "cuda" else None,
        flash_attn=flash_attn_versions() if device == "cuda" else None,
        world_size=launch.world_size,
        threads=torch.get_num_threads(),
    )


def flash_attn_versions() -> list[str]:
    """The installed versions of flash-attn, whose major versions are separate packages."""
    versions = []
    for name in ("flash-attn", "flash-attn-3", "flash-attn-4"):
        try:
            versions.append(version(name))
        except PackageNotFoundError:
            continue
    return versions


def find_revision() -> str | None:
    """The git commit of this package's own checkout, or None."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12")
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


def device_of(kind: str, local_rank: int) -> torch.device:
    """A rank's device, `kind` cpu or cuda. Ranks share fewer GPUs in turn."""
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, local_rank % max(1, torch.cuda.device_count()))


def use_device(device: torch.device) -> None:
    """Make `device` the current device of this thread, since threads have their own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def release_memory(device: torch.device) -> None:
    """Free models in reference cycles, and the unused memory of a GPU for other ranks."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    """Readings of one device, empty without NVML or GPU. A refusal gives null, and one line on
    stderr."""

    nvml: Any = None
    handle: Any = None
    sm_mhz: list[int] = field(default_factory=list)
    reasons: list[int] = field(default_factory=list)
    refusal: str | None = None  # the first one

    def call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.nvml, name)(*arguments)
        except self.nvml.NVMLError as error:
            if self.refusal is None:
                self.refusal = f"NVML: {name}: {error}"
                print(f"{self.refusal}; what it does not read is null", file=sys.stderr, flush=True)
            return None

    def read(self) -> None:
        if self.handle is None:
            return
        mhz = self.call("nvmlDeviceGetClockInfo", self.handle, self.nvml.NVML_CLOCK_SM)
        reasons = self.call("nvmlDeviceGetCurrentClocksThrottleReasons", self.handle)
        self.sm_mhz += [] if mhz is None else [mhz]
        self.reasons += [] if reasons is None else [reasons]

    def add_to(self, environment: Environment) -> Environment:
        clocks = None
        most = None
        slowed = None
        if self.sm_mhz:
            clocks = [min(self.sm_mhz), max(self.sm_mhz)]
            sm = self.nvml.NVML_CLOCK_SM
            most = self.call("nvmlDeviceGetMaxClockInfo", self.handle, sm)
        if self.reasons:
            slowed = [s for bit, s in SLOWDOWNS.items() if any(r & bit for r in self.reasons)]
        return replace(environment, gpu_sm_mhz=clocks, gpu_most_sm_mhz=most, gpu_slowed_by=slowed)


def watch_gpu(device: torch.device) -> GpuState:
    """A GpuState for `device`, found by its UUID: NVML's indices include GPUs hidden from CUDA."""
    if device.type != "cuda" or find_spec("pynvml") is None:
        return GpuState()
    import pynvml

    state = GpuState(pynvml)
    state.call("nvmlInit")
    if state.refusal is None:
        uuid = torch.cuda.get_device_properties(device).uuid
        state.handle = state.call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    return state
