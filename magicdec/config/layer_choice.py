"""What `auto` means for a model's layers: the dtypes, how matrices are multiplied, and what
computes norms, rotation and gates. Imports no torch itself.

Must not know how a machine is probed nor how a choice is implemented.
"""

from __future__ import annotations

from magicdec.config.capabilities import requirements_of
from magicdec.config.choice import Choice, How, asked_for
from magicdec.config.machine import Machine
from magicdec.names import (
    ELEMENTWISE_BESIDE_PACKED,
    ELEMENTWISE_ON_CUDA,
    PORTABLE_ELEMENTWISE,
)


def choose_dtype(asked: str, weights: str, is_fast_bfloat16: bool) -> str:
    """The dtype of activations and KV cache. `weights` is what the user wrote for the dtype of the
    target's weights."""
    if asked != "auto":
        return asked
    if weights not in ("auto", "int8"):
        return weights
    return "bfloat16" if is_fast_bfloat16 else "float32"


def choose_weights(flag: str, asked: str, dtype: str) -> str:
    """The dtype of a model's matrices in a run of `dtype`. Raises ValueError if the user asked for
    another floating-point type."""
    if asked in ("auto", dtype):
        return dtype
    if asked == "int8":
        return asked
    raise ValueError(
        f"{flag} {asked}: weights that are not int8 have the --dtype of the run, {dtype}; "
        f"choose from auto, {dtype}, int8"
    )


def choose_linear(asked: str, device: str, dtype: str, machine: Machine) -> str:
    """How linear layers multiply. Raises ValueError if the user asked for `packed` and this run
    cannot use it."""
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
) -> Choice:
    """What computes the elementwise operations, in a model with linear layers of that kind. Raises
    ValueError if the user named one that cannot serve."""
    if asked == "auto" and device == "cuda":
        missing = machine.missing_backends.get(ELEMENTWISE_ON_CUDA)
        if missing:
            why = f"auto: {PORTABLE_ELEMENTWISE}; {missing}"
            return Choice(PORTABLE_ELEMENTWISE, why, How.SECOND_BEST)
        return Choice(ELEMENTWISE_ON_CUDA, "auto: CUDA")
    if asked == "auto":
        name = ELEMENTWISE_BESIDE_PACKED if linear == "packed" else PORTABLE_ELEMENTWISE
        return Choice(name, f"auto: --linear {linear}")
    requirements = requirements_of(asked)
    obstacle = requirements.unmet(machine, device, dtype, subject="it")
    if obstacle:
        raise ValueError(
            f"--elementwise {asked}: {obstacle}; choose from auto, {PORTABLE_ELEMENTWISE}"
        )
    return asked_for(asked, requirements.is_interpreted_on_cpu and device == "cpu")
