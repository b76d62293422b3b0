"""The estimates of what a run needs for a short time, compared with what torch allocates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import TINY, make_requests, make_runner, random_prompts, tiny_transformer
from torch.profiler import ProfilerActivity, profile

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    WorkloadSection,
)
from magicdec.drafting.policies.policy import keep_queries, make_draft_kv
from magicdec.engine import Engine
from magicdec.memory.model_plan import ModelPlan
from magicdec.memory.plan import first_choice_bytes, forward_bytes, working_bytes
from magicdec.request import Batch

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "grouped": GroupedBackend,
    "sdpa": SDPABackend,
}
ROWS, PREFIX, NEW = 3, 900, 8


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch's allocator held at once beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, most = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def make_model_plan(backend: str, kv: KVSection) -> ModelPlan:
    config = RunConfig(
        model=ModelSection(dtype="float32"),
        kv=kv,
        attention=AttentionSection(backend),
        decoding=DecodingSection("speculative", "self", 3),
        workload=WorkloadSection(batch_size=ROWS, prefix_len=PREFIX, gen_len=NEW),
    )
    return ModelPlan(resolve(config, Machine(2)), TINY, (0,), 0)


@pytest.mark.parametrize(
    "kv", [KVSection("snapkv", 60), KVSection("snapkv", 60, window_size=8), KVSection("verified"),
     KVSection("retrieval")],
    ids=["snapkv", "snapkv, window of 8", "verified", "retrieval"],
)  # fmt: skip
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_the_first_choice_takes(backend: str, kv: KVSection) -> None:
    """The caches that a reader keeps are counted apart."""
    runner = make_runner(tiny_transformer(), ROWS, PREFIX + NEW + 3, BACKENDS[backend](), NEW + 3)
    requests = make_requests(random_prompts([PREFIX] * ROWS, TINY.vocab_size), NEW)
    keep_queries(runner, kv)
    batch = Batch(tuple(Engine(runner, 128).prefill(requests)))
    reader = make_draft_kv(runner, kv)
    found = peak_bytes(lambda: reader.admit(batch.requests))
    if kv.policy == "snapkv":
        found -= reader.runner.cache.num_bytes
    plan = make_model_plan(backend, kv)
    estimate = first_choice_bytes(plan)
    print(f"{backend} {kv.policy}: {found} allocated, {estimate} estimated")
    assert found / 1.5 < estimate < 2 * found
    assert working_bytes(plan) >= estimate


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_of_a_prompt(backend: str) -> None:
    runner = make_runner(tiny_transformer(), 1, PREFIX, BACKENDS[backend]())
    engine, chunk = Engine(runner, 128), 128
    requests = make_requests(random_prompts([PREFIX - 1], TINY.vocab_size), NEW)
    found = peak_bytes(lambda: engine.prefill(requests))
    plan = make_model_plan(backend, KVSection("full"))
    estimate = forward_bytes(plan, (1, chunk, PREFIX))
    print(f"{backend} chunk: {found} allocated, {estimate} estimated")
    assert found / 1.5 < estimate < 2 * found


def test_no_first_choice_for_a_view_of_fixed_positions() -> None:
    for kv in (KVSection("full"), KVSection("streaming_llm")):
        assert first_choice_bytes(make_model_plan("grouped", kv)) == 0
