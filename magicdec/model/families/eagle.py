"""EAGLE-3 heads: the configs that EAGLE, SpecForge, AngelSlim and RedHat's `speculators` write. The
weights say the rest (`checkpoint/eagle_weights.py`). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from magicdec.model.config import EagleConfig, ModelConfig
from magicdec.model.families.config_keys import check_unread
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import ConfigFields, only, shown, size, switch
from magicdec.model.families.llama import read, read_qwen3
from magicdec.names import EAGLE_HEAD

ARCHITECTURES = (
    *(EAGLE_HEAD, "Eagle3DraftModel"),  # speculators
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"),  # SpecForge, AngelSlim
)
LAYERS = "eagle_aux_hidden_state_layer_ids"
# What others call a head by that of its layer, and what none calls itself.
LAYER_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "")
# A head's layer has biases on q, k and v only if `attention_bias` says so, also under "qwen2".
LAYER_FAMILIES = {"llama": read, "qwen2": read, "qwen3": read_qwen3}
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OLD_NAMES = {"fc_norm": "use_aux_norm"}
# How a head was trained, how its makers propose to decode with it, and which of the target's layers
# are mixtures, which the head's is not.
IRRELEVANT = (
    "decoder_sparse_step",
    "embed_requires_grad",
    "has_no_defaults_at_init",
    "speculators_config",
    "speculators_version",
    "target_model_type",
    "truncated_vocab_size",
    "transformers_version",
    "tie_word_embeddings",
    "torch_dtype",
    "dtype",
    "bos_token_id",
    "eos_token_id",
)


def is_head(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a draft head. Some call themselves by the name of the
    architecture of their layer, but only heads have a draft vocabulary."""
    is_named = architecture_of(raw) in ARCHITECTURES or "speculators_model_type" in raw
    return is_named or "draft_vocab_size" in raw


def architecture_of(raw: Mapping[str, Any]) -> str:
    return str((raw.get("architectures") or [""])[0])


def read_head(raw: dict[str, Any], name: str) -> ModelConfig:
    """The ModelConfig of a head. Raises ValueError, or KeyError for a missing field, for what is
    not computed."""
    architecture = architecture_of(raw)
    if architecture not in (*ARCHITECTURES, *LAYER_ARCHITECTURES):
        raise ValueError(
            f"architecture {architecture!r} of a draft head is not supported; choose an EAGLE-3 "
            f"head, which calls itself {', '.join(ARCHITECTURES)}"
        )
    fields = ConfigFields(raw)
    is_of_speculators = "speculators_model_type" in fields
    inner = None
    if is_of_speculators:
        only(fields, "speculators_model_type", "eagle3")
        inner = fields["transformer_layer_config"]
        if not isinstance(inner, dict):
            raise ValueError(f"transformer_layer_config {shown(inner)} is not a table")
    nested = fields.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"eagle_config {shown(nested)} is not a table")
    head_fields = ConfigFields(nested)
    only(head_fields, "use_aux_hidden_state", True)
    switches = {field: _switch(fields, head_fields, field, is_of_speculators) for field in SWITCHES}
    layers = ConfigFields(inner) if isinstance(inner, dict) else fields
    kind = layers.get("model_type") or "llama"
    if kind not in LAYER_FAMILIES:
        raise ValueError(
            f"model_type {shown(kind)} is not supported; choose from {', '.join(LAYER_FAMILIES)}"
        )
    found = LAYER_FAMILIES[kind](layers)
    vocab_size = found.pop("vocab_size")
    found["tie_word_embeddings"] = False  # some say that it is tied, though it has a head
    draft_vocab_size = size(fields, "draft_vocab_size", default=vocab_size)
    state_size = size(fields, "target_hidden_size", default=found["hidden_size"])
    eagle = EagleConfig(
        vocab_size,
        state_size,
        capture=_capture(fields, head_fields),
        is_exact=is_of_speculators,
        **switches,
    )
    for table in (fields, head_fields, layers):
        for field in IRRELEVANT:
            table.get(field)
        check_unread(table, EAGLE_HEAD)
    return ModelConfig(
        name=name, architecture=EAGLE_HEAD, vocab_size=draft_vocab_size, eagle=eagle, **found
    )


def _switch(fields: ConfigFields, head_fields: ConfigFields, field: str, is_stated: bool) -> bool:
    """Of the table or of `eagle_config`. Programs read a missing `norm_before_residual` of
    `speculators` differently."""
    old = OLD_NAMES.get(field, field)
    given = [table for table in (fields, head_fields) if field in table or old in table]
    if not given and is_stated and field == "norm_before_residual":
        raise ValueError(
            f"{field} is missing, which some programs read as true and others as false; add it"
        )
    values = {switch(table, field if field in table else old, False) for table in given}
    if len(values) > 1:
        raise ValueError(f"{field} and that of eagle_config contradict each other")
    return values.pop() if values else False


def _capture(fields: ConfigFields, head_fields: ConfigFields) -> tuple[int, ...] | None:
    lists = [table.get(LAYERS) for table in (fields, head_fields)]
    given = [layers for layers in lists if layers is not None]
    if not given:
        return None
    for layers in given:
        if not isinstance(layers, list) or not all(type(number) is int for number in layers):
            raise ValueError(f"{LAYERS} {shown(layers)} is not a list of layers")
    if len({tuple(layers) for layers in given}) > 1:
        raise ValueError(f"{LAYERS} and that of eagle_config contradict each other")
    return tuple(given[0])


def head_names(config: ModelConfig) -> Names:
    return Names(embedding="embed_tokens", norm="norm", layer="layers.{}.")


EAGLE3 = Family("llama", read, head_names, buffers=("d2t", "t2d"))
