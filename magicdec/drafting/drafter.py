"""Drafter: the protocol of what proposes draft tokens.

Owns how a drafter takes part in the life of requests. Must not know how drafts are judged. The name
table is `names.DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.device_batch import DeviceBatch
from magicdec.drafting.draft_kv import DraftKV
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.names import DRAFTERS, load_named
from magicdec.request import Request
from magicdec.runner import ModelRunner, QueryWatch, Watch
from magicdec.sampling.model_tokens import Proposal


@dataclass(frozen=True)
class DraftModel:
    """A standalone draft: a model of its own on some of the target's ranks. All ranks learn the
    draft tokens from it.

    `runner` is None on ranks that hold no draft. `source` is the place, in the target's group, of
    the rank that broadcasts. `is_rolling`: the cache gives blocks back as the text grows, which the
    host has to do.
    """

    runner: ModelRunner | None
    source: int
    prefill_chunk: int
    is_rolling: bool = False


@dataclass(frozen=True)
class DraftSetup:
    """What a drafter is built from: the runner that holds the target, and its sections."""

    runner: ModelRunner
    decoding: DecodingSection
    kv: KVSection
    draft: DraftModel | None = None


class Drafter(Protocol):
    """Requests come (`admit`), take part in steps (`prepare`, `propose`, `commit`) and go
    (`release`), each by itself."""

    @property
    def draft_kv(self) -> DraftKV | None:
        """What drafts read the context with; None where no model of this rank drafts."""
        ...

    @property
    def watch(self) -> Watch | None:
        """Called with the attention weights of each verification; None where they are not
        needed."""
        ...

    @property
    def watch_queries(self) -> QueryWatch | None:
        """Called with the queries of each verification; None where they are not needed."""
        ...

    @property
    def has_probabilities(self) -> bool:
        """Whether drafts of sampled requests are drawn at random, so that `propose` gives their
        probabilities."""
        ...

    @property
    def can_capture(self) -> bool:
        """Whether `propose` can be captured and replayed. The same on every rank."""
        ...

    @property
    def pending(self) -> Sequence[int]:
        """What `prepare` may return where steps are captured, each of which is a step of its own.
        The same on every rank."""
        ...

    @classmethod
    def build(cls, setup: DraftSetup) -> Drafter: ...

    def admit(self, requests: Sequence[Request]) -> None:
        """The prompts of `requests` stand in the target's cache. Not timed as decoding."""
        ...

    def prepare(self, requests: Sequence[Request], num_draft_tokens: int, most_pending: int) -> int:
        """The host's phase before a draft: what needs lengths or texts on the host. Returns how
        many newest tokens of each row the first draft forward takes, 1 to `most_pending`."""
        ...

    def propose(self, batch: DeviceBatch, num_draft_tokens: int, pending: int = 1) -> Proposal:
        """Continue each request after its newest token; `pending` is what `prepare` returned.
        Leaves the target's cache as it found it. The host reads nothing, and all sizes follow from
        those of the batch and the two numbers."""
        ...

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        """A step has ended: the target's cache holds `lengths` committed tokens of `rows`."""
        ...

    def release(self, rows: Sequence[int]) -> None:
        """The requests in `rows` have ended."""
        ...


def make_drafter(name: str, setup: DraftSetup) -> Drafter:
    """The drafter of that name."""
    drafter: Drafter = load_named(DRAFTERS, name).build(setup)
    return drafter
