"""What the tests of every backend do not reach of our Triton kernels: splits and their merging,
unusual block sizes, strided inputs, and a whole run. Without a GPU, the kernels are interpreted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import launches
import pytest
import torch
from attention_cases import BackendCase, exact_attention, fill
from conftest import TINY, Launch, tiny_transformer
from hypothesis import given
from hypothesis import strategies as st
from launches import compile_apart
from lossless import speculate
from tiers import nested

from magicdec.attention import triton
from magicdec.attention.sdpa import SDPABackend
from magicdec.attention.triton import (
    LEAST_SPLIT,
    MOST_SPLITS,
    MOST_WAVES,
    TritonBackend,
    choose_splits,
    choose_tile,
    fit_programs,
    load_kernels,
)
from magicdec.config.sections import KVSection
from magicdec.kv.cache import KVCache
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import WEIGHTS_BLOCK, make_view
from magicdec.speculation.policies.policy import FullKV
from magicdec.speculation.policies.streaming_llm import StreamingLLM

pytestmark = pytest.mark.wide

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.narrow("values", "values")
@pytest.mark.parametrize(
    ("split", "num_new", "dtype"),
    [(3, 3, torch.bfloat16), (4, 20, torch.float32), (2, 1, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("policy", [FullKV(), StreamingLLM(5, 90)], ids=repr)
def test_splits_are_merged_by_their_log_sum_exp(
    policy: FullKV | StreamingLLM, split: int, num_new: int, dtype: torch.dtype
) -> None:
    """A batch has rows of many splits, of one tile and of new tokens alone. Splits cut ranges, and
    the new tokens of the longest row lie in two tiles, which two programs read. 20 tokens of 4
    heads for each KV head are two tiles of queries. A block of the cache has two tiles of keys."""
    torch.manual_seed(0)
    backend = TritonBackend(split)
    lengths = [127, 3, 0]
    rows = [2, 0, 1]
    cache, k, v = fill(backend, 2, 64, lengths, dtype, 256, layers=1, block=128)
    q = torch.randn(3, num_new, 8, 64).to(DEVICE, dtype)
    view = make_view(cache, rows, policy, num_new)
    case = BackendCase(view, q, k, v)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    out, mass = case.run(backend, "run_with_weights")
    repeated, lse = case.run(backend, "run_with_lse")
    assert torch.equal(repeated, out) and repeated.dtype == dtype and lse.dtype == torch.float32
    for i, keys in enumerate(view.key_positions()[:, 0].tolist()):
        seen = [s for s in keys if s >= 0]
        row = rows[i]
        blocks = view.num_weight_blocks
        exact = exact_attention(q[i], k[row], v[row], seen, lengths[row], num_blocks=blocks)
        assert (out[i].double() - exact.out).abs().max() < tolerance
        assert (lse[i].double() - exact.lse).abs().max() < 10 * tolerance
        assert (mass[i].double() - exact.mass).abs().max() < 10 * tolerance * exact.mass.max()


@given(
    num_keys=st.integers(1, 140_000),
    num_programs=st.integers(1, 3000),
    capacity=st.sampled_from([108, 132, 264, 396, 792]),
    block_n=st.sampled_from([16, 32, 64]),
)
def test_splits_fill_the_device(
    num_keys: int, num_programs: int, capacity: int, block_n: int
) -> None:
    def waves(num_splits: int) -> int:
        return -(-num_programs * num_splits // capacity)

    num_splits = choose_splits(num_keys, block_n, num_programs, capacity)
    assert 1 <= num_splits <= MOST_SPLITS
    assert num_splits == 1 or num_keys >= num_splits * LEAST_SPLIT
    assert num_splits == 1 or waves(num_splits) <= MOST_WAVES
    without = waves(1) * (num_keys + LEAST_SPLIT)
    assert waves(num_splits) * num_keys / num_splits <= without, "not slower than one split"


def test_splits_at_the_sizes_of_the_headlines() -> None:
    """Three programs on each of 132 processors. Eight KV heads, with 1 and 5 new tokens."""
    assert fit_programs(128, 72_700, 4, 233_472) == 3, "by shared memory"
    assert fit_programs(212, 45_568, 4, 233_472) == 2, "by registers"
    capacity = 3 * 132
    for num_new in (1, 5):
        splits = [choose_splits(32_768 + num_new, 64, 8 * B, capacity) for B in (1, 8, 28, 32)]
        assert splits == [47, 6, 7, 3]
        waves = [8 * B * n / capacity for B, n in zip((1, 8, 28, 32), splits, strict=True)]
        assert all(wave / math.ceil(wave) > 0.94 for wave in waves), "full waves"
    assert choose_splits(261, 64, 8, capacity) == 2, "a draft's budget"


@given(num_tiles=st.integers(0, 3000), num_splits=st.integers(1, MOST_SPLITS))
def test_splits_are_equal_up_to_a_tile(num_tiles: int, num_splits: int) -> None:
    """Of a row with any number of tiles, also of fewer than it was planned for. `split_tiles` is a
    kernel's function, called with numbers."""
    split_tiles = load_kernels(DEVICE.type).split_tiles.fn
    parts = [split_tiles(split, num_splits, num_tiles) for split in range(num_splits)]
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == num_tiles, "all tiles are covered"
    sizes = {last - first for first, last in parts}
    assert max(sizes) - min(sizes) <= 1
    assert num_tiles < num_splits or min(sizes) > 0, "no split is empty"


def test_weight_blocks_are_those_of_the_policies() -> None:
    assert load_kernels(DEVICE.type).WEIGHTS_BLOCK.value == WEIGHTS_BLOCK


@pytest.mark.parametrize(
    "kv",
    [
        KVSection("streaming_llm", 12, 4),
        pytest.param(KVSection("verified", 24, 4), marks=pytest.mark.wide),
    ],
    ids=repr,
)
def test_speculation_emits_the_baseline_tokens(kv: KVSection) -> None:
    """As in test_lossless, with our kernels. The tokens are also those of the reference backend."""
    config = replace(TINY, num_layers=1, num_heads=4, num_kv_heads=2)
    sizes = {"lengths": [5, 37]}
    ours, reference = (
        speculate(tiny_transformer(config).to(DEVICE), kv, 3, num_new=8, backend=build, **sizes)
        for build in (TritonBackend, SDPABackend)
    )
    assert len(ours.counts) > 1, "some drafts were refused, some were not"
    assert ours.tokens == reference.tokens


SIZES: dict[str, list[Any]] = {
    "size": [128, 64, 80, 256],
    "num_new": [1, 5, 9, 100],
    "group": [4, 1, 8],
    "policy": [FullKV(), StreamingLLM(5, 90)],
    "window": [None, 100],
    "dtype": ["bfloat16", "float32"],
    "codes": [None, "int8", "uint8", "float8_e4m3fn"],
    "num_splits": [2, 1],
    "method": ["run", "run_with_weights"],
    "capability": [90, 80],
}


def launch_case(case: dict[str, Any]) -> list[launches.CountedLaunch]:
    """What our backend launches on a GPU for a forward of such sizes."""
    dtype = getattr(torch, case["dtype"])
    size = case["size"]
    num_new = case["num_new"]
    backend = TritonBackend(case["num_splits"])
    stored = dtype if case["codes"] is None else getattr(torch, case["codes"])
    shape = CacheShape(1, 2, size, 64, 8, backend.layout(stored))
    cache = KVCache(shape, 2, 4, stored, torch.device("cpu"))
    for row in (0, 1):
        cache.allocate(row, 256)
        cache.advance([row], 130)
    view = make_view(cache, [0, 1], case["policy"], num_new, window=case["window"])
    q = torch.empty(2, num_new, 2 * case["group"], size, dtype=dtype)
    k, v = torch.empty(2, 2, num_new, 2, size, dtype=dtype)
    recorder = launches.LaunchRecorder()
    recorder.WEIGHTS_BLOCK = load_kernels("cuda").WEIGHTS_BLOCK
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "load_kernels", lambda device: recorder)
        patch.setattr(triton, "choose_tile", lambda *sizes: choose_tile(*sizes[:5], False))
        backend.plan(view)
        getattr(backend, case["method"])(0, q, k, v, view)
    return recorder.launches


def chosen_cases(size: int) -> list[dict[str, Any]]:
    """Cases that together have every combination of `size` values of SIZES."""
    cases = [dict(zip(SIZES, values, strict=True)) for values in product(*SIZES.values())]
    return [cases[i] for i in nested(cases, size, 2)]


COMPILE = """
import re
from launches import compile_launch, resources
from test_triton import chosen_cases, launch_case
from magicdec.attention import triton_kernels

SHARED = {80: 99, 90: 227}  # KiB; 8.0 has more, 8.6 has no more
for case in chosen_cases(SIZE):
    for launch in launch_case(case):
        made = compile_launch(getattr(triton_kernels, launch.kernel), launch, case["capability"])
        numbers = resources(made.asm["cubin"])
        what = launch.kernel, case, numbers
        # Three numbers that the largest of int4 keep from before the loop over keys until after it;
        # and what float32 queries of that size, which are for checks, widen beside their own bits.
        is_largest = case["codes"] is not None and case["size"] == 256
        most = 280 if is_largest and case["dtype"] == "float32" else 0
        most = most or 16 * (is_largest and case["codes"] == "uint8")
        assert numbers["STACK"] <= most and numbers["LOCAL"] == 0, what
        assert made.metadata.shared <= SHARED[case["capability"]] * 1024, what
        if launch.kernel == "attend":
            code = made.asm["ttgir"]
            size = launch.options["BLOCK_D"] // (1 + (case["codes"] == "uint8"))
            kind = "(?:bf16|f32)" if case["codes"] is None else "i8"
            tile = f"{launch.options['BLOCK_N']}x{size}x{kind}"
            buffers = re.findall(f"local_alloc : .*memdesc<([0-9]+)x{tile}", code)
            assert len(buffers) == 2 and min(map(int, buffers)) > 1, (what, buffers)
            assert "async_wait" in code and re.search("async_wait .*num = [1-9]", code), what
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's cache: what the first test has compiled is there for the second."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.wide)])
def test_kernels_fit_gpus_that_are_not_here(size: int, compiled: Path) -> None:
    """What a forward launches is compiled to machine code: nothing is spilled, the shared memory is
    there, and the next tile of keys and of values is loaded while one is computed with. The cases
    have every value of SIZES together; in `make test-wide` every pair of them."""
    compile_apart(COMPILE.replace("SIZE)", f"{size})"), compiled)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is nothing to interpret")
def test_the_driver_interprets_the_kernels_on_a_cpu_and_says_so(
    launch: Launch,
    tiny_checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user who asks for Triton on a CPU need not set anything."""
    monkeypatch.delenv("TRITON_INTERPRET")
    kinds = "--attention triton --elementwise triton --device cpu --dtype float32"
    few = "--B 1 --prefix_len 20 --gen_len 3 --num_batches 1 --warmup_batches 0 --gamma 1"
    place = ("--model", tiny_checkpoint, "--dataset", text_file, "--draft_budget", 18)
    words = (*kinds.split(), *few.split(), *place, "--out", "r.jsonl")
    done = launch("selfspec_benchmark.py", *words)
    assert done.returncode == 0, done.stderr
    for flag in ("attention", "elementwise"):
        assert f"--{flag} triton: asked for; interpreted on a CPU" in done.stderr
    assert "verified: the other pass has the 3 tokens of static" in done.stdout
    _, record = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    model = record["config"]["model"]
    assert model["elementwise"] == "triton" and "interpreted" in model["elementwise_reason"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is nothing to interpret")
@pytest.mark.parametrize("imported_before", [pytest.param(False, marks=pytest.mark.wide), True])
def test_triton_is_interpreted_on_a_cpu_or_refused(imported_before: bool) -> None:
    """Triton decides when it is first imported. A process in which it compiles kernels cannot
    interpret them later."""
    code = "import triton\n" if imported_before else ""
    code += "from magicdec.attention.triton import load_kernels\nload_kernels('cpu')"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode != 0) == imported_before, done.stderr
    if imported_before:
        message = "--attention triton --device cpu: TRITON_INTERPRET must be 1 when triton is first"
        assert message in done.stderr.splitlines()[-1]
