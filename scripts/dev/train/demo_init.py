"""The initialisation of the demo models: an induction circuit in the first two layers.

In an earlier training no induction head formed by itself (docs/log/models.md: after 6.4 M tokens
recall was zero at every distance). Therefore training starts from the circuit that Olsson et al.
2022 found in trained models, and refines it:

- layer 0, heads 0 and 1 attend to the token 1 and 2 positions back (through the rotary pairs of
  high frequency) and write a summary of it into a part of the residual stream;
- layer 1, the first half of the heads finds earlier positions whose two preceding tokens are the
  current two tokens (through the rotary pairs of low frequency, which hardly rotate over the whole
  context), and copies the token at that position.

All other weights have the usual random initialisation, with output projections of zero.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from magicdec.model.block import Attention, Block
from magicdec.model.positions import rope_table
from magicdec.model.transformer import Transformer

EMBEDDING_STD = 0.5
FINAL_NORM = 0.04  # times EMBEDDING_STD: keeps the first logits small despite the tied head
CONSTANT = 4.0  # the residual stream's constant entry, in units of EMBEDDING_STD
FAST_PAIRS = 12  # rotary pairs for offsets
SLOW_SHARE = 3 / 8  # of the pairs, for content
OFFSET_GAP = 6.0
MATCH_SCORE = 10.0
COPY_SCALE = 4.0


def initialise(model: Transformer) -> Transformer:
    """Initialise randomly, then write the circuit. Uses torch's global generator."""
    config = model.config
    for name, p in model.named_parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=1 / math.sqrt(p.shape[1]))
        if name.endswith(("output.weight", "down.weight")):
            torch.nn.init.zeros_(p)
    with torch.no_grad():
        hidden = config.hidden_size
        embedding = model.embedding.weight
        room = hidden // 5  # entries of the residual stream for each of the two preceding tokens
        content = slice(1, hidden - 2 * room)
        places = [slice(hidden - 2 * room, hidden - room), slice(hidden - room, hidden)]
        embedding.normal_(std=EMBEDDING_STD)
        embedding[:, 0] = CONSTANT * EMBEDDING_STD
        embedding[:, content.stop :] = 0
        model.norm.weight.fill_(FINAL_NORM)
        width = content.stop - content.start
        summary = random_rows(room, width)  # a token's summary: [room, content]
        look_back(model, content, places, summary)
        match_and_copy(model, content, places, summary)
    return model


def circuit_parameters(model: Transformer) -> list[torch.nn.Parameter]:
    """The matrices with the circuit, and the MLP between its layers. At the full learning rate, the
    noise of the first hundred steps would destroy the circuit."""
    first, second = (cast(Block, model.blocks[i]) for i in (0, 1))
    holders = (first.attention, first.mlp, second.attention)
    return [p for holder in holders for p in holder.parameters() if p.ndim == 2]


def look_back(model: Transformer, content: slice, places: list[slice], summary: Tensor) -> None:
    """Layer 0: head h writes the summary of the token h + 1 positions back into `places[h]`."""
    config = model.config
    attention = attention_of(model, 0)
    size = config.head_dim
    half = config.head_dim // 2
    room = summary.shape[0]
    q, k, v = qkv_views(model, 0)
    constant = norm_scale(model) * CONSTANT * EMBEDDING_STD
    angles = rope_table(config.rope, size, 2)[1]  # cos and sin of one step, [2, D/2]
    step = torch.atan2(angles[1], angles[0])[:FAST_PAIRS]
    gap = (1 - torch.cos(step)).sum()  # score difference between the right offset and the next
    amplitude = math.sqrt(OFFSET_GAP * math.sqrt(size) / gap) / constant
    for head, place in enumerate(places):
        turn = -step * (head + 1)
        q[head].zero_(), k[head].zero_(), v[head].zero_()
        k[head, :FAST_PAIRS, 0] = amplitude
        q[head, :FAST_PAIRS, 0] = amplitude * torch.cos(turn)
        q[head, half : half + FAST_PAIRS, 0] = amplitude * torch.sin(turn)
        v[head, :room, content] = summary
        weight_of(attention.output)[place, head * size : head * size + room] = (
            torch.eye(room) * EMBEDDING_STD
        )


def match_and_copy(
    model: Transformer, content: slice, places: list[slice], summary: Tensor
) -> None:
    """Layer 1: the query has the current and the previous token, the key its two previous ones."""
    config = model.config
    attention = attention_of(model, 1)
    size = config.head_dim
    half = config.head_dim // 2
    slow = int(half * SLOW_SHARE)
    dims = torch.cat([torch.arange(half - slow, half), torch.arange(size - slow, size)])
    q, k, v = qkv_views(model, 1)
    width = content.stop - content.start
    copies = random_rows(min(width, size * config.num_heads // 2), width).split(size)
    for head, rows in enumerate(copies):
        q[head].zero_(), k[head].zero_(), v[head].zero_()
        for i, place in enumerate(places):
            keep = random_rows(len(dims), summary.shape[0]) * math.sqrt(
                MATCH_SCORE * math.sqrt(size) / len(dims)
            )
            k[head, dims, place] = keep
            if i == 0:
                q[head, dims, content] = keep @ summary
            else:
                q[head, dims, places[i - 1]] = keep
        v[head, : len(rows), content] = rows
        columns = slice(head * size, head * size + len(rows))
        weight_of(attention.output)[content, columns] = rows.T * COPY_SCALE * EMBEDDING_STD


def qkv_views(model: Transformer, layer: int) -> list[Tensor]:
    """The query, key and value weights of a layer, [heads, D, hidden] each."""
    config = model.config
    weight = weight_of(attention_of(model, layer).qkv)
    assert config.num_heads == config.num_kv_heads
    return list(weight.view(3, config.num_heads, config.head_dim, -1))


def attention_of(model: Transformer, layer: int) -> Attention:
    return cast(Block, model.blocks[layer]).self_attention


def weight_of(linear: nn.Module) -> Tensor:
    return cast(nn.Linear, linear).weight


def random_rows(rows: int, columns: int) -> Tensor:
    """Random orthonormal rows, [rows, columns]."""
    return torch.linalg.qr(torch.randn(columns, rows))[0].T


def norm_scale(model: Transformer) -> float:
    """The mean factor of the first norm on an embedding."""
    return 1 / model.embedding.weight.square().mean(1).sqrt().mean().item()
