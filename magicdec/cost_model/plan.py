"""Plan: a checked question of `magicdec plan`, and the cells that answer it. Predicted from shapes
and rates; nothing is run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.cost_model.costs import (
    Acceptance,
    Deployment,
    Prediction,
    Speculation,
    best_gamma,
    break_even_context,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Plan:
    """A checked question: what is served on what, and which cells are asked for."""

    target: Deployment
    draft: Deployment  # the target itself in self-speculation
    dtype: str
    curves: dict[int, Acceptance]  # a KV budget each
    acceptance_source: str
    machine_source: str
    batch_sizes: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    max_gamma: int

    @property
    def is_self_speculation(self) -> bool:
        return self.draft is self.target

    def ways(self) -> list[Speculation]:
        return [Speculation(self.target, self.draft, b, c) for b, c in self.curves.items()]

    def predict(self, batch_size: int, prefix_len: int) -> Prediction:
        return best_gamma(self.ways(), batch_size, prefix_len, self.max_gamma)

    def break_even(self, batch_size: int) -> int | None:
        return break_even_context(self.ways(), batch_size, self.max_gamma)
