"""scripts/dev/train_hybrid.py: what it writes is what it trained, by transformers, and a training
that was stopped ends as one that was not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

pytestmark = pytest.mark.wide

BOOK = np.random.default_rng(0).integers(259, 2048, 5000)


@pytest.fixture
def train_hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    import train_hybrid

    shape = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4}
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
