"""The meaning of `auto` for dtypes, matrix products, elementwise operations, and native forwards.
Reading capabilities imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.config.capabilities import capabilities_of, requirements_of
from magicdec.config.choices.choice import Choice, How, asked_for, first_obstacle
from magicdec.config.machine import Machine
from magicdec.config.run_config import RunConfig
from magicdec.config.weight_formats import is_native
from magicdec.names import (
    ELEMENTWISE_BESIDE_PACKED,
    ELEMENTWISE_ON_CUDA,
    FP8,
    NARROW,
    PACKED,
    PORTABLE_ELEMENTWISE,
    STORED,
)

PACKED_DTYPES = ("bfloat16", "float32")


def choose_dtype(config: RunConfig, device: str, machine: Machine) -> str:
    """The dtype of activations and KV cache. `auto` is bfloat16 where it is fast: on CUDA, on CPUs
    with products of it, and where our kernels widen it."""
    model = config.model
    if model.dtype != "auto":
        return model.dtype
    if model.target_dtype not in ("auto", *NARROW):
        return model.target_dtype
    if device == "cuda" or machine.has_bfloat16_products:
        return "bfloat16"
    backend = config.attention.backend
    is_ours = backend == "auto" or capabilities_of(backend).is_part_of_native_steps
    is_widened = machine.widens_bfloat16 and is_ours and model.linear in ("auto", *PACKED)
    return "bfloat16" if is_widened else "float32"


def choose_weights(flag: str, value: str, dtype: str) -> str:
    """The dtype of matrices. Raises ValueError for a floating-point type other than `dtype`."""
    if value in ("auto", dtype):
        return dtype
    if value in NARROW:
        return value
    raise ValueError(
        f"{flag} {value}: weights that are not int8 or as they are stored have the --dtype of the "
        f"run, {dtype}; choose from auto, {dtype}, int8, {STORED}"
    )


def check_low_bit(low_bit: str | None, device: str, machine: Machine) -> None:
    """Raises ValueError for a draft's matrices that nothing multiplies well on this machine."""
    if device != "cuda" or low_bit in (None, "int8"):
        return
    obstacle = machine.missing_backends.get(ELEMENTWISE_ON_CUDA)
    other = "int8"
    if low_bit == FP8 and machine.fp8_obstacle is not None:
        obstacle = machine.fp8_obstacle
        other = "int4_g128"
    if obstacle:
        raise ValueError(f"--draft_weights {low_bit} --device cuda: {obstacle}; or choose {other}")


def check_copy(low_bit: str | None, weights: str, native_steps: str = "auto") -> None:
    """Raises ValueError for a self-draft copy of matrices that are in this format themselves, and
    for one that native steps, which somebody asked for, cannot compute."""
    if native_steps == "on" and not is_native(low_bit):
        raise ValueError(
            f"--native_steps on: not possible with --draft_weights {low_bit}; choose from auto, off"
        )
    if low_bit is not None and low_bit == weights:
        raise ValueError(
            f"--draft_weights {low_bit}: the model's own weights are {weights} already; leave it "
            "out"
        )


def choose_linear(
    value: str, device: str, dtype: str, machine: Machine, weights: Sequence[str] = ()
) -> str:
    """The kind of matrix products. Raises ValueError for one that is impossible. `auto` rounds the
    activations of numbers in groups, which is faster."""
    has_groups = any(weight in NARROW and is_native(weight) for weight in weights)
    obstacles = {
        "it is for --device cpu": device != "cpu",
        f"it is for --dtype bfloat16 and float32, not {dtype}": dtype not in PACKED_DTYPES,
        "it needs a C++ compiler (on Debian: apt install g++)": not machine.has_compiler,
    }
    obstacle = first_obstacle(obstacles)
    if value == "auto":
        return "torch" if obstacle else "packed_a8" if has_groups else "packed"
    if value == "packed_a8" and not has_groups:
        obstacle = obstacle or "it is for weights in groups: int8, or stored so"
    refused = obstacle if value in PACKED else None
    return str(asked_for("--linear", value, refused, "auto, torch"))


def choose_elementwise(
    value: str, device: str, dtype: str, linear: str, machine: Machine
) -> Choice:
    """The elementwise operations beside `linear` layers. Raises ValueError for a named one that
    cannot serve."""
    if value == "auto" and device == "cuda":
        missing = machine.missing_backends.get(ELEMENTWISE_ON_CUDA)
        if missing:
            why = f"auto: {PORTABLE_ELEMENTWISE}; {missing}"
            return Choice(PORTABLE_ELEMENTWISE, why, How.SECOND_BEST)
        return Choice(ELEMENTWISE_ON_CUDA, "auto: CUDA")
    if value == "auto":
        name = ELEMENTWISE_BESIDE_PACKED if linear in PACKED else PORTABLE_ELEMENTWISE
        return Choice(name, f"auto: --linear {linear}")
    requirements = requirements_of(value)
    obstacle = requirements.unmet(machine, device, dtype, subject="it")
    is_interpreted = requirements.is_interpreted_on_cpu and device == "cpu"
    others = f"auto, {PORTABLE_ELEMENTWISE}"
    return asked_for("--elementwise", value, obstacle, others, is_interpreted)


@dataclass(frozen=True)
class StepParts:
    """The implementations of a forward's parts. `avoids_native`: the environment asks for forwards
    layer by layer."""

    device: str
    backend: str
    linear: str
    elementwise: str
    collectives: str | None
    avoids_native: bool

    def obstacle(self) -> str | None:
        """The reason why they cannot be one native call, or None."""
        if self.device != "cpu":
            return f"--device {self.device}"
        is_native_attention = capabilities_of(self.backend).is_part_of_native_steps
        obstacles = {
            f"--attention {self.backend}": not is_native_attention,
            f"--linear {self.linear}": self.linear not in PACKED,
            f"--elementwise {self.elementwise}": self.elementwise != ELEMENTWISE_BESIDE_PACKED,
            f"--collectives {self.collectives}": self.collectives not in (None, "shared_memory"),
        }
        return first_obstacle(obstacles)


def choose_native_steps(value: str, parts: StepParts, layer_obstacle: str | None) -> Choice:
    """Whether native steps are on. Only `layer_obstacle`, a part of the layers that the library
    lacks, makes `auto` second best. Raises ValueError if the user asked for impossible ones."""
    part_obstacle = parts.obstacle()
    if value != "auto":
        obstacle = part_obstacle or layer_obstacle
        why = f"not possible with {obstacle}" if obstacle and value == "on" else None
        return asked_for("--native_steps", value, why, "auto, off")
    if part_obstacle:
        return Choice("off", f"auto: off, {part_obstacle}")
    if parts.avoids_native:
        return Choice("off", "auto: off, MAGICDEC_NATIVE_STEPS=off")
    if layer_obstacle:
        return Choice("off", f"auto: off, the model has {layer_obstacle}", How.SECOND_BEST)
    return Choice("on", "auto: on")
