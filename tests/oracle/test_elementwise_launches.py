"""Launches of Triton's elementwise kernels, tested without a GPU: they depend on shapes alone,
their number per layer, and their machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from launches import Operators, record_launches
from torch import Tensor

from magicdec.model.config import ModelConfig
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.elementwise.triton import TritonElementwise, choose_tile
from magicdec.model.transformer import Transformer

pytest.importorskip("triton")
BF16, F32 = torch.bfloat16, torch.float32
OURS, TORCHS = TritonElementwise(), Elementwise()


def test_no_pair_of_numbers_is_read_by_two_threads() -> None:
    """Otherwise a thread could read a pair that another has already rotated."""
    for num_heads in (1, 2, 3, 40, 128):
        for pairs in (1, 3, 8, 48, 64, 128):
            block_h, block_p, num_warps = choose_tile(num_heads, pairs)
            assert block_p >= pairs and block_h * block_p >= 32 * num_warps


def call_all(device: str, T: int, dtype: torch.dtype) -> list[Tensor]:
    """Call every operation with the shapes of a model with 32 query and 8 KV heads of 128."""
    x, y, weight = (torch.empty(2, T, 4096, dtype=dtype, device=device) for _ in range(3))
    heads = torch.empty(2, T, 48, 128, dtype=dtype, device=device)
    table = torch.empty(2, T, 2, 64, dtype=F32, device=device)
    gate_up = torch.empty(2, T, 28672, dtype=dtype, device=device)
    with Operators() as operators:
        found = [
            OURS.rms_norm(x[:, -1:], weight[0, 0], 1e-5),
            *OURS.add_rms_norm(x, y, weight[0, 0], 1e-5),
            OURS.rms_norm(heads[:, :, :32], weight[0, 0, :128], 1e-5),
            OURS.rotate(heads, table, 40, False),
            OURS.silu_gate(gate_up),
        ]
    assert not operators.counts, "nothing but our kernels runs"
    return found


@pytest.mark.parametrize("T", [1, 5, 512])
def test_a_launch_follows_from_shapes_alone(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested on fake tensors without values: nothing is read by the host or copied, and allocations
    and launches are determined by shapes, as a CUDA graph needs."""
    launches = record_launches(monkeypatch)
    shapes = [tuple(t.shape) for t in call_all("meta", T, BF16)]
    row, heads = (2, T, 4096), (2, T, 32, 128)
    assert shapes == [(2, 1, 4096), row, row, heads, (2, T, 40, 128), (2, T, 14336)]
    assert [(launch.kernel, launch.grid) for launch in launches] == [
        ("norm_rows", (2,)),
        ("norm_rows", (2 * T,)),
        ("norm_rows", (2 * T * 32,)),
        ("rotate_heads", (2 * T, 10)),
        ("gate_rows", (2 * T, 28)),
    ]


def launches_of(config: ModelConfig, chosen: Elementwise, ours: list[Any]) -> tuple[int, int]:
    """(torch's operators, our kernels) of one token's forward in bfloat16, attention left out; on
    tensors that hold no numbers. An RMS norm of torch's counts as one, as it is on CUDA."""
    with torch.device("meta"), torch.inference_mode():
        model = Transformer(config).to(BF16)
        model.rope = torch.empty(64, 2, config.head_dim // 2)
        model.use(chosen)
        ids = torch.empty(1, 1, dtype=torch.int64)
        ours.clear()
        with Operators() as operators:
            model(ids, ids, lambda layer, q, k, v: q, lambda x: x)
    return operators.counts.total(), len(ours)


def test_a_layer_launches_half_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers in docs/gpu.md, for this model and without attention."""
    ours = record_launches(monkeypatch)
    layers = (TINY.num_layers, 10 + TINY.num_layers)
    counts = [
        [launches_of(replace(TINY, num_layers=n), chosen, ours) for n in layers]
        for chosen in (TORCHS, OURS)
    ]
    (before, longer_before), (after, longer_after) = counts
    assert (before, after) == ((2 * 18 + 4, 0), (2 * 5 + 3, 2 * 4 + 1))
    assert longer_before[0] - before[0] == 10 * 18
    assert sum(longer_after) - sum(after) == 10 * 9


COMPILE = """
import re
from collections import defaultdict
import pytest
import torch
import triton
from test_elementwise_launches import call_all
from launches import record_launches
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from magicdec.model.elementwise import triton_kernels

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
launches, orders = record_launches(pytest.MonkeyPatch()), defaultdict(set)
for dtype in (torch.bfloat16, torch.float32):
    call_all("meta", 5, dtype)
assert len(launches) == 10
for launch in launches:
    dtype = launch.args[0].dtype
    kernel = getattr(triton_kernels, launch.kernel)
    options = {"num_warps": launch.options["num_warps"]}
    given = dict(zip(kernel.arg_names, launch.args)) | launch.options
    signature, constants = {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = given[name]
        if name in launch.options:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    pointers = [i for i, name in enumerate(kernel.arg_names) if signature[name][0] == "*"]
    unaligned = {(i,): [["tt.divisibility", 16]] for i in pointers[1:]}
    aligned = {(0,): [["tt.divisibility", 16]]} | unaligned
    for capability, attrs in ((80, aligned), (86, unaligned), (90, aligned)):
        source = ASTSource(kernel, signature, constants, attrs)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(made.asm["cubin"]) > 1000 and made.metadata.shared <= 1024, launch
        if launch.kernel == "norm_rows":
            words = re.findall(r"(?:ld|st)\\.global\\.\\S+", made.asm["ptx"])
            assert attrs is unaligned or all(".v" in word for word in words), words
            code = made.asm["ttgir"]
            summed = re.search(r'"tt.reduce".*?\\}\\) : \\((.*?)\\)', code, re.S)[1]
            layout = re.search("(?m)^" + re.search("#[a-z0-9]+", summed)[0] + " = (.*)$", code)[1]
            orders[launch.options["WIDTH"], dtype].add(layout)
assert len(orders) == 4 and all(len(layouts) == 1 for layouts in orders.values()), orders
"""


@pytest.mark.wide
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """What a model launches, to machine code for compute capability 8.0, 8.6 and 9.0. And a norm
    adds up its squares in an order that follows from the width alone: not from where rows lie, nor
    from whether something was added to them first."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), env.get("PYTHONPATH", "")]
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    # The tests' own imports must not make it interpret.
    code = "import torch; torch.cuda.is_available = lambda: True\n" + COMPILE
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
