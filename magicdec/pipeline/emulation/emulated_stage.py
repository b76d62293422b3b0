"""Stages that sleep, to see what a pipeline does with its time where there are fewer cores than
stages: in place of computing (`EmulatedStage`), or after it (`PaddedStage`).

Owns what the first kind returns: zeros, from which every next token is the first of the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from magicdec.hardware.devices import wait_for_stream
from magicdec.pipeline.stage import Stage


@dataclass
class EmulatedStage(Stage):
    """Takes `seconds` for a message of any size. Rows have the lengths and the memory that they
    have in a stage that computes."""

    seconds: float = 0.0

    def compute(self, x: Tensor, rows: Sequence[int], last_only: bool) -> Tensor:
        time.sleep(self.seconds)
        config, cache = self.runner.model.config, self.runner.cache
        cache.advance(rows, x.shape[1])
        width = config.vocab_size if self.is_whole else config.hidden_size
        num_tokens = 1 if self.is_last and last_only else x.shape[1]
        weight = next(self.runner.model.parameters())
        return weight.new_zeros(x.shape[0], num_tokens, width)

    def logits(self, hidden: Tensor) -> Tensor:
        first, last = self.runner.model.head_rows
        return hidden.new_zeros(*hidden.shape[:2], last - first)


@dataclass
class PaddedStage(Stage):
    """Computes, and takes at least `seconds` for a message."""

    seconds: float = 0.0

    def compute(self, x: Tensor, rows: Sequence[int], last_only: bool) -> Tensor:
        due = time.perf_counter() + self.seconds
        out = super().compute(x, rows, last_only)
        wait_for_stream(out.device)
        time.sleep(max(0.0, due - time.perf_counter()))
        return out
