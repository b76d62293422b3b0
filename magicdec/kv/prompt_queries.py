"""PromptQueries: queries of the newest prompt tokens by row, from prefill, kept until the row takes
another prompt.

Shapes: T tokens of a chunk, W kept tokens, B rows, H query heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class _Kept:
    """Kept queries of a row by layer, [up to W, H, D] after RoPE."""

    prompt_length: int
    num_computed: int  # of its tokens; others come from rows whose texts begin alike
    layers: dict[int, Tensor] = field(default_factory=dict)


class PromptQueries:
    """A keeper of the queries of the last `num_tokens` tokens of prompts."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._rows: dict[int, _Kept] = {}

    def begin(self, row: int, prompt_length: int, num_computed: int) -> None:
        self._rows[row] = _Kept(prompt_length, num_computed)

    def watch(self, row: int, num_left: int) -> Callable[[int, Tensor], None] | None:
        """A function of layer and queries [1, T, H, D] of a prompt chunk, after which `num_left`
        tokens follow; None if it keeps nothing."""
        count = self.num_tokens - num_left
        if count <= 0:
            return None
        layers = self._rows[row].layers

        def keep(layer: int, queries: Tensor) -> None:
            newest = queries[0, -count:]
            parts = [layers[layer], newest] if layer in layers else [newest]
            layers[layer] = torch.cat(parts)  # a copy: the chunk's other queries can be freed

        return keep

    def newest(self, rows: Sequence[int], lengths: Sequence[int], count: int) -> list[Tensor]:
        """Queries [B, count, H, D] by layer of the newest `count` tokens of `rows` with prompts
        of `lengths`; empty if not kept."""
        prompts = [self._rows.get(row) for row in rows]
        for each, length in zip(prompts, lengths, strict=True):
            num_kept = 0 if each is None else min(self.num_tokens, each.num_computed)
            if each is None or each.prompt_length != length or num_kept < count:
                return []
        layers = [each.layers for each in prompts if each is not None]
        return [
            torch.stack([each[layer][-count:] for each in layers]) for layer in sorted(layers[0])
        ]
