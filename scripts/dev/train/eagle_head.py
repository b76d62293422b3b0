"""An EAGLE-3 draft head as it is trained, on all slots of a window at once (arXiv 2503.01840).

Slot i pairs the target's hidden states at token x_i with the embedding of x_{i+1}, at rotary
position i, and predicts x_{i+2}. A chain goes on from every slot: in its step t the slot takes its
own output of step t - 1 in place of the target's states, and the token after the one before. The
slots of one step do not see each other's later steps, so that a window of T slots holds T chains.

Shapes: B windows, T slots, C captured states, E their width, W the head's width, H query heads,
G KV heads, D head size, V draft vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magicdec.model.config import RopeConfig
from magicdec.model.elementwise.operators import apply_rope
from magicdec.model.positions import rope_table

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one step, [B,T,G,D] each."""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes and options of a head. `norm_before_residual`: the normed features are the residual.
    `norm_output`: a step's features are the last step's states after the final norm. `fc_norm`:
    each captured state has a norm of its own before `fc` (EAGLE-3.1)."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    target_hidden_size: int
    num_captured: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool = False


class CastLinear(nn.Linear):
    """A linear layer without bias that computes in the dtype of its input."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class CastNorm(nn.Module):
    """An RMS norm that computes in the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class HeadAttention(nn.Module):
    """The projections of the head's layer; q, k and v read embedding and features, [2W]."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        query_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = CastLinear(2 * config.hidden_size, query_size)
        self.k_proj = CastLinear(2 * config.hidden_size, kv_size)
        self.v_proj = CastLinear(2 * config.hidden_size, kv_size)
        self.o_proj = CastLinear(query_size, config.hidden_size)


class HeadMLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = CastLinear(config.hidden_size, config.intermediate_size)
        self.up_proj = CastLinear(config.hidden_size, config.intermediate_size)
        self.down_proj = CastLinear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """The head's one layer, with its norms of embeddings and features."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm = CastNorm(config.hidden_size, config.norm_eps)
        self.hidden_norm = CastNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = CastNorm(config.hidden_size, config.norm_eps)
        self.self_attn = HeadAttention(config)
        self.mlp = HeadMLP(config)

    def forward(
        self, features: Tensor, embeddings: Tensor, rope: Tensor, past: list[KeyValue]
    ) -> Tensor:
        """Features and embeddings [B,T,W], and the rows of the rotary table [1,T,2,D/2], to states
        [B,T,W]. The step's keys and values are appended to `past`."""
        normed = self.hidden_norm(features)
        x = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        attention = self.self_attn
        heads = (*x.shape[:2], -1, self.config.head_dim)
        q = apply_rope(attention.q_proj(x).view(heads), rope)
        k = apply_rope(attention.k_proj(x).view(heads), rope)
        v = attention.v_proj(x).view(heads)
        past.append((k, v))
        residual = normed if self.config.norm_before_residual else features
        states = residual + attention.o_proj(forked_attention(q, past).flatten(2))
        return states + self.mlp(self.post_attention_layernorm(states))


class TrainedHead(nn.Module):
    """The head. Its parameters are named as tensors are in a file of `speculators`."""

    rope: Tensor

    def __init__(self, config: HeadConfig, max_positions: int) -> None:
        super().__init__()
        self.config = config
        eps = config.norm_eps
        width = config.target_hidden_size
        self.fc = CastLinear(config.num_captured * width, config.hidden_size)
        self.fc_norm: nn.ModuleList | None = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(CastNorm(width, eps) for _ in range(config.num_captured))
        self.layers = nn.ModuleList([HeadLayer(config)])
        self.norm = CastNorm(config.hidden_size, eps)
        self.lm_head = CastLinear(config.hidden_size, config.draft_vocab_size)
        table = rope_table(RopeConfig(theta=config.rope_theta), config.head_dim, max_positions)
        self.register_buffer("rope", table, persistent=False)

    @property
    def layer(self) -> HeadLayer:
        layer = self.layers[0]
        assert isinstance(layer, HeadLayer)
        return layer

    def fuse(self, captured: Tensor) -> Tensor:
        """The target's states [B,T,C*E] to features [B,T,W]."""
        if self.fc_norm is not None:
            chunks = captured.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(x) for norm, x in zip(self.fc_norm, chunks, strict=True)]
            captured = torch.cat(normed, dim=-1)
        fused: Tensor = self.fc(captured)
        return fused

    def step(
        self, features: Tensor, embeddings: Tensor, past: list[KeyValue]
    ) -> tuple[Tensor, Tensor]:
        """The next step of all chains, [B,T,W] both, to the features of the step after it and the
        states that `lm_head` multiplies. `past` holds the steps so far."""
        first = len(past)
        rows = self.rope[first : first + features.shape[1]][None]
        states = self.layer(features, embeddings, rows, past)
        normed = self.norm(states)
        return (normed if self.config.norm_output else states), normed


def forked_attention(q: Tensor, past: list[KeyValue]) -> Tensor:
    """Attention of the newest step's queries [B,T,H,D]: slot i sees the keys of step 0 at slots up
    to i, and of each later step only its own. Returns [B,T,H,D]."""
    num_repeats = q.shape[2] // past[0][0].shape[2]
    keys_values = [
        x.repeat_interleave(num_repeats, dim=2).transpose(1, 2) for pair in past for x in pair
    ]
    q = q.transpose(1, 2)
    attend = plain_attention if q.is_cuda else FlashForkedAttention.apply
    out: Tensor = attend(q, *keys_values)
    return out.transpose(1, 2)


def plain_attention(q: Tensor, *keys_values: Tensor) -> Tensor:
    """`forked_attention` with all scores in memory: q, and k and v of each step, [B,H,T,D]."""
    first_key, first_value = keys_values[:2]
    scale = 1 / math.sqrt(q.shape[-1])
    size = q.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    scores = [((q @ first_key.mT).float() * scale).masked_fill(later, -math.inf)]
    scores += [_own_score(q, key, scale)[..., None] for key in keys_values[2::2]]
    weights = torch.cat(scores, dim=-1).softmax(dim=-1).to(q.dtype)
    out = weights[..., :size] @ first_value
    for i, value in enumerate(keys_values[3::2]):
        out = out + weights[..., size + i, None] * value
    return out


def _own_score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scores [B,H,T] of each query with the key at its own slot."""
    return (q.float() * k.float()).sum(dim=-1) * scale


class FlashForkedAttention(torch.autograd.Function):
    """`plain_attention` by torch's flash kernel for CPUs, without scores in memory.

    The kernel gives step 0's result and the logarithm of its sum, to which the later steps' terms
    are added. Its backward recomputes weights from that logarithm: with the one over all steps,
    they are the weights over all steps.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, *keys_values: Tensor) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sum = flash(q, keys_values[0], keys_values[1], 0.0, True)
        scale = 1 / math.sqrt(q.shape[-1])
        own = [_own_score(q, key, scale) for key in keys_values[2::2]]
        if own:
            # The kernel reads the logarithms in the memory layout in which it gives them.
            total = torch.empty_like(log_sum).copy_(torch.stack([log_sum, *own]).logsumexp(dim=0))
            mixed = out * (log_sum - total).exp()[..., None]
            for score, value in zip(own, keys_values[3::2], strict=True):
                mixed += (score - total).exp()[..., None] * value
            out = torch.empty_like(out).copy_(mixed)
            log_sum = total
        ctx.save_for_backward(q, out, log_sum, *keys_values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, out, log_sum, *keys_values = ctx.saved_tensors
        grad = grads[0].to(q.dtype)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        first = flash(grad, q, keys_values[0], keys_values[1], out, log_sum, 0.0, True)
        scale = 1 / math.sqrt(q.shape[-1])
        q_grad = first[0].float()
        found = list(first[1:])
        weighted = (grad.float() * out).sum(dim=-1)
        for key, value in zip(keys_values[2::2], keys_values[3::2], strict=True):
            weight = (_own_score(q, key, scale) - log_sum).exp()
            score_grad = weight * ((grad.float() * value).sum(dim=-1) - weighted) * scale
            q_grad += score_grad[..., None] * key
            found.append((score_grad[..., None] * q).to(q.dtype))
            found.append((weight[..., None] * grad).to(q.dtype))
        return q_grad.to(q.dtype), *found


class SoftCrossEntropy(torch.autograd.Function):
    """The weighted sum of cross-entropies to given probabilities, without logits in memory.

    States [N,W], weights of the head [V,W], probabilities [N,V], weights of slots [N], slots of a
    chunk -> a scalar. Gradients are computed in the forward, which has the logits already.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int
    ) -> Tensor:
        total = states.new_zeros((), dtype=torch.float32)
        states_grad = torch.empty_like(states)
        head_grad = torch.zeros_like(head)
        used = head.to(states.dtype)
        for first in range(0, len(states), chunk):
            slots = slice(first, first + chunk)
            part = states[slots]
            guesses = F.linear(part, used).float().log_softmax(dim=-1)
            total -= (guesses * targets[slots]).sum(dim=-1) @ weights[slots]
            difference = guesses.exp_().sub_(targets[slots]).mul_(weights[slots, None])
            difference = difference.to(states.dtype)
            states_grad[slots] = difference @ used
            head_grad += difference.mT @ part
        ctx.save_for_backward(states_grad, head_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states_grad, head_grad = ctx.saved_tensors
        grad = grads[0]
        return states_grad * grad.to(states_grad.dtype), head_grad * grad, None, None, None
