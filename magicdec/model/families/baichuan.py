"""Baichuan 7B (RoPE) and 13B (ALiBi): Llama with q, k and v in one tensor, `W_pack`.

Their architecture names differ only in case, so a field tells them apart: the 7B config has
`max_position_embeddings`, the 13B config has `model_max_length` instead.
"""

from __future__ import annotations

from typing import Any

from magicdec.model.config import ModelConfig
from magicdec.model.families import llama
from magicdec.model.families.family import Family, Names
from magicdec.model.families.fields import Raw, size

BAICHUAN_2_VOCABULARY = 125696


def read(raw: Raw) -> dict[str, Any]:
    if "z_loss_weight" in raw or raw.get("vocab_size") == BAICHUAN_2_VOCABULARY:
        raise ValueError(
            f"vocab_size {raw.get('vocab_size')} or z_loss_weight shows that this is Baichuan 2, "
            "whose normalised head is not supported; choose Baichuan 1"
        )
    if "max_position_embeddings" in raw:
        return llama.read(raw)
    length = size(raw, "model_max_length")
    return llama.read(raw | {"max_position_embeddings": length}) | {"positions": "alibi"}


def names(config: ModelConfig) -> Names:
    return Names(qkv=("self_attn.W_pack",), packing="stacked")


BAICHUAN = Family(read, names)
