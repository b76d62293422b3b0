"""Int8 and int4 weights times a few rows in Triton: a launch reads stored weights once. Interpreted
on a CPU, for tests. Grid and tiles follow from shapes, so that a CUDA graph can capture a call
after a warm-up.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from magicdec.kernels.build import load_kernels, next_power

STORAGE = (torch.float32, torch.bfloat16)
FEW_ROWS = 64  # with more, the weights are converted once and multiplied by torch
ROWS = 16  # of a tile: the least that tensor cores multiply
INPUTS = {torch.bfloat16: 256, torch.float32: 64}  # of a step, by the dtype of x


@cache
def is_installed() -> bool:
    return find_spec("triton") is not None


@cache
def kernels(device: str) -> ModuleType:
    return load_kernels("magicdec.model.linear.triton_kernels", "--draft_weights", device)


def serves(device: str, num_rows: int, dtype: torch.dtype) -> bool:
    """Whether `multiply` is meant for `num_rows` rows. Without Triton, torch multiplies."""
    return device == "cuda" and num_rows <= FEW_ROWS and dtype in STORAGE and is_installed()


def choose_outputs(num_outputs: int) -> int:
    """Outputs of a tile: fewer of few, so that more processors have a tile."""
    return 16 if num_outputs <= 4096 else 32 if num_outputs <= 16384 else 64


def multiply(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """x [..., K] -> [..., N] in x's dtype, without bias, with `weight` and `scale` of an
    `Int8Linear` or, with two dimensions of `scale`, `Int4Linear`."""
    assert x.dtype in STORAGE and weight.is_contiguous() and scale.is_contiguous()
    x, num_outputs, width = x.contiguous(), len(weight), x.shape[-1]
    group = width // scale.shape[1] if scale.dim() == 2 else 0
    out = x.new_empty(*x.shape[:-1], num_outputs)
    num_rows = x.numel() // width
    block = choose_outputs(num_outputs)
    grid = -(-num_outputs // block), -(-num_rows // ROWS)
    kernels(x.device.type).multiply_rows[grid](
        x,
        weight,
        scale,
        out,
        num_rows,
        num_outputs,
        WIDTH=width,
        GROUP=group,
        BLOCK_M=ROWS,
        BLOCK_N=block,
        BLOCK_K=min(INPUTS[x.dtype], max(32, next_power(width))),
        INTERPRETED=x.device.type == "cpu",
        num_warps=block // 8,
        num_stages=4,
    )
    return out
