"""What `auto` means: which backend and which collectives suit a machine, and why. Imports nothing
of ours and no torch.

Must not know how a machine is probed (`hardware.environment`) nor how a choice is implemented.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

INTERPRETED = "asked for; interpreted on a CPU, for checks and not for times"
TO_BE_MEASURED = "auto: to be measured"  # on CUDA: `autotune.fastest_backend` decides in the run
CUDA_ONLY = ("varlen", "flash_attn", "flashinfer")
WITHOUT_MASS = CUDA_ONLY  # backends that do not tell where the attention goes
WITHOUT_WINDOW = CUDA_ONLY  # backends that do not keep to a model's sliding window
WITHOUT_GRAPHS = ("grouped", "native", "flashinfer")  # backends that need lengths on the host
GPU_COLLECTIVES = ("nccl", "symmetric_memory")
HEAD_SIZES: dict[str, tuple[str, Sequence[int]]] = {
    "native": ("a multiple of 16", range(16, 1024, 16)),
    "triton": ("at most 256", range(1, 257)),
    "varlen": ("a multiple of 8, at most 256", range(8, 257, 8)),
    "flash_attn": ("a multiple of 8, at most 256", range(8, 257, 8)),
    "flashinfer": ("64, 128 or 256", (64, 128, 256)),
}


@dataclass(frozen=True)
class Machine:
    """What `resolve` needs to know of where it runs. `world_size` and `local_world_size` are
    torchrun's; `missing_backends` says what attention backends lack, by name, and
    `missing_symmetric_memory` what the collectives of that name do. `wants_symmetric_memory`: the
    environment has ENABLE_INTRA_NODE_COMM=1."""

    num_cpus: int
    world_size: int = 1
    local_world_size: int = 1
    has_cuda: bool = False
    has_fast_bfloat16: bool = False
    has_avx512_bf16: bool = False
    has_compiler: bool = False
    has_shared_memory: bool = False
    num_gpus: int = 0
    missing_symmetric_memory: str | None = "no CUDA"
    wants_symmetric_memory: bool = False
    missing_backends: Mapping[str, str] = field(default_factory=dict)


def choose_backend(
    asked: str, device: str, machine: Machine, head_dim: int, dtype: str = "float32"
) -> tuple[str, str]:
    """(name, why) of the attention backend to use. Raises ValueError if one was asked for that
    cannot be. On CUDA `auto` is `grouped` for the moment, to be replaced by what a measurement
    finds."""
    if asked == "auto" and device == "cuda":
        return "grouped", TO_BE_MEASURED
    name = "native" if asked == "auto" else asked
    obstacle = backend_obstacle(name, device, machine, head_dim, dtype)
    if asked == "auto":
        return ("grouped", f"auto: grouped; {obstacle}") if obstacle else ("native", "auto: native")
    if obstacle:
        raise ValueError(f"--attention {asked}: {obstacle}; choose from auto, sdpa, grouped")
    if (asked, device) == ("triton", "cpu"):
        return asked, INTERPRETED
    return asked, "asked for"


def choose_dtype(asked: str, weights: str, is_fast_bfloat16: bool) -> str:
    """Of activations and KV cache, where the target's weights were asked for as `weights`."""
    if asked != "auto":
        return asked
    if weights not in ("auto", "int8"):
        return weights
    return "bfloat16" if is_fast_bfloat16 else "float32"


def choose_weights(flag: str, asked: str, dtype: str) -> str:
    """Of a model's matrices in a run of `dtype`. Raises ValueError for a floating-point type that
    is another."""
    if asked in ("auto", dtype):
        return dtype
    if asked == "int8":
        return asked
    raise ValueError(
        f"{flag} {asked}: weights that are not int8 have the --dtype of the run, {dtype}; "
        f"choose from auto, {dtype}, int8"
    )


def choose_draft_kv(
    asked: str, dtype: str, backend: str | None, machine: Machine, head_dim: int
) -> str:
    """Of a draft's own KV cache in a run of `dtype`, where the draft attends by `backend`. Raises
    ValueError for int8 that cannot be read."""
    if asked != "int8":
        return dtype
    is_native = backend == "native"
    obstacles = {
        f"head size {head_dim} is not a multiple of 16; choose auto": head_dim % 16 != 0,
        f"--attention {backend} reads none; choose auto, or --attention sdpa": backend
            not in (None, "native", "sdpa"),
        f"--attention native reads it in --dtype bfloat16, not {dtype}; choose auto, or "
        "--attention sdpa": is_native and dtype != "bfloat16",
        "--attention native reads it on CPUs with AVX512-BF16; choose auto, or --attention sdpa":
            is_native and not machine.has_avx512_bf16,
    }  # fmt: skip
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if obstacle:
        raise ValueError(f"--draft_kv_dtype int8: {obstacle}")
    return asked


def settled(backend: str | None, reason: str | None) -> str | None:
    """The backend, or None where a measurement will name it."""
    return None if reason == TO_BE_MEASURED else backend


def backend_obstacle(
    name: str, device: str, machine: Machine, head_dim: int, dtype: str
) -> str | None:
    """Why a backend cannot serve a model of these heads here; None where it can."""
    fitting, sizes = HEAD_SIZES.get(name, ("", (head_dim,)))
    is_native, is_library = name == "native", name in CUDA_ONLY
    obstacles = {
        "native is for --device cpu": is_native and device != "cpu",
        "native needs a C++ compiler (on Debian: apt install g++)": (
            is_native and not machine.has_compiler
        ),
        f"{name} is for --device cuda": is_library and device != "cuda",
        machine.missing_backends.get(name, ""): name in machine.missing_backends,
        f"{name} is for --dtype bfloat16, not {dtype}": is_library and dtype != "bfloat16",
        f"head size {head_dim} is not {fitting}": head_dim not in sizes,
    }
    return next((reason for reason, applies in obstacles.items() if applies), None)


def check_tells_mass(backend: str, policy: str) -> None:
    """The `verified` policy asks the target's attention where it went."""
    if policy == "verified" and backend in WITHOUT_MASS:
        raise ValueError(
            f"--attention {backend} does not tell where the attention goes, which --kv_policy "
            "verified needs; choose from auto, sdpa, grouped, native, triton"
        )


def choose_graphs(asked: str, device: str, backends: Sequence[str | None]) -> tuple[str, str]:
    """(on or off, why) of CUDA graphs. `backends` are the target's and a draft's, None where a
    measurement will name it. Raises ValueError if they were asked for and cannot be."""
    unfit = next((name for name in backends if name in WITHOUT_GRAPHS), None)
    obstacles = {
        f"--device {device} has none": device != "cuda",
        f"--attention {unfit} needs lengths on the host": unfit is not None,
    }
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if asked == "on" and obstacle:
        raise ValueError(f"--cuda_graphs on: {obstacle}; choose from auto, off")
    if asked == "auto":
        return ("off", f"auto: off, {obstacle}") if obstacle else ("on", "auto: on")
    return asked, "asked for"


def choose_collectives(
    asked: str | None, device: str, machine: Machine
) -> tuple[str | None, str | None]:
    """(name, why) of the collectives to use; (None, None) for one rank. Raises ValueError for what
    the device, the hosts or the machine cannot do."""
    if machine.world_size == 1:
        return None, None
    if device == "cuda":
        return choose_gpu_collectives(asked, machine)
    obstacles = {
        "several hosts": machine.local_world_size != machine.world_size,
        "no C++ compiler": not machine.has_compiler,
        "no /dev/shm": not machine.has_shared_memory,
    }
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if asked == "auto":
        return ("gloo", f"auto: {obstacle}") if obstacle else ("shared_memory", "auto: one host")
    if asked in GPU_COLLECTIVES:
        raise ValueError(
            f"--collectives {asked} cannot serve --device {device}; choose from gloo, shared_memory"
        )
    if asked == "shared_memory" and obstacle:
        raise ValueError(f"--collectives shared_memory: {obstacle} here; choose from auto, gloo")
    return asked, "asked for"


def choose_gpu_collectives(asked: str | None, machine: Machine) -> tuple[str, str]:
    """As `choose_collectives`, between several ranks with a GPU each: `auto` is symmetric memory
    where ENABLE_INTRA_NODE_COMM=1 asks for it and it is there, else NCCL. Raises ValueError."""
    ranks, gpus = machine.local_world_size, machine.num_gpus
    if asked not in ("auto", *GPU_COLLECTIVES):
        fitting = ", ".join(GPU_COLLECTIVES)
        raise ValueError(f"--collectives {asked} cannot serve --device cuda; choose from {fitting}")
    if ranks > gpus:
        raise ValueError(
            f"--collectives {asked} --device cuda: NCCL wants a GPU for each of the {ranks} ranks "
            f"of a host, and this one has {gpus}; start at most {gpus}, or choose --device cpu "
            "--collectives gloo"
        )
    obstacle = machine.missing_symmetric_memory
    if machine.local_world_size != machine.world_size:
        obstacle = "several hosts"
    if asked == "symmetric_memory" and obstacle:
        raise ValueError(f"--collectives symmetric_memory: {obstacle}; choose from auto, nccl")
    if asked == "auto" and machine.wants_symmetric_memory:
        if obstacle:
            return "nccl", f"auto: ENABLE_INTRA_NODE_COMM=1, but {obstacle}"
        return "symmetric_memory", "auto: ENABLE_INTRA_NODE_COMM=1"
    return ("nccl", "auto: CUDA") if asked == "auto" else (str(asked), "asked for")
