"""Checkpoints in gpt-fast's layout, as the original suite's converter writes them, read under their
Hugging Face names.

Owns the tables of names and the order of rotary rows. Source: `convert_hf_checkpoint.py` of
gpt-fast and of MagicDec, which write one `model.pth`. It holds q, k and v as one matrix, and the
rows of each query and key head of size D are reordered from halves (0, 1, ..., D - 1) to pairs (0,
D/2, 1, D/2 + 1, ...).
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import Index, WeightSource
from magicdec.model.config import ModelConfig

TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
NAME = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)")
FUSED = "attention.wqkv"
KNOWN = re.compile(r"layers\.\d+\.attention\.wqkv\.weight|tok_embeddings\.weight")


class GptFastWeights(WeightSource):
    """The tensors of such a file. Raises ValueError naming the file for tensors that are not part
    of the layout, and for a fused matrix that does not have the config's size."""

    def __init__(self, source: WeightSource, config: ModelConfig) -> None:
        super().__init__(source.path)
        self.source, self.config = source, config
        size, kv_size = config.head_dim * config.num_heads, config.head_dim * config.num_kv_heads
        # For q, k and v: first row in the fused matrix, number of rows, whether they are reordered.
        self._parts = {
            "q_proj": (0, size, True),
            "k_proj": (size, kv_size, True),
            "v_proj": (size + kv_size, kv_size, False),
        }
        # Hugging Face name -> (stored name, key of `_parts` or None for the whole tensor).
        self._places: dict[str, tuple[str, str | None]] = {}
        for stored_name, stored in source.tensors.items():
            rows, *others = stored.shape
            for name, part in self._names_of(stored_name, rows).items():
                self._places[name] = stored_name, part
                shape = (rows if part is None else self._parts[part][1], *others)
                self.tensors[name] = stored._replace(shape=shape)

    def _names_of(self, name: str, rows: int) -> dict[str, str | None]:
        """The Hugging Face tensors that the stored tensor `name` holds, with their keys of
        `_parts`."""
        if name in TOP:
            return {TOP[name]: None}
        match = NAME.fullmatch(name)
        if match is None or (match[2] not in LAYER and match[2] != FUSED):
            raise ValueError(f"{self.path}: tensor {name} is not part of the gpt-fast layout")
        prefix = f"model.layers.{match[1]}"
        if match[2] != FUSED:
            return {f"{prefix}.{LAYER[match[2]]}.{match[3]}": None}
        expected = sum(part[1] for part in self._parts.values())
        if rows != expected:
            raise ValueError(
                f"{self.path}: tensor {name} has {rows} rows, expected {expected} for the heads of "
                "q, k and v in config.json"
            )
        return {f"{prefix}.self_attn.{part}.{match[3]}": part for part in self._parts}

    def read(self, name: str, index: Index = ()) -> Tensor:
        """Rows are in Hugging Face's order."""
        stored_name, part = self._places[name]
        if part is None:
            return self.source.read(stored_name, index)
        first, count, is_reordered = self._parts[part]
        rows = torch.arange(count)[index[:1]]
        if is_reordered:
            rows = paired_rows(rows, self.config.head_dim)
        return self.source.read(stored_name, (slice(None), *index[1:]))[first + rows]


def is_gpt_fast(source: WeightSource) -> bool:
    """Whether the names are of this layout."""
    return any(KNOWN.fullmatch(name) for name in source.tensors)


def paired_rows(rows: Tensor, head_dim: int) -> Tensor:
    """The indices, in a matrix ordered by pairs, of rows (int64, any shape) numbered by halves."""
    head, within = rows // head_dim, rows % head_dim
    half, place = within // (head_dim // 2), within % (head_dim // 2)
    return head * head_dim + 2 * place + half
