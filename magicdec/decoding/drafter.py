"""Drafter: the protocol of what proposes draft tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from magicdec.config import DRAFTERS, KVSection, load_named
from magicdec.runner import ModelRunner


class Drafter(Protocol):
    @classmethod
    def build(cls, target: ModelRunner, kv: KVSection) -> Drafter: ...

    def propose(self, last_ids: Tensor, rows: Sequence[int], num_draft_tokens: int) -> Tensor:
        """Continue each of `rows` after its newest token last_ids [B, 1] by draft ids [B,
        num_draft_tokens].

        Leaves the target's cache as it found it.
        """
        ...


def make_drafter(name: str, target: ModelRunner, kv: KVSection) -> Drafter:
    """The drafter of that name for `target`."""
    drafter: Drafter = load_named(DRAFTERS, name).build(target, kv)
    return drafter
