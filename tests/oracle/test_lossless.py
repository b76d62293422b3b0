"""Speculation is lossless: self-speculation and standalone drafts emit exactly the tokens of the
baseline in float32, for every policy, budget and shape.

A new policy is one row in KV_SECTIONS. `tests/distributed/matrix.py` tests all drafters on several
ranks.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

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
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.decoding import steps
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.draft_kv import DraftKV
from magicdec.drafting.drafter import DraftSetup, DraftShape, make_drafter
from magicdec.drafting.model_drafter import SelfDrafter, fold
from magicdec.drafting.policies.streaming_llm import StreamingLLM
from magicdec.engine import Engine
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.model.config import RopeConfig
from magicdec.names import KV_POLICIES
from magicdec.request import Batch
from magicdec.runner import ModelRunner
from magicdec.sampling.metadata import SamplingMetadata
from magicdec.sampling.model_tokens import Proposal, judge

BACKENDS = [GroupedBackend, SDPABackend, NativeBackend]
SMALL = replace(
    TINY, num_layers=1, hidden_size=32, intermediate_size=40, num_heads=2, num_kv_heads=2
)
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
DRAFT_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 17, 16),
    KVSection("streaming_llm", 1, 0),
    KVSection("streaming_llm", 33, 16),
    KVSection("streaming_llm", 5000, 16),
    KVSection("snapkv", 20, window_size=4),
]
# Every second section for a shape: together, every policy for every shape.
EACH = [
    (kv, shape)
    for (i, kv), (j, shape) in product(enumerate(KV_SECTIONS), enumerate(SHAPES))
    if (i + j) % 2 == 0 or kv.policy == "full"
]


def test_every_shape_is_decoded_under_every_policy() -> None:
    assert {(kv.policy, shape) for kv, shape in EACH} == set(product(KV_POLICIES, SHAPES))


def reads_all(kv: KVSection) -> bool:
    return kv.policy == "full" or kv.budget >= 500


@pytest.mark.narrow("values")
@pytest.mark.parametrize(("kv", "shape"), EACH, ids=str)
def test_speculation_emits_the_baseline_tokens(kv: KVSection, shape: str) -> None:
    found = speculate(tiny_transformer(SHAPES[shape]), kv)
    assert len(set(map(tuple, found.tokens))) == len(RAGGED), "the rows decode different texts"
    assert found.accepts_all == reads_all(kv)


@pytest.mark.narrow("pairs")
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


@pytest.mark.narrow("values", "pairs")
@pytest.mark.parametrize("num_drafts", [1, 2, 3, 7])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("drafter", "policy"),
    [("self", "streaming_llm"), ("self", "verified"), ("model", "streaming_llm")],
)
def test_300_tokens_past_the_window_are_the_baselines(
    drafter: str, policy: str, backend: Callable[[], AttentionBackend], num_drafts: int
) -> None:
    """The window moves on: 300 tokens after prompts of different lengths, with a budget of 40. A
    standalone draft has the target's weights and rolls."""
    model, kv = tiny_transformer(seed=1), KVSection(policy, 40, 4)
    draft = model if drafter == "model" else None
    found = speculate(
        model, kv, num_drafts, draft=draft, lengths=[3, 50], num_new=300, seed=4, backend=backend
    )
    assert 0 in found.counts and len(found.counts) > 1, "some drafts were refused, some were not"
    if found.draft is not None:
        assert found.draft.runner is not None
        shape = found.draft.runner.cache.shape
        assert shape.num_blocks * shape.block_size < 2 * 120, "the draft's storage is bounded"


@pytest.mark.parametrize("num_drafts", [1, 30])
def test_few_or_many_drafts_over_everything_are_accepted(num_drafts: int) -> None:
    """Of a policy that chooses by what verifications have seen, in native kernels."""
    kv, sizes = KVSection("verified", 5000, 16), {"lengths": [100, 3, 60], "num_new": 40}
    assert speculate(tiny_transformer(), kv, num_drafts, backend=NativeBackend, **sizes).accepts_all


def test_a_row_that_outgrows_its_budget_begins_to_choose() -> None:
    """Rows of unlike lengths pass the budget at unlike steps, and end at unlike steps."""
    found = speculate(
        tiny_transformer(), KVSection("verified", 50, 4), lengths=[10, 40, 2],
        num_new=[90, 30, 60], backend=NativeBackend,
    )  # fmt: skip
    assert len(found.counts) > 1 and found.accepted[0] == [4, 4, 4], "at first all is visible"


def test_each_row_ends_at_its_own_length_or_end_token() -> None:
    kv, lengths = KVSection("streaming_llm", 20, 4), [20, 9, 31]
    free = speculate(tiny_transformer(), kv, lengths=lengths, num_new=[50, 7, 50], seed=2).tokens
    end = next(t for i, t in enumerate(free[0]) if i > 10 and t not in free[0][:i])
    ours = speculate(
        tiny_transformer(), kv, lengths=lengths, num_new=[50, 7, 50], seed=2, eos=(end,)
    ).tokens
    assert ours[0] == free[0][: free[0].index(end) + 1], "stops at the end token, inclusive"
    assert len(ours[2]) > len(ours[0]), "the others go on"


@pytest.mark.narrow("values")
@pytest.mark.parametrize("lengths", [RAGGED, (33,)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("end", [None, 30])
@pytest.mark.parametrize(
    ("drafter", "kv"),
    [
        ("self", KVSection("streaming_llm", 17, 16)),
        ("self", KVSection("snapkv", 20, window_size=3, reselect_every=7)),
        ("self", KVSection("verified", 60, 4)),
        ("self", KVSection("retrieval", 60, 4)),
        ("model", KVSection("full")),
        ("model", KVSection("streaming_llm", 33, 16)),
    ],
)
def test_chains_that_stop_emit_the_baseline_tokens(
    drafter: str,
    kv: KVSection,
    end: int | None,
    backend: Callable[[], AttentionBackend],
    lengths: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The standalone draft has the target's weights. Most confidences of this model are between .1
    and .4. Some rows meet an end token."""
    model, drafted = tiny_transformer(), set[int]()

    def note(runner: ModelRunner, sampling: SamplingMetadata, proposal: Proposal, x: Tensor) -> Any:
        drafted.add(proposal.ids.shape[1])
        return judge(runner, sampling, proposal, x)

    monkeypatch.setattr(steps, "judge", note)
    speculate(
        model, kv, 6, draft=model if drafter == "model" else None, lengths=lengths,
        backend=backend, eos=() if end is None else (end,), pa=0.2,
    )  # fmt: skip
    assert len(drafted - {0}) > 1


def test_a_request_for_one_token_needs_no_step() -> None:
    kv = KVSection("streaming_llm", 8, 2)
    assert not speculate(tiny_transformer(), kv, lengths=[20], num_new=1).accepted


@pytest.mark.parametrize("drafter", ["self", "model"])
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    num_new=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    num_drafts=st.integers(1, 6),
    sinks=st.integers(0, 8),
    window=st.integers(1, 70),
    chunk=st.sampled_from([1, 7, 64]),
    block_size=st.sampled_from([1, 6, 64]),
    seed=st.integers(0, 100),
)
def test_any_ragged_batch(
    drafter: str, lengths: list[int], num_new: list[int], num_drafts: int, sinks: int, window: int,
    chunk: int, block_size: int, seed: int,
) -> None:  # fmt: skip
    model, kv = tiny_transformer(seed=seed % 3), KVSection("streaming_llm", sinks + window, sinks)
    speculate(
        model, kv, num_drafts, draft=model if drafter == "model" else None, lengths=lengths,
        num_new=num_new[: len(lengths)], seed=seed, chunk=64 if drafter == "model" else chunk,
        draft_chunk=chunk, block_size=block_size,
    )  # fmt: skip


def test_speculation_adds_no_second_prefill_and_no_kv_memory() -> None:
    """A step of the speculative pass has gamma draft forwards and one verification. No forward runs
    the prompt again."""
    kv, sizes = KVSection("streaming_llm", 20, 4), {"lengths": [64, 64], "num_new": 30}
    found = speculate(tiny_transformer(), kv, 3, chunk=32, **sizes)
    prefill, baseline, counts = 2 * 2, 29, found.runner.counts
    assert counts.num_forwards == prefill + baseline + len(found.accepted) * (3 + 1)
    assert counts.num_tokens == 2 * 64 + 2 * 29 + sum(map(len, found.accepted)) * (3 + 4)
    per_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert found.runner.cache.num_bytes == 2 * (64 + 30 + 3) * per_token


def test_a_draft_costs_its_forwards_and_no_more() -> None:
    """All accepted: gamma forwards a step, none for the token that the cache misses."""
    model = tiny_transformer()
    found = speculate(model, KVSection("full"), 3, draft=model, lengths=[64, 64], num_new=31)
    assert found.draft is not None and found.draft.runner is not None
    chunks, steps = 2 * 64 // found.draft.prefill_chunk, len(found.accepted)
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


@pytest.mark.parametrize("budget", [17, 10_000])
def test_bfloat16_full_budget_accepts_nearly_everything(budget: int) -> None:
    model, kv = tiny_transformer(dtype=torch.bfloat16), KVSection("streaming_llm", budget, 16)
    runner = make_runner(model, 2, 64 + 100 + 4)
    requests = make_requests(random_prompts([64, 40], TINY.vocab_size), 100)
    _, _, accepted = decode_both(runner, requests, kv, 4)
    rate = sum(map(sum, accepted)) / sum(4 * len(step) for step in accepted)
    assert rate >= 0.99 if budget > 1000 else rate < 0.9


def test_a_smaller_or_larger_padding_of_the_vocabulary_is_no_obstacle() -> None:
    """Ids of the padding are never text; a draft may still prefer one."""
    prompts, kv = random_prompts([20, 9], 90), KVSection("full")
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
    kv, cpu, lengths = KVSection("streaming_llm", 30, 4), torch.device("cpu"), [50, 9]
    draft = make_draft(tiny_transformer(), kv, 2, 200)
    engine = Engine(make_runner(tiny_transformer(seed=3), 2, 200), 64)
    engine.prefill(make_requests(random_prompts(lengths, TINY.vocab_size), 100))
    setup = DraftSetup(engine.runner, DecodingSection("speculative", "model"), kv, draft)
    drafter, running = make_drafter("model", setup), engine.scheduler.running
    drafter.admit(running)
    rows, cache = BatchRows.of([0, 1], cpu), engine.runner.cache
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
