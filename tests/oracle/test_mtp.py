"""Heads for multi-token prediction in the checkpoints of models with linear attention: each draft
has the logits of the definition, with a layer of transformers; and drafts change no token."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_draft, make_requests, random_prompts
from tiny_hybrids import KINDS, PlainMtpHead, the_model
from torch import Tensor

from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.engine.engine import Engine
from magicdec.kv.cache import Lengths
from magicdec.model.checkpoint.mtp_weights import find_mtp_head
from magicdec.model.checkpoint.source import find_model, load_transformer
from magicdec.model.mtp import MtpHead
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.hidden_states import HiddenStates
from magicdec.runner.request import Batch
from magicdec.speculation.drafter import DraftShape
from magicdec.speculation.head_drafter import HeadDrafter
from magicdec.speculation.steps.speculative import Speculative
from magicdec.speculation.steps.strategy import Setup, make_strategy

VOCAB = 97
LENGTHS = (5, 40, 1, 23)
GAMMA = 4
NEW = 40


def save(target: Any, head: PlainMtpHead, folder: Path) -> Path:
    target.save_pretrained(folder)
    head.add_to(folder)
    return folder


def load(folder: Path) -> tuple[Any, MtpHead]:
    source = find_model("--model", str(folder))
    cpu = torch.device("cpu")
    models = []
    for found in (source, find_mtp_head("--draft mtp", source)):
        model = load_transformer(found.config, found.weights, Shard(), None, torch.float32, cpu)
        models.append(model)
    target, head = models
    assert isinstance(head, MtpHead)
    head.share(target)
    return target, head


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_have_the_logits_of_the_definition(
    kind: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ragged batches, after steps that accepted all, some or none of the drafts, whose slots the
    head forgets."""
    reference = the_model(VOCAB, kind, tie_word_embeddings=tied)
    plain = PlainMtpHead(reference, kind)
    target, head = load(save(reference, plain, tmp_path))
    drafted: list[Tensor] = []
    read_out = MtpHead.read_out

    def noted(head: MtpHead, output: Tensor) -> tuple[Tensor, Tensor]:
        logits, state = read_out(head, output)
        drafted.append(logits[:, 0])
        return logits, state

    monkeypatch.setattr(MtpHead, "read_out", noted)
    size = len(LENGTHS), max(LENGTHS) + NEW + GAMMA
    runner = ModelRunner(target, SDPABackend(16), Group((0,), 0), *size, most_uncommitted=GAMMA + 2)
    runner.observers.append(HiddenStates.of(runner, [target.config.num_layers]))
    kv = KVSection("full")
    draft = make_draft(head, kv, *size)
    prompts = random_prompts(LENGTHS, VOCAB, 5)
    requests = make_requests(prompts, NEW)
    Engine(runner, 16).prefill(requests)
    decoding = DecodingSection("speculative", "mtp", GAMMA)
    strategy = make_strategy("speculative", Setup(runner, decoding, kv, draft=draft))
    assert isinstance(strategy, Speculative) and isinstance(strategy.drafter, HeadDrafter)
    drafter = strategy.drafter
    strategy.admit(Batch(tuple(requests)))
    texts = [
        [*request.prompt_ids, *request.output_ids, *random_prompts([NEW], VOCAB, number)[0]]
        for number, request in enumerate(requests)
    ]
    lengths = list(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        batch = DeviceBatch.of(Batch(tuple(requests)), VOCAB, runner.device)
        drafted.clear()
        pending = drafter.prepare(requests, GAMMA)
        proposal = drafter.propose(batch, DraftShape(GAMMA, pending))
        found = torch.stack(drafted, dim=1)
        for row, text in enumerate(texts):
            expected = torch.stack(plain.chain(text[: lengths[row] + 1], GAMMA))
            torch.testing.assert_close(found[row], expected, atol=1e-3, rtol=0)
            assert proposal.ids[row].tolist() == expected.argmax(-1).tolist()
        accepted = torch.randint(0, GAMMA + 1, (len(LENGTHS),), generator=generator).tolist()
        for row, count in enumerate(accepted):
            following = texts[row][lengths[row] : lengths[row] + 1 + count]
            runner.forward(ForwardBatch([following + [0] * (GAMMA - count)], [row]))
            lengths[row] += 1 + count
            runner.truncate([row], [lengths[row]])
            requests[row].output_ids[:] = texts[row][LENGTHS[row] : lengths[row] + 1]
        drafter.commit(batch.rows, Lengths.of(lengths, runner.device))
