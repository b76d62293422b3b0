"""A standalone draft emits the baseline's float32 tokens, exactly, under every policy; what it has
taken of the text is right whatever was accepted."""

from __future__ import annotations

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

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection, SamplingSection
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.drafter import DraftModel, DraftSetup, make_drafter
from magicdec.drafting.model_drafter import ModelDrafter, fold
from magicdec.engine import Engine
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.request import Batch
from magicdec.sampling.model_tokens import Proposal

RAGGED = [5, 70, 1, 33]
SMALL = replace(
    TINY, num_layers=1, hidden_size=32, intermediate_size=40, num_heads=2, num_kv_heads=2
)
KV_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 17, 16),
    KVSection("streaming_llm", 1, 0),
    KVSection("streaming_llm", 33, 16),
    KVSection("streaming_llm", 5000, 16),
    KVSection("snapkv", 20, window_size=4),
]


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("backend", [GroupedBackend, SDPABackend, NativeBackend])
@pytest.mark.parametrize("weights", ["another model", "the target's"])
@pytest.mark.parametrize("kv", KV_SECTIONS, ids=repr)
def test_a_draft_model_emits_the_baseline_tokens(
    kv: KVSection, weights: str, backend: type[AttentionBackend]
) -> None:
    target = tiny_transformer()
    model = target if weights == "the target's" else tiny_transformer(SMALL, seed=5)
    runner = make_runner(target, len(RAGGED), 70 + 60 + 4, backend())
    draft = make_draft(model, kv, len(RAGGED), 70 + 60 + 4, backend())
    requests = make_requests(random_prompts(RAGGED, TINY.vocab_size), 60)
    baseline, ours, accepted = decode_both(runner, requests, kv, 4, 64, "model", draft)
    assert ours == baseline and all(len(tokens) == 60 for tokens in ours)
    everything = weights == "the target's" and (kv.policy == "full" or kv.budget >= 5000)
    assert all(a == 4 for step in accepted for a in step) == everything


@pytest.mark.narrow("values")
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("backend", [GroupedBackend, NativeBackend])
def test_300_tokens_roll_the_draft(num_draft_tokens: int, backend: type[AttentionBackend]) -> None:
    """The target's own weights under a window: some drafts are refused, some steps take all."""
    kv, prompts = KVSection("streaming_llm", 40, 4), random_prompts([3, 50], TINY.vocab_size, 4)
    model, max_tokens = tiny_transformer(seed=1), 350 + num_draft_tokens
    runner = make_runner(model, 2, max_tokens, backend())
    draft = make_draft(model, kv, 2, max_tokens, backend())
    baseline, ours, accepted = decode_both(
        runner, make_requests(prompts, 300), kv, num_draft_tokens, 64, "model", draft
    )
    assert ours == baseline and all(len(t) == 300 for t in ours)
    counts = {a for step in accepted for a in step}
    assert 0 in counts and len(counts) > 1
    assert draft.runner is not None
    shape = draft.runner.cache.shape
    assert shape.num_blocks * shape.block_size < 2 * 120, "the draft's storage is bounded"


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    num_new=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    num_draft_tokens=st.integers(1, 6),
    sinks=st.integers(0, 8),
    window=st.integers(1, 70),
    chunk=st.sampled_from([1, 7, 64]),
    block_size=st.sampled_from([1, 6, 64]),
    seed=st.integers(0, 100),
)
def test_any_ragged_batch(
    lengths: list[int],
    num_new: list[int],
    num_draft_tokens: int,
    sinks: int,
    window: int,
    chunk: int,
    block_size: int,
    seed: int,
) -> None:
    requests = make_requests(
        random_prompts(lengths, TINY.vocab_size, seed), num_new[: len(lengths)]
    )
    model, kv = tiny_transformer(seed=seed % 3), KVSection("streaming_llm", sinks + window, sinks)
    runner = make_runner(model, len(lengths), 60 + 40 + 6)
    draft = make_draft(
        model, kv, len(lengths), 60 + 40 + 6, chunk=chunk, block_size=block_size, max_drafts=6
    )
    baseline, ours, _ = decode_both(runner, requests, kv, num_draft_tokens, 64, "model", draft)
    assert ours == baseline


def test_a_draft_costs_its_forwards_and_no_more() -> None:
    """All accepted: gamma forwards a step, none for the token that the cache misses."""
    model, kv = tiny_transformer(), KVSection("full")
    runner, draft = make_runner(model, 2, 64 + 31 + 3), make_draft(model, kv, 2, 64 + 31 + 3)
    requests = make_requests(random_prompts([64, 64], TINY.vocab_size), 31)
    _, _, accepted = decode_both(runner, requests, kv, 3, 64, "model", draft)
    assert draft.runner is not None
    chunks, steps = 2 * 64 // draft.prefill_chunk, len(accepted)
    assert draft.runner.counts.num_forwards == chunks + 3 * steps
    # One token more a row in every step but the first: the last that was accepted.
    assert draft.runner.counts.num_tokens == 2 * 64 + 2 * 3 * steps + 2 * (steps - 1)


def begin(draft: DraftModel, kv: KVSection, lengths: list[int]) -> tuple[Engine, ModelDrafter]:
    """A target of other weights with prompts in its cache, and the drafter that has taken them."""
    engine = Engine(make_runner(tiny_transformer(seed=3), len(lengths), 200), 64)
    engine.prefill(make_requests(random_prompts(lengths, TINY.vocab_size), 100))
    setup = DraftSetup(engine.runner, DecodingSection("speculative", "model"), kv, draft)
    drafter = make_drafter("model", setup)
    assert isinstance(drafter, ModelDrafter)
    drafter.admit(engine.scheduler.running)
    return engine, drafter


def propose(engine: Engine, drafter: ModelDrafter, num_draft_tokens: int) -> Proposal:
    """What a step that the host starts drafts."""
    batch = Batch(tuple(engine.scheduler.running))
    pending = drafter.prepare(batch.requests, num_draft_tokens, 1000)
    on_device = DeviceBatch.of(batch, TINY.vocab_size, torch.device("cpu"))
    return drafter.propose(on_device, num_draft_tokens, pending)


def commit(engine: Engine, drafter: ModelDrafter, lengths: list[int]) -> None:
    """The target holds so many tokens. Its cache, which the draft asks for lengths, follows."""
    rows, cache = BatchRows.of(range(len(lengths)), torch.device("cpu")), engine.runner.cache
    cache.seq_lens.copy_(torch.tensor(lengths))
    cache.set_host_lengths(rows.numbers, lengths)
    drafter.commit(rows, Lengths.of(lengths, torch.device("cpu")))


@pytest.mark.parametrize("kv", [KVSection("full"), KVSection("streaming_llm", 30, 4)], ids=repr)
def test_drafts_depend_on_the_text_alone(kv: KVSection) -> None:
    """After steps that drafted 3, nothing, 2, nothing for long, 4: the draft has taken the whole
    text, and under full KV proposes what it would have if the text had been its prompt."""
    lengths = [9, 40, 21]
    model = tiny_transformer()
    draft = make_draft(model, kv, 3, 200)
    engine, drafter = begin(draft, kv, lengths)
    generator = torch.Generator().manual_seed(0)
    running = engine.scheduler.running
    for num_drafts, emitted in (
        (3, [4, 1, 2]),
        (0, [1, 1, 1]),
        (2, [1, 3, 3]),
        *[(0, [1] * 3)] * 20,
    ):
        # A step without drafts asks the drafter for nothing, and costs it nothing.
        proposal = Proposal(torch.zeros(3, 0, dtype=torch.int64))
        if num_drafts:
            proposal = propose(engine, drafter, num_drafts)
        assert proposal.ids.shape == (3, num_drafts) and proposal.probabilities is None
        for request, count in zip(running, emitted, strict=True):
            known = len(request.prompt_ids) + len(request.output_ids)
            # What was accepted is the draft's own; the last is the target's.
            new = proposal.ids[request.row, : count - 1].tolist()
            new += torch.randint(3, 97, (count - len(new),), generator=generator).tolist()
            request.output_ids += new
            assert known + count == len(request.prompt_ids) + len(request.output_ids)
        commit(engine, drafter, [len(r.prompt_ids) + len(r.output_ids) - 1 for r in running])
    found = propose(engine, drafter, 4).ids
    if kv.policy == "full":
        fresh = make_draft(model, kv, 3, 200)
        texts = [(*r.prompt_ids, *r.output_ids) for r in running]
        for row, text in enumerate(texts):
            assert fresh.runner is not None
            fresh.runner.allocate(row)
            ids = torch.tensor([text])
            for i in range(4):
                logits = fresh.runner.forward(ids, [row], last_only=True)
                ids = logits.argmax(-1)
                assert ids.item() == found[row, i].item(), (row, i)
    assert draft.runner is not None
    expected = [len(r.prompt_ids) + len(r.output_ids) + 3 for r in running]
    assert draft.runner.cache.lengths == expected


def test_after_a_step_without_drafts_one_forward_takes_all_that_is_pending() -> None:
    kv = KVSection("streaming_llm", 30, 4)
    draft = make_draft(tiny_transformer(), kv, 2, 200)
    engine, drafter = begin(draft, kv, [50, 9])
    assert draft.runner is not None
    for num_pending, num_forwards in ((5, 1), (16, 1), (17, 2)):  # chunks of 16
        for request in engine.scheduler.running:
            request.output_ids += [7] * (num_pending - (num_pending == 5))
        before = draft.runner.counts.num_forwards
        lengths = [len(r.prompt_ids) + len(r.output_ids) for r in engine.scheduler.running]
        commit(engine, drafter, [n - 1 for n in lengths])
        propose(engine, drafter, 1)
        assert draft.runner.counts.num_forwards - before == num_forwards
        commit(engine, drafter, lengths)


def test_a_smaller_or_larger_padding_of_the_vocabulary_is_no_obstacle() -> None:
    """Ids of the padding are never text; a draft may still prefer one."""
    for vocab_size in (90, 120):
        config = replace(SMALL, vocab_size=vocab_size)
        for sampling in (SamplingSection(), SamplingSection(temperature=1.5)):
            runner = make_runner(tiny_transformer(), 2, 60)
            kv = KVSection("full")
            draft = make_draft(tiny_transformer(config, seed=2), kv, 2, 60)
            prompts = random_prompts([20, 9], 90)
            requests = make_requests(prompts, 30, sampling=sampling)
            baseline, ours, _ = decode_both(runner, requests, kv, 3, 64, "model", draft)
            assert len(ours[0]) == 30
            if sampling.temperature == 0:
                assert ours == baseline


def test_folded_probabilities_are_those_of_clamped_ids() -> None:
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    assert torch.allclose(fold(probs, 3), torch.tensor([[[0.1, 0.2, 0.7]]]))
    assert torch.equal(fold(probs, 6), torch.tensor([[[0.1, 0.2, 0.3, 0.4, 0, 0]]]))
    assert torch.equal(fold(probs, 4), probs)
