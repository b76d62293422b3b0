"""The reference backend for tests of others: it copies visible keys and calls torch's
scaled_dot_product_attention with a mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend, CallSize, sum_blocks, visible_mask
from magicdec.attention.sinks import fused_attention, softmax_with_sinks
from magicdec.config.capabilities import Capabilities
from magicdec.kv.layout import CODED, PLAIN, KVLayout
from magicdec.kv.view import KVView


class SDPABackend(AttentionBackend):
    """A backend for any block size, row lengths, KV policy and dtype."""

    capabilities = Capabilities("sdpa", reads_codes=True)

    def __init__(self, block_size: int = 64) -> None:
        self._block_size = block_size
        self._new: Tensor | None = None
        self._chosen: tuple[Tensor, Tensor, Tensor] | None = None

    @staticmethod
    def working_bytes(size: CallSize) -> int:
        """Copies of K and V and the mask; codes and what they are in float32 come before."""
        widened = (1 + 4) * size.kv_numbers if size.is_coded else 0
        return size.kv_bytes + widened + size.mask_bytes

    @staticmethod
    def weights_bytes(size: CallSize) -> int:
        """Keys, scores and weights of the second softmax, in float32."""
        scores = size.B * size.num_heads * size.T * size.S
        return 4 * (size.B * size.S * size.num_kv_heads * size.head_dim + 3 * scores)

    def block_size(self, max_tokens: int) -> int:
        return self._block_size

    def layout(self, dtype: torch.dtype) -> KVLayout:
        return CODED.get(dtype, PLAIN)

    def plan(self, view: KVView) -> None:
        self._new = view.cache.slots(view.row_index, view.query_positions())
        self._chosen = None if view.per_head else _choose(0, view)

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        assert self._new is not None, "plan before run"
        view.cache.write(layer, self._new, k, v)
        _, slots, mask = self._chosen or _choose(layer, view)
        keys, values = (entries.to(q.dtype) for entries in view.cache.read(layer, slots))
        if mask.shape[1] > 1:
            mask = mask.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        return fused_attention(q, keys, values, mask, self.layer_sinks(layer))

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        """Computes the softmax again, in float32, because torch does not return it."""
        out = self.run(layer, q, k, v, view)
        positions, slots, mask = self._chosen or _choose(layer, view)
        keys = view.cache.read(layer, slots)[0].float()  # [B, G, N, D]
        rows, num_new, _, size = q.shape
        packed = q.float().view(rows, num_new, keys.shape[1], -1, size).permute(0, 2, 3, 1, 4)
        scores = packed @ keys.unsqueeze(2).transpose(-1, -2) * size**-0.5  # [B, G, H/G, T, N]
        scores = scores.masked_fill(~mask.unsqueeze(2), float("-inf"))
        sinks = self.layer_sinks(layer)
        if sinks is not None:
            sinks = sinks.view(keys.shape[1], -1, 1).expand(scores.shape[1:4])
        weights = softmax_with_sinks(scores, sinks).sum(dim=(2, 3))
        return out, sum_blocks(weights, positions, view.num_weight_blocks)


def _choose(layer: int, view: KVView) -> tuple[Tensor, Tensor, Tensor]:
    """The positions [B, G or 1, N], slots [B, G, N] and mask [B, G or 1, T, N] of a layer's
    keys."""
    positions = view.key_positions(layer)
    slots = view.cache.slots(view.row_index, positions.clamp(min=0))
    return positions, slots, visible_mask(view, positions)
