"""Speculation is lossless: self-speculation and standalone drafts emit exactly the tokens of the
baseline in float32, for every policy, budget and shape.

A new policy is one row in KV_SECTIONS. `tests/distributed/matrix.py` tests all drafters on several
ranks.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from conftest import (
    TINY,
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from lossless import RAGGED, speculate

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.engine.engine import Engine
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.names import KV_POLICIES
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.request import Batch
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.drafter import DraftSetup, DraftShape, make_drafter
from magicdec.speculation.model_drafter import SelfDrafter, fold
from magicdec.speculation.policies.streaming_llm import StreamingLLM

BACKENDS = [GroupedBackend, SDPABackend, NativeBackend]
SMALL = replace(
    TINY, num_layers=1, hidden_size=32, intermediate_size=40, num_heads=2, num_kv_heads=2
)
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
    KVSection("quantised"),
    KVSection("quantised", draft_kv_dtype="int8"),
]
# The largest budgets, which read everything, and those of one token: all between are wide.
FEW_SECTIONS = (0, 1, 2, 4, 6, 9, 10, 11, 13, 14, 17, 18, 20, 21)
EACH_SECTION = [
    kv if index in FEW_SECTIONS else pytest.param(kv, marks=pytest.mark.wide)
    for index, kv in enumerate(KV_SECTIONS)
]
DRAFT_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 17, 16),
    KVSection("streaming_llm", 1, 0),
    KVSection("streaming_llm", 33, 16),
    KVSection("streaming_llm", 5000, 16),
    KVSection("snapkv", 20, window_size=4),
]


def reads_all(kv: KVSection) -> bool:
    return kv.policy == "full" or kv.budget >= 500


@pytest.mark.narrow(8)
@pytest.mark.parametrize("kv", EACH_SECTION, ids=str)
def test_speculation_emits_the_baseline_tokens(kv: KVSection) -> None:
    """`test_families.py` does this with every shape of a model, under every policy."""
    found = speculate(tiny_transformer(), kv)
    assert len(set(map(tuple, found.tokens))) == len(RAGGED), "the rows decode different texts"
    assert found.accepts_all == reads_all(kv)


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weights", ["another model", "the target's"])
@pytest.mark.parametrize("kv", DRAFT_SECTIONS, ids=repr)
def test_a_draft_model_emits_the_baseline_tokens(
    kv: KVSection, weights: str, backend: Callable[[], AttentionBackend]
) -> None:
    target = tiny_transformer()
    is_same = weights == "the target's"
    draft = target if is_same else tiny_transformer(SMALL, seed=5)
    assert speculate(target, kv, draft=draft, backend=backend).accepts_all == (
        is_same and reads_all(kv)
    )


@pytest.mark.narrow(2, "pairs")
@pytest.mark.parametrize("gamma", [1, 2, 3, 7])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("drafter", "policy"),
    [("self", "streaming_llm"), ("self", "verified"), ("model", "streaming_llm")],
)
def test_tokens_far_past_the_window_are_the_baselines(
    drafter: str, policy: str, backend: Callable[[], AttentionBackend], gamma: int
) -> None:
    """The window moves on: 150 tokens after prompts of different lengths, with a budget of 40. A
    standalone draft has the target's weights and rolls."""
    model = tiny_transformer(seed=1)
    kv = KVSection(policy, 40, 4)
    draft = model if drafter == "model" else None
    found = speculate(
        model, kv, gamma, draft=draft, lengths=[3, 50], num_new=150, seed=4, backend=backend
    )
    assert 0 in found.counts and len(found.counts) > 1, "some drafts were refused, some were not"
    if found.draft is not None:
        assert found.draft.runner is not None
        shape = found.draft.runner.cache.shape
        assert shape.num_blocks * shape.block_size < 2 * 120, "the draft's storage is bounded"


GROWN = [KVSection(policy, 33, 4, 6, recent_window=5) for policy in KV_POLICIES]
RENEWED = replace(GROWN[list(KV_POLICIES).index("snapkv")], reselect_every=20)


@pytest.mark.parametrize("kv", [*GROWN, RENEWED], ids=str)
def test_tokens_are_the_baselines_when_the_cache_grows_to_8_times_the_prompt(kv: KVSection) -> None:
    """As of models that reason: what a policy chose of the prompt is a small part of the text, or
    gone."""
    found = speculate(tiny_transformer(seed=1), kv, 3, lengths=[40, 37], num_new=290, seed=4)
    assert found.accepts_all == (kv.policy == "full")
    is_mixed = 0 in found.counts and len(found.counts) > 1
    assert found.accepts_all or is_mixed, "some drafts were refused, some were not"


@pytest.mark.parametrize("gamma", [1, 30])
def test_few_or_many_drafts_over_everything_are_accepted(gamma: int) -> None:
    """Of a policy that chooses by what verifications have seen, in native kernels."""
    kv = KVSection("verified", 5000, 16)
    sizes = {"lengths": [100, 3, 60], "num_new": 40}
    assert speculate(tiny_transformer(), kv, gamma, backend=NativeBackend, **sizes).accepts_all


def test_a_request_for_one_token_needs_no_step() -> None:
    kv = KVSection("streaming_llm", 8, 2)
    assert not speculate(tiny_transformer(), kv, lengths=[20], num_new=1).accepted


@pytest.mark.parametrize("drafter", ["self", "model"])
@settings(max_examples=6, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    num_new=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    gamma=st.integers(1, 6),
    sinks=st.integers(0, 8),
    window=st.integers(1, 70),
    chunk=st.sampled_from([1, 7, 64]),
    block_size=st.sampled_from([1, 6, 64]),
    seed=st.integers(0, 100),
)
def test_any_ragged_batch(
    drafter: str,
    lengths: list[int],
    num_new: list[int],
    gamma: int,
    sinks: int,
    window: int,
    chunk: int,
    block_size: int,
    seed: int,
) -> None:
    model = tiny_transformer(seed=seed % 3)
    kv = KVSection("streaming_llm", sinks + window, sinks)
    speculate(
        model,
        kv,
        gamma,
        draft=model if drafter == "model" else None,
        lengths=lengths,
        num_new=num_new[: len(lengths)],
        seed=seed,
        chunk=64 if drafter == "model" else chunk,
        draft_chunk=chunk,
        block_size=block_size,
    )


def test_speculation_adds_no_second_prefill_and_no_kv_memory() -> None:
    """A step of the speculative pass has gamma draft forwards and one verification. No forward runs
    the prompt again."""
    kv = KVSection("streaming_llm", 20, 4)
    sizes = {"lengths": [64, 64], "num_new": 30}
    found = speculate(tiny_transformer(), kv, 3, chunk=32, **sizes)
    prefill = 2 * 2
    baseline = 29
    counts = found.runner.counts
    assert counts.num_forwards == prefill + baseline + len(found.accepted) * (3 + 1)
    assert counts.num_tokens == 2 * 64 + 2 * 29 + sum(map(len, found.accepted)) * (3 + 4)
    per_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert found.runner.cache.num_bytes == 2 * (64 + 30 + 3) * per_token


def test_a_draft_costs_its_forwards_and_no_more() -> None:
    """All accepted: gamma forwards a step, none for the token that the cache misses."""
    model = tiny_transformer()
    found = speculate(model, KVSection("full"), 3, draft=model, lengths=[64, 64], num_new=31)
    assert found.draft is not None and found.draft.runner is not None
    chunks = 2 * 64 // found.draft.prefill_chunk
    steps = len(found.accepted)
    counts = found.draft.runner.counts
    assert counts.num_forwards == chunks + 3 * steps
    # One token more a row in every step but the first: the last that was accepted.
    assert counts.num_tokens == 2 * 64 + 2 * 3 * steps + 2 * (steps - 1)


def test_drafting_changes_no_committed_token_of_the_cache() -> None:
    runner = make_runner(tiny_transformer(), 1, 64)
    engine = Engine(runner, 64)
    engine.prefill(make_requests(random_prompts([40], TINY.vocab_size), 5))
    before = runner.cache.k[:, :, :, :40].clone()
    batch = Batch(tuple(engine.scheduler.running))
    drafter = SelfDrafter(DraftKV(runner, StreamingLLM(4, 10)))
    drafter.propose(DeviceBatch.of(batch, TINY.vocab_size, runner.device), DraftShape(3))
    assert runner.cache.lengths == [40] and torch.equal(runner.cache.k[:, :, :, :40], before)


def test_a_smaller_or_larger_padding_of_the_vocabulary_is_no_obstacle() -> None:
    """Ids of the padding are never text; a draft may still prefer one."""
    prompts = random_prompts([20, 9], 90)
    kv = KVSection("full")
    for vocab_size in (90, 120):
        config = replace(SMALL, vocab_size=vocab_size)
        for sampling in (SamplingSection(), SamplingSection(temperature=1.5)):
            runner = make_runner(tiny_transformer(), 2, 60)
            draft = make_draft(tiny_transformer(config, seed=2), kv, 2, 60)
            requests = make_requests(prompts, 30, sampling=sampling)
            baseline, ours, _ = decode_both(runner, requests, kv, 3, 64, "model", draft)
            assert len(ours[0]) == 30
            assert ours == baseline or sampling.temperature > 0


def test_after_steps_without_drafts_chunks_take_all_that_is_pending() -> None:
    """A target of other weights holds the prompts; the drafter has taken them."""
    kv = KVSection("streaming_llm", 30, 4)
    cpu = torch.device("cpu")
    lengths = [50, 9]
    draft = make_draft(tiny_transformer(), kv, 2, 200)
    engine = Engine(make_runner(tiny_transformer(seed=3), 2, 200), 64)
    engine.prefill(make_requests(random_prompts(lengths, TINY.vocab_size), 100))
    setup = DraftSetup(engine.runner, DecodingSection("speculative", "model"), kv, draft)
    drafter = make_drafter("model", setup)
    running = engine.scheduler.running
    drafter.admit(running)
    rows = BatchRows.of([0, 1], cpu)
    cache = engine.runner.cache
    assert draft.runner is not None

    def commit(uncached: int) -> None:
        """The target holds all tokens but so many."""
        held = [len(r.prompt_ids) + len(r.output_ids) - uncached for r in running]
        cache.seq_lens.copy_(torch.tensor(held))
        cache.set_host_lengths([0, 1], held)
        drafter.commit(rows, Lengths.of(held, cpu))

    for num_pending, num_forwards in ((5, 2), (17, 2), (18, 3)):  # chunks of 16, and one draft
        for request in running:
            request.output_ids += [7] * (num_pending - (num_pending == 5))
        before = draft.runner.counts.num_forwards
        commit(1)
        pending = drafter.prepare(running, 1)
        drafted = DeviceBatch.of(Batch(tuple(running)), TINY.vocab_size, cpu)
        drafter.propose(drafted, DraftShape(1, pending))
        assert draft.runner.counts.num_forwards - before == num_forwards
        commit(0)


def test_folded_probabilities_are_those_of_clamped_ids() -> None:
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    assert torch.allclose(fold(probs, 3), torch.tensor([[[0.1, 0.2, 0.7]]]))
    assert torch.equal(fold(probs, 6), torch.tensor([[[0.1, 0.2, 0.3, 0.4, 0, 0]]]))
    assert torch.equal(fold(probs, 4), probs)
