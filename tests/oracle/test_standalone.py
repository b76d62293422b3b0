"""What a standalone draft has taken of the text is right, whatever was accepted. `test_lossless.py`
tests that it changes no token."""

from __future__ import annotations

import torch
from conftest import TINY, make_draft, make_requests, make_runner, random_prompts, tiny_transformer

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.drafter import DraftSetup, make_drafter
from magicdec.drafting.model_drafter import fold
from magicdec.engine import Engine
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.request import Batch


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
        drafter.propose(DeviceBatch.of(Batch(tuple(running)), TINY.vocab_size, cpu), 1, pending)
        assert draft.runner.counts.num_forwards - before == num_forwards
        commit(0)


def test_folded_probabilities_are_those_of_clamped_ids() -> None:
    probs = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    assert torch.allclose(fold(probs, 3), torch.tensor([[[0.1, 0.2, 0.7]]]))
    assert torch.equal(fold(probs, 6), torch.tensor([[[0.1, 0.2, 0.3, 0.4, 0, 0]]]))
    assert torch.equal(fold(probs, 4), probs)
