"""What `auto` means: which backend and which collectives suit a machine, and why. Imports nothing
of ours and no torch.

Must not know how a machine is probed (`bench.environment`) nor how a choice is implemented.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """What `resolve` needs to know of where it runs. `world_size` and `local_world_size` are
    torchrun's."""

    num_cpus: int
    world_size: int = 1
    local_world_size: int = 1
    has_cuda: bool = False
    has_fast_bfloat16: bool = False
    has_avx512_bf16: bool = False
    has_compiler: bool = False
    has_shared_memory: bool = False


def choose_backend(asked: str, device: str, machine: Machine, head_dim: int) -> tuple[str, str]:
    """(name, why) of the attention backend to use. Raises ValueError if `native` was asked for and
    cannot be."""
    obstacles = {
        "native is for --device cpu": device != "cpu",
        "native needs a C++ compiler (on Debian: apt install g++)": not machine.has_compiler,
        f"head size {head_dim} is not a multiple of 16": head_dim % 16 != 0,
    }
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if asked == "auto":
        return ("grouped", f"auto: grouped; {obstacle}") if obstacle else ("native", "auto: native")
    if asked == "native" and obstacle:
        raise ValueError(f"--attention native: {obstacle}; choose from auto, sdpa, grouped")
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
        "--attention grouped reads none; choose auto, or --attention sdpa": backend == "grouped",
        f"--attention native reads it in --dtype bfloat16, not {dtype}; choose auto, or "
        "--attention sdpa": is_native and dtype != "bfloat16",
        "--attention native reads it on CPUs with AVX512-BF16; choose auto, or --attention sdpa":
            is_native and not machine.has_avx512_bf16,
    }  # fmt: skip
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if obstacle:
        raise ValueError(f"--draft_kv_dtype int8: {obstacle}")
    return asked


def choose_linear(asked: str, device: str, dtype: str, machine: Machine) -> str:
    """How linear layers are computed. Raises ValueError if `packed` was asked for and cannot be."""
    obstacles = {
        "it is for --device cpu": device != "cpu",
        f"it is for --dtype bfloat16, not {dtype}": dtype != "bfloat16",
        "this CPU has no AVX512-BF16": not machine.has_avx512_bf16,
        "it needs a C++ compiler (on Debian: apt install g++)": not machine.has_compiler,
    }
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if asked == "packed" and obstacle:
        raise ValueError(f"--linear packed: {obstacle}; choose from auto, torch")
    if asked == "auto":
        return "torch" if obstacle else "packed"
    return asked


def choose_collectives(
    asked: str | None, device: str, machine: Machine
) -> tuple[str | None, str | None]:
    """(name, why) of the collectives to use; (None, None) for one rank. Raises ValueError for what
    the device, the hosts or the machine cannot do."""
    if machine.world_size == 1:
        return None, None
    obstacles = {
        "several hosts": machine.local_world_size != machine.world_size,
        "no C++ compiler": not machine.has_compiler,
        "no /dev/shm": not machine.has_shared_memory,
    }
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if asked == "auto":
        if device == "cuda":
            return "nccl", "auto: CUDA"
        return ("gloo", f"auto: {obstacle}") if obstacle else ("shared_memory", "auto: one host")
    if (asked == "nccl") != (device == "cuda"):
        fitting = "nccl" if device == "cuda" else "gloo, shared_memory"
        raise ValueError(
            f"--collectives {asked} cannot serve --device {device}; choose from {fitting}"
        )
    if asked == "shared_memory" and obstacle:
        raise ValueError(f"--collectives shared_memory: {obstacle} here; choose from auto, gloo")
    return asked, "asked for"
