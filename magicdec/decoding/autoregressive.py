"""Autoregressive decoding: one token a row a step. The baseline, and what every other strategy must
reproduce."""

from __future__ import annotations

import torch

from magicdec.config import DecodingSection, KVSection
from magicdec.decoding.strategy import Phase, choose, untimed
from magicdec.request import Batch, StepOutput
from magicdec.runner import ModelRunner


class Autoregressive:
    def __init__(self, runner: ModelRunner, phase: Phase = untimed) -> None:
        self.runner, self.phase = runner, phase

    @classmethod
    def build(
        cls, runner: ModelRunner, decoding: DecodingSection, kv: KVSection, phase: Phase
    ) -> Autoregressive:
        return cls(runner, phase)

    def step(self, batch: Batch) -> StepOutput:
        last = torch.tensor([[r.last_token] for r in batch.requests], device=self.runner.device)
        with self.phase("decode"):
            ids = choose(self.runner, self.runner.forward(last, batch.rows))
        return StepOutput(ids.tolist())
