"""Steps with Triton's kernels, recorded once and replayed, as with CUDA graphs. Those of attention
have grids and splits of the longest possible row, and the lengths at the time of the replay. Steps
with the elementwise kernels emit the same tokens as torch's operators."""

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
from launches import dispatched
from recorder import Recorder
from test_replay import run

from magicdec.attention import triton
from magicdec.attention.sdpa import SDPABackend
from magicdec.attention.triton import TritonBackend
from magicdec.config.sections import KVSection
from magicdec.engine import Engine
from magicdec.model.elementwise import triton as elementwise
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.elementwise.triton import TritonElementwise

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs themselves are there")
# Without "full", which a row within its budget sees under every policy. "streaming_llm" is tested
# under a sliding window.
CHOOSING = sorted(
    p for d, p in served_pairs() if d == "self" and p not in (None, "full", "streaming_llm")
)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the attention kernels that were launched, also in a replay."""
    with dispatched(triton.load_kernels("cpu")) as found:
        monkeypatch.setattr(triton, "load_kernels", lambda device: found)
        yield found.made


@pytest.fixture
def elementwise_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The same of the elementwise kernels."""
    with dispatched(elementwise.kernels("cpu")) as found:
        monkeypatch.setattr(elementwise, "kernels", lambda device: found)
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


@pytest.mark.parametrize(("drafter", "policy"), [(None, None), ("self", "streaming_llm")], ids=str)
def test_replayed_steps_emit_the_tokens_of_torchs_operators(
    drafter: str | None, policy: str | None, elementwise_launches: list[str]
) -> None:
    launches = elementwise_launches
    runner = make_runner(tiny_transformer(), 3, 20 + 7 + 3, SDPABackend(16))
    engine = Engine(runner, 20)
    requests = make_requests(random_prompts([20, 1, 9], TINY.vocab_size), [4, 7, 5])
    snapshots, recorder, model = engine.prefill(requests), Recorder(), runner.model
    kv = KVSection("full") if policy is None else KVSection(policy, 12, 4)
    expected, accepted, _ = run(engine, snapshots, drafter, kv, 3, None)
    assert type(model.elementwise) is Elementwise and not launches
    model.use(TritonElementwise())
    found, replayed, _ = run(engine, snapshots, drafter, kv, 3, recorder)
    assert (found, replayed) == (expected, accepted)
    assert recorder.replayed >= len(replayed)
    a_forward = 4 * model.config.num_layers + 1
    assert len(launches) % a_forward == 0 and len(launches) > recorder.replayed * a_forward
    assert set(launches) == {"norm_rows", "rotate_heads", "gate_rows"}
