"""Drafter: the base class of all sources of draft tokens, named in `names.DRAFTERS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.kv.cache import BatchRows, Lengths
from magicdec.kv.prefix_cache import CachedText
from magicdec.names import DRAFTERS, load_named
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.forward_batch import ForwardObserver
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.draft_length import DraftLength
from magicdec.speculation.policies.policy import make_draft_kv


@dataclass(frozen=True)
class DraftModel:
    """A standalone draft model on some of the target's ranks; `runner` is None elsewhere.

    `source` is the rank in the target's group that broadcasts draft tokens. `is_rolling`: the
    host frees blocks of the cache as the text grows."""

    runner: ModelRunner | None
    source: int
    prefill_chunk: int
    is_rolling: bool = False


@dataclass(frozen=True)
class DraftPlan:
    """The number of draft tokens of each row; shorter rows are padded, and all 0 is plain
    decoding.

    `judged` are the tokens that count for the acceptance by which `--gamma` chooses."""

    counts: Sequence[int]
    judged: Sequence[int]


@dataclass(frozen=True)
class DraftShape:
    """At most `gamma` drafts, after the `pending` newest tokens of each row that the first
    draft forward takes."""

    gamma: int
    pending: int = 1


@dataclass(frozen=True)
class DraftSetup:
    """The inputs of `Drafter.build`. `corpus` are token ids that prompt lookup searches beside
    the text."""

    runner: ModelRunner
    decoding: DecodingSection
    kv: KVSection
    draft: DraftModel | None = None
    corpus: Sequence[int] = ()


class Drafter(ABC):
    """A source of draft tokens.

    A request is admitted (`admit`), takes part in steps (`plan`, `prepare`, `propose`, `commit`)
    and is released (`release`). `plan` and `prepare` get the same requests."""

    draft_kv: DraftKV | None = None
    """The KV that drafts read; None if no model drafts on this rank."""
    observers: Sequence[ForwardObserver] = ()
    """They see verifications. These take rows with equal numbers of drafts then."""
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
        """Prepare for `requests`, whose prompts are in the target's cache. Timed as `begin_ms`,
        not as decoding."""

    def fork(self, forks: Sequence[Request], texts: Sequence[Request]) -> None:  # noqa: B027
        """Admit requests at earlier places of `texts`, of each of which one begins with so much.
        The texts were admitted at the ends of their prompts, and prepared for a draft at their own
        ends since; their rows stay as they are until the forks are released. The target's cache
        has forked (`ModelRunner.fork`)."""

    def lengths(self, choices: Sequence[int]) -> Sequence[int]:
        """The draft lengths of captured steps where `choices` may be asked for; others are
        padded."""
        return choices

    def pendings(self, gamma: int) -> Sequence[int]:
        """The values of `pending` with which `gamma` may be drafted."""
        return self.pending

    def plan(
        self,
        requests: Sequence[Request],
        gamma: int,
        draft_length: DraftLength,
        can_join: bool = False,
    ) -> DraftPlan:
        """Plan the next draft of at most `gamma`, the same on every rank. Rows of
        different lengths are verified together if they `can_join`, and padded otherwise."""
        counts = [gamma] * len(requests)
        return DraftPlan(counts, counts)

    def prepare(self, requests: Sequence[Request], gamma: int) -> int:
        """The host phase of a draft. Returns the number of newest tokens of each row that the
        first draft forward takes."""
        return 1

    @abstractmethod
    def propose(self, batch: DeviceBatch, shape: DraftShape) -> Proposal:
        """The device phase: draft tokens after each request's newest token. The target's cache
        ends unchanged. Without `pa` the host reads no result, so that the phase can be captured."""

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:  # noqa: B027
        """Follow a step that left `lengths` committed tokens in the target's cache."""

    def release(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Forget the ended requests in `rows`."""


def fork_rows(runner: ModelRunner, forks: Sequence[Request], texts: Sequence[Request]) -> None:
    """Let the rows of `forks` begin with the cached tokens that each has of its text."""
    for request, text in zip(forks, texts, strict=True):
        assert request.row is not None and text.row is not None, "texts and forks have rows"
        length = min(request.num_cached, runner.cache.lengths[text.row])
        runner.fork(request.row, text.row, length)


class StandaloneDrafter(Drafter):
    """A drafter with a model, and a KV cache of its own, on some of the target's ranks. The others
    only receive its tokens.

    If its cache shares prefixes, a text begins with the blocks that this has, whatever the target's
    has of it, and those that it has computed stay for others."""

    def __init__(
        self, target: ModelRunner, draft: DraftModel, kv: KVSection, pa: float, max_gamma: int
    ) -> None:
        self.target = target
        self.draft = draft
        self.pa = pa
        self.max_gamma = max_gamma
        self._admitted: dict[int, tuple[Request, int]] = {}  # by row, with the tokens it had then
        self.vocab_size = target.model.config.vocab_size
        self.draft_kv = None if draft.runner is None else make_draft_kv(draft.runner, kv)
        self.can_capture = not draft.is_rolling

    def begin(self, runner: ModelRunner, request: Request) -> int:
        """Empty the row of a request, and give it room and what the cache has of its text. Returns
        how many of the text's entries these are."""
        row = request.row
        assert row is not None, "an admitted request has a row"
        runner.release(row)
        self._admitted[row] = request, request.num_cached
        # No more than the request can need: other blocks keep other texts.
        most = len(request.prompt_ids) + request.sampling.max_new_tokens + self.max_gamma
        return runner.begin(row, self.entries_of(request.cached_ids), most)

    def entries_of(self, text: Sequence[int]) -> CachedText:
        """That from which the entries of the draft's cache for a text follow, one for each. Of
        texts with the same first ones these entries are the same."""
        return text

    def keep(self, runner: ModelRunner, request: Request) -> None:
        """Let others begin with what was computed of the text of a request that is admitted."""
        assert request.row is not None, "an admitted request has a row"
        runner.keep(request.row, self.entries_of(request.cached_ids))

    def fork(self, forks: Sequence[Request], texts: Sequence[Request]) -> None:
        if self.draft_kv is not None and self.draft.runner is not None:
            fork_rows(self.draft.runner, forks, texts)
            self.draft_kv.fork(forks, texts)

    def release(self, rows: Sequence[int]) -> None:
        runner = self.draft.runner
        if self.draft_kv is None or runner is None:
            return
        self.draft_kv.release(rows)
        for row in rows:
            if not runner.shares_prefixes:
                runner.release(row)
                continue
            request, num_admitted = self._admitted.pop(row)
            text = (*request.prompt_ids, *request.output_ids)
            if self.draft.is_rolling:  # what steps have added follows from the steps too
                text = text[:num_admitted]
            runner.release(row, self.entries_of(text))

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        """Forget rejected drafts. The policy's `commit` would copy K and V from the target."""
        if self.draft_kv is not None:
            self.draft_kv.rewind(rows, lengths)


STOPPED = -1  # no token: what stands behind a chain that has stopped


def proposal_of_source(
    proposal: Proposal | None,
    batch: DeviceBatch,
    shape: DraftShape,
    draft: DraftModel,
    target: ModelRunner,
    pa: float,
) -> Proposal:
    """The proposal of the rank that drafts, on all ranks of the target. Those that do not draft
    have None. Chains that stop by `pa` may be shorter than was planned."""
    vocab_size = target.model.config.vocab_size
    if proposal is None:  # room, into which the rank receives it
        ids = batch.newest.new_zeros(len(batch.rows), shape.gamma)
        probs = None
        if batch.sampling.draws is not None:
            probs = ids.new_zeros(*ids.shape, vocab_size, dtype=torch.float64)
    else:
        ids = proposal.ids
        probs = proposal.probabilities
    if pa > 0:  # every rank learns from padding where the chain has stopped
        ids = F.pad(ids, (0, shape.gamma - ids.shape[1]), value=STOPPED)
    ids = target.group.broadcast(ids, draft.source)
    if pa > 0:
        ids = ids[:, : int((ids[0] != STOPPED).sum())]
        probs = None if probs is None else probs[:, : ids.shape[1]]
    return Proposal(ids, None if probs is None else target.group.broadcast(probs, draft.source))


def make_drafter(name: str, setup: DraftSetup) -> Drafter:
    drafter: Drafter = load_named(DRAFTERS, name).build(setup)
    return drafter
