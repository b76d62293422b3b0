"""The structures of `forward.h`, field by field in its order."""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
KeepWaiting = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def _fields(pointers_and_counts: str) -> list[tuple[str, Any]]:
    """Fields from their names; a name that ends in `*` is a pointer, all others are counts."""
    names = pointers_and_counts.split()
    return [(name.rstrip("*"), _POINTER if name.endswith("*") else _COUNT) for name in names]


class LinearFields(ctypes.Structure):
    _fields_: ClassVar = _fields("packed* bias* scale* N K")


class LayerFields(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields("attention_norm* mlp_norm* q_norm* k_norm* output_bias* down_bias*"),
        *((name, LinearFields) for name in ("qkv", "output", "gate_up", "down")),
    ]


class ModelFields(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields("num_layers hidden H G vocab_size rope_pairs interleaved"),
        ("eps", ctypes.c_float),
        ("query_scale", ctypes.c_float),
        *_fields("embedding* norm* rope*"),
        ("head", LinearFields),
        ("first_id", _COUNT),
        ("layers", ctypes.POINTER(LayerFields)),
    ]


class CacheFields(ctypes.Structure):
    _fields_: ClassVar = _fields("k* v* layer_bytes table_stride block_size table*")


class ExchangeFields(ctypes.Structure):
    _fields_: ClassVar = [
        *_fields("segment* rank size slot_bytes patience"),
        ("keep_waiting", KeepWaiting),
        ("turn", ctypes.c_uint64),
    ]


class CallFields(ctypes.Structure):
    _fields_: ClassVar = _fields(
        "B T steps tokens* rows* seq_lens* committed* offsets* hidden_in* ranges* range_layers "
        "range_heads num_ranges window base* parents* cells* num_nodes last_only logits* "
        "hidden_out* drafts* mass* num_blocks queries* cancelled* "
        "cancelled_value layers_done keys_seen keys_read"
    )
    kept: list[Any]  # tensors that the fields point into
