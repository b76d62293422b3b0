"""Attention with sink logits: a softmax with one more logit for each query head, which takes weight
and has no value (gpt-oss, arXiv 2508.10925, section 2.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DIGITS = 3  # of a logit in bfloat16, which together have the digits of float32
PADDING = 8  # dimensions that hold them


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights of scores [..., N], in float32. `sinks` [...] are the logits of their last
    dimensions but one; the weights then add up to less than 1."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    column = sinks.to(torch.float32).expand(scores.shape[:-1]).unsqueeze(-1)
    return torch.softmax(torch.cat([scores.float(), column], dim=-1), dim=-1)[..., :-1]


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """torch's fused attention of q [B, T, H, D] over k, v [B, G, N, D]: [B, T, H, D]. `mask`, bool
    [B, 1 or H, T, N]: which keys are seen, None for all. `sinks` [H] cost a copy of k and v."""
    size = q.shape[-1]
    q = q.transpose(1, 2)
    if sinks is not None:
        q, k, v = _with_sink_key(q, k, v, sinks * size**0.5)
        mask = None if mask is None else F.pad(mask, (0, 1), value=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=size**-0.5, enable_gqa=True)
    return out[..., :size].transpose(1, 2)


def _with_sink_key(
    q: Tensor, k: Tensor, v: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, T, D + PADDING] and k, v [B, G, N + 1, D + PADDING] with a last key whose products
    with queries are `scores` [H], and whose value is zero."""
    room = (0, PADDING)
    last_key = F.pad(k.new_zeros(*k.shape[:2], 1, k.shape[3]), room)
    last_key[..., k.shape[3] : k.shape[3] + DIGITS] = 1
    k = torch.cat([F.pad(k, room), last_key], dim=2)
    v = F.pad(v, (*room, 0, 1))
    size = q.shape[-1]
    q = F.pad(q, room)
    rest = scores
    for digit in range(DIGITS):
        part = rest.to(q.dtype)
        q[..., size + digit] = part[:, None]
        rest = rest - part.to(rest.dtype)
    return q, k, v
