"""The presets have the published parameter counts, and transformers' tensor shapes."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import ROOT, num_parameters

from magicdec.model.presets.presets import FILE, PRESETS

RAW = {name: preset["config"] for name, preset in json.loads(FILE.read_text()).items()}


@pytest.mark.parametrize("name", list(PRESETS))
def test_parameter_counts(name: str) -> None:
    preset = PRESETS[name]
    assert num_parameters(preset.config) == preset.num_parameters


@pytest.mark.parametrize("name", list(PRESETS))
def test_transformers_counts_the_same(name: str) -> None:
    raw = RAW[name]
    if raw["model_type"] == "baichuan":  # not part of transformers: Llama with packed tensors
        raw = {k: v for k, v in raw.items() if k != "architectures"} | {"model_type": "llama"}
    config = transformers.AutoConfig.for_model(**{k: v for k, v in raw.items() if v is not None})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].num_parameters


@pytest.mark.parametrize("name", list(PRESETS))
def test_shapes_make_sense(name: str) -> None:
    preset = PRESETS[name]
    config = preset.config
    assert name == name.lower() == config.name
    assert config.head_dim * config.num_heads == config.hidden_size
    assert config.head_dim in (64, 128, 256)
    assert config.num_heads % config.num_kv_heads == 0
    assert preset.repo_id.count("/") == 1
    assert config.eos_token_ids and max(config.eos_token_ids) < config.vocab_size


def test_the_original_suites_errors_are_not_repeated() -> None:
    assert PRESETS["qwen2.5-7b"].config.norm_eps == 1e-6
    assert PRESETS["qwen2.5-32b"].config.norm_eps == 1e-5
    for name in ("yi-1.5-6b", "yi-1.5-34b-32k"):
        assert PRESETS[name].config.rope.theta == 5e6
        assert PRESETS[name].config.norm_eps == 1e-6
    assert PRESETS["mistral-7b-v0.1"].config.sliding_window == 4096
    assert PRESETS["mistral-7b-v0.3"].config.sliding_window is None


def test_the_page_of_models_has_the_presets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import preset_table

    text = preset_table.PAGE.read_text()
    assert preset_table.BEGIN in text and preset_table.END in text
    assert preset_table.written(text) == text, "run scripts/preset_table.py --write"
    for name, preset in PRESETS.items():
        assert f"| `{name}` | {preset.config.num_layers} | " in text
