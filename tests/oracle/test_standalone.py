"""What a standalone draft has taken of the text is right, whatever was accepted. `test_lossless.py`
tests that it changes no token."""

from __future__ import annotations

import pytest
import torch
from conftest import (
    TINY,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.drafter import DraftModel, DraftSetup, make_drafter
from magicdec.drafting.model_drafter import ModelDrafter, fold
from magicdec.engine import Engine
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.request import Batch
from magicdec.sampling.model_tokens import Proposal


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


def test_folded_probabilities_are_those_of_clamped_ids() -> None:
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    assert torch.allclose(fold(probs, 3), torch.tensor([[[0.1, 0.2, 0.7]]]))
    assert torch.equal(fold(probs, 6), torch.tensor([[[0.1, 0.2, 0.3, 0.4, 0, 0]]]))
    assert torch.equal(fold(probs, 4), probs)
