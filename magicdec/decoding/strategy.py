"""DecodingStrategy: the protocol every way of decoding follows. The name table is
`names.STRATEGIES`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magicdec.config.sections import DecodingSection, KVSection
from magicdec.decoding.choosing import Choosing
from magicdec.decoding.device_batch import DeviceBatch
from magicdec.decoding.draft_length import DraftLength
from magicdec.decoding.moments import Moments
from magicdec.decoding.randomness import Purpose
from magicdec.decoding.sampling import (
    count_accepted,
    gather_vocab,
    greedy,
    probabilities,
    process,
    sample,
)
from magicdec.decoding.verification import verify
from magicdec.kv.device_rows import upload
from magicdec.names import STRATEGIES, load_named
from magicdec.request import Batch, StepOutput
from magicdec.runner import ModelRunner

Phase = Callable[[str], AbstractContextManager[None]]
"""Called with a phase's name ("draft", "verify", ...), gives a context that may time it."""


def untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True)
class DraftModel:
    """A standalone draft: a model of its own on some of the target's ranks, which all ranks learn
    the draft tokens of.

    `runner` is None on ranks that hold no draft; `source` is the place, in the target's group, of
    the rank that tells the others. `is_rolling`: its cache gives blocks back as the text grows,
    which the host has to do.
    """

    runner: ModelRunner | None
    source: int
    prefill_chunk: int
    is_rolling: bool = False


@dataclass(frozen=True)
class Setup:
    """What a strategy is built from: the runner that holds the target, and its sections."""

    runner: ModelRunner
    decoding: DecodingSection
    kv: KVSection
    phase: Phase = untimed
    draft: DraftModel | None = None
    draft_length: DraftLength | None = None  # default: as the section says, knowing nothing yet
    recorder: Recorder | None = None  # of steps to be replayed; None: each is started anew


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of a batch and the distributions they were drawn from.

    `probabilities` is None where a draft was not drawn: greedy requests, prompt lookup.
    """

    ids: Tensor  # int64 [B, K]
    probabilities: Tensor | None = None  # [B, K, V] over the whole vocabulary


class Recorder(Protocol):
    """Keeps work of the device, to have it done again without the host (`cuda_graphs`)."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What repeats `work`, on the tensors it works on, and gives its result, which the next
        repetition of any work may overwrite. `work` was done before; what it does while it is
        recorded is undone by the caller."""
        ...


class DecodingStrategy(Protocol):
    @classmethod
    def build(cls, setup: Setup) -> DecodingStrategy: ...

    def begin(self, batch: Batch) -> None:
        """Prepare for `batch`, whose prompts were just taken; not timed as decoding."""
        ...

    def step(self, batch: Batch) -> StepOutput:
        """Advance every request of `batch` by at least one token."""
        ...


def make_strategy(name: str, setup: Setup) -> DecodingStrategy:
    """The strategy of that name."""
    strategy: DecodingStrategy = load_named(STRATEGIES, name).build(setup)
    return strategy


def newest_tokens(batch: Batch | DeviceBatch, device: torch.device) -> Tensor:
    """The newest token of each request, which the next forward takes: int64 [B, 1]."""
    if isinstance(batch, DeviceBatch):
        return batch.newest[:, -1:]
    return upload([[r.last_token] for r in batch.requests], device)


def choosing_of(runner: ModelRunner, batch: Batch | DeviceBatch) -> Choosing:
    """What the rows of `batch` choose tokens of the runner's model by, at this step."""
    if isinstance(batch, DeviceBatch):
        return batch.choosing
    return Choosing.of(batch.requests, runner.model.config.vocab_size, runner.device)


def choose(
    runner: ModelRunner, logits: Tensor, choosing: Choosing, drafts: Tensor | None = None
) -> Tensor:
    """Greedy ids [B, T] of this rank's logits [B, T, V], agreed by the runner's group, for greedy
    requests whose T positions follow `drafts` (see `sampling.process`)."""
    if choosing.penalties is None:
        return greedy(logits, runner.model.head_rows[0], runner.group)
    return whole_logits(runner, logits, choosing, drafts).argmax(dim=-1)


def whole_logits(
    runner: ModelRunner, logits: Tensor, choosing: Choosing, drafts: Tensor | None = None
) -> Tensor:
    """Logits over the whole vocabulary with each request's penalties, the same on every rank:
    float32 [B, T, V]."""
    whole = gather_vocab(logits, runner.vocab_places, runner.group)
    return process(whole, choosing.penalties, drafts)


def next_tokens(runner: ModelRunner, logits: Tensor, choosing: Choosing) -> Tensor:
    """The token after each request's output, from this rank's logits [B, 1, V] of it: int64 [B,
    1]."""
    draws = choosing.draws
    if draws is None:
        return choose(runner, logits, choosing)
    probs = probabilities(whole_logits(runner, logits, choosing), draws.filters)
    u = draws.ahead(1, Purpose.RESAMPLE)
    return sample(probs[:, 0], u[:, 0]).unsqueeze(1)


def judge(
    runner: ModelRunner, choosing: Choosing, proposal: Proposal, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """How many drafts of each row are kept [B], and ids [B, K+1] whose first that many + 1 the row
    emits, given this rank's logits [B, K+1, V] of its newest token and the drafts."""
    draws, drafts = choosing.draws, proposal.ids
    if draws is None:
        target = choose(runner, logits, choosing, drafts)
        return count_accepted(drafts, target), target
    probs = probabilities(whole_logits(runner, logits, choosing, drafts), draws.filters)
    count, following = verify(
        drafts,
        proposal.probabilities,
        probs,
        draws.ahead(drafts.shape[1], Purpose.ACCEPT),
        draws.ahead(drafts.shape[1] + 1, Purpose.RESAMPLE),
    )
    tokens = torch.cat([drafts, following.unsqueeze(1)], dim=1)
    return count, tokens.scatter(1, count.unsqueeze(1), following.unsqueeze(1))


def prefill(
    runner: ModelRunner, batch: Batch, chunk: int, progress: Callable[[int], None] = lambda n: None
) -> StepOutput:
    """Take the prompts of `batch` into the cache, one after the other, and emit each request's
    first token. Nothing is read by the host before the last chunk of the last prompt was started.

    `progress` is told how many prompt tokens were taken, on CUDA: asked to be.
    """
    tokens, moments = [], Moments(runner.device)
    for request, row in zip(batch.requests, batch.rows, strict=True):
        runner.allocate(row)
        prompt = upload([request.prompt_ids], runner.device)
        for part in prompt.split(chunk, dim=1):
            logits = runner.forward(part, [row], last_only=True)
            progress(part.shape[1])
        choosing = Choosing.of([request], runner.model.config.vocab_size, runner.device)
        tokens.append(next_tokens(runner, logits, choosing)[0])
        moments.mark()
    return StepOutput(torch.stack(tokens).tolist(), emitted_s=moments.seconds())
