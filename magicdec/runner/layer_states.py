"""LayerStates: the states of layers with linear attention, which go back as caches do.

A row's state after its first `base` tokens is kept whole, and of each token after it what it wrote:
a key, a correction and a decay, some 190 times less than a state. So a row has its state after any
of these tokens: truncating it costs nothing, and the next forward starts from what the tokens wrote
that are left. `base` moves to what is committed when a forward begins, or behind it by what is run
again, and far enough that at most `room.new` tokens follow it; in a prompt only this far. All of
this is kept once more as it was at the end of the prompt, from where another pass may start again.
A snapshot is the state after a text, with the last inputs of the convolution, with which other rows
begin (`PrefixCache`).

Shapes: L layers with a state, B rows, T new tokens, H value heads and G key heads on this rank, D
and E the sizes of a key and of a value, C channels of the convolution before, K its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.elementwise.delta import (
    DeltaTokens,
    HeldLayer,
    StatePlaces,
    state_before,
    write,
)
from magicdec.model.elementwise.operators import Elementwise
from magicdec.model.mixers import LinearAttention, Mixer


@dataclass(frozen=True)
class StateRoom:
    """How far rows go back: `new`, the most tokens by which a step truncates one, and `rerun`, the
    newest committed ones that a step may run again, which are among them."""

    new: int
    rerun: int = 0

    def joined(self, other: StateRoom) -> StateRoom:
        """What serves both."""
        return StateRoom(max(self.new, other.new), max(self.rerun, other.rerun))


@dataclass(frozen=True)
class StateShape:
    """The sizes of a layer's state on this rank."""

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    length: int  # of the convolution, in tokens

    @classmethod
    def of(cls, mixers: Sequence[Mixer], shard: Shard) -> StateShape:
        """That of layers with linear attention, which are all alike, on a rank."""
        mixer = mixers[0]
        assert isinstance(mixer, LinearAttention) and set(mixers) == {mixer}, "all alike"
        values, keys = shard.heads(mixer.num_value_heads, mixer.num_key_heads)
        return cls(
            num_keys=keys[1] - keys[0],
            num_values=values[1] - values[0],
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            length=mixer.kernel,
        )

    @property
    def channels(self) -> int:
        return 2 * self.num_keys * self.key_dim + self.num_values * self.value_dim

    def num_slots(self, most_new: int) -> int:
        """The newest tokens of a row whose channels, keys and corrections are kept."""
        return most_new + self.length - 1

    def row_numbers(self, most_new: int) -> int:
        """Numbers of a row of a layer, now and as at the end of the prompt."""
        written = self.num_keys * self.key_dim + self.num_values * (self.value_dim + 1)
        state = self.num_values * self.key_dim * self.value_dim
        return 2 * (state + self.num_slots(most_new) * (self.channels + written))

    @property
    def snapshot_numbers(self) -> int:
        """Numbers of a snapshot of a layer."""
        state = self.num_values * self.key_dim * self.value_dim
        return state + (self.length - 1) * self.channels


@dataclass(frozen=True)
class RowStates:
    """What is kept of rows: `states` [L, rows, H, D, E] after `base` [L, rows] tokens, and of the
    newest tokens, by position, `channels` [L, rows, slots, C], `keys` [.., G, D], `corrections`
    [.., H, E] and `decays` [.., H]. Layers differ in `base` after a forward that was cancelled."""

    base: Tensor
    states: Tensor
    channels: Tensor
    keys: Tensor
    corrections: Tensor
    decays: Tensor

    @classmethod
    def zeros(
        cls,
        shape: StateShape,
        num_layers: int,
        num_rows: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> RowStates:
        def zeros(*sizes: int) -> Tensor:
            return torch.zeros(num_layers, num_rows, *sizes, dtype=dtype, device=device)

        s = shape
        return cls(
            base=torch.zeros(num_layers, num_rows, dtype=torch.int64, device=device),
            states=zeros(s.num_values, s.key_dim, s.value_dim),
            channels=zeros(num_slots, s.channels),
            keys=zeros(num_slots, s.num_keys, s.key_dim),
            corrections=zeros(num_slots, s.num_values, s.value_dim),
            decays=zeros(num_slots, s.num_values),
        )

    @property
    def by_layer(self) -> tuple[Tensor, ...]:
        return self.base, self.states, self.channels, self.keys, self.corrections, self.decays

    def layer(self, number: int) -> HeldLayer:
        return HeldLayer(
            self.states[number],
            self.keys[number],
            self.corrections[number],
            self.decays[number],
        )

    def copy_rows(
        self, rows: Tensor, other: RowStates, source: Tensor, layers: Sequence[int]
    ) -> None:
        """Take what `layers` of `other`, as many as there are here, have of its rows `source` [B]
        for `rows` [B]."""
        for own, others in zip(self.by_layer, other.by_layer, strict=True):
            for layer, number in enumerate(layers):
                own[layer, rows] = others[number, source].to(own.dtype)


class LayerStates:
    """Of `num_rows` rows, which go back as far as `room` says, with `num_snapshots`."""

    def __init__(
        self,
        shape: StateShape,
        num_layers: int,
        num_rows: int,
        room: StateRoom,
        dtype: torch.dtype,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> None:
        self.shape = shape
        self.room = room
        self.num_slots = shape.num_slots(room.new)
        self.device = device
        place = shape, num_layers, num_rows, self.num_slots, dtype, device
        self.now = RowStates.zeros(*place)
        self.kept = RowStates.zeros(*place)  # at the ends of prompts
        self.kept_lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.snapshots = torch.zeros(
            num_layers,
            num_snapshots,
            *(shape.num_values, shape.key_dim, shape.value_dim),
            dtype=dtype,
            device=device,
        )
        # Of the tokens before.
        self.snapshot_channels = torch.zeros(
            num_layers, num_snapshots, shape.length - 1, shape.channels, dtype=dtype, device=device
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's state in all layers, which a forward reads."""
        state = self.now.states[:, 0]
        return state.numel() * state.element_size()

    def forget(self, rows: Sequence[int]) -> None:
        """Begin these rows anew."""
        index = torch.tensor(list(rows), device=self.device)
        self.kept_lengths[index] = 0
        self._begin(index)

    def _begin(self, rows: Tensor) -> None:
        self.now.base[:, rows] = 0
        self.now.states[:, rows] = 0

    def ends(self, row: int, length: int) -> list[int]:
        """The lengths at which texts may begin with what this row has after `length` tokens: of its
        prompt, and all."""
        prompt = int(self.kept_lengths[row])
        return [prompt, length] if 0 < prompt < length else [length]

    def save(self, row: int, number: int, length: int) -> None:
        """Take a snapshot of a row as it was after `length` tokens, which it has or are the ends of
        its prompt."""
        held = self.kept if length == int(self.kept_lengths[row]) else self.now
        base = int(held.base[0, row])  # which is that of all layers between two steps
        assert 0 <= length - base <= self.num_slots, "it goes back so far"
        state = held.states[:, row]
        for position in range(base, length):
            at = (slice(None), row, position % self.num_slots)
            state = write(state, held.keys[at], held.corrections[at], held.decays[at])
        self.snapshots[:, number] = state
        before = self.positions_before(length) % self.num_slots
        self.snapshot_channels[:, number] = held.channels[:, row, before]

    def load(self, row: int, number: int, length: int) -> None:
        """Begin a row with a snapshot, after `length` tokens."""
        self.now.base[:, row] = length
        self.now.states[:, row] = self.snapshots[:, number]
        before = self.positions_before(length) % self.num_slots
        self.now.channels[:, row, before] = self.snapshot_channels[:, number]

    def positions_before(self, length: Tensor | int) -> Tensor:
        """Those of the tokens that the convolution of the one at `length` sees, also of several at
        [.., 1]: [.., K - 1]."""
        return length + torch.arange(1 - self.shape.length, 0, device=self.device)

    def assume(self, rows: Sequence[int], length: int) -> None:
        """Take the states as those after `length` tokens, for measurements."""
        self.now.base[:, torch.tensor(list(rows), device=self.device)] = length

    def copy_prompts(
        self, rows: Tensor, other: LayerStates, source: Tensor, layers: Sequence[int]
    ) -> None:
        """Begin `rows` [B] with what `layers` of `other` have of the prompts in its rows `source`
        [B]."""
        assert self.num_slots == other.num_slots, "of the same positions"
        self.now.copy_rows(rows, other.kept, source, layers)

    def forward(
        self,
        rows: Tensor,
        first: Tensor,
        committed: Tensor,
        num_new: int,
        is_of_prompt: bool,
        elementwise: Elementwise,
    ) -> StateForward:
        """A forward of `num_new` tokens after the `first` [B] of rows [B], of which `committed` [B]
        stay, which `elementwise` computes."""
        is_back = (first < self.now.base[:, rows]).any(0)
        if is_back.any():
            self._go_back(rows[is_back], first[is_back])
        base = self.now.base[:, rows]
        end = first + num_new
        moved = torch.maximum(base, end - self.room.new)
        if not is_of_prompt:
            moved = torch.maximum(moved, committed - self.room.rerun)
        is_room = (end - self.room.new <= committed) | (first == committed)
        assert bool(is_room.all()), "no more drafts than there is room for"
        if is_of_prompt:
            self.kept_lengths[rows] = end
        return StateForward(self, rows, base, first, moved, num_new, is_of_prompt, elementwise)

    def _go_back(self, rows: Tensor, first: Tensor) -> None:
        """Start again at the ends of prompts, or anew."""
        is_begin = first == 0
        self._begin(rows[is_begin])
        again = rows[~is_begin]
        self.now.copy_rows(again, self.kept, again, range(len(self.kept.states)))
        kept = (self.now.base[:, again] <= first[~is_begin]).all(0)
        assert bool((kept & (first[~is_begin] <= self.kept_lengths[again])).all()), (
            f"rows {rows.tolist()} went back to {first.tolist()} tokens, and were kept from "
            f"{self.kept.base[:, rows].tolist()} to {self.kept_lengths[rows].tolist()}"
        )


class StateForward:
    """The states in one forward: `run` is called for each layer in turn."""

    def __init__(
        self,
        states: LayerStates,
        rows: Tensor,
        base: Tensor,
        first: Tensor,
        moved: Tensor,
        num_new: int,
        is_of_prompt: bool,
        elementwise: Elementwise,
    ) -> None:
        self.states = states
        self.elementwise = elementwise
        self.rows = rows
        self.base = base
        self.first = first
        self.moved = moved
        self.is_of_prompt = is_of_prompt
        # Tokens before the newest ones can never go back.
        self.num_final = max(0, num_new - states.room.new)
        before = states.positions_before(first[:, None])
        self.slots_before = before % states.num_slots
        self.is_before = (before >= 0).unsqueeze(-1)
        newest = torch.arange(max(0, num_new - states.num_slots), num_new, device=rows.device)
        self.num_shown = len(newest)
        self.slots_shown = (first[:, None] + newest) % states.num_slots

    def run(self, layer: int, tokens: DeltaTokens) -> Tensor:
        """The outputs [B, T, H, E] of a layer, by its number among those with a state."""
        now = self.states.now
        rows = self.rows[:, None]
        before = now.channels[layer, rows, self.slots_before] * self.is_before
        q, k, v = self.elementwise.delta_convolve(tokens, before)
        held = now.layer(layer)
        places = StatePlaces(self.rows, self.base[layer], self.first, self.moved[layer])
        outputs = []
        if self.num_final:
            final = slice(0, self.num_final)
            state, _ = state_before(held, places)
            out, state = self.elementwise.delta_chunks(
                state, q[:, final], k[:, final], v[:, final], tokens.part(final)
            )
            outputs.append(out)
            held.states[self.rows] = state
            places = StatePlaces(self.rows, self.moved[layer], self.moved[layer], self.moved[layer])
        rest = slice(self.num_final, None)
        new = q[:, rest], k[:, rest], v[:, rest], tokens.part(rest)
        outputs.append(self.elementwise.delta_steps(held, places, *new))
        now.base[layer, self.rows] = self.moved[layer]
        shown = tokens.channels[:, tokens.channels.shape[1] - self.num_shown :]
        now.channels[layer, rows, self.slots_shown] = shown
        if self.is_of_prompt:
            kept = self.states.kept
            for own, others in zip(kept.by_layer, now.by_layer, strict=True):
                own[layer, self.rows] = others[layer, self.rows]
        return torch.cat(outputs, dim=1)
