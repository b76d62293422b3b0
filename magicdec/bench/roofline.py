"""The bytes that a pass must read at least: weights once per forward, the KV that each forward's
view shows, and the states of linear attention.
"""

from __future__ import annotations

from magicdec.kv.forward_counts import ForwardCounts
from magicdec.model.experts import Experts
from magicdec.model.linear.packed import PackedLinear, padding_bytes
from magicdec.model.transformer import Transformer

# Not read by each forward: a few rows of tables, and what a draft head multiplies or norms the
# target's states with, once for a chain of drafts.
NOT_READ = ("embedding.", "position_embedding.", "fc.", "target_norm.")


def weight_bytes(model: Transformer) -> int:
    """Bytes of this rank's weights that a forward reads: layers, all of their experts, norms and
    head rows, without embeddings, a head's `fc` and the padding of packed layers."""
    names = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    total = sum(size for name, size in names.items() if not name.startswith(NOT_READ))
    packed = [
        module
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and not f"{name}.".startswith(NOT_READ)
    ]
    total -= sum(padding_bytes(layer.packed, layer.out_features) for layer in packed)
    if model.has_tied_head:
        total += model.tied_head.numel() * model.tied_head.element_size()
    return total


def kv_bytes_per_token(model: Transformer) -> int:
    config = model.config
    weight = next(model.parameters())
    _, (first, last) = model.shard.heads(config.num_heads, config.num_kv_heads)
    return 2 * len(model.layers) * (last - first) * config.cached_head_dim * weight.element_size()


def expert_bytes(model: Transformer) -> tuple[int, int]:
    """Bytes of this rank's experts of all layers, without padding, and their number."""
    total = number = 0
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        number += len(experts.down)
        for layer in (*experts.gate_up, *experts.down):
            total += sum(p.numel() * p.element_size() for p in layer.parameters())
            if isinstance(layer, PackedLinear):
                total -= padding_bytes(layer.packed, layer.out_features)
    return total, number


def bytes_read(model: Transformer, counts: ForwardCounts) -> int:
    """Weights once a forward, of a mixture those experts that it read, K and V, and states."""
    expert_total, num_experts = expert_bytes(model)
    always = weight_bytes(model) - expert_total
    read = expert_total * counts.experts_read // num_experts if num_experts else 0
    return counts.num_forwards * always + read + counts.kv_bytes_read + counts.state_bytes
