"""Mistral's sliding window in texts that are longer than it: the tokens of `transformers`, and
drafts that read only keys which the target would see. `test_attention.py` tests attention alone,
and `test_families.py` the logits, and drafts under every policy in shorter texts."""

from dataclasses import replace

import pytest
import torch
from conftest import decode_both, make_requests, make_runner, random_prompts
from lossless import speculate
from tiny_families import VOCAB, stored
from torch import Tensor

from magicdec.attention.grouped import GroupedBackend
from magicdec.bench.roofline import bytes_read, kv_bytes_per_token, weight_bytes
from magicdec.config.sections import KVSection
from magicdec.kv.cache import BatchRows, KVCache, Lengths
from magicdec.kv.view import KVView, make_view
from magicdec.model.config import LayerKind
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch
from magicdec.speculation.policies.policy import make_draft_kv

WINDOW = 56
LENGTHS = [150, 7, 91]
KV_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 17, 4),
    KVSection("streaming_llm", 100, 60),
    KVSection("verified", 37, 4),
    KVSection("retrieval", 37, 4),
    KVSection("verified", 37, 4, recent_window=20),
]


@pytest.fixture
def mistral() -> Transformer:
    assert stored("mistral").source.config.windows == (WINDOW,)
    return stored("mistral").load()


@pytest.mark.narrow(3)
@pytest.mark.parametrize("kv", KV_SECTIONS, ids=str)
def test_tokens_are_those_of_transformers_and_drafts_read_no_key_before_the_window(
    kv: KVSection, mistral: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt is longer than the window, one text grows past it. The only keys before it that
    drafts read are those of blocks that were chosen when the step began; the backend masks them."""
    forward = ModelRunner.forward
    runner = make_runner(mistral, 2, 150 + 40 + 4)
    num_checked = 0

    def note(self: ModelRunner, batch: ForwardBatch) -> Tensor:
        nonlocal num_checked
        if batch.is_draft:
            assert batch.policy is not None and batch.committed is not None
            rows = BatchRows.of(batch.rows, self.device)
            committed = batch.committed
            view = make_view(self.cache, rows, batch.policy, 1, committed, self.window)
            committed = Lengths.of(committed, runner.device).bounds
            for layer in range(3):
                positions = view.key_positions(layer)
                positions = positions.where(positions >= 0, 10**6)  # padding
                for length, settled, found in zip(view.lengths, committed, positions, strict=True):
                    place = settled if view.per_head else length
                    assert int(found.min()) > place - WINDOW
                    num_checked += 1
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", note)
    prompts = random_prompts([150, 30], VOCAB, seed=4)
    baseline, tokens, _ = decode_both(runner, make_requests(prompts, 40), kv, 4)
    reference = stored("mistral").reference
    assert tokens == baseline == [reference.greedy(prompt, 40) for prompt in prompts]
    assert num_checked > 100


def test_a_rolling_draft_keeps_its_sinks(mistral: Transformer) -> None:
    """Its cache is shorter than the window, so it drafts as if its model had no window."""
    plain = Transformer(replace(mistral.config, layer_kinds=(LayerKind(None),)))
    plain.load_state_dict(mistral.state_dict())
    kv = KVSection("streaming_llm", 24, 4)
    accepted = []
    for drafting in (mistral, plain):
        found = speculate(mistral, kv, 3, draft=drafting, lengths=LENGTHS, num_new=40, seed=6)
        accepted.append(found.accepted)
    assert accepted[0] == accepted[1]


@pytest.mark.parametrize("every", [0, 7, 70])  # with 70, later tokens leave the window too
def test_snapkv_keeps_only_keys_within_the_window(
    every: int, mistral: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys that draft forwards read from the small cache are looked up in the whole cache."""
    num_new = 30 if every == 0 else 100
    runner = make_runner(mistral, 1, 150 + num_new + 4)
    reader = make_draft_kv(runner, KVSection("snapkv", 20, window_size=8, reselect_every=every))
    (prompt,) = random_prompts([150], VOCAB, seed=5)
    (request,) = make_requests([prompt], num_new)
    request.row = 0
    request.output_ids.append(3)
    runner.allocate(0)
    runner.forward(ForwardBatch(torch.tensor([prompt]), [0]))
    batch = Batch((request,))
    reader.admit(batch.requests)
    found: list[int] = []
    views: list[KVView] = []
    plan = GroupedBackend.plan
    monkeypatch.setattr(GroupedBackend, "plan", lambda b, view: views.append(view) or plan(b, view))
    for step in range(num_new // 4 - 1):
        reader.prepare(batch.requests, 4)
        reader.follow(BatchRows.of([0], runner.device), 5)
        settled = reader.lengths([0])
        assert settled.bounds == (150 + 4 * step,)
        for k in range(4):
            reader.forward(torch.tensor([[5 + k]]), [0], settled)
            found.append(oldest(views[-1], runner, settled.bounds[0]) - settled.bounds[0])
            assert found[-1] > k - WINDOW
        reader.rewind([0], settled)
        runner.forward(ForwardBatch(torch.tensor([[5, 6, 7, 8]]), [0]))
        request.output_ids.extend([6, 7, 8, 9])
    assert min(found) < -WINDOW // 4, "something is found"


def oldest(view: KVView, whole: ModelRunner, settled: int) -> int:
    """The smallest position in the text of any committed key that a forward reads through
    `view`."""

    def keys(cache: KVCache, places: Tensor) -> Tensor:
        return cache.read(1, cache.slots(torch.tensor([0]), places))[0][0]

    ours = keys(view.cache, view.key_positions()[0])
    theirs = keys(whole.cache, torch.arange(settled)[None])
    equal = (ours.unsqueeze(2) == theirs.unsqueeze(1)).all(-1)  # [G, ours, theirs]
    return min(equal.float().argmax(-1)[equal.any(-1)].tolist(), default=settled)


def test_a_decode_step_reads_only_a_window(mistral: Transformer) -> None:
    """The KV bytes follow from the view: the tokens of the window, the new token included."""
    runner = make_runner(mistral, 2, 160)
    for row in (0, 1):
        runner.allocate(row)
    runner.cache.advance([0, 1], 120)
    runner.cache.truncate([1], [20])
    runner.forward(ForwardBatch(torch.tensor([[5], [6]]), [0, 1]))
    assert runner.counts.copy().kv_tokens_read == WINDOW + 21
    kv = (WINDOW + 21) * kv_bytes_per_token(mistral)
    assert bytes_read(mistral, runner.counts) == weight_bytes(mistral) + kv
