"""NoDrafter: the drafter of plain decoding, whose strategy always asks for 0 draft tokens."""

from __future__ import annotations

from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.drafter import Drafter, DraftSetup, DraftShape


class NoDrafter(Drafter):
    has_probabilities = False

    @classmethod
    def build(cls, setup: DraftSetup) -> NoDrafter:
        return cls()

    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        raise AssertionError("it is asked for no drafts")
