"""Which layers have a window, experts or linear attention, one below, at and above each bound of a
config and for even and odd numbers of layers, as the config and model classes of transformers
say."""

from typing import Any

import pytest
import torch
import transformers
from test_planned_models import MODELS as PLANNED
from test_planned_models import saved
from tiny_families import MODELS, SIZES

from magicdec.model.config import LayerKind
from magicdec.model.families.hf_config import parse_hf_config
from magicdec.model.mixers import LinearAttention

SLIDING = "sliding_attention"
LINEAR = "linear_attention"
WINDOWS = {"use_sliding_window": True, "sliding_window": 40}
MIXTURE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GPT_OSS = MODELS["gpt-oss"][1]
NEAR = (-1, 0, 1)  # below, at and above the number of layers


def bounds(num_layers: int, *values: int) -> list[int]:
    return sorted({*values, *(num_layers + step for step in NEAR)})


# Family, its fields, and the field whose values, from the first on, are tried.
BOUNDS: tuple[tuple[str, dict[str, Any], str, int], ...] = (
    ("Qwen2", WINDOWS, "max_window_layers", 0),
    ("Qwen3", WINDOWS | {"head_dim": 16}, "max_window_layers", 0),
    (
        "Qwen2Moe",
        WINDOWS | MIXTURE | {"shared_expert_intermediate_size": 8},
        "max_window_layers",
        0,
    ),
    ("Gemma3", {"head_dim": 16, "sliding_window": 40}, "sliding_window_pattern", 1),
    ("GptOss", GPT_OSS, "sliding_window", 23),  # no bound: every second layer
    ("Qwen3_5", PLANNED["Qwen3_5ForCausalLM"][1], "full_attention_interval", 1),
    ("Qwen3Next", PLANNED["Qwen3NextForCausalLM"][1], "full_attention_interval", 1),
    ("Gemma4", PLANNED["Gemma4ForCausalLM"][1], "sliding_window", 15),  # the last layer is full
)
CONFIGS = {"Gemma3": "Gemma3Text", "Gemma4": "Gemma4Text", "Qwen3_5": "Qwen3_5Text"}


@pytest.mark.parametrize("num_layers", [5, 6, 7])
@pytest.mark.parametrize(("family", "fields", "field", "least"), BOUNDS, ids=[b[0] for b in BOUNDS])
def test_layers_are_of_the_types_of_transformers(
    family: str, fields: dict[str, Any], field: str, least: int, num_layers: int
) -> None:
    architecture = f"{family}ForCausalLM"
    seen = set()
    for value in bounds(num_layers, least, least + 1, least + 2):
        own = SIZES | fields | {"num_hidden_layers": num_layers, field: value}
        own.pop("layer_types", None)
        config = getattr(transformers, f"{CONFIGS.get(family, family)}Config")(**own)
        raw = saved(architecture) if architecture in PLANNED else {}
        raw = raw | own | {"architectures": [architecture]}
        kinds = parse_hf_config(raw, "test").kinds
        assert len(config.layer_types) == len(kinds) == num_layers
        assert [type_of(kind) for kind in kinds] == [
            layer_type if layer_type in (SLIDING, LINEAR) else "full"
            for layer_type in config.layer_types
        ], (field, value)
        seen.add(tuple(config.layer_types))
    assert len(seen) > 1 or family in ("GptOss", "Gemma4")


def type_of(kind: LayerKind) -> str:
    if isinstance(kind.mixer, LinearAttention):
        return LINEAR
    return "full" if kind.window is None else SLIDING


SPARSE: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("Qwen3Moe", MIXTURE, "decoder_sparse_step"),
    ("Qwen2Moe", MIXTURE | {"shared_expert_intermediate_size": 8}, "decoder_sparse_step"),
    ("Qwen3Moe", MIXTURE | {"decoder_sparse_step": 2}, "mlp_only_layers"),
    ("DeepseekV3", PLANNED["DeepseekV3ForCausalLM"][1], "first_k_dense_replace"),
)


@pytest.mark.parametrize("num_layers", [5, 6])
@pytest.mark.parametrize(
    ("family", "fields", "field"), SPARSE, ids=[f"{s[0]} {s[2]}" for s in SPARSE]
)
def test_layers_have_experts_where_those_of_transformers_do(
    family: str, fields: dict[str, Any], field: str, num_layers: int
) -> None:
    architecture = f"{family}ForCausalLM"
    for value in bounds(num_layers, 1, 2, 3):
        own = SIZES | fields | {"num_hidden_layers": num_layers}
        own[field] = [value - 1] if field == "mlp_only_layers" else value
        raw = own | {"architectures": [architecture], "rope_theta": 1e4}
        if field == "first_k_dense_replace" and value > num_layers:
            with pytest.raises(ValueError, match=f"{field} {value} is no number of layers"):
                parse_hf_config(raw, "test")
            continue
        with torch.device("meta"):
            config = getattr(transformers, f"{family}Config")(**own)
            model = getattr(transformers, f"{family}Model")(config)
        expected = [hasattr(layer.mlp, "experts") for layer in model.layers]
        found = parse_hf_config(raw, "test")
        assert [not kind.has_mlp for kind in found.kinds] == expected, (field, value)
