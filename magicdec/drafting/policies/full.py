"""FullKV: a draft reads every committed token."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.sections import KVSection
from magicdec.drafting.draft_kv import DraftKV
from magicdec.drafting.policies.policy import KVPolicy
from magicdec.kv.view import FULL, FullView, Visible
from magicdec.runner import ModelRunner


@dataclass(frozen=True)
class FullKV(FullView, KVPolicy):
    """Self-speculation under it accepts every draft; for a standalone draft it is the default way
    to keep a cache."""

    @classmethod
    def build(cls, kv: KVSection) -> FullKV:
        return cls()

    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        return DraftKV(runner, self)

    def draft_reads(self, context: int) -> tuple[int, Visible]:
        return context, FULL
