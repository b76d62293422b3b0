"""Autoregressive decoding: one token a row a step. The baseline, and what every other strategy must
reproduce."""

from __future__ import annotations

from magicdec.decoding.strategy import Phase, Setup, newest_tokens, next_tokens, untimed
from magicdec.request import Batch, StepOutput
from magicdec.runner import ModelRunner


class Autoregressive:
    def __init__(self, runner: ModelRunner, phase: Phase = untimed) -> None:
        self.runner, self.phase = runner, phase

    @classmethod
    def build(cls, setup: Setup) -> Autoregressive:
        return cls(setup.runner, setup.phase)

    def begin(self, batch: Batch) -> None:
        """Nothing to prepare."""

    def step(self, batch: Batch) -> StepOutput:
        last = newest_tokens(batch, self.runner.device)
        with self.phase("decode"):
            ids = next_tokens(self.runner, self.runner.forward(last, batch.rows), batch.requests)
        return StepOutput(ids.tolist())
