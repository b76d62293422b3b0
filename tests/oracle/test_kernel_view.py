"""The kernel that computes a view, against torch's operators: every tensor is equal, for every kind
of rule, captured or not. Without a GPU it is interpreted, and compiled for GPUs that are not here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from launches import LaunchRecorder, compile_apart

from magicdec.kv import kernel_view
from magicdec.kv.cache import BatchRows, KVCache, Lengths
from magicdec.kv.kernel_view import KernelView, make_kernel_view
from magicdec.kv.pool import CacheShape
from magicdec.kv.view import FULL, KVView, Visible, make_view
from magicdec.speculation.block_kv import BlockRanges
from magicdec.speculation.policies.streaming_llm import StreamingLLM
from magicdec.speculation.policies.verified import VerifiedKV

pytestmark = pytest.mark.wide

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOST = 100  # tokens of a row
KINDS = ("full", "streaming_llm", "verified")


def rule_of(kind: str, committed: list[int], sinks: int, room: int, window: int | None) -> Visible:
    if kind == "full":
        return FULL
    if kind == "streaming_llm":
        return StreamingLLM(sinks, sinks + room)
    policy = VerifiedKV(sinks, room, sinks + room, window)
    lengths = torch.tensor(committed)
    scores = torch.rand(2, len(committed), 3, MOST // 16)
    return BlockRanges(policy, policy.top_blocks(lengths, scores, 2).to(DEVICE))


def cache_of(lengths: list[int]) -> KVCache:
    cache = KVCache(CacheShape(2, 3, 4, 16, 1), 4, MOST // 16 + 1, torch.float32, DEVICE)
    cache.advance(range(4), 7)  # the rows that are not asked for
    for row, length in zip((2, 0, 3), lengths, strict=False):
        cache.truncate([row], [0])
        cache.advance([row], length)
    return cache


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 80), st.integers(0, 8), st.booleans()), min_size=1, max_size=3
    ),
    kind=st.sampled_from(KINDS),
    num_new=st.integers(1, 9) | st.just(300),
    sinks=st.integers(0, 9),
    room=st.integers(1, 60),
    window=st.none() | st.integers(1, 90),
    says_committed=st.booleans(),
    has_offsets=st.booleans(),
    is_captured=st.booleans(),
)
@example([(80, 3, True), (0, 2, False)], "full", 1, 0, 1, 9, True, True, True)
def test_the_kernel_and_torch_compute_the_same_view(
    rows: list[tuple[int, int, bool]],
    kind: str,
    num_new: int,
    sinks: int,
    room: int,
    window: int | None,
    says_committed: bool,
    has_offsets: bool,
    is_captured: bool,
) -> None:
    settled = [length for length, _, _ in rows]
    cache = cache_of([length + tail for length, tail, _ in rows])
    batch = BatchRows.of((2, 0, 3)[: len(rows)], DEVICE, 9 if is_captured else None)
    if is_captured:
        batch.active.copy_(torch.tensor([int(goes_on) for *_, goes_on in rows]))
    visible = rule_of(kind, settled, sinks, room, window)
    committed = Lengths.of(settled, DEVICE) if says_committed or kind == "verified" else None
    offsets = torch.arange(4, device=DEVICE) * 1000 if has_offsets else None

    def members(view: KVView) -> list[Any]:
        tensors = (view.seq_lens, view.all_ranges, view.ranges, view.positions())
        tensors += (view.query_positions(), view.reads(batch), view.count_keys())
        on_host = (view.lengths, view.num_visible, view.is_full, view.per_head, view.num_new)
        return [*(tensor.tolist() for tensor in tensors), *on_host]

    arguments = (cache, batch, visible, num_new, committed, window, offsets)
    by_kernel = make_kernel_view(*arguments)
    assert isinstance(by_kernel, KernelView)
    assert members(by_kernel) == members(make_view(*arguments))


COMPILE = """
import torch
import test_kernel_view
from launches import compile_launch, resources
from magicdec.kv import triton_kernels

test_kernel_view.DEVICE = torch.device("cpu")
for launch in test_kernel_view.launch_all():
    for capability in (80, 90):
        made = compile_launch(triton_kernels.describe_rows, launch, capability)
        numbers = resources(made.asm["cubin"])
        assert numbers["STACK"] == numbers["LOCAL"] == 0, numbers
"""


def launch_all() -> list[Any]:
    recorder = LaunchRecorder()
    cache = cache_of([40, 9])
    rows = BatchRows.of((2, 0), DEVICE, 9)
    committed = Lengths.of([38, 7], DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_view, "kernels", lambda device: recorder)
        for kind in KINDS:
            rule = rule_of(kind, [38, 7], 4, 16, None)
            for given_committed, offsets in ((None, None), (committed, cache.seq_lens)):
                make_kernel_view(cache, rows, rule, 5, given_committed, None, offsets)
    assert len(recorder.launches) == 6
    return recorder.launches


def test_the_kernel_compiles_for_gpus_that_are_not_here(tmp_path: Path) -> None:
    """To machine code that spills nothing."""
    compile_apart(COMPILE, tmp_path)
