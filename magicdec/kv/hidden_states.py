"""HiddenStates: hidden states of a model's tokens after some of its layers, by row and position,
kept for a head that drafts from them.

Shapes: B rows, T new tokens, N states of a token, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HiddenStates:
    """States, and token ids, of `num_rows` rows of at most `max_tokens` tokens.

    `layers`: state R[a] is what a layers have made of the embedding, before any final norm. A row's
    lengths are those of the cache of the model that writes here."""

    def __init__(
        self,
        layers: Sequence[int],
        num_rows: int,
        max_tokens: int,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        shape = num_rows, max_tokens
        self.values = torch.zeros(*shape, len(layers), size, dtype=dtype, device=device)
        self.token_ids = torch.zeros(shape, dtype=torch.int64, device=device)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.token_ids.nbytes

    def write(self, rows: Tensor, positions: Tensor, token_ids: Tensor, states: Tensor) -> None:
        """States [N, B, T, S] of token ids [B, T] at positions [B, T] of rows [B]."""
        place = rows.unsqueeze(1), positions
        self.values[place] = states.permute(1, 2, 0, 3)
        self.token_ids[place] = token_ids

    def ids_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Token ids [B, T]."""
        return self.token_ids[rows.unsqueeze(1), positions]

    def states_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """[B, T, N, S]."""
        return self.values[rows.unsqueeze(1), positions]
