"""Steps over the Triton attention kernels, recorded once and replayed, as with CUDA graphs. Grids
and splits are those of the longest possible row; lengths are those at the time of the replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import (
    TINY,
    make_requests,
    make_runner,
    random_prompts,
    served_pairs,
    tiny_transformer,
)
from recorded_launches import dispatched
from recorder import Recorder
from test_replay import run

from magicdec.attention import triton as module
from magicdec.attention.triton import TritonBackend
from magicdec.config.sections import KVSection
from magicdec.engine import Engine

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs themselves are there")
# Without "full", which a row within its budget sees under every policy. "streaming_llm" is tested
# under a sliding window.
CHOOSING = sorted(
    p for d, p in served_pairs() if d == "self" and p not in (None, "full", "streaming_llm")
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the kernels that were launched, also in a replay."""
    kernels = module.load_kernels("cpu")
    with dispatched(kernels) as found:
        monkeypatch.setattr(module, "load_kernels", lambda device: found)
        yield found.made


@pytest.mark.wide
@pytest.mark.parametrize(("policy", "window"), [*product(CHOOSING, [None]), ("streaming_llm", 18)])
def test_replayed_steps_emit_the_eager_tokens(
    policy: str, window: int | None, launches: list[str]
) -> None:
    config = replace(TINY, num_layers=1, num_heads=4, num_kv_heads=2, sliding_window=window)
    runner = make_runner(tiny_transformer(config), 2, 26 + 4 + 2, TritonBackend(split_keys=16))
    engine = Engine(runner, 26)
    prompts = random_prompts([26, 1], TINY.vocab_size)
    snapshots = engine.prefill(make_requests(prompts, [3, 4]))
    kv, recorder = KVSection(policy, 20, 4, 8), Recorder()
    expected, accepted, counts = run(engine, snapshots, "self", kv, 2, None)
    launches.clear()
    found, replayed, read = run(engine, snapshots, "self", kv, 2, recorder)
    assert (found, replayed) == (expected, accepted)
    assert read.kv_tokens_read == counts.kv_tokens_read
    assert launches.count("attend_split") > recorder.replayed > 0
    assert ("sum_mass" in launches) == (policy == "verified")
