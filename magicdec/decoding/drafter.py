"""Drafter: the protocol of what proposes draft tokens, and what it proposes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from magicdec.decoding.choosing import Choosing
from magicdec.decoding.device_batch import DeviceBatch
from magicdec.decoding.randomness import Purpose
from magicdec.decoding.reader import Reader
from magicdec.decoding.sampling import probabilities, sample
from magicdec.decoding.strategy import Proposal, Setup, choose, whole_logits
from magicdec.kv.device_rows import Lengths, Rows
from magicdec.names import DRAFTERS, load_named
from magicdec.request import Batch
from magicdec.runner import ModelRunner, Watch


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

    def prepare(self, batch: Batch, num_draft_tokens: int) -> None:
        """Before a recorded `propose` is replayed for `batch`: what the host has to decide, and
        what is not the work of every step."""
        ...

    def propose(self, batch: Batch | DeviceBatch, num_draft_tokens: int) -> Proposal:
        """Continue each request after its newest token. Leaves the target's cache as it found it.
        For a `DeviceBatch` nothing is read by the host, and all sizes follow from the batch's and
        the number of tokens."""
        ...

    @property
    def draws(self) -> bool:
        """Whether drafts of sampled requests are drawn: `propose` then gives their
        probabilities."""
        ...

    @property
    def reader(self) -> Reader | None:
        """What `propose` reads the context with; None where no model of this rank drafts."""
        ...

    @property
    def can_replay(self) -> bool:
        """Whether `propose` can be recorded and replayed, for a `DeviceBatch`. Alike on every
        rank."""
        ...

    def commit(self, rows: Rows, lengths: Lengths) -> None:
        """A step has ended: the target's cache holds `lengths` tokens of `rows`, all settled."""
        ...


def draw(
    runner: ModelRunner, logits: Tensor, choosing: Choosing, drafts: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The draft token after `drafts` [B, k], from this rank's logits [B, 1, V] of a drafting model:
    ids [B, 1], and what they were drawn from [B, 1, V], None where all requests are greedy."""
    draws = choosing.draws
    if draws is None:
        return choose(runner, logits, choosing, drafts), None
    probs = probabilities(whole_logits(runner, logits, choosing, drafts), draws.filters)
    u = draws.ahead(1, Purpose.DRAFT, skip=drafts.shape[1])
    return sample(probs[:, 0], u[:, 0]).unsqueeze(1), probs


def make_drafter(name: str, setup: Setup) -> Drafter:
    """The drafter of that name."""
    drafter: Drafter = load_named(DRAFTERS, name).build(setup)
    return drafter
