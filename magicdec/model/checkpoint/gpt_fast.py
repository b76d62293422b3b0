"""Checkpoints in gpt-fast's layout, as the original suite's converter writes them, read under their
Hugging Face names.

Owns the tables of names and the order of rotary rows. Source: `convert_hf_checkpoint.py` of
gpt-fast and of MagicDec, which write one `model.pth`. It holds q, k and v as one matrix, and the
rows of each query and key head of size D are reordered from halves (0, 1, ..., D - 1) to pairs (0,
D/2, 1, D/2 + 1, ...).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from magicdec.model.checkpoint.weight_files import PthWeights, WeightSource
from magicdec.model.checkpoint.weight_map import Piece
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


class GptFastWeights(WeightSource):
    """A `WeightSource` that reads such a file. Raises ValueError naming the file for tensors that
    are not part of the layout, and for a fused matrix that does not have the config's size."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        super().__init__(path)
        self.config = config
        self._file = PthWeights(path, gpt_fast=True)
        size, kv_size = config.head_dim * config.num_heads, config.head_dim * config.num_kv_heads
        # For q, k and v: first row in the fused matrix, number of rows, whether they are reordered.
        self._parts = {
            "q_proj": (0, size, True),
            "k_proj": (size, kv_size, True),
            "v_proj": (size + kv_size, kv_size, False),
        }
        # Hugging Face name -> (stored name, key of `_parts` or None for the whole tensor).
        self._places: dict[str, tuple[str, str | None]] = {}
        for stored_name, stored in self._file.tensors.items():
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

    def read(self, piece: Piece) -> Tensor:
        """The slice `piece` in the stored dtype, with rows in Hugging Face's order."""
        stored_name, part = self._places[piece.name]
        stored = self._file.tensors[stored_name].shape
        if part is None:
            return self._file.read(replace(piece, name=stored_name, full_shape=stored))
        first, _, is_reordered = self._parts[part]
        rows = torch.arange(*piece.rows)
        if is_reordered:
            rows = paired_rows(rows, self.config.head_dim)
        everything = replace(piece, name=stored_name, rows=(0, stored[0]), full_shape=stored)
        return self._file.read(everything)[first + rows]


def paired_rows(rows: Tensor, head_dim: int) -> Tensor:
    """The indices, in a matrix ordered by pairs, of rows (int64, any shape) numbered by halves."""
    head, within = rows // head_dim, rows % head_dim
    half, place = within // (head_dim // 2), within % (head_dim // 2)
    return head * head_dim + 2 * place + half
