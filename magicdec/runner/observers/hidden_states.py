"""HiddenStates: hidden states of a model's tokens after some of its layers, by row and position,
kept for a head that drafts from them. Where rows share blocks of K and V, these have the states of
their tokens, so that who begins with a block has them too.

Shapes: B rows, T new tokens, N states of a token, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from magicdec.kv.cache import KVCache
from magicdec.runner.forward_batch import EnqueuedForward, ForwardObserver
from magicdec.runner.model_runner import ModelRunner


class HiddenStates(ForwardObserver):
    """States, and token ids, of `num_texts` rows of at most `max_tokens` tokens, of all tokens that
    a runner computes from now on. Of `num_rows` the others are forks, which read the states of
    their texts, and write to a row that nobody reads. With a `cache`, whose rows share blocks, the
    states of a row are those of its blocks, and it has no forks.

    `state_layers`: state R[a] is what a layers have made of the embedding, before any final norm. A
    row's lengths are those of the cache of the model that writes here."""

    def __init__(
        self,
        state_layers: Sequence[int],
        num_rows: int,
        num_texts: int,
        max_tokens: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        cache: KVCache | None = None,
    ) -> None:
        self.state_layers = tuple(state_layers)
        num_states = len(self.state_layers)
        places = min(num_texts + 1, num_rows), max_tokens
        if cache is not None:
            assert num_texts == num_rows, "forks share no blocks that others have left"
            places = cache.shape.num_blocks, cache.shape.block_size
        self.values = torch.zeros(*places, num_states, size, dtype=dtype, device=device)
        self.token_ids = torch.zeros(places, dtype=torch.int64, device=device)
        self._cache = cache
        if cache is not None:
            cache.attach(self.values)
            cache.attach(self.token_ids)
        self._texts = torch.arange(num_rows, device=device)  # the row whose states each row has

    @classmethod
    def of(cls, runner: ModelRunner, state_layers: Sequence[int]) -> HiddenStates:
        """Room for the states of all tokens of a runner, after so many of its layers."""
        return cls(
            state_layers,
            num_rows=runner.num_rows,
            num_texts=runner.num_texts,
            max_tokens=runner.max_tokens,
            size=runner.model.config.hidden_size,
            dtype=next(runner.model.parameters()).dtype,
            device=runner.device,
            cache=runner.cache if runner.shares_prefixes else None,
        )

    def wants(self, forward: EnqueuedForward) -> bool:
        return not forward.is_draft

    def on_states(self, forward: EnqueuedForward, states: Tensor) -> None:
        self.write(forward.rows.index, forward.positions, forward.x, states)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.token_ids.nbytes

    def write(self, rows: Tensor, positions: Tensor, token_ids: Tensor, states: Tensor) -> None:
        """States [N, B, T, S] of token ids [B, T] at positions [B, T] of rows [B]."""
        if self._cache is None:
            rows = rows.clamp(max=len(self.values) - 1)
        place = self._place(rows, positions)
        self.values[place] = states.permute(1, 2, 0, 3)
        self.token_ids[place] = token_ids

    def fork(self, rows: Sequence[int], texts: Sequence[int]) -> None:
        """Let `rows`, whose tokens are the first ones of `texts`, have the states of these."""
        self._texts[rows] = self._texts[texts]

    def ids_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Token ids [B, T]."""
        return self.token_ids[self._place(self._texts[rows], positions)]

    def states_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[B, T, N, S]."""
        return self.values[self._place(self._texts[rows], positions)]

    def _place(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The first two indices of what is kept of rows [B] at positions [B, T]."""
        if self._cache is None:
            return rows.unsqueeze(1), positions
        size = self._cache.shape.block_size
        return self._cache.block_table[rows.unsqueeze(1), positions // size], positions % size


class ReceivedStates(HiddenStates):
    """States after layers that another stage has, which sends them: forwards of this stage do not
    show them."""

    def wants(self, forward: EnqueuedForward) -> bool:
        return False
