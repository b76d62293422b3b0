"""PromptQueries: queries of the newest prompt tokens by row, from prefill, kept until the row takes
another prompt.

Shapes: T tokens of a chunk, W kept tokens, B rows, H query heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from magicdec.runner.forward_batch import EnqueuedForward, ForwardObserver


@dataclass
class _Kept:
    """Kept queries of a row by layer, [up to W, H, D] after RoPE."""

    prompt_length: int
    num_computed: int  # of its tokens; others come from rows whose texts begin alike
    layers: dict[int, Tensor] = field(default_factory=dict)


class PromptQueries(ForwardObserver):
    """A keeper of the queries of the last `num_tokens` tokens of prompts."""

    needs_queries = True

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._rows: dict[int, _Kept] = {}

    def begin_prompt(self, row: int, length: int, num_left: int) -> None:
        self._rows[row] = _Kept(length, num_left)

    def wants(self, forward: EnqueuedForward) -> bool:
        if not forward.view.is_of_prompt or forward.view.rows[0] not in self._rows:
            return False
        return self._num_kept(forward) > 0

    def on_queries(self, forward: EnqueuedForward, layer: int, queries: Tensor) -> None:
        layers = self._rows[forward.view.rows[0]].layers
        newest = queries[0, -self._num_kept(forward) :]
        parts = [layers[layer], newest] if layer in layers else [newest]
        layers[layer] = torch.cat(parts)  # a copy: the chunk's other queries can be freed

    def _num_kept(self, forward: EnqueuedForward) -> int:
        """How many of the tokens of a chunk of one row's prompt are among the last ones."""
        view = forward.view
        (row,) = view.rows
        (length,) = view.lengths
        num_left = self._rows[row].prompt_length - length - view.num_new
        return self.num_tokens - num_left

    def newest(self, rows: Sequence[int], lengths: Sequence[int], count: int) -> list[Tensor]:
        """Queries [B, count, H, D] by layer of the newest `count` tokens of `rows` with prompts
        of `lengths`; empty if not kept."""
        prompts = [self._rows.get(row) for row in rows]
        for prompt, length in zip(prompts, lengths, strict=True):
            num_kept = 0 if prompt is None else min(self.num_tokens, prompt.num_computed)
            if prompt is None or prompt.prompt_length != length or num_kept < count:
                return []
        layers = [prompt.layers for prompt in prompts if prompt is not None]
        return [
            torch.stack([queries[layer][-count:] for queries in layers])
            for layer in sorted(layers[0])
        ]
