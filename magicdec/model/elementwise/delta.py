"""The gated delta rule (Yang et al., arXiv 2412.06464) with torch's operators: what tokens write to
the state of a layer with linear attention, and read of it.

A token decays the state, S <- e^g S, writes the correction delta = beta (v - S^T k) to its key,
S <- S + k delta^T, and reads o = S^T q. Before that, a causal convolution over the newest tokens
mixes q, k and v. All of it is computed in float32, or in float64 of a model in float64.

Shapes: B rows, T new tokens, H value heads and G key heads on this rank, D and E the sizes of a key
and of a value, C = 2 G D + H E channels of the convolution, K its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens of a prompt that are computed together
NORM_EPS = 1e-6  # of the lengths of q and k
WHOLE = 64  # numbers that fill the vectors of any CPU


@dataclass(frozen=True)
class DeltaTokens:
    """What new tokens bring to a layer: `channels` [B, T, C] of q, k and v before the convolution,
    whose `weight` is [C, K]; `decay` g and `rate` beta, [B, T, H]."""

    channels: Tensor
    weight: Tensor
    decay: Tensor
    rate: Tensor
    sizes: tuple[int, int, int, int]  # G, H, D, E

    def part(self, span: slice) -> DeltaTokens:
        """Some of the tokens."""
        parts = (x[:, span] for x in (self.channels, self.decay, self.rate))
        channels, decay, rate = parts
        return replace(self, channels=channels, decay=decay, rate=rate)


@dataclass(frozen=True)
class HeldLayer:
    """What the caller keeps of a layer, of all its rows: `states` [rows, H, D, E], and in `slots`
    by position what the newest tokens have written: `keys` [rows, slots, G, D], `corrections`
    [.., H, E] and `decays` [.., H]."""

    states: Tensor
    keys: Tensor
    corrections: Tensor
    decays: Tensor


@dataclass(frozen=True)
class StatePlaces:
    """Where rows [B] are: their states are those after `base` [B] tokens, and are to be those after
    `moved`, between that and the new tokens' `first`."""

    rows: Tensor
    base: Tensor
    first: Tensor
    moved: Tensor


def widened(x: Tensor) -> Tensor:
    """In float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x [..., N], with the same bits for a token alone and among others:
    what fills no vectors at the end of a tensor, torch computes by other instructions on a CPU."""
    size = x.shape[-1]
    if size % WHOLE == 0 or x.device.type != "cpu":
        return function(x)
    return function(F.pad(x, (0, -size % WHOLE)))[..., :size]


def convolve(tokens: DeltaTokens, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, of length one and q divided by the root of D, [B, T, G, D], and v [B, T, H, E],
    after the channels [B, K - 1, C] of the tokens `before`."""
    G, H, D, E = tokens.sizes
    length = tokens.weight.shape[1]
    num_new = tokens.channels.shape[1]
    # Sums in a fixed order: the same bits for a token alone and among others.
    channels = torch.cat([before, tokens.channels], dim=1)
    weight = widened(tokens.weight)
    mixed = channels[:, :num_new] * weight[:, 0]
    for place in range(1, length):
        mixed = mixed + channels[:, place : place + num_new] * weight[:, place]
    q, k, v = in_vectors(F.silu, mixed).split([G * D, G * D, H * E], dim=-1)
    q = _normed(q.unflatten(-1, (G, D))) * D**-0.5
    return q, _normed(k.unflatten(-1, (G, D))), v.unflatten(-1, (H, E))


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def write(state: Tensor, keys: Tensor, corrections: Tensor, decays: Tensor) -> Tensor:
    """The states [B, H, D, E] after one token, with keys [B, G, D], of which `recur` has computed
    corrections [B, H, E]: the same bits as there."""
    repeated = _for_values(keys, corrections.shape[1])
    decay = in_vectors(torch.exp, decays)[..., None, None]
    return state * decay + repeated[..., None] * corrections[..., None, :]


def recur(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
) -> tuple[Tensor, Tensor]:
    """The outputs [B, T, H, E] of tokens one by one, and the corrections [B, T, H, E] that they
    write to their keys."""
    outputs = []
    corrections = []
    num_values = v.shape[2]
    for t in range(v.shape[1]):
        key = _for_values(k[:, t], num_values)[..., None]  # [B, H, D, 1]
        decayed = state * in_vectors(torch.exp, tokens.decay[:, t])[..., None, None]
        read = (decayed * key).sum(-2)
        corrections.append(tokens.rate[:, t, :, None] * (v[:, t] - read))
        state = write(state, k[:, t], corrections[-1], tokens.decay[:, t])
        outputs.append((state * _for_values(q[:, t], num_values)[..., None]).sum(-2))
    return torch.stack(outputs, dim=1), torch.stack(corrections, dim=1)


def state_before(held: HeldLayer, places: StatePlaces) -> tuple[Tensor, Tensor]:
    """The states [B, H, D, E] before the new tokens, and those to which the base moves."""
    state = moved = held.states[places.rows]
    for number in range(int((places.first - places.base).max())):
        position = places.base + number
        at = (places.rows, position % held.keys.shape[1])
        after = write(state, held.keys[at], held.corrections[at], held.decays[at])
        state = torch.where(_by_row(position < places.first), after, state)
        moved = torch.where(_by_row(position < places.moved), state, moved)
    return state, moved


def _by_row(mask: Tensor) -> Tensor:
    return mask.view(-1, 1, 1, 1)


def delta_steps(
    held: HeldLayer, places: StatePlaces, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
) -> Tensor:
    """The outputs [B, T, H, E] of new tokens, no more than slots; keeps what they write, and moves
    the base of rows."""
    state, moved = state_before(held, places)
    out, corrections = recur(state, q, k, v, tokens)
    held.states[places.rows] = moved
    held.corrections[slots_of(held, places, v.shape[1])] = corrections
    keep_shared(held, places, k, tokens)
    return out


def kernel_tensors(
    held: HeldLayer, places: StatePlaces, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
) -> list[Tensor]:
    """All of them in the order in which kernels of steps take them, contiguous, since these compute
    addresses from the sizes."""
    own = held.states, held.keys, held.corrections, held.decays
    at = places.rows, places.base, places.first, places.moved
    new = [x.contiguous() for x in (*at, q, k, v, tokens.decay, tokens.rate)]
    assert all(x.is_contiguous() for x in own), "they are whole layers"
    assert all(x.dtype == torch.float32 for x in (*own, *new[len(at) :])), "as states are kept"
    return [*own, *new]


def keep_shared(held: HeldLayer, places: StatePlaces, k: Tensor, tokens: DeltaTokens) -> None:
    """Keep the keys and decays of new tokens, whose slots may be those that kernels of steps have
    read for several heads at once."""
    slots = slots_of(held, places, k.shape[1])
    held.keys[slots] = k
    held.decays[slots] = tokens.decay


def slots_of(held: HeldLayer, places: StatePlaces, num_new: int) -> tuple[Tensor, Tensor]:
    """The index of new tokens among all rows' slots."""
    new = torch.arange(num_new, device=places.rows.device)
    return places.rows[:, None], (places.first[:, None] + new) % held.keys.shape[1]


def recur_in_chunks(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, tokens: DeltaTokens
) -> tuple[Tensor, Tensor]:
    """The outputs [B, T, H, E] of many tokens, and the state after them: what `recur` computes, by
    products of matrices (arXiv 2412.06464, section 3.3)."""
    num_new, num_values = v.shape[1:3]
    filling = -num_new % CHUNK

    def chunks(x: Tensor) -> Tensor:
        """[B, T, H, ...] as [B, H, chunks, CHUNK, ...]; tokens that fill up are zeros, which leave
        the state as it is."""
        filled = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, filling))
        return filled.unflatten(1, (-1, CHUNK)).movedim(3, 1)

    q, k = (chunks(_for_values(x, num_values, dim=2)) for x in (q, k))
    v = chunks(v)
    rate = chunks(tokens.rate)[..., None]
    decayed = chunks(tokens.decay).cumsum(-1)  # since the begin of the chunk
    ratio = (decayed[..., :, None] - decayed[..., None, :]).tril().exp().tril()
    mixing = ((k * rate) @ k.transpose(-1, -2) * ratio).tril(-1)
    known = torch.cat([v * rate, k * rate * decayed[..., None].exp()], dim=-1)
    unit = torch.eye(CHUNK, device=v.device) + mixing
    solved = torch.linalg.solve_triangular(unit, known, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = q @ k.transpose(-1, -2) * ratio
    outputs = []
    for at in range(v.shape[2]):
        total = decayed[:, :, at, -1, None]
        corrections = values[:, :, at] - reads[:, :, at] @ state
        seen = q[:, :, at] * decayed[:, :, at, :, None].exp()
        outputs.append(seen @ state + scores[:, :, at] @ corrections)
        kept = k[:, :, at] * (total - decayed[:, :, at])[..., None].exp()
        state = state * total[..., None].exp() + kept.transpose(-1, -2) @ corrections
    together = torch.stack(outputs, dim=2).movedim(1, 3).flatten(1, 2)
    return together[:, :num_new], state


def _for_values(x: Tensor, num_values: int, dim: int = 1) -> Tensor:
    """What key heads have, for each of the value heads that they serve."""
    return x.repeat_interleave(num_values // x.shape[dim], dim=dim)
