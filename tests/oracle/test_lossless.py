"""Speculation is lossless: self-speculation emits exactly the tokens of the baseline in float32,
for every policy, budget and shape.

A new policy is one row in KV_SECTIONS. `tests/distributed/matrix.py` tests all drafters on several
ranks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import TINY, decode_both, make_requests, make_runner, random_prompts, tiny_transformer
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import KVSection
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.draft_kv import DraftKV
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.drafting.self_drafter import SelfDrafter
from magicdec.engine import Engine
from magicdec.model.config import RopeConfig
from magicdec.names import KV_POLICIES
from magicdec.request import Batch

RAGGED = [5, 70, 1, 33]
SHAPES = {
    "MHA": replace(TINY, num_kv_heads=6),
    "GQA": TINY,
    "MQA": replace(TINY, num_kv_heads=1),
    "biases, tied, llama3 rope": replace(
        TINY,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rope=RopeConfig(10000.0, "llama3", 8.0, 1.0, 4.0, 32),
    ),
}
SHAPES |= {
    "learned positions": replace(TINY, norm="layer", positions="learned", gated_mlp=False),
    "ALiBi": replace(TINY, num_kv_heads=6, positions="alibi", embedding_norm=True),
    "parallel, interleaved rope": replace(
        TINY,
        residual="parallel_shared_norm",
        activation="gelu_tanh",
        rope=RopeConfig(rotary_dim=8, interleaved=True),
        head_bias=True,
    ),
}
KV_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 17, 16),
    KVSection("streaming_llm", 1, 0),
    KVSection("streaming_llm", 32, 16),
    KVSection("streaming_llm", 33, 16),  # the length of the last prompt, and near it
    KVSection("streaming_llm", 34, 16),
    KVSection("streaming_llm", 5000, 16),
    KVSection("snapkv", 9, window_size=8),
    KVSection("snapkv", 40, window_size=32, pooling="max"),
    KVSection("snapkv", 20, window_size=3, reselect_every=7),
    KVSection("snapkv", 5000),
    KVSection("verified", 17, 16),
    KVSection("verified", 1, 0),
    KVSection("verified", 60, 4),
    KVSection("verified", 64, 0, recent_window=1),
    KVSection("verified", 5000, 16),
    KVSection("retrieval", 17, 16),
    KVSection("retrieval", 60, 4),
    KVSection("retrieval", 64, 0, recent_window=1),
    KVSection("retrieval", 5000, 16),
]


# Every second section for a shape: together, every policy for every shape.
EACH = [
    (kv, shape)
    for (i, kv), (j, shape) in product(enumerate(KV_SECTIONS), enumerate(SHAPES))
    if (i + j) % 2 == 0 or kv.policy == "full"
]


def test_every_shape_is_decoded_under_every_policy() -> None:
    assert {(kv.policy, shape) for kv, shape in EACH} == set(product(KV_POLICIES, SHAPES))


@pytest.mark.narrow("values")
@pytest.mark.parametrize(("kv", "shape"), EACH, ids=str)
def test_speculation_emits_the_baseline_tokens(kv: KVSection, shape: str) -> None:
    config = SHAPES[shape]
    runner = make_runner(tiny_transformer(config), len(RAGGED), 70 + 60 + 4)
    requests = make_requests(random_prompts(RAGGED, config.vocab_size), 60)
    baseline, ours, accepted = decode_both(runner, requests, kv, 4)
    assert ours == baseline
    assert all(len(tokens) == 60 for tokens in ours)
    assert len(set(map(tuple, baseline))) == len(RAGGED), "the rows decode different texts"
    everything_visible = kv.policy == "full" or kv.budget >= 500
    assert all(a == 4 for step in accepted for a in step) == everything_visible


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 7])
@pytest.mark.parametrize("backend", [GroupedBackend, SDPABackend, NativeBackend])
@pytest.mark.parametrize("policy", ["streaming_llm", "verified"])
def test_300_tokens_past_the_window_are_the_baselines(
    num_draft_tokens: int, backend: type, policy: str
) -> None:
    """The window moves on: 300 tokens after prompts of different lengths, with a budget of 40."""
    requests = make_requests(random_prompts([3, 50], TINY.vocab_size, seed=4), 300)
    runner = make_runner(tiny_transformer(seed=1), 2, 350 + num_draft_tokens, backend())
    baseline, ours, accepted = decode_both(
        runner, requests, KVSection(policy, 40, 4), num_draft_tokens
    )
    assert ours == baseline and all(len(t) == 300 for t in ours)
    counts = {a for step in accepted for a in step}
    assert 0 in counts and len(counts) > 1, "some drafts were refused, some were not"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("drafter", "kv"),
    # Prompt lookup reads no cache, so the policy does not matter.
    [("ngram", KV_SECTIONS[0]), *(("self", kv) for kv in KV_SECTIONS)],
    ids=repr,
)
def test_160_tokens_of_rows_of_different_lengths_are_the_baselines(
    drafter: str, kv: KVSection
) -> None:
    requests = make_requests(random_prompts(RAGGED, TINY.vocab_size, seed=5), 160)
    runner = make_runner(tiny_transformer(seed=2), len(RAGGED), 234, NativeBackend())
    baseline, ours, _ = decode_both(runner, requests, kv, 4, drafter=drafter)
    assert ours == baseline and all(len(t) == 160 for t in ours)


def test_each_row_ends_at_its_own_length_or_end_token() -> None:
    prompts = random_prompts([20, 9, 31], TINY.vocab_size, seed=2)
    runner = make_runner(tiny_transformer(), 3, 120)
    kv = KVSection("streaming_llm", 20, 4)
    free, _, _ = decode_both(runner, make_requests(prompts, [50, 7, 50]), kv, 4)
    assert [len(t) for t in free] == [50, 7, 50]
    end = next(t for i, t in enumerate(free[0]) if i > 10 and t not in free[0][:i])
    requests = make_requests(prompts, [50, 7, 50], eos=(end,))
    baseline, ours, _ = decode_both(runner, requests, kv, 4)
    assert ours == baseline
    assert baseline[0] == free[0][: free[0].index(end) + 1], "stops at the end token, inclusive"
    assert len(ours[2]) > len(ours[0]), "the others go on"


def test_a_request_for_one_token_needs_no_step() -> None:
    runner = make_runner(tiny_transformer(), 1, 40)
    requests = make_requests(random_prompts([20], TINY.vocab_size), 1)
    baseline, ours, accepted = decode_both(runner, requests, KVSection("streaming_llm", 8, 2), 4)
    assert ours == baseline and len(ours[0]) == 1 and not accepted


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    num_new=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    num_draft_tokens=st.integers(1, 6),
    sinks=st.integers(0, 8),
    window=st.integers(1, 70),
    chunk=st.sampled_from([7, 64]),
    seed=st.integers(0, 100),
)
def test_any_ragged_batch(
    lengths: list[int],
    num_new: list[int],
    num_draft_tokens: int,
    sinks: int,
    window: int,
    chunk: int,
    seed: int,
) -> None:
    requests = make_requests(
        random_prompts(lengths, TINY.vocab_size, seed), num_new[: len(lengths)]
    )
    runner = make_runner(tiny_transformer(seed=seed % 3), len(lengths), 60 + 40 + 6)
    kv = KVSection("streaming_llm", sinks + window, sinks)
    baseline, ours, _ = decode_both(runner, requests, kv, num_draft_tokens, chunk)
    assert ours == baseline


def test_speculation_adds_no_second_prefill_and_no_kv_memory() -> None:
    """A step of the speculative pass has gamma draft forwards and one verification. No forward runs
    the prompt again."""
    requests = make_requests(random_prompts([64, 64], TINY.vocab_size), 30)
    runner = make_runner(tiny_transformer(), 2, 64 + 30 + 3)
    held = runner.cache.num_bytes
    _, _, accepted = decode_both(runner, requests, KVSection("streaming_llm", 20, 4), 3, chunk=32)
    prefill, baseline = 2 * 2, 29
    assert runner.counts.num_forwards == prefill + baseline + len(accepted) * (3 + 1)
    assert runner.counts.num_tokens == 2 * 64 + 2 * 29 + sum(len(a) for a in accepted) * (3 + 4)
    tokens_needed = 2 * (64 + 30 + 3)
    per_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert runner.cache.num_bytes == held == tokens_needed * per_token


def test_drafting_changes_no_committed_token_of_the_cache() -> None:
    runner = make_runner(tiny_transformer(), 1, 64)
    engine = Engine(runner, 64)
    engine.prefill(make_requests(random_prompts([40], TINY.vocab_size), 5))
    before = runner.cache.k[:, :, :, :40].clone()
    batch = Batch(tuple(engine.scheduler.running))
    drafter = SelfDrafter(DraftKV(runner, StreamingLLM(4, 10)))
    drafter.propose(DeviceBatch.of(batch, TINY.vocab_size, runner.device), 3)
    assert runner.cache.lengths == [40] and torch.equal(runner.cache.k[:, :, :, :40], before)


@pytest.mark.parametrize("budget", [17, 10_000])
def test_bfloat16_full_budget_accepts_nearly_everything(budget: int) -> None:
    model = tiny_transformer(dtype=torch.bfloat16)
    runner = make_runner(model, 2, 64 + 100 + 4)
    requests = make_requests(random_prompts([64, 40], TINY.vocab_size), 100)
    _, _, accepted = decode_both(runner, requests, KVSection("streaming_llm", budget, 16), 4)
    rate = sum(map(sum, accepted)) / sum(4 * len(a) for a in accepted)
    assert rate >= 0.99 if budget > 1000 else rate < 0.9
