"""The `config.json` of each preset and family as its makers publish it, from copies in public
repositories: what `published_configs.json` has under "read" is read as transformers reads it, and
what it has under "refused" is refused for the reason that it states. Long lists are cut."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from test_config_keys import WALKED, config_class

from magicdec.model.config import ModelConfig
from magicdec.model.families.eagle import is_head
from magicdec.model.families.hf_config import parse_hf_config
from magicdec.model.presets.presets import PRESETS
from magicdec.names import ARCHITECTURES, EAGLE_HEAD, PLANNED

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())
READ: dict[str, dict[str, Any]] = PUBLISHED["read"]
REFUSED: dict[str, dict[str, Any]] = PUBLISHED["refused"]
# What a preset has from its base model, and an instruct model of the same shape otherwise.
TUNING_FIELDS = ("dtype", "bos_token_id", "eos_token_ids", "architecture")


def test_every_preset_and_family_has_one() -> None:
    assert set(PRESETS) <= set(READ)
    known = {config["architectures"][0] for config in READ.values()}
    text_alone = {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Gemma4ForCausalLM"}
    assert (set(ARCHITECTURES) | set(PLANNED)) - known == text_alone


@pytest.mark.parametrize("name", READ)
def test_what_is_published_is_read(name: str) -> None:
    raw = READ[name]
    config = parse_hf_config(raw, name)
    if name in PRESETS:
        preset = PRESETS[name].config
        alike = {field: getattr(preset, field) for field in TUNING_FIELDS}
        assert replace(config, **alike) == preset
    architecture = raw["architectures"][0]
    if is_head(raw):
        assert config.architecture == EAGLE_HEAD
    elif architecture in WALKED:
        compare(config, config_class(architecture).from_dict(raw))


def compare(config: ModelConfig, theirs: Any) -> None:
    assert isinstance(theirs, transformers.PreTrainedConfig)
    found = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.output_bias,
        "num_experts": config.experts and config.experts.num_experts,
        "num_local_experts": config.experts and config.experts.num_experts,
        "moe_intermediate_size": config.experts and config.experts.width,
    }
    stated = {field: getattr(theirs, field, None) for field in found}
    if theirs.model_type == "falcon":  # which has KV heads under another name, for one kind
        stated["num_key_value_heads"] = theirs.num_kv_heads
        if not theirs.new_decoder_architecture:
            stated["num_key_value_heads"] = 1 if theirs.multi_query else theirs.num_attention_heads
    stated = {field: value for field, value in stated.items() if value is not None}
    if theirs.model_type in ("qwen2", "qwen2_moe"):
        stated.pop("attention_bias", None)
    assert {field: found[field] for field in stated} == stated
    ropes = getattr(theirs, "rope_parameters", None)
    if ropes:
        full = ropes.get("full_attention", ropes)
        assert config.rope.theta == full["rope_theta"]
        assert config.rope.rope_type == full["rope_type"]
        assert full.get("factor", config.rope.factor) == config.rope.factor
    types = getattr(theirs, "layer_types", None)
    if types:
        every = [kind.window for kind in config.kinds]
        assert every == [theirs.sliding_window if t == "sliding_attention" else None for t in types]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hf_config(REFUSED[name]["config"], name)
    assert REFUSED[name]["because"] in str(caught.value)
