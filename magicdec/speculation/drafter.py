"""Drafter: the base class of everything that proposes draft tokens.

Owns the order in which a drafter is called for a request. The name table is `names.DRAFTERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.names import DRAFTERS, load_named
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import AttentionObserver
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.draft_length import DraftLength


@dataclass(frozen=True)
class DraftModel:
    """A standalone draft: a model of its own on some of the target's ranks. All ranks learn the
    draft tokens from it.

    `runner` is None on ranks that hold no draft. `source` is the index, within the target's group,
    of the rank that broadcasts the draft tokens. `is_rolling` says that the cache frees blocks as
    the text grows; only the host can do this.
    """

    runner: ModelRunner | None
    source: int
    prefill_chunk: int
    is_rolling: bool = False


@dataclass(frozen=True)
class DraftPlan:
    """What the next draft of some rows will be. `counts` are the tokens of each row that the
    drafter proposes. A row with fewer than the longest is padded, and if there are none the step is
    one of plain decoding. `judged` are those among them that tell how good the model is which
    drafts on `--gamma`'s account."""

    counts: Sequence[int]
    judged: Sequence[int]


@dataclass(frozen=True)
class DraftShape:
    """What `propose` drafts: at most `gamma` tokens. The first draft forward takes the
    `pending` newest tokens of each row, as `prepare` has returned."""

    gamma: int
    pending: int = 1


@dataclass(frozen=True)
class DraftSetup:
    """What a drafter is built from: the runner that holds the target, and its sections. `corpus`
    are tokens in which prompt lookup searches beside the text."""

    runner: ModelRunner
    decoding: DecodingSection
    kv: KVSection
    draft: DraftModel | None = None
    corpus: Sequence[int] = ()


class Drafter(ABC):
    """A request is admitted (`admit`), takes part in steps (`plan`, `prepare`, `propose`, `commit`;
    the first two with the same requests) and is released when it has ended (`release`). Requests of
    one batch may start and end at different times. A drafter without work at one of these calls
    leaves it as it is here."""

    draft_kv: DraftKV | None = None
    """The KV that drafts read; None if no model drafts on this rank."""
    watch: AttentionObserver | None = None
    """Called with the attention weights of each verification, if they are needed."""
    watch_queries: AttentionObserver | None = None
    """Called with the queries of each verification, if they are needed."""
    has_probabilities: bool = True
    """Whether drafts of sampled requests are drawn at random. `propose` then returns their
    probabilities."""
    can_capture: bool = True
    """Whether `propose` can be captured and replayed. The same on every rank."""
    pa: float = 0.0
    """A chain of drafts stops when its best candidate is less probable than this."""
    pending: Sequence[int] = (1,)
    """The numbers that `prepare` may return. The same on every rank."""

    @classmethod
    @abstractmethod
    def build(cls, setup: DraftSetup) -> Drafter: ...

    def admit(self, requests: Sequence[Request]) -> None:  # noqa: B027
        """Prepare for `requests`, whose prompts are in the target's cache. This is recorded as
        `begin_ms`, not as decode time."""

    def lengths(self, choices: Sequence[int]) -> Sequence[int]:
        """The numbers of draft tokens of captured steps, if `choices` may be asked for. Steps with
        another number are padded."""
        return choices

    def pendings(self, gamma: int) -> Sequence[int]:
        """Those of `pending` with which so many tokens may be drafted. With captured steps, each of
        them is captured as a step of its own."""
        return self.pending

    def plan(
        self,
        requests: Sequence[Request],
        gamma: int,
        draft_length: DraftLength,
        can_join: bool = False,
    ) -> DraftPlan:
        """Decide on the next draft, where `gamma` are asked for. `draft_length` knows
        what they cost and how many are accepted. Rows with different numbers of drafts are verified
        together if they `can_join`, and padded otherwise. The same on every rank."""
        counts = [gamma] * len(requests)
        return DraftPlan(counts, counts)

    def prepare(self, requests: Sequence[Request], gamma: int) -> int:
        """The host phase before a draft: the work that needs lengths or tokens on the host. Returns
        the number of newest tokens of each row that the first draft forward takes."""
        return 1

    @abstractmethod
    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        """The device phase: draft tokens that follow each request's newest token. The target's
        cache is the same afterwards. If drafts have no `pa`, the host reads no result, and all
        shapes of tensors follow from the arguments, so that the phase can be captured."""

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:  # noqa: B027
        """A step has ended. The target's cache now holds `lengths` committed tokens of `rows`."""

    def release(self, rows: Sequence[int]) -> None:  # noqa: B027
        """The requests in `rows` have ended."""


def make_drafter(name: str, setup: DraftSetup) -> Drafter:
    """The drafter of that name."""
    drafter: Drafter = load_named(DRAFTERS, name).build(setup)
    return drafter
