"""Reading `config.json`: both generations of Hugging Face fields, and the ways it can be wrong; and
the presets, with the published parameter counts and transformers' tensor shapes."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import num_parameters

from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.families.hf_config import (
    WRITTEN,
    load_model_config,
    parse_hf_config,
    to_hf_config,
)
from magicdec.model.presets.presets import FILE, PRESETS

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = SIZES | {"architectures": ["LlamaForCausalLM"]}
MISTRAL = SIZES | {"architectures": ["MistralForCausalLM"]}
QWEN = SIZES | {"architectures": ["Qwen2ForCausalLM"]}
GPT2 = {
    **{"architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 32},
    **{"n_layer": 3, "n_head": 4, "n_positions": 128},
}
GPTJ = GPT2 | {"architectures": ["GPTJForCausalLM"]}
FALCON = SIZES | {"architectures": ["FalconForCausalLM"]}
BAICHUAN = SIZES | {"architectures": ["BaichuanForCausalLM"]}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def parse(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return parse_hf_config(raw, "test", generation)


def write(directory: Path, config: Any, generation: Any = None) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_transformers_4_rope(key: str) -> None:
    raw = LLAMA | {"rope_theta": 5e5, "rope_scaling": {key: "linear", "factor": 8.0}}
    assert parse(raw).rope == RopeConfig(5e5, "linear", 8.0)


def test_transformers_5_rope() -> None:
    table = {"rope_theta": 5e5, "rope_type": "llama3"} | LLAMA3_ROPE
    assert parse(LLAMA | {"rope_parameters": table}).rope == RopeConfig(
        5e5, "llama3", 8.0, 1.0, 4.0, 64
    )


@pytest.mark.parametrize(
    ("scaling", "scale"),
    [
        ({"factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"factor": 0.5}, 1.0),
        ({"factor": 4.0, "attention_factor": 1.5}, 1.5),
    ],
)
def test_yarn(scaling: dict[str, Any], scale: float) -> None:
    config = parse(LLAMA | {"rope_scaling": {"type": "yarn"} | scaling})
    assert config.rope.rope_type == "yarn"
    assert config.rope.original_max_position_embeddings == 128
    assert config.rope.attention_factor == pytest.approx(scale)
    assert config.max_length == max(128, 128 * scaling["factor"])


def test_both_generations_agree() -> None:
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3_ROPE}
    new = LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3_ROPE}
    assert parse(old | {"torch_dtype": "bfloat16"}) == parse(new | {"dtype": "bfloat16"})


def test_defaults_of_missing_fields() -> None:
    raw = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    config = parse(raw)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 8, 10000.0)
    assert config.norm_eps == 1e-6 and not config.tie_word_embeddings
    assert config.bos_token_id is None and config.eos_token_ids == ()


def test_generation_config_wins(tmp_path: Path) -> None:
    raw = LLAMA | {"bos_token_id": 1, "eos_token_id": 2}
    write(tmp_path, raw, {"eos_token_id": [5, 6, 7], "bos_token_id": None})
    config = load_model_config(tmp_path)
    assert config.eos_token_ids == (5, 6, 7) and config.bos_token_id == 1
    assert config.name == tmp_path.name


def test_biases_follow_the_architecture() -> None:
    def biases(raw: dict[str, Any]) -> tuple[bool, bool, bool]:
        config = parse(raw)
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases(LLAMA) == (False, False, False)
    assert biases(LLAMA | {"attention_bias": True, "mlp_bias": True}) == (True, True, True)
    assert biases(QWEN) == (True, False, False)
    assert biases(MISTRAL) == (False, False, False)


@pytest.mark.parametrize(
    ("raw", "window"),
    [
        (MISTRAL | {"sliding_window": 16}, 16),
        (MISTRAL | {"sliding_window": None}, None),
        (MISTRAL, 4096),
        (QWEN | {"sliding_window": 16}, None),
        (QWEN | {"sliding_window": 16, "max_window_layers": 0}, None),
        (QWEN | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 0}, 16),
        (QWEN | {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3}, None),
        (LLAMA | {"sliding_window": 16, "use_sliding_window": False}, None),
        (LLAMA | {"sliding_window": 128}, None),
    ],
)
def test_sliding_window(raw: dict[str, Any], window: int | None) -> None:
    assert parse(raw).windows == (window,)


WRITTEN_PRESETS = [name for name in PRESETS if PRESETS[name].config.architecture in WRITTEN]


@pytest.mark.parametrize("name", WRITTEN_PRESETS)
def test_round_trip_of_presets(name: str) -> None:
    """What is written has plain weights."""
    config = PRESETS[name].config
    if config.experts is not None:
        config = replace(config, experts=replace(config.experts, stored_bytes=None))
    written = json.loads(json.dumps(to_hf_config(config)))
    assert parse_hf_config(written, name) == config


def test_round_trip_of_rare_fields() -> None:
    base = parse(LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "dtype": "x"})
    qwen = parse(QWEN | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0})
    yarn = RopeConfig(1e4, "yarn", 4.0, attention_factor=1.2, beta_fast=20.0, truncate=False)
    stretched = replace(base, rope=yarn), replace(base, rope=RopeConfig(1e4, "dynamic", 2.0))
    some = parse(QWEN | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1})
    assert some.layers_by_window == {None: 1, 9: some.num_layers - 1}
    for config in (
        *stretched,
        some,
        base,
        qwen,
        replace(base, tie_word_embeddings=True, eos_token_ids=(3, 4)),
    ):
        assert parse_hf_config(to_hf_config(config), "test") == config


BAD = [
    (LLAMA | {"architectures": ["T5Model"]}, "'T5Model' is not supported; choose from Llama"),
    ({k: v for k, v in LLAMA.items() if k != "architectures"}, "'unknown' is not supported"),
    ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "'vocab_size' is missing"),
    (LLAMA | {"hidden_size": "big"}, "hidden_size 'big'"),
    (LLAMA | {"num_hidden_layers": None}, "num_hidden_layers None"),
    (LLAMA | {"num_attention_heads": 0}, "num_attention_heads 0"),
    (LLAMA | {"num_key_value_heads": -2}, "num_key_value_heads -2"),
    (LLAMA | {"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
    (LLAMA | {"head_dim": 7}, "head_dim 7 is odd"),
    (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    (LLAMA | {"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope type 'longrope'"),
    (LLAMA | {"rope_scaling": {"type": "yarn"}}, "'factor' is missing"),
    (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (GPT2 | {"activation_function": "relu"}, "activation_function 'relu'"),
    (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights False"),
    (GPT2 | {"n_inner": "big"}, "n_inner 'big'"),
    ({k: v for k, v in GPT2.items() if k != "n_embd"}, "'n_embd' is missing"),
    (GPTJ | {"rotary_dim": 7}, "rotary_dim 7 is odd"),
    (GPTJ | {"rotary_dim": 64}, "rotary_dim 64 is over head_dim 8"),
    (FALCON | {"alibi": True}, "alibi True is not supported"),
    (BAICHUAN | {"vocab_size": 125696}, "Baichuan 2"),
    (LLAMA | {"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
    (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor'"),
    (LLAMA | {"rope_scaling": 8}, "config.json"),
    (LLAMA | {"eos_token_id": "</s>"}, "</s>"),
    ([1, 2], "expected a JSON object, found list"),
]


@pytest.mark.parametrize(("raw", "message"), BAD)
def test_bad_fields_name_file_and_value(tmp_path: Path, raw: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        load_model_config(write(tmp_path, raw))
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "config.json")) and message in text
    assert "\n" not in text


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_model_config(tmp_path)


RAW = {name: preset["config"] for name, preset in json.loads(FILE.read_text()).items()}


@pytest.mark.parametrize("name", list(PRESETS))
def test_parameter_counts(name: str) -> None:
    preset = PRESETS[name]
    assert num_parameters(preset.config) == preset.num_parameters


# The first preset of each architecture; `make test-wide` builds all of them.
FIRST = {preset.config.architecture: name for name, preset in reversed(PRESETS.items())}


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST.values() else pytest.param(name, marks=pytest.mark.wide)
        for name in PRESETS
    ],
)
def test_transformers_counts_the_same(name: str) -> None:
    raw = RAW[name]
    if raw["model_type"] == "baichuan":  # not part of transformers: Llama with packed tensors
        raw = {k: v for k, v in raw.items() if k != "architectures"} | {"model_type": "llama"}
    config = transformers.AutoConfig.for_model(**{k: v for k, v in raw.items() if v is not None})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].num_parameters


def test_the_original_suites_errors_are_not_repeated() -> None:
    assert PRESETS["qwen2.5-7b"].config.norm_eps == 1e-6
    assert PRESETS["qwen2.5-32b"].config.norm_eps == 1e-5
    for name in ("yi-1.5-6b", "yi-1.5-34b-32k"):
        assert PRESETS[name].config.rope.theta == 5e6
        assert PRESETS[name].config.norm_eps == 1e-6
    assert PRESETS["mistral-7b-v0.1"].config.windows == (4096,)
    assert PRESETS["mistral-7b-v0.3"].config.windows == (None,)


def test_the_page_of_models_has_the_presets_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import preset_table

    text = preset_table.PAGE.read_text()
    assert preset_table.BEGIN in text and preset_table.END in text
    assert preset_table.written(text) == text, "run scripts/dev/preset_table.py --write"
    for name, preset in PRESETS.items():
        assert f"| `{name}` | {preset.config.num_layers} | " in text


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M.Q4_K_M.gguf", "SmolLM2-135M.Q4_K_M"),
        ("model.gguf", "folder"),
        ("ggml-model-q4_0.gguf", "folder"),
        ("Model-F16-00001-of-00003.gguf", "folder"),
        ("large-00001-of-00002.gguf", "large"),
        ("model-organism.gguf", "model-organism"),
    ],
)
def test_a_gguf_is_called_by_its_name_or_its_folder(file: str, name: str, tmp_path: Path) -> None:
    from magicdec.model.families.gguf_config import called

    assert called(tmp_path / "folder" / file) == name
