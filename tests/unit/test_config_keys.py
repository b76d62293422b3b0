"""Every field of a `config.json` is computed, is refused by its name, or is on the list of those
that do not matter. The walk goes through what transformers reads, which shows a new field."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_families import HYBRIDS
from transformers.models.auto.configuration_auto import model_type_to_module_name

from magicdec.model.config import ModelConfig
from magicdec.model.families.config_keys import FIXED, is_irrelevant
from magicdec.model.families.family import find_family
from magicdec.model.families.fields import ConfigFields
from magicdec.model.families.hf_config import parse_hf_config
from magicdec.names import ARCHITECTURES

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
WIDE = {"intermediate_size": 48, "max_position_embeddings": 128}
WINDOW = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}
# Settings under which as many fields as possible have an effect.
WALKED: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("Llama", SIZES | WIDE),
    "MistralForCausalLM": ("Mistral", SIZES | WIDE | {"num_key_value_heads": 2}),
    "MinistralForCausalLM": ("Ministral", SIZES | WIDE | {"num_key_value_heads": 2}),
    "Gemma3ForCausalLM": ("Gemma3Text", SIZES | WIDE | {"num_key_value_heads": 2}),
    "MixtralForCausalLM": ("Mixtral", SIZES | WIDE | {"num_key_value_heads": 2}),
    "Qwen2MoeForCausalLM": (
        "Qwen2Moe",
        SIZES | WIDE | WINDOW | {"num_key_value_heads": 2, "max_window_layers": 3},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3Moe", SIZES | WIDE | WINDOW | {"num_key_value_heads": 2}),
    "GptOssForCausalLM": ("GptOss", SIZES | WIDE | {"num_key_value_heads": 2}),
    "Qwen2ForCausalLM": ("Qwen2", SIZES | WIDE | WINDOW | {"num_key_value_heads": 2}),
    "Qwen3ForCausalLM": ("Qwen3", SIZES | WIDE | WINDOW | {"num_key_value_heads": 2}),
    "GPT2LMHeadModel": ("GPT2", GPT),
    "GPTBigCodeForCausalLM": ("GPTBigCode", GPT),
    "GPTJForCausalLM": ("GPTJ", GPT | {"rotary_dim": 4}),
    "FalconForCausalLM": ("Falcon", SIZES | {"new_decoder_architecture": True}),
    "BloomForCausalLM": ("Bloom", SIZES),
}
# Of the classes themselves, not of a file.
METHODS = {"get_text_config", "to_dict", "save_pretrained", "per_layer_config", "dtype"}
# What parse_hf_config reads besides the family, and what its callers have.
ELSEWHERE = {"model_type", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "n_embed"}
# Of the class with images, whose code stands in the same file.
IMAGES = {"mm_tokens_per_image", "text_config", "token_type_ids", "vision_config"}
GENERATION = set(transformers.GenerationConfig().to_dict())
# Not part of transformers.
UNKNOWN = {"BaiChuanForCausalLM", "BaichuanForCausalLM", "MiMoForCausalLM"}


def config_class(architecture: str) -> Any:
    return getattr(transformers, f"{WALKED[architecture][0]}Config")


def saved(architecture: str) -> dict[str, Any]:
    """A config with all fields that transformers would write, except those that follow from others
    of them."""
    raw = config_class(architecture)(**WALKED[architecture][1]).to_dict()
    raw.pop("layer_types", None)
    if architecture == "GPTBigCodeForCausalLM":
        del raw["num_key_value_heads"]
    raw = json.loads(json.dumps(raw, default=str))
    return raw | {"architectures": [architecture]}


def parse(raw: dict[str, Any]) -> ModelConfig:
    return parse_hf_config(raw, "test")


def fields_in_code(architecture: str) -> set[str]:
    """Fields that the code of transformers reads: those of the class, and by name."""
    cls = config_class(architecture)
    names = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)
    module = model_type_to_module_name(cls.model_type)
    folder = Path(inspect.getfile(cls)).parent
    text = (folder / f"modeling_{module}.py").read_text(encoding="utf-8")
    text += (folder / f"configuration_{module}.py").read_text(encoding="utf-8")
    text += inspect.getsource(transformers.PreTrainedConfig.__post_init__)
    text += inspect.getsource(transformers.PreTrainedConfig.convert_rope_params_to_dict)
    text += inspect.getsource(transformers.PreTrainedConfig.standardize_rope_params)
    names |= set(re.findall(r"\bconfig\.([a-z]\w*)\b(?!\()", text)) - {"json"}
    names |= set(re.findall(r"\bkwargs\.(?:pop|get)\(\s*\"(\w+)\"", text))
    return names | set(re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", text))


def was_read(architecture: str, raw: dict[str, Any]) -> frozenset[str]:
    fields = ConfigFields(raw)
    find_family(architecture).read(fields)
    return fields.was_read()


def test_every_architecture_is_walked() -> None:
    assert set(WALKED) == set(ARCHITECTURES) - UNKNOWN - HYBRIDS  # test_planned_models.py has them


@pytest.mark.parametrize("architecture", WALKED)
def test_no_field_of_transformers_is_forgotten(architecture: str) -> None:
    fields = fields_in_code(architecture)
    fields -= IMAGES if architecture == "Gemma3ForCausalLM" else set()
    assert len(fields) > 30 and "vocab_size" in fields
    known = was_read(architecture, saved(architecture)) | set(FIXED) | METHODS | ELSEWHERE
    assert sorted(f for f in fields - known if not is_irrelevant(f)) == []


def test_how_to_generate_is_irrelevant() -> None:
    """Configs before 2023 held what a `generation_config.json` holds, and some still do."""
    assert len(GENERATION) > 40
    assert sorted(f for f in GENERATION if not is_irrelevant(f)) == []


def other(value: Any) -> Any:
    """Another value of the kind that the field has."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value // 2 or 2
    if isinstance(value, float):
        return value * 2 or 0.5
    if isinstance(value, dict):
        return {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    return "other" if isinstance(value, str) else 16


@pytest.mark.parametrize("architecture", WALKED)
def test_another_value_is_computed_or_refused(architecture: str) -> None:
    """Each field of the class that is not irrelevant, changed by itself."""
    raw = saved(architecture)
    base = parse(saved(architecture))
    kinds = {"layer_types": ["full_attention"] * 3}
    ignored = {"multi_query"} if architecture == "FalconForCausalLM" else set()
    changed = 0
    for field in (f.name for f in dataclasses.fields(config_class(architecture))):
        if is_irrelevant(field) or field in ignored:
            continue
        changed += 1
        value = kinds.get(field, other(raw.get(field)))
        try:
            assert parse(raw | {field: value}) != base, f"{field} {value} changes nothing"
        except ValueError as error:
            assert field in str(error) or "rotary_dim" in str(error), f"{field}: {error}"
    assert changed > 8


@pytest.mark.parametrize("field", FIXED)
def test_a_field_without_code_has_one_value(field: str) -> None:
    architecture = next(a for a in WALKED if field not in was_read(a, saved(a)))
    raw = {k: v for k, v in saved(architecture).items() if k != field}
    for value in FIXED[field]:
        assert parse(raw | {field: value}) == parse(raw)
    with pytest.raises(ValueError, match=rf"^{field} .* is not supported for {architecture}"):
        parse(raw | {field: "another"})


def test_unknown_fields() -> None:
    raw = saved("LlamaForCausalLM")
    with pytest.raises(ValueError, match=r"^logits_scaling 8\.0 is not known for Llama.*; remove"):
        parse(raw | {"logits_scaling": 8.0})
    for known in ({"logits_scaling": None}, {"_own": 1}, {"attention_dropout": 0.5}):
        assert parse(raw | known) == parse(raw)
    with pytest.raises(ValueError) as caught:
        parse(raw | {"vision_config": {str(i): i for i in range(1000)}})
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported; choose from llama"),
        ({"sliding_window": 64}, "sliding_window 64 is not supported"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window None is not supported"),
        ({"attention_bias": "no"}, "attention_bias 'no' is not supported; choose from true, false"),
        ({"vocab_size": True}, "vocab_size True is not a positive whole number"),
    ],
)
def test_refused_for_llama(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        parse(saved("LlamaForCausalLM") | changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("GPT2LMHeadModel", {"hidden_size": 64}, "n_embd 32 and hidden_size 64 contradict"),
        ("BloomForCausalLM", {"n_embed": 64}, "hidden_size 32 and n_embed 64 contradict"),
        ("FalconForCausalLM", {"n_head_kv": 2, "num_kv_heads": 4}, "num_kv_heads 4 and n_head_kv"),
        ("FalconForCausalLM", {"parallel_attn": False}, "parallel_attn False is not supported"),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn 3"),
        ("GPTBigCodeForCausalLM", {"num_key_value_heads": 4}, "num_key_value_heads 4"),
        ("MistralForCausalLM", {"attention_bias": True}, "attention_bias True is not supported"),
        ("MistralForCausalLM", {"use_sliding_window": False}, "use_sliding_window false and slid"),
        ("MistralForCausalLM", {"sliding_window": 0}, "sliding_window 0 is not a positive"),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types .* no list of 3"),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": None},
            "sliding_attention, but no sliding_window",
        ),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            "Gemma3ForCausalLM",
            {"rope_parameters": {"rope_theta": 1e4}},
            "is no object with a table",
        ),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": 5.0}, "of sliding_attention contradicts"),
        ("Gemma3ForCausalLM", {"rope_scaling": {"factor": 8.0}}, "rope_parameters .* contradict"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "9 is more than the 8 experts"),
        ("MixtralForCausalLM", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["1"]}, "mlp_only_layers .* is no list of num"),
        ("Qwen3ForCausalLM", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
        ("Qwen3MoeForCausalLM", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
        ("Qwen3MoeForCausalLM", {"shared_expert_intermediate_size": 8}, "shared_expert_inter.* 8"),
        ("Qwen3ForCausalLM", {"layer_types": ["conv"] * 3}, "layer_types: 'conv' is not supported"),
        (
            "MistralForCausalLM",
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            r"layer_types mixes full_attention \(layer 0\) and sliding_attention \(layer 1\)",
        ),
        (
            "Qwen2ForCausalLM",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            "layer_types is sliding_attention, but no sliding_window",
        ),
    ],
)
def test_contradictions(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(saved(architecture) | changes)


def test_layer_types_that_are_alike() -> None:
    for architecture in ("MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        raw = saved(architecture) | {"sliding_window": 32}
        for kind, window in (
            ("full_attention", None),
            ("attention", None),
            ("sliding_attention", 32),
        ):
            assert parse(raw | {"layer_types": [kind] * 3}).windows == (window,)
    past = {"max_window_layers": 3, "layer_types": ["sliding_attention"] * 3}
    assert parse(saved("Qwen2ForCausalLM") | past).windows == (32,)


def test_missing_heads_are_those_of_transformers() -> None:
    for architecture, heads in (("MistralForCausalLM", 8), ("Qwen2ForCausalLM", 32)):
        raw = saved(architecture) | {"num_attention_heads": 32, "head_dim": 8}
        raw.pop("num_key_value_heads", None)
        assert parse(raw).num_kv_heads == heads
        assert config_class(architecture)(**raw).num_key_value_heads == heads


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": PLAIN, "rope_theta": 5e5},
            "rope_theta 500000.0 contradicts the 10000",
        ),
        (
            {"rope_scaling": YARN | {"rope_theta": 3e4}, "rope_theta": 5e5},
            "rope_theta 500000.0 con",
        ),
        (
            {"rope_parameters": PLAIN | {"rope_theta": 5e5}, "rope_scaling": YARN},
            "rope_scaling repl",
        ),
        (
            {"rope_parameters": PLAIN | YARN, "rope_scaling": YARN | {"factor": 8.0}},
            "rope_parameters .* and rope_scaling .* contradict",
        ),
        (
            {"rope_scaling": YARN | {"type": "linear"}},
            "type 'linear' and rope_type 'yarn' contradict",
        ),
        (
            {"rope_scaling": YARN, "original_max_position_embeddings": 64},
            "original_max_position_embeddings 64 contradicts the 32",
        ),
        (
            {"rope_parameters": {"full_attention": PLAIN}},
            "rope_parameters: full_attention .* not read",
        ),
        (
            {"rope_parameters": PLAIN | {"factor": 4.0}},
            "rope_parameters: factor 4.0 is not read with",
        ),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": YARN | {"factor": 0}}, "factor 0 is not a positive finite number"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000}},
            "alpha 1000 is not read",
        ),
        ({"rope_parameters": None, "rope_theta": 0.0}, "rope_theta 0.0 is not a positive finite"),
        ({"rope_scaling": [1]}, r"rope_scaling \[1\] is not a JSON object"),
    ],
)
def test_rope_that_contradicts_itself(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(saved("LlamaForCausalLM") | changes)


def test_rope_that_says_a_thing_twice() -> None:
    raw = saved("LlamaForCausalLM")
    twice = {"rope_parameters": PLAIN | YARN, "rope_scaling": YARN, "rope_theta": 10000.0}
    once = {"rope_parameters": None, "rope_scaling": YARN}
    assert parse(raw | twice).rope == parse(raw | once).rope
    assert parse(raw | once).rope.rope_type == "yarn"


QUANTIZED = [
    ({"quantization_config": {"quant_method": "bitsandbytes", "bits": 4}}, "bitsandbytes"),
    ({"quantization_config": {"quant_algo": "NVFP4"}}, "NVFP4"),
    ({"quantization_config": {"load_in_4bit": True}}, "load_in_4bit"),
    ({"compression_config": {"format": "float-quantized"}}, "compression_config"),
    ({"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
]


@pytest.mark.parametrize(("table", "named"), QUANTIZED)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_foreign_quantization_is_refused(
    architecture: str, table: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(table))}: .*{named}|{named}: ") as caught:
        parse(saved(architecture) | table)
    assert "choose a checkpoint in bfloat16" in str(caught.value)
    assert parse(saved(architecture) | dict.fromkeys(table)) == parse(saved(architecture))
