"""scripts/dev/train_hybrid.py: what it writes is what it trained, by transformers, and a training
that was stopped ends as one that was not. scripts/dev/train_mtp.py: what it trains, and adds to
that checkpoint, are chains of a head by its definition, and it learns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_hybrids import PlainMtpHead, the_model

from magicdec.model.checkpoint.source import find_model

pytestmark = pytest.mark.wide

FILE = "model.safetensors"
BOOK = np.random.default_rng(0).integers(259, 2048, 5000)


@pytest.fixture
def train_hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    import train_hybrid

    shape = {"hidden_size": 128, "intermediate_size": 48, "num_hidden_layers": 4}
    shape["layer_types"] = train_hybrid.CONFIG["layer_types"][:4]
    for name, size in shape.items():
        monkeypatch.setitem(train_hybrid.CONFIG, name, size)
    monkeypatch.setattr(train_hybrid, "SAVE_STEPS", 1)
    return train_hybrid


def training(module: Any, out: Path) -> Any:
    sizes = module.BOS, 13, module.FIRST_WORD, module.VOCAB_SIZE, module.MAX_POSITIONS
    source = module.WindowSource([BOOK], *sizes)
    out.mkdir(exist_ok=True)
    return module.Training([module.Phase(3, 2, 130, (1.0, 0.5))], source, out)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "train_log.jsonl").read_text().splitlines()]


def test_what_is_written_is_what_was_trained(train_hybrid: Any, tmp_path: Path) -> None:
    trained = training(train_hybrid, tmp_path)
    trained.run()
    with torch.no_grad():
        for parameter in trained.model.parameters():
            parameter.copy_(parameter.bfloat16())
        norms = [p for name, p in trained.model.named_parameters() if "norm" in name]
        for norm in norms:  # stored without one, some of them
            norm.copy_(1 + (norm - 1).bfloat16().float())
    train_hybrid.export(trained.model, tmp_path)
    other = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.from_numpy(BOOK[None, :150])
    with torch.no_grad():
        ours = train_hybrid.logits_of(trained.model, ids, torch.arange(150)[None])
        theirs = other(ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


def test_a_training_that_was_stopped_goes_on(train_hybrid: Any, tmp_path: Path) -> None:
    whole = training(train_hybrid, tmp_path / "whole")
    whole.run()
    stopped = training(train_hybrid, tmp_path / "stopped")
    phases = stopped.phases
    stopped.phases = [train_hybrid.Phase(1, 2, 130, (1.0, 0.5))]
    step = stopped.step
    stopped.step = lambda phase, rate: step(phase, next(train_hybrid.schedule(phases))[1])
    stopped.run()
    again = training(train_hybrid, tmp_path / "stopped")
    again.resume()
    again.run()
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    for own, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(own, other)


HEAD_SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "rope_parameters"),
)


def test_chains_of_a_head_are_those_of_the_definition(
    train_hybrid: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import train_mtp

    tiny = the_model(train_hybrid.VOCAB_SIZE, tie_word_embeddings=True).config
    for name in HEAD_SIZES:
        monkeypatch.setitem(train_hybrid.CONFIG, name, getattr(tiny, name))
    trained = training(train_hybrid, tmp_path)
    train_hybrid.export(trained.model, tmp_path)
    plan = train_mtp.TrainingPlan(12, 1, 40, 3, 3e-3, 0.1)
    source = find_model("--model", str(tmp_path))
    trainer = train_mtp.MtpTrainer(source, train_mtp.BookWindows([BOOK], None), plan)
    with torch.no_grad():
        for parameter in trainer.parameters:
            parameter.add_(0.1 * torch.randn_like(parameter))
            parameter.copy_(parameter.bfloat16())
        for name, norm in trainer.head.named_parameters():
            if "norm" in name and not name.startswith("target"):  # stored without one
                norm.copy_(1 + (norm - 1).bfloat16().float())
    train_mtp.add_to_checkpoint(trainer.head, tmp_path)
    assert find_model("--model", str(tmp_path)).config.num_mtp_layers == 1

    target = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    plain = PlainMtpHead(target)
    stored = {name: tensor.float() for name, tensor in load_file(tmp_path / FILE).items()}
    layer = {
        name.replace("mtp.", "model."): stored[name]
        for name in stored
        if name.startswith(("mtp.layers.", "mtp.norm."))
    }
    left = plain.layer.load_state_dict(layer, strict=False).missing_keys
    assert set(left) == {"model.embed_tokens.weight", "lm_head.weight"}
    plain.fc = stored["mtp.fc.weight"]
    plain.token_norm = stored["mtp.pre_fc_norm_embedding.weight"]
    plain.state_norm = stored["mtp.pre_fc_norm_hidden.weight"]

    text = torch.from_numpy(BOOK[:43])
    losses, _ = trainer.chain(text[None])
    with torch.no_grad():
        wanted = target(text[None]).logits[0].softmax(-1)
    entropies = torch.zeros(3, 40, dtype=torch.float64)
    for slot in range(40):
        drafts = text[slot + 2 : slot + 4].tolist()
        chains = plain.chain(text[: slot + 2].tolist(), 3, drafts)
        for t, logits in enumerate(chains):
            expected = -(wanted[slot + 1 + t] * logits.log_softmax(-1)).sum()
            entropies[t, slot] = expected.double()
    found = torch.stack(losses).double()
    torch.testing.assert_close(found, entropies.mean(-1), atol=1e-5, rtol=1e-6)
    first = trainer.step()[0]
    for _ in range(11):
        last = trainer.step()[0]
    assert last[0] < first[0]
