"""Autoregressive decoding: one token a row a step. The baseline, and what every other strategy must
reproduce."""

from __future__ import annotations

from magicdec.decoding.steps import Steps, make_steps
from magicdec.decoding.strategy import Setup
from magicdec.request import Batch, StepOutput


class Autoregressive:
    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    @classmethod
    def build(cls, setup: Setup) -> Autoregressive:
        return cls(make_steps(setup))

    def begin(self, batch: Batch) -> None:
        self.steps.begin(batch, (0,))

    def step(self, batch: Batch) -> StepOutput:
        return StepOutput(self.steps.decode(batch))
