"""ModelSection: the model of a run, and how it is stored and computed. Imports no torch.

Owns these fields and their flags. Must not know how any of their values is implemented.
"""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.options import option
from magicdec.names import (
    DTYPES,
    ELEMENTWISE,
    ELEMENTWISE_BESIDE_PACKED,
    ELEMENTWISE_ON_CUDA,
    LINEARS,
    PORTABLE_ELEMENTWISE,
    WEIGHT_DTYPES,
)


@dataclass(frozen=True)
class ModelSection:
    model: str = option(
        "demo",
        "The model: demo, demo-draft, random:<preset>, a Hugging Face directory, a model's name on "
        "the Hugging Face hub, or a .safetensors/.pth/.bin file beside its config.json.",
        "--model",
    )
    dtype: str = option(
        "auto",
        "The dtype of activations, KV cache and weights. auto is bfloat16 where the hardware "
        "computes in it, else float32.",
        "--dtype", choices=("auto", *DTYPES),
    )  # fmt: skip
    linear: str = option(
        "auto",
        "How linear layers multiply. packed lays weights out once for the products of a few rows "
        "on a CPU.",
        "--linear",
        choices=("auto", *LINEARS),
    )
    elementwise: str = option(
        "auto",
        "What computes norms, rotation and gates between linear layers. auto takes "
        f"{ELEMENTWISE_BESIDE_PACKED} (C++) beside packed layers, {ELEMENTWISE_ON_CUDA} on CUDA "
        f"where it is installed, else {PORTABLE_ELEMENTWISE}.",
        "--elementwise",
        choices=("auto", *ELEMENTWISE),
    )
    native_steps: str = option(
        "auto",
        "Compute each forward of a few tokens, and each chain of greedy drafts, in one call of a "
        "C++ library. auto does so on a CPU where attention, linear layers and elementwise "
        "operations are all native. MAGICDEC_NATIVE_STEPS=off in the environment turns auto off.",
        "--native_steps",
        choices=("auto", "on", "off"),
    )
    target_dtype: str = option(
        "auto",
        "The dtype of the target's matrices. int8 has a scale for each output, while activations "
        "and KV stay in --dtype. auto is int8 if they are stored so, else --dtype.",
        "--target_dtype",
        choices=("auto", *WEIGHT_DTYPES),
    )


@dataclass(frozen=True)
class TargetSection(ModelSection):
    """Where `--model` names the draft, as in the original suite."""

    model: str = option(
        "demo", "The target, which verifies. Named as --model names a draft.", "--target"
    )
