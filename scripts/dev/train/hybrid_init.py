"""The initialisation of a small model with linear attention: the induction circuit of the demo
models (`demo_init.py`), whose second half is in the first layer with full attention.

- The first layer, linear, has two heads that forget each state at once and write with all their
  strength: their outputs are their values, and convolutions make these the token 1 and 2 positions
  back. A summary of it goes into a part of the residual stream. A value passes through silu, and
  silu(x) - silu(-x) = x, so that a head has each number twice.
- The first layer with full attention finds earlier positions whose two preceding tokens are the
  current two, by the dimensions that are not rotated, and copies the token at that position.

Gates read the residual stream's constant entry. All other weights have the usual random
initialisation, with output projections of zero, and states that forget at many rates, as in the
paper's code (arXiv 2412.06464).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from magicdec.model.block import Attention
from magicdec.model.gated_delta import GatedDeltaNet
from magicdec.model.transformer import Transformer
from train.demo_init import (
    CONSTANT,
    COPY_SCALE,
    EMBEDDING_STD,
    FINAL_NORM,
    norm_scale,
    random_rows,
    weight_of,
)

SLOWEST_STEP = 1e-3  # softplus of the step's bias at first, of decays
FASTEST_STEP = 0.1
OPEN = 6.0  # what a gate reads
FORGETFUL = 10.0  # the bias of steps: a state decays to exp(-160) of itself
MATCH_SCORE = 20.0  # of a position where both tokens are the current ones
LOOKING_BACK = 2  # heads of the first layer


@torch.no_grad()
def initialise(model: Transformer) -> Transformer:
    """Initialise randomly, then write the circuit. Uses torch's global generator."""
    randomise(model)
    first, second = circuit_layers(model)
    value_dim = first.sizes[3]
    hidden = model.config.hidden_size
    room = value_dim // 2  # entries of the residual stream for each of the two preceding tokens
    content = slice(1, hidden - LOOKING_BACK * room)
    places = [slice(start, start + room) for start in range(content.stop, hidden, room)]
    embedding = model.embedding.weight
    embedding[:, 0] = CONSTANT * EMBEDDING_STD
    embedding[:, content.stop :] = 0
    summary = random_rows(room, content.stop - content.start)
    constant = norm_scale(model) * CONSTANT * EMBEDDING_STD
    look_back(first, content, places, summary, constant)
    match_and_copy(second, model, content, places, summary, constant)
    return model


@torch.no_grad()
def randomise(model: Transformer) -> Transformer:
    """Random numbers from torch's global generator; layers add nothing at first."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
        if name.endswith(("output.weight", "down.weight")):
            nn.init.zeros_(parameter)
    for layer in model.modules():
        if isinstance(layer, GatedDeltaNet):
            forget_at_many_rates(layer)
    model.embedding.weight.normal_(std=EMBEDDING_STD)
    model.norm.weight.fill_(FINAL_NORM)
    return model


def forget_at_many_rates(layer: GatedDeltaNet) -> None:
    layer.convolution.normal_(std=0.3)
    layer.convolution[:, 0, -1] += 1.0
    layer.log_decay.copy_(torch.empty_like(layer.log_decay).uniform_(1, 16).log())
    ends = math.log(SLOWEST_STEP), math.log(FASTEST_STEP)
    steps = torch.empty_like(layer.step_bias).uniform_(*ends).exp()
    layer.step_bias.copy_(steps + torch.log(-torch.expm1(-steps)))


def circuit_layers(model: Transformer) -> tuple[GatedDeltaNet, Attention]:
    mixers = [block.attention for block in model.blocks]
    first = mixers[0]
    second = next(mixer for mixer in mixers if isinstance(mixer, Attention))
    assert isinstance(first, GatedDeltaNet), "the first layer is a linear one"
    return first, second


def circuit_parameters(model: Transformer) -> list[nn.Parameter]:
    """The matrices with the circuit. At the full learning rate, the noise of the first hundred
    steps would destroy it."""
    return [p for layer in circuit_layers(model) for p in layer.parameters() if p.ndim == 2]


def look_back(
    layer: GatedDeltaNet, content: slice, places: list[slice], summary: Tensor, constant: float
) -> None:
    """Head h writes the summary of the token h + 1 positions back into `places[h]`."""
    num_keys, num_values, key_dim, value_dim = layer.sizes
    weight = weight_of(layer.inputs)
    output = weight_of(layer.output)
    q, k, v, gates, rates, steps = weight.split(
        [num_keys * key_dim] * 2 + [num_values * value_dim] * 2 + [num_values] * 2
    )
    first_value = 2 * num_keys * key_dim
    newest = layer.convolution.shape[-1] - 1
    for head, place in enumerate(places):
        own_key = slice(head * key_dim, (head + 1) * key_dim)
        own_value = slice(head * value_dim, (head + 1) * value_dim)
        for part, first in ((q, 0), (k, num_keys * key_dim)):
            part[own_key] = 0
            part[own_key, 0] = 1 / constant
            channels = layer.convolution[first + own_key.start : first + own_key.stop, 0]
            channels.zero_()
            channels[:, newest] = 1
        v[own_value] = 0
        v[own_value, content] = torch.cat([summary, -summary])
        channels = layer.convolution[
            first_value + own_value.start : first_value + own_value.stop, 0
        ]
        channels.zero_()
        channels[:, newest - 1 - head] = 1
        gates[own_value] = 0
        gates[own_value, 0] = 1 / constant
        for part, read in ((rates, OPEN), (steps, 0.0)):
            part[head] = 0
            part[head, 0] = read / constant
        layer.step_bias[head] = FORGETFUL
        layer.log_decay[head] = math.log(16)
        same = torch.eye(len(summary)) * EMBEDDING_STD
        output[place, own_value] = torch.cat([same, -same], dim=1)


def match_and_copy(
    layer: Attention,
    model: Transformer,
    content: slice,
    places: list[slice],
    summary: Tensor,
    constant: float,
) -> None:
    """The query has the current and the previous token, the key its two previous ones. Each KV head
    copies a part of the token, by the first of its query heads."""
    config = model.config
    size = config.head_dim
    num_kv = layer.num_kv_heads
    group = layer.num_heads // num_kv
    weight = weight_of(layer.qkv).view(-1, size, config.hidden_size)
    q, k, v, gates = weight.split([layer.num_heads, num_kv, num_kv, layer.num_heads])
    still = torch.arange(config.rope.rotary_dim or 0, size)  # dimensions that are not rotated
    width = content.stop - content.start
    copies = random_rows(min(width, size * num_kv), width).split(size)
    for head, rows in enumerate(copies):
        asks = head * group
        for part in (q[asks], k[head], v[head], gates[asks]):
            part.zero_()
        for number, place in enumerate(places):
            keep = random_rows(len(summary), len(still)).T
            k[head, still, place] = keep
            if number == 0:
                q[asks, still, content] = keep @ summary
            else:
                q[asks, still, places[number - 1]] = keep
        v[head, : len(rows), content] = rows
        gates[asks, :, 0] = OPEN / constant
        columns = slice(asks * size, asks * size + len(rows))
        weight_of(layer.output)[content, columns] = rows.T * COPY_SCALE * EMBEDDING_STD
    for norm in (layer.q_norm, layer.k_norm):
        assert norm is not None, "scores are those of normed queries and keys"
        norm.weight.fill_(math.sqrt(MATCH_SCORE / math.sqrt(size)))
