"""The presets have the published parameter counts and configs, and transformers' tensor shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from conftest import ROOT, num_parameters

from magicdec.model.families.hf_config import parse_hf_config, to_hf_config
from magicdec.model.presets import published
from magicdec.model.presets.presets import PRESETS

# Published config.json texts, without the fields that do not describe the model.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
    "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
LLAMA_3_2_ROPE = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
PUBLISHED = {
    "llama-2-7b-32k": LLAMA | {"rope_scaling": {"factor": 8.0, "type": "linear"}},
    "llama-3.2-1b": LLAMA | {
        "attention_bias": False, "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64,
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "rope_scaling": LLAMA_3_2_ROPE, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "vocab_size": 128256,
    },
    "qwen2.5-14b": LLAMA | {
        "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643,
        "hidden_size": 5120, "intermediate_size": 13824, "max_position_embeddings": 131072,
        "max_window_layers": 48, "num_attention_heads": 40, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "rope_theta": 1000000.0, "sliding_window": 131072,
        "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 152064,
    },
    "mistral-7b-v0.1": LLAMA | {
        "architectures": ["MistralForCausalLM"], "intermediate_size": 14336,
        "num_key_value_heads": 8, "rope_theta": 10000.0, "sliding_window": 4096,
        "torch_dtype": "bfloat16",
    },
    "llama-68m": {
        key: value for key, value in LLAMA.items() if key != "num_key_value_heads"
    } | {
        "bos_token_id": 0, "hidden_size": 768, "intermediate_size": 3072,
        "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 2,
        "rms_norm_eps": 1e-06, "torch_dtype": "float32",
    },
}  # fmt: skip
OTHERS = {name: raw for name, _, _, _, raw in published.PUBLISHED}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_text_gives_the_preset(name: str) -> None:
    assert parse_hf_config(PUBLISHED[name], name) == PRESETS[name].config


@pytest.mark.parametrize("name", list(PRESETS))
def test_parameter_counts(name: str) -> None:
    preset = PRESETS[name]
    assert num_parameters(preset.config) == preset.num_parameters


@pytest.mark.parametrize("name", list(PRESETS))
def test_transformers_counts_the_same(name: str) -> None:
    raw = OTHERS[name] if name in OTHERS else to_hf_config(PRESETS[name].config)
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
