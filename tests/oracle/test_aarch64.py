"""The kernels on a CPU of another kind, which this machine emulates: aarch64, cross-compiled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels_on_stdin.cpp")
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
needs_emulator = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason="on Debian: apt install g++-aarch64-linux-gnu qemu-user",
)


def as_bytes(*tensors: Tensor) -> bytes:
    return b"".join(bytes(tensor.contiguous().view(torch.uint8).numpy()) for tensor in tensors)


@needs_emulator
def test_linear_layers_and_attention_equal_torch(tmp_path: Path) -> None:
    program = tmp_path / "kernels"
    flags = ("-std=c++20", "-O3", "-fopenmp", "-static", "-DHEAD_SIZE=64")
    subprocess.run([COMPILER, *flags, str(SOURCE), "-o", str(program)], check=True)
    torch.manual_seed(0)
    num_rows, out, width = 13, 100, 130
    x, weight, bias = (
        torch.randn(*s).bfloat16() for s in ((num_rows, width), (out, width), (out,))
    )
    small, scale = torch.randint(-127, 128, (out, width), dtype=torch.int8), torch.rand(out) / 50
    length, heads, kv_heads = 333, 6, 2
    q = torch.randn(length, heads, 64).bfloat16()
    k, v = torch.randn(2, length, kv_heads, 64).bfloat16()
    sent = as_bytes(
        torch.tensor([num_rows, out, width]), x, weight, bias, small, scale,
        torch.tensor([length, heads, kv_heads]), q, k, v,
    )  # fmt: skip
    command = [EMULATOR, str(program)]
    done = subprocess.run(command, input=sent, capture_output=True, check=True, timeout=300)
    numbers = torch.frombuffer(bytearray(done.stdout), dtype=torch.bfloat16)
    linear, linear_small, mixed = numbers.split([num_rows * out] * 2 + [q.numel()])
    wide = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear.view(wide.shape).double(), wide, rtol=0.01, atol=0.01)
    wide = x.double() @ (small.double() * scale.double().unsqueeze(1)).T + bias.double()
    torch.testing.assert_close(linear_small.view(wide.shape).double(), wide, rtol=0.01, atol=0.01)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(each.double().transpose(0, 1) for each in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(0, 1)  # fmt: skip
    torch.testing.assert_close(mixed.view(exact.shape).double(), exact, rtol=0.02, atol=0.01)
