"""Models with selective state spaces (Mamba 2) in most layers and attention in some, which
`magicdec plan` alone knows: Nemotron-H and Nemotron 3, and Granite 4. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from magicdec.model.config import ExpertsConfig, LayerKind
from magicdec.model.families.family import Family
from magicdec.model.families.fields import ConfigFields, only, shown, size, switch
from magicdec.model.families.planned import (
    LINEAR,
    common,
    free,
    types_of_layers,
    uncounted_quantization,
)
from magicdec.model.families.windows import FULL
from magicdec.model.mixers import Mamba2

MLP = "mlp"
EXPERTS = "moe"
# Parts of Nemotron-H by their signs in a pattern, and older names of parts.
PARTS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
OLDER = {"mamba": LINEAR, "attention": FULL}
POSITIONS = {"rope": "rope", "nope": "none"}  # of attention, by its name in a config
NAMES_OF_PARTS = ("layers_block_type", "layer_types")
PATTERN = "hybrid_override_pattern"


def read_nemotron_h(raw: ConfigFields) -> dict[str, Any]:
    """Each of the published layers is one part, behind one norm: a state space, attention, an MLP
    or experts. Here a layer is a mixer with the MLP or the experts behind it, if any are."""
    uncounted_quantization(raw)
    free(raw, "nemotron_h")
    only(raw, "mlp_hidden_act", "relu2")
    only(raw, "mamba_hidden_act", "silu")
    only(raw, "mlp_bias", False)
    only(raw, "use_bias", False)
    only(raw, "mamba_proj_bias", False)
    only(raw, "sliding_window", None)
    only(raw, "moe_latent_size", None)
    only(raw, "n_shared_experts", 1)
    only(raw, "mamba_ssm_cache_dtype", "float32")
    parts = parts_of(raw)
    fields = common(raw, len(parts))
    mixer = Mamba2(
        size(raw, "mamba_num_heads", default=128),
        size(raw, "mamba_head_dim", default=64),
        size(raw, "n_groups", "mamba_n_groups", default=8),
        size(raw, "ssm_state_size", default=128),
        size(raw, "conv_kernel", "mamba_d_conv", default=4),
        switch(raw, "use_conv_bias", True),
    )
    kinds = kinds_of(parts, mixer)
    width = size(raw, "moe_intermediate_size", default=7688)
    experts = ExpertsConfig(
        size(raw, "n_routed_experts", "num_local_experts", default=8),
        size(raw, "num_experts_per_tok", default=2),
        width,
        shared_width=size(raw, "moe_shared_expert_intermediate_size", default=7688),
    )
    return fields | {
        "num_layers": len(kinds),
        "intermediate_size": size(raw, "intermediate_size", default=21504),
        "num_kv_heads": size(raw, "num_key_value_heads", default=8),
        "head_dim": size(raw, "head_dim", "attention_head_dim", default=128),
        "norm_eps": float(raw.get("layer_norm_epsilon", 1e-5)),
        "gated_mlp": False,
        "positions": "none",
        "layer_kinds": tuple(kinds),
        "experts": experts if EXPERTS in parts else None,
        "planned_only": "ssm_state_size (Mamba 2)",
    }


def parts_of(raw: ConfigFields) -> list[str]:
    """The parts one after another, of a list of names or a pattern of signs. Raises ValueError if
    what is stated differs, or is not as long as `num_hidden_layers`."""
    found = {
        field: parts_stated(field, raw[field])
        for field in (*NAMES_OF_PARTS, PATTERN)
        if raw.get(field) is not None
    }
    if not found:
        raise ValueError(f"{NAMES_OF_PARTS[0]} is missing, and {PATTERN}, too")
    field, parts = next(iter(found.items()))
    other = next((name for name in found if found[name] != parts), None)
    if other is not None:
        raise ValueError(f"{field} and {other} contradict each other")
    if size(raw, "num_hidden_layers", default=len(parts)) != len(parts):
        raise ValueError(
            f"{field} has {len(parts)} layers, and num_hidden_layers is "
            f"{raw.get('num_hidden_layers')}"
        )
    return parts


def parts_stated(field: str, stated: Any) -> list[str]:
    if field == PATTERN and isinstance(stated, str) and set(stated) <= set(PARTS):
        return [PARTS[sign] for sign in stated]
    known = {name: name for name in PARTS.values()} | OLDER
    if field != PATTERN and isinstance(stated, list) and all(name in known for name in stated):
        return [known[name] for name in stated]
    choices = PARTS if field == PATTERN else PARTS.values()
    raise ValueError(
        f"{field} {shown(stated)} has parts that are not counted; choose from {', '.join(choices)}"
    )


def kinds_of(parts: list[str], mixer: Mamba2) -> list[LayerKind]:
    """A layer for each mixer, with what stands behind it."""
    kinds = list[LayerKind]()
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        if part in (MLP, EXPERTS):
            if before not in (LINEAR, FULL):
                raise ValueError(
                    f"layers_block_type: {part} behind {before or 'nothing'} is not counted; an "
                    f"{MLP} or {EXPERTS} stands behind {LINEAR} or {FULL}"
                )
            continue
        kinds.append(
            LayerKind(
                mixer=mixer if part == LINEAR else None,
                has_mlp=after == MLP,
                is_mixer_alone=after not in (MLP, EXPERTS),
            )
        )
    return kinds


def read_granite_hybrid(raw: ConfigFields) -> dict[str, Any]:
    """An MLP that every token goes to in each layer, and experts beside it, if there are any."""
    uncounted_quantization(raw)
    free(raw, "granite_hybrid")
    only(raw, "mamba_proj_bias", False)
    only(raw, "hidden_act", "silu")
    fields = common(raw)
    hidden = fields["hidden_size"]
    num_heads = size(raw, "mamba_n_heads", default=128)
    width = size(raw, "mamba_expand", default=2) * hidden
    stated = raw.get("mamba_d_head", "auto")
    head_dim = width // num_heads if stated == "auto" else size(raw, "mamba_d_head")
    if num_heads * head_dim != width:
        raise ValueError(
            f"mamba_d_head {head_dim} times mamba_n_heads {num_heads} is not mamba_expand times "
            f"hidden_size, {width}"
        )
    mixer = Mamba2(
        num_heads,
        head_dim,
        size(raw, "mamba_n_groups", default=1),
        size(raw, "mamba_d_state", default=256),
        size(raw, "mamba_d_conv", default=4),
        switch(raw, "mamba_conv_bias", True),
    )
    types = [OLDER.get(kind, kind) for kind in layer_types(raw, fields["num_layers"])]
    shared = size(raw, "shared_intermediate_size", default=1024)
    num_experts = raw.get("num_local_experts", 8)
    experts = None
    if num_experts:
        experts = ExpertsConfig(
            size(raw, "num_local_experts", default=8),
            size(raw, "num_experts_per_tok", default=2),
            size(raw, "intermediate_size", default=11008),
            shared_width=shared,
        )
    else:
        for field in ("num_experts_per_tok", "intermediate_size"):
            raw.get(field)  # of experts that are not there
    return fields | {
        "intermediate_size": shared,
        "num_kv_heads": size(raw, "num_key_value_heads", default=fields["num_heads"]),
        "head_dim": hidden // fields["num_heads"],
        "positions": positions(raw),
        "layer_kinds": tuple(LayerKind(mixer=mixer if kind == LINEAR else None) for kind in types),
        "experts": experts,
        "planned_only": "mamba_d_state (Mamba 2)",
    }


def positions(raw: ConfigFields) -> str:
    stated = raw.get("position_embedding_type")
    if stated not in (None, *POSITIONS):
        raise ValueError(
            f"position_embedding_type {shown(stated)} is not supported; choose from "
            f"{', '.join(POSITIONS)}"
        )
    return POSITIONS["nope" if stated is None else stated]


def layer_types(raw: ConfigFields, num_layers: int) -> list[str]:
    """Every one a state space where no list is."""
    if raw.get("layer_types") is None and raw.get("layers_block_type") is None:
        return [LINEAR] * num_layers
    field = "layer_types" if raw.get("layer_types") is not None else "layers_block_type"
    table = ConfigFields({"num_hidden_layers": num_layers, "layer_types": raw[field]})
    return types_of_layers(table, (LINEAR, FULL, *OLDER), 1, LINEAR)


NEMOTRON_H = Family("nemotron_h", read_nemotron_h)
GRANITE_HYBRID = Family("granitemoehybrid", read_granite_hybrid)
