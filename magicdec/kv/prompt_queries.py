"""PromptQueries: the queries of the newest tokens of each row's prompt, as prefill computed them.

Owns which queries of a chunk are kept. They stay until the row takes another prompt, so that every
pass over one prefill finds them.

Shapes: T tokens of a chunk, W kept tokens, B rows, H query heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class _Kept:
    """`layers` are queries [up to W, H, D] after RoPE, by layer."""

    prompt_length: int
    layers: dict[int, Tensor] = field(default_factory=dict)


class PromptQueries:
    """Keeps the queries of the last `num_tokens` tokens of each prompt, or of all if it has
    fewer."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._rows: dict[int, _Kept] = {}

    def begin(self, row: int, prompt_length: int) -> None:
        """`row` takes a new prompt. What was kept of its last prompt is forgotten."""
        self._rows[row] = _Kept(prompt_length)

    def watch(self, row: int, num_left: int) -> Callable[[int, Tensor], None] | None:
        """What to call with the layer and the queries [1, T, H, D] of a chunk of the prompt, after
        which `num_left` tokens of it are still to come; None if none of them is kept."""
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
        """The queries [B, count, H, D] of each layer of the newest `count` tokens of `rows`, if
        their prompts have these lengths and so many were kept of each; else an empty list."""
        prompts = [self._rows.get(row) for row in rows]
        for each, length in zip(prompts, lengths, strict=True):
            num_kept = 0 if each is None else min(self.num_tokens, each.prompt_length)
            if each is None or each.prompt_length != length or num_kept < count:
                return []
        layers = [each.layers for each in prompts if each is not None]
        return [
            torch.stack([each[layer][-count:] for each in layers]) for layer in sorted(layers[0])
        ]
