"""The reference backend: gather the visible keys, mask, torch's scaled_dot_product_attention.
Plain, and the others' test."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from magicdec.attention.backend import visible_mask
from magicdec.kv.policy import KVView


class SDPABackend:
    """Copies what is visible every layer; right for any block size, raggedness, policy and
    dtype."""

    def __init__(self, block_size: int = 64) -> None:
        self._block_size = block_size
        self._new: Tensor | None = None
        self._slots: Tensor | None = None
        self._mask: Tensor | None = None

    def block_size(self, max_tokens: int) -> int:
        return self._block_size

    def plan(self, view: KVView) -> None:
        keys = view.key_positions()  # [B, N]
        self._new = view.cache.slots(view.row_index, view.query_positions())
        self._slots = view.cache.slots(view.row_index, keys.clamp(min=0))
        self._mask = visible_mask(view, keys).unsqueeze(1)  # [B, 1, T, N]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        assert self._new is not None and self._slots is not None, "plan before run"
        view.cache.write(layer, self._new, k, v)
        keys, values = view.cache.read(layer, self._slots)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=self._mask, enable_gqa=True
        )
        return out.transpose(1, 2)
