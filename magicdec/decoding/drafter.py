"""Drafter: the protocol of what proposes draft tokens, and what it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from magicdec.config import DRAFTERS, load_named
from magicdec.decoding.strategy import Setup
from magicdec.request import Batch
from magicdec.runner import Watch


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of a batch and the distributions they were drawn from.

    `probabilities` is None where a draft was not drawn: greedy requests, prompt lookup.
    """

    ids: Tensor  # int64 [B, K]
    probabilities: Tensor | None = None  # [B, K, V] over the whole vocabulary


class Drafter(Protocol):
    @property
    def watch(self) -> Watch | None:
        """Told where the attention of each verification went; None where that is no concern."""
        ...

    @classmethod
    def build(cls, setup: Setup) -> Drafter: ...

    def begin(self, batch: Batch) -> None:
        """Prepare for `batch`, whose prompts stand in the target's cache. Before its first step,
        and outside what is timed as decoding."""
        ...

    def propose(self, batch: Batch, num_draft_tokens: int) -> Proposal:
        """Continue each request after its newest token. Leaves the target's cache as it found
        it."""
        ...

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """A step has ended: the target's cache holds `lengths` tokens of `rows`, all settled."""
        ...


def make_drafter(name: str, setup: Setup) -> Drafter:
    """The drafter of that name."""
    drafter: Drafter = load_named(DRAFTERS, name).build(setup)
    return drafter
