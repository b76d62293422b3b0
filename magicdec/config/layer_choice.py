"""What `auto` means for a model's layers: how they multiply, and what computes what lies between.
Imports no torch.

Must not know how a machine is probed nor how a choice is implemented.
"""

from __future__ import annotations

from magicdec.config.machine import INTERPRETED, Machine


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


def choose_elementwise(
    asked: str, device: str, dtype: str, linear: str, machine: Machine
) -> tuple[str, str]:
    """(name, why) of what computes norms, rotation and gates beside linear layers of that kind.
    Raises ValueError if one was asked for that cannot be."""
    missing = machine.missing_backends.get("triton")
    if asked == "auto" and device == "cuda":
        return ("torch", f"auto: torch; {missing}") if missing else ("triton", "auto: CUDA")
    if asked == "auto":
        name = "native" if linear == "packed" else "torch"
        return name, f"auto: --linear {linear}"
    obstacles = {
        "native": {
            "it is for --device cpu": device != "cpu",
            f"it is for --dtype bfloat16, not {dtype}": dtype != "bfloat16",
            "it needs a C++ compiler (on Debian: apt install g++)": not machine.has_compiler,
        },
        "triton": {str(missing): missing is not None},
    }
    found = obstacles.get(asked, {}).items()
    obstacle = next((reason for reason, applies in found if applies), None)
    if obstacle:
        raise ValueError(f"--elementwise {asked}: {obstacle}; choose from auto, torch")
    if (asked, device) == ("triton", "cpu"):
        return asked, INTERPRETED
    return asked, "asked for"
