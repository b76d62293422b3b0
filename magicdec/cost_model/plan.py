"""Plan: the checked arguments of `magicdec plan`, and the predictions for them. Everything is
predicted from shapes and rates; nothing is run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.cost_model.costs import Deployment
from magicdec.cost_model.curves import Acceptance
from magicdec.cost_model.speculation import (
    Choice,
    Prediction,
    Speculation,
    best_gamma,
    break_even_context,
)

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Plan:
    """Models, hardware and acceptance, and the batch sizes and prefix lengths to predict."""

    target: Deployment
    draft: Deployment  # the target itself in self-speculation
    dtype: str
    curves: dict[int, Acceptance]  # by KV budget
    acceptance_source: str
    machine_source: str
    batch_sizes: tuple[int, ...]
    prefix_lens: tuple[int, ...]
    max_gamma: int
    gen_len: int  # output tokens of a sequence, for the net speedup
    choices: dict[int, Choice]  # what the KV policy does before the first step, by KV budget

    @property
    def is_self_speculation(self) -> bool:
        return self.draft is self.target

    def candidates(self) -> list[Speculation]:
        return [
            Speculation(self.target, self.draft, budget, curve, self.choices[budget])
            for budget, curve in self.curves.items()
        ]

    def predict(self, batch_size: int, prefix_len: int) -> Prediction:
        return best_gamma(self.candidates(), batch_size, prefix_len, self.max_gamma)

    def break_even(self, batch_size: int) -> int | None:
        return break_even_context(self.candidates(), batch_size, self.max_gamma)
