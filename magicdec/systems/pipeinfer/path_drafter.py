"""Drafters of pipelined speculation and their messages. A drafter gives the most probable token
after a path that follows a request's committed text."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from magicdec.config.sections import KVSection, SamplingSection
from magicdec.distributed.channels.message import Kind, Message, floats_of, words_of
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.runner.prefill import take
from magicdec.runner.request import NotFinite, Request, SamplingParams
from magicdec.runner.sampling.coupled import CoupledSampling
from magicdec.runner.step_plan import PrefillChunk
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import make_draft_kv
from magicdec.speculation.suffix_index import Lookup, SuffixIndex
from magicdec.systems.pipeinfer.messages import Candidate, RunLaunch
from magicdec.systems.stages.spans import SpanKind


@dataclass(frozen=True)
class DraftRequest:
    """A question to the drafter: which token follows `path`, after `kept` known tokens and `new`?
    Without a path it only tells the text."""

    request: int
    lane: int
    kept: int
    new: tuple[int, ...]
    path: tuple[int, ...] | None = None

    def to_message(self, draft: int) -> Message:
        length = -1 if self.path is None else len(self.path)
        header = (self.request, self.lane, self.kept, length)
        return Message(Kind.NUMBERS, draft, words=(*header, *(self.path or ()), *self.new))

    @classmethod
    def from_message(cls, message: Message) -> DraftRequest:
        request, lane, kept, length, *tokens = message.words
        path = tokens[: max(0, length)]
        new = tokens[max(0, length) :]
        return cls(request, lane, kept, tuple(new), None if length < 0 else tuple(path))


def pack_candidate(draft: int, candidate: Candidate | None) -> Message:
    if candidate is None:
        return Message(Kind.NUMBERS, draft)
    token, probability = candidate
    return Message(Kind.NUMBERS, draft, words=(token, *words_of([probability])))


def candidate_of(message: Message) -> Candidate | None:
    """The candidate of an answer. Raises NotFinite if the drafter's logits are not finite."""
    if not message.words:
        return None
    (probability,) = floats_of(message.words[1:])
    if math.isnan(probability):
        raise NotFinite(f"the logits of draft {message.run} are not finite numbers")
    return message.words[0], probability


class PathDrafter(ABC):
    def keep_states(self, launch: RunLaunch, states: Tensor) -> None:  # noqa: B027
        """Take the target's hidden states [1, T, hidden] of the rows of a run, after the last
        layer, which are sent to drafters with a head."""

    @abstractmethod
    def propose(self, step: DraftRequest, text: list[int]) -> Candidate | None:
        """The candidate after the path that follows `text`, if there is one. A request without a
        path announces a text."""


class PathDraftHandler:
    what: ClassVar[SpanKind] = SpanKind.DRAFT

    def __init__(self, drafter: PathDrafter) -> None:
        self.drafter = drafter
        self.texts: dict[int, list[int]] = {}  # the committed text of each lane

    def answer(self, message: Message) -> tuple[Message | None, int | None]:
        if message.payload is not None:
            self.drafter.keep_states(RunLaunch.from_words(message.words), message.payload)
            return None, None
        step = DraftRequest.from_message(message)
        text = self.texts.setdefault(step.lane, [])
        text[step.kept :] = step.new
        candidate = self.drafter.propose(step, text)
        return (None, None) if step.path is None else (pack_candidate(message.run, candidate), 0)


class LookupPathDrafter(PathDrafter):
    """Prompt lookup: the token after the path's longest suffix in the committed text, with
    probability 1."""

    def __init__(self, corpus: Sequence[int] = ()) -> None:
        self.corpus = SuffixIndex(corpus, len(corpus)) if corpus else None
        self.lookups: dict[int, Lookup] = {}  # by lane

    def propose(self, step: DraftRequest, text: list[int]) -> Candidate | None:
        if step.kept == 0 or step.lane not in self.lookups:
            self.lookups[step.lane] = Lookup(self.corpus)
        lookup = self.lookups[step.lane]
        lookup.extend(text[lookup.length :])
        token = None if step.path is None else lookup.following(step.path)
        return None if token is None else (token, 1.0)


def num_known(path: Sequence[int], drafted: Sequence[int]) -> int:
    """The number of leading tokens of `path` that are `drafted` already."""
    pairs = enumerate(zip(path, drafted, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(path), len(drafted)))


@dataclass
class HeldText:
    """The text of a cache row: the first `committed` tokens of `request`, whose `output` follows
    the prompt, then the drafted `tokens`. `candidates[i]` follows the first i of these."""

    request: int = 0
    prompt: tuple[int, ...] = ()
    committed: int = 0
    output: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)

    def cut(self, count: int) -> None:
        """Keep the first `count` drafted tokens."""
        del self.tokens[count:], self.candidates[count + 1 :]

    def commit(self, count: int) -> None:
        self.committed += count
        self.output += self.tokens[:count]
        del self.tokens[:count], self.candidates[:count]


class ModelPathDrafter(PathDrafter):
    """A drafting model with its own KV cache, a row per lane, read by a KV policy. In
    self-speculation it is the target, whose own KV is divided among the stages.

    Candidates are ids below `vocab_size`, the target's: the best that `sampling` could choose, with
    their probabilities.
    """

    def __init__(
        self,
        draft: DraftModel,
        kv: KVSection,
        vocab_size: int,
        sampling: CoupledSampling = CoupledSampling(SamplingSection()),
    ) -> None:
        assert draft.runner is not None, "this rank drafts"
        self.runner = draft.runner
        self.kv = make_draft_kv(draft.runner, kv)
        self.prefill_chunk = draft.prefill_chunk
        self.vocab_size = vocab_size
        self.sampling = sampling
        self.held = [HeldText() for _ in range(draft.runner.num_rows)]

    def propose(self, step: DraftRequest, text: list[int]) -> Candidate | None:
        """The candidate. The cache keeps what lies on the
        path."""
        if step.kept == 0:
            self._begin(step.request, step.lane, text)
        if step.path is None:
            return None
        held = self.held[step.lane]
        new = text[held.committed :]
        tokens = [*new, *step.path]
        self._forget(step.lane, num_known(tokens, held.tokens))
        num_committed = min(len(new), len(held.tokens))
        held.commit(num_committed)
        self._compute(step.lane, tokens[num_committed + len(held.tokens) :])
        held.commit(len(new) - num_committed)
        return held.candidates[-1]

    def _begin(self, number: int, lane: int, text: Sequence[int]) -> None:
        request = Request(lane, tuple(text), SamplingParams(1), row=lane)
        self.runner.release(lane)
        self.runner.allocate(lane)
        (part,) = PrefillChunk.whole([request])
        logits = take(self.runner, part, self.prefill_chunk)
        assert logits is not None, "a whole text is complete"
        self.kv.admit([request])
        self.held[lane] = held = HeldText(number, tuple(text), len(text))
        self._learn(logits, held, 0)

    def _forget(self, lane: int, count: int) -> None:
        held = self.held[lane]
        device = self.runner.device
        held.cut(count)
        self.kv.rewind(BatchRows.of([lane], device), Lengths.of([held.committed + count], device))

    def _compute(self, lane: int, tokens: Sequence[int]) -> None:
        held = self.held[lane]
        device = self.runner.device
        committed = Lengths.of([held.committed], device)
        for begin in range(0, len(tokens), self.prefill_chunk):
            chunk = tokens[begin : begin + self.prefill_chunk]
            # The draft's vocabulary may be padded to another size than the target's.
            ids = upload([chunk], device).clamp(max=self.runner.model.config.vocab_size - 1)
            logits = self.kv.forward(ids, [lane], committed)
            first = len(held.tokens) + 1
            held.tokens += chunk
            self._learn(logits, held, first)

    def _learn(self, logits: Tensor, held: HeldText, first: int) -> None:
        """Add the candidates after the first `first` drafted tokens and more, from logits [1, T,
        V]."""
        logits = logits[0, :, : self.vocab_size]
        counts = range(first, first + len(logits))
        texts = [[*held.output, *held.tokens[:count]] for count in counts]
        following = [held.committed + count for count in counts]
        held.candidates += best_candidates(
            self.sampling, logits, held.request, held.prompt, texts, following
        )


def best_candidates(
    sampling: CoupledSampling,
    logits: Tensor,
    request: int,
    prompt: Sequence[int],
    texts: Sequence[Sequence[int]],
    following: Sequence[int],
) -> list[Candidate]:
    """What `sampling` would choose by the logits [T, V] of a drafter, for the positions `following`
    of a request, after its prompt and outputs `texts`."""
    if sampling.has_penalties:
        logits = sampling.penalised(logits, prompt, texts)
    probs = sampling.perturbed(logits, request, following).float().softmax(dim=-1)
    best = probs.max(dim=-1)
    # A token is exact in float64, so that the host reads once.
    both = torch.stack([best.indices.double(), best.values.double()], dim=1).tolist()
    return [(int(token), share) for token, share in both]
