"""The structures of `forward_part.h`, field by field, with descriptions of models and caches for
that library. They hold addresses, so the tensors must outlive them.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from magicdec.kv.cache import KVCache
from magicdec.model.block import MLP, Block
from magicdec.model.config import ModelConfig
from magicdec.model.eagle import EagleHead, FirstBlock
from magicdec.model.elementwise.native import CLAMPED, GELU, SILU
from magicdec.model.experts import Experts
from magicdec.model.linear.packed import Linear, PackedLinear, format_numbers, multiply_in_team
from magicdec.model.transformer import Transformer, embedding_scale

_POINTER = ctypes.c_void_p
_COUNT = ctypes.c_int64
KeepWaiting = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def _fields(pointers_and_counts: str) -> list[tuple[str, Any]]:
    """Fields from names: pointers end in `*`, others are counts."""
    names = pointers_and_counts.split()
    return [(name.rstrip("*"), _POINTER if name.endswith("*") else _COUNT) for name in names]


class LinearFields(ctypes.Structure):
    _fields_: ClassVar = _fields(
        "packed* bias* N K bits group scale_type has_minimum least rounds order*"
    )


class GateFields(ctypes.Structure):
    """`Gate` of rows.h."""

    _fields_: ClassVar = [
        *_fields("kind"),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    ]


class ExpertsFields(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields("num_experts num_used renormalises"),
        ("router", LinearFields),
        *_fields("gate_up* down* down_bias*"),
        ("gate", GateFields),
        *((name, LinearFields) for name in ("shared_gate_up", "shared_down", "shared_gate")),
    ]
    kept: list[Any]  # arrays that the fields point to


class LayerFields(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields("attention_norm* mlp_norm* q_norm* k_norm* post_attention_norm* post_mlp_norm*"),
        *_fields("output_bias* down_bias* rope* sinks*"),
        ("query_scale", ctypes.c_float),
        *((name, LinearFields) for name in ("qkv", "output", "gate_up", "down")),
        ("experts", _POINTER),
    ]
    kept: ExpertsFields | None  # what `experts` points to


class ModelFields(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields("num_layers hidden H G vocab_size rope_pairs interleaved"),
        ("eps", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        *_fields("embedding* norm*"),
        ("head", LinearFields),
        *_fields("multiply*"),
        ("gate", GateFields),
        *_fields("first_id hidden_norm* target_ids* norm_before_residual norm_output"),
        ("layers", ctypes.POINTER(LayerFields)),
    ]


class CacheFields(ctypes.Structure):
    _fields_: ClassVar = _fields("k* v* layer_bytes table_stride block_size table*")


class ExchangeFields(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields("segment* rank size slot_bytes wait_ms"),
        ("keep_waiting", KeepWaiting),
        ("turn", ctypes.c_uint64),
    ]


class ViewFields(ctypes.Structure):
    _fields_: ClassVar = _fields("ranges* layers heads num_ranges window keys_seen")


class CallFields(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields(
            "B T steps tokens* rows* seq_lens* committed* offsets* hidden_in* views* num_views "
            "view_of* is_of_prompt num_outputs logits* hidden_out* drafts* mass* num_blocks "
            "queries* states* state_layers* num_states cancelled* "
            "cancelled_value layers_done keys_read num_drafted experts_read not_finite"
        ),
        ("pa", ctypes.c_double),
    ]
    kept: list[Any]  # tensors that the fields point into


def describe_model(
    model: Transformer,
    num_heads: int,
    num_kv_heads: int,
    layers: ctypes.Array[LayerFields],
    dtype: torch.dtype,
) -> ModelFields:
    """`num_heads` and `num_kv_heads` are this rank's. Parts of a model get null pointers for
    weights that they lack. `layers` get the rotary tables, which may have grown."""
    config = model.config
    eagle = config.eagle
    for layer, number in zip(layers, model.layers, strict=True):
        layer.rope = model.rope_of(number).data_ptr()
    has_head = model.is_last and (model.has_head or eagle is not None)
    head = LinearFields()
    if has_head:
        assert model.head is not None, "packed models have a head"
        head = _linear(model.head, True)
    head_fields: tuple[int | None, ...] = (None, None, 0, 0)
    first = model.blocks[0]
    if isinstance(model, EagleHead) and isinstance(first, FirstBlock):
        norm: int = first.hidden_norm.weight.data_ptr()
        switches = int(first.norm_before_residual), int(model.norm_output)
        head_fields = (norm, model.target_ids.data_ptr(), *switches)
    return ModelFields(
        len(model.blocks),
        config.hidden_size,
        num_heads,
        num_kv_heads,
        config.vocab_size if eagle is None else eagle.target_vocab_size,
        next(iter(model.ropes.values())).shape[2],
        config.rope.interleaved,
        config.norm_eps,
        embedding_scale(config, dtype),
        model.embedding.weight.data_ptr() if model.has_embedding or eagle is not None else None,
        model.norm.weight.data_ptr() if has_head else None,
        head,
        multiply_in_team(dtype),
        GateFields(GELU if config.activation == "gelu_tanh" else SILU),
        model.head_rows[0],
        *head_fields,
        layers,
    )


def describe_cache(cache: KVCache) -> CacheFields:
    return CacheFields(
        cache.k.data_ptr(),
        cache.v.data_ptr(),
        cache.k.stride(0) * cache.k.element_size(),
        cache.block_table.shape[1],
        cache.shape.block_size,
        cache.block_table.data_ptr(),
    )


def describe_layer(block: Block, query_scale: float, sinks: Tensor | None) -> LayerFields:
    attention = block.self_attention
    mlp = block.mlp
    mlp_norm = block.mlp_norm
    norms = (
        block.attention_norm,
        mlp_norm,
        attention.q_norm,
        attention.k_norm,
        block.post_attention_norm,
        block.post_mlp_norm,
    )
    experts = mlp if isinstance(mlp, Experts) else None
    down_bias = None
    linears = LinearFields(), LinearFields()
    if isinstance(mlp, MLP):
        down_bias = mlp.down.bias
        linears = _linear(mlp.gate_up, True), _linear(mlp.down, False)
    layer = LayerFields(
        *(None if norm is None else norm.weight.data_ptr() for norm in norms),
        pointer(attention.output.bias),
        pointer(down_bias),
        None,
        pointer(sinks),
        query_scale,
        _linear(attention.qkv, True),
        _linear(attention.output, False),
        *linears,
    )
    layer.kept = None if experts is None else _experts(experts)
    if layer.kept is not None:
        layer.experts = ctypes.addressof(layer.kept)
    return layer


def _experts(experts: Experts) -> ExpertsFields:
    number = len(experts.down)
    array = LinearFields * number
    gate_up = array(*(_linear(layer, True) for layer in experts.gate_up))
    down = array(*(_linear(layer, False) for layer in experts.down))
    biases = [cast(Linear, layer).bias for layer in experts.down]
    down_bias = None
    if experts.is_first and biases[0] is not None:
        down_bias = (_POINTER * number)(*map(pointer, biases))
    gate = experts.gate
    fields = ExpertsFields(
        number,
        experts.num_used,
        experts.renormalises,
        _linear(experts.router, True),
        ctypes.addressof(gate_up),
        ctypes.addressof(down),
        None if down_bias is None else ctypes.addressof(down_bias),
        GateFields(SILU) if gate is None else GateFields(CLAMPED, gate.limit, gate.alpha),
        *(
            LinearFields() if layer is None else _linear(layer, False)
            for layer in (experts.shared_gate_up, experts.shared_down, experts.shared_gate)
        ),
    )
    fields.kept = [gate_up, down, down_bias]
    return fields


def _linear(linear: nn.Module, adds_bias: bool) -> LinearFields:
    assert isinstance(linear, PackedLinear), "checked before the run"
    return LinearFields(
        linear.packed.data_ptr(),
        pointer(linear.bias if adds_bias else None),
        linear.out_features,
        linear.in_features,
        *(format_numbers(linear.format) if linear.format is not None else [0] * 5),
        linear.rounds,
        pointer(linear.order),
    )


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def layer_obstacle(config: ModelConfig) -> str | None:
    """The first part of the model's layers that the library cannot compute."""
    obstacles = {
        f"{config.norm} norms": config.norm != "rms",
        f"{config.positions} positions": config.positions != "rope",
        f"{config.residual} residuals": config.residual != "sequential",
        "an MLP without a gate": not config.gated_mlp,
        f"{config.activation} activations": config.activation not in ("silu", "gelu_tanh"),
        "a norm after the embedding": config.embedding_norm,
        "linear attention": bool(config.mixers),
        "gates of attention": config.gated_attention,
        "a head for multi-token prediction": config.is_mtp,
        f"hidden size {config.hidden_size}, which is odd": config.hidden_size % 2 == 1,
    }
    return next((part for part, applies in obstacles.items() if applies), None)
