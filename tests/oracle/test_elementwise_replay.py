"""Steps with Triton's elementwise kernels, captured once and replayed like CUDA graphs, emit the
same tokens as torch's operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import TINY, make_requests, make_runner, random_prompts, tiny_transformer
from recorded_launches import dispatched
from recorder import Recorder
from test_replay import run

from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import KVSection
from magicdec.engine import Engine
from magicdec.model.elementwise import triton as module
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.elementwise.triton import TritonElementwise

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs themselves are there")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of those that were made or made again."""
    with dispatched(module.kernels("cpu")) as found:
        monkeypatch.setattr(module, "kernels", lambda device: found)
        yield found.made


@pytest.mark.parametrize(("drafter", "policy"), [(None, None), ("self", "streaming_llm")], ids=str)
def test_replayed_steps_emit_the_tokens_of_torchs_operators(
    drafter: str | None, policy: str | None, launches: list[str]
) -> None:
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
