"""Qwen2 and Qwen2.5: Llama with biases on q, k and v. Qwen3: with norms on each head of q and k."""

from __future__ import annotations

from typing import Any

from magicdec.model.families import llama
from magicdec.model.families.family import Family
from magicdec.model.families.fields import Raw, size


def read_qwen2(raw: Raw) -> dict[str, Any]:
    own = {"qkv_bias": True, "output_bias": False, "sliding_window": sliding_window(raw)}
    return llama.read(raw) | own


def read_qwen3(raw: Raw) -> dict[str, Any]:
    head_dim = size(raw, "head_dim", default=128)
    own = {"head_dim": head_dim, "qk_norm": True, "sliding_window": sliding_window(raw)}
    return llama.read(raw) | own


def sliding_window(raw: Raw) -> int | None:
    """The window if `use_sliding_window` is set. Only a window on all layers is supported, so
    `max_window_layers`, the first layer with the window, must be 0 or the number of layers."""
    num_layers = raw["num_hidden_layers"]
    first = raw.get("max_window_layers", 28) if raw.get("use_sliding_window") else num_layers
    if 0 < first < num_layers:
        raise ValueError(f"max_window_layers {first} is not supported; choose 0 or {num_layers}")
    window = raw.get("sliding_window", 4096) if first == 0 else None
    return int(window) if window else None


QWEN2, QWEN3 = Family(read_qwen2), Family(read_qwen3)
