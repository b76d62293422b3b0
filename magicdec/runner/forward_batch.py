"""ForwardBatch: what a forward computes. ForwardObserver: who sees it. EnqueuedForward: a forward
that is computed, or waits for the next one.

Shapes: L layers, B rows, T new tokens, V vocabulary rows on this rank, H query heads and G KV heads
of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from magicdec.kv.cache import BatchRows, Lengths, Rows
from magicdec.kv.layer_caches import LayerCaches
from magicdec.kv.layer_views import LayerViews
from magicdec.kv.view import KVView, Visible

Tokens = Tensor | Sequence[Sequence[int]]
"""Token ids [B, T], on the device or on the host, or hidden states [B, T, hidden]."""


class Cancellation(Protocol):
    """A cancellation is set once the int64 at `address` is `value`. Native forwards read it."""

    @property
    def address(self) -> int: ...

    @property
    def value(self) -> int: ...

    def is_set(self) -> bool: ...


class Cancelled(Exception):
    """A forward ended after `num_layers` layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.num_layers = num_layers


@dataclass(frozen=True)
class ForwardBatch:
    """New tokens of rows, which a forward appends to the cache.

    `policy` (default: the runner's) chooses among the first `committed` tokens of each row
    (default: all). Only the last `num_outputs` tokens get logits (default: all). The reads of a
    draft are also counted apart. A part of a prompt has the same bits in any other part.
    `observers` see this forward, beside those of the runner."""

    tokens: Tokens
    rows: Rows
    policy: Visible | None = None
    committed: Lengths | Sequence[int] | None = None
    num_outputs: int | None = None
    is_draft: bool = False
    is_of_prompt: bool = False
    cancellation: Cancellation | None = None
    observers: Sequence[ForwardObserver] = ()


class ForwardObserver:
    """One that sees forwards of a runner (`ModelRunner.observers`), or one of them
    (`ForwardBatch.observers`). What nobody needs is not computed."""

    needs_weights: bool = False
    """It sees attention weights. Native attention computes them in passing."""
    needs_queries: bool = False
    """It sees queries. A native forward of a long chunk does not show them."""
    state_layers: Sequence[int] = ()
    """It sees hidden states after so many of the layers."""

    def begin_prompt(self, row: int, length: int, num_left: int) -> None:
        """A row takes a prompt of `length` tokens. The last `num_left` of them are computed."""

    def on_choice(
        self, caches: LayerCaches, rows: Sequence[int], positions: Sequence[Tensor]
    ) -> None:
        """The first entries of `rows` in `caches` are now tokens at `positions`, [B, G, N] by
        layer; empty: no choice."""

    def on_draft(
        self, rows: BatchRows, views: LayerViews, offsets: Tensor | None, num_forwards: int
    ) -> None:
        """Draft forwards read `views`, with a tail that grows by one token each. `offsets` are the
        runner's."""

    def wants(self, forward: EnqueuedForward) -> bool:
        """Whether it sees this forward, which has not been computed yet."""
        return self.needs_weights or self.needs_queries

    def on_weights(self, forward: EnqueuedForward, layer: int, weights: Tensor) -> None:
        """Attention weights [B, G, blocks] of a layer (`AttentionBackend.run_with_weights`)."""

    def on_queries(self, forward: EnqueuedForward, layer: int, queries: Tensor) -> None:
        """Queries [B, T, H, D] of a layer after RoPE, before attention."""

    def on_states(self, forward: EnqueuedForward, states: Tensor) -> None:
        """Hidden states [N, B, T, hidden] after the `state_layers`."""


@dataclass(eq=False)
class EnqueuedForward:
    """A forward of `rows` with equal numbers of new tokens, computed alone or with others.

    `x` are token ids [B, T] or hidden states [B, T, hidden]; `out` [B, num_outputs, V or hidden]
    is set once it is computed. `observers` are those that see it."""

    x: Tensor
    rows: BatchRows
    views: LayerViews
    num_outputs: int
    is_draft: bool = False
    cancellation: Cancellation | None = None
    observers: Sequence[ForwardObserver] = ()
    out: Tensor | None = None

    @property
    def view(self) -> KVView:
        return self.views.widest

    @cached_property
    def positions(self) -> Tensor:
        """Of the new tokens, [B, T]."""
        return self.view.positions()

    @property
    def state_layers(self) -> list[int]:
        """Those that observers need, one after the other."""
        return [layer for observer in self.observers for layer in observer.state_layers]

    def show_states(self, states: Tensor) -> None:
        """Show observers the hidden states [N, B, T, hidden] after the `state_layers`."""
        parts = states.split([len(observer.state_layers) for observer in self.observers])
        for observer, own in zip(self.observers, parts, strict=True):
            if len(own):
                observer.on_states(self, own)
