"""A request emits what it emits in a clean cache although every free block of the KV cache is full
of NaN, as another request may have left it: a masked slot has the weight 0, and 0 * NaN is NaN."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import DTYPES, LENGTHS, MAX_TOKENS, ON_CPUS, make_case
from conftest import (
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    that_drafts,
    tiny_transformer,
)
from lossless import RAGGED
from test_in_flight import EACH_CASE, check_seeds, learn_lone_outputs

from magicdec.attention.native import NativeBackend
from magicdec.attention.triton import TritonBackend
from magicdec.config.sections import KVSection
from magicdec.kv.cache import EVICTED, KVCache
from magicdec.kv.layout import TILE
from magicdec.runner.native_steps.executor import Executor
from magicdec.speculation.policies.policy import FullKV

NUM_NEW = 20
NUM_DRAFTS = 4
DRAFTS = [
    ("self", KVSection("full")),
    ("self", KVSection("streaming_llm", 17, 0)),
    ("self", KVSection("snapkv", 20, window_size=3, reselect_every=7)),
    ("self", KVSection("verified", 60, 4)),
    ("self", KVSection("retrieval", 60, 4)),
    ("self", KVSection("quantised")),
    ("model", KVSection("full")),
    ("model", KVSection("streaming_llm", 12, 0)),
    ("model", KVSection("snapkv", 20, window_size=4)),
]


@contextmanager
def spoiled() -> Iterator[None]:
    """Blocks that no row has are full of NaN: all of a new cache, and what rows give back."""
    init = KVCache.__init__
    release = KVCache.release
    evict = KVCache.evict
    give_back = KVCache.give_back

    def spoil(cache: KVCache, blocks: list[int]) -> None:
        gone = [block for block in blocks if block != EVICTED]
        for pool in (cache.k, cache.v):
            # Codes are spoiled by the NaN of their scales.
            pool[:, gone] = float("nan") if pool.is_floating_point() else -1
        for tensor in cache.attached:
            tensor[gone] = float("nan") if tensor.is_floating_point() else -1

    def make(cache: KVCache, *args: Any, **named: Any) -> None:
        init(cache, *args, **named)
        spoil(cache, list(range(cache.shape.num_blocks)))

    def leave(cache: KVCache, row: int, kept: Collection[int] = ()) -> None:
        blocks = list(cache.blocks[row])
        release(cache, row, kept)
        spoil(cache, [block for block in blocks if block not in kept])

    def give_some_back(cache: KVCache, row: int, first: int, last: int) -> None:
        blocks = cache.blocks[row][first:last]
        evict(cache, row, first, last)
        spoil(cache, blocks)

    def forget(cache: KVCache, blocks: list[int]) -> None:
        give_back(cache, blocks)
        spoil(cache, blocks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "__init__", make)
        patch.setattr(KVCache, "release", leave)
        patch.setattr(KVCache, "give_back", forget)
        patch.setattr(KVCache, "evict", give_some_back)
        yield


def decoded(name: str, dtype: torch.dtype, drafter: str, kv: KVSection) -> Any:
    """The tokens of both passes over a ragged batch, and the accepted drafts of each step."""
    backend = {**ON_CPUS, "native steps": NativeBackend}[name]()
    model = pack(tiny_transformer(dtype=dtype))
    size = (len(RAGGED), max(RAGGED) + NUM_NEW + 12)
    runner = that_drafts(make_runner(model, *size, backend), kv)
    if name == "native steps":
        runner = replace(runner, executor=Executor(model, runner.group))
    blocks = TILE if name.startswith("native") else 8  # of a rolling cache, which gives them back
    place = type(backend)(), 16, blocks
    draft = make_draft(model, kv, *size, *place) if drafter == "model" else None
    requests = make_requests(random_prompts(RAGGED, 97), NUM_NEW)
    return decode_both(runner, requests, kv, NUM_DRAFTS, 16, drafter, draft)


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ON_CPUS, "native steps"])
@pytest.mark.parametrize(("drafter", "kv"), DRAFTS, ids=str)
def test_a_batch_emits_what_it_emits_in_a_clean_cache(
    drafter: str, kv: KVSection, name: str, dtype: torch.dtype
) -> None:
    """In prefill, decoding, drafts and verification, of rows of different lengths."""
    clean = decoded(name, dtype, drafter, kv)
    with spoiled():
        assert decoded(name, dtype, drafter, kv) == clean


def test_triton_loads_no_masked_slot() -> None:
    """In one forward of ragged rows, since its kernels may be interpreted, which is slow."""
    pytest.importorskip("triton")
    torch.manual_seed(0)
    backend = TritonBackend()
    case = make_case(backend, (4, 2, 16), FullKV(), 3, [2, 0, 1], torch.float32)
    clean = case.run(backend).clone()
    cache = case.view.cache
    device = case.k.device
    for row, length in enumerate(LENGTHS):
        places = torch.arange(length, MAX_TOKENS, device=device).unsqueeze(0)
        stale = case.k[row : row + 1, length:] * float("nan")
        cache.write(1, cache.slots(torch.tensor([row], device=device), places), stale, stale)
    assert torch.equal(case.run(backend), clean)


@pytest.mark.narrow(4)
@pytest.mark.usefixtures("trusted_lookups")
@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize(("drafter", "kv"), EACH_CASE, ids=str)
def test_requests_in_flight_emit_what_they_emit_in_a_clean_cache(
    drafter: str | None, kv: KVSection, is_native: bool
) -> None:
    """Those that come later get blocks of those that have left or were preempted."""
    seeds = range(100, 104) if is_native else range(3)
    learn_lone_outputs(seeds, drafter, is_native)  # in a clean cache
    with spoiled():
        seen = check_seeds(seeds, drafter, kv, is_native=is_native)
    assert seen["joined"] > 0 and (is_native or seen["preempted"] > 0)
