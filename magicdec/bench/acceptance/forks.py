"""Forks: drafts at many positions of known texts at once. Each position is a row of one batch that
shares the blocks of its text, and no forward verifies: a draft is compared with how the text goes
on. The texts are the model's own, decoded once for all these drafts of a context.

This serves drafts that follow from the text (`inexact_reason`): those of the target itself or a
low-bit copy of it under a policy that chooses by lengths or at the end of the prompt, and those of
a draft model or a head with its whole cache; and lookups, which need no forward at all. Other
drafts are made step by step. So are sampled ones, which the target's distribution after them
judges, and not how a text goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from magicdec.config.capabilities import policy_called
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import NGRAM, SamplingSection
from magicdec.hardware.timing import synchronize
from magicdec.kv.cache import BatchRows
from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch, Request, SamplingParams, StepOutput
from magicdec.setup.loading import make_draft
from magicdec.setup.model_plan import ModelPlan
from magicdec.speculation.draft_length import WholeLookups
from magicdec.speculation.drafter import (
    Drafter,
    DraftModel,
    DraftSetup,
    fork_rows,
    make_drafter,
)
from magicdec.speculation.ngram import NgramDrafter
from magicdec.speculation.observation import newest_cached, rerun_tail
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.steps import DecodeSteps
from magicdec.systems.modes import Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.systems.system import SystemDetails

CONTINUATIONS = "continuations"  # the name of a result that drafts share
MOST_FORKS = 256  # rows of a batch, beside those of the texts


def inexact_reason(config: ResolvedConfig) -> str | None:
    """Why a run may draft otherwise at a position; None if it does not."""
    decoding = config.decoding
    if decoding.model_drafter is None:
        return None
    policy = policy_called(config.kv.policy)
    if decoding.looks_up:
        return "whether a run looks up follows from what it has accepted before"
    if policy.needs_weights:
        return "what a draft reads follows from the last verification, which a run has elsewhere"
    if config.kv.policy != FULL_KV_POLICY and decoding.has_draft_model:
        return (
            "its window begins as many tokens earlier as the last step committed, which in a run "
            "are more"
        )
    if "reselect_every" in policy.settings and config.kv.reselect_every:
        return "a run chooses anew at the first step that is due, which is elsewhere"
    return None


def can_fork(config: ResolvedConfig) -> bool:
    """Whether a draft at a position follows from the text, and how many of its tokens are accepted
    from how the text goes on."""
    sampling = config.sampling
    if sampling != SamplingSection(seed=sampling.seed):  # also where penalties follow the drafts
        return False
    return inexact_reason(config) is None


def num_forks(config: ResolvedConfig) -> int:
    """The rows of a batch of forks."""
    w = config.workload
    return min(MOST_FORKS, w.batch_size * w.num_new_tokens)


@dataclass(frozen=True)
class Position:
    """A place in the continuation of a text: `number` tokens of it are known, the last of which is
    not cached yet."""

    request: Request
    continuation: Sequence[int]
    number: int

    def count(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft lead the rest of the continuation."""
        following = self.continuation[self.number : self.number + len(draft)]
        differ = (
            n for n, pair in enumerate(zip(draft, following, strict=True)) if len({*pair}) > 1
        )
        return next(differ, len(draft))


class TextDrafts(PrefilledBatching):
    """Drafts beside texts that all drafts of a context share, in a cache that has rows for
    forks."""

    def _plan_of(self, row_tokens: int, rewound: int | None = None) -> ModelPlan:
        plan = replace(super()._plan_of(row_tokens, rewound), kept_states=self.room.state_layers)
        return plan.with_forks(self.room.num_forks)


class ForkedDrafts(TextDrafts):
    """Drafts in forks of the texts of a context."""

    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        assert self.runner is not None and self.kept is not None, "these prompts were kept"
        with observer.threads.during(), torch.inference_mode():
            key = CONTINUATIONS, self.kept.number
            if key not in self.caches.results:
                self.caches.results[key] = self._continue(requests)
            continuations = self.caches.results[key]
            positions = list[Position]()
            for request, tokens in zip(requests, continuations, strict=True):
                request.output_ids = tokens[: self._end_of(request, tokens)]
                numbers = range(1, len(request.output_ids))
                positions += [Position(request, tokens, number) for number in numbers]
            observer.begin(self.runners)
            if self.run.config.decoding.drafter == NGRAM:
                self._look_up(positions, observer)
            else:
                self._draft(self.runner, positions, observer)
        return SystemDetails()

    def _continue(self, requests: Sequence[Request]) -> list[list[int]]:
        """How each text goes on, past its end by as many tokens as a draft has. The rows keep the
        K and V of it."""
        assert self.runner is not None and self.kept is not None, "these prompts were kept"
        config = self.run.config
        most = config.workload.num_new_tokens + config.decoding.max_gamma
        asked = [request.sampling for request in requests]
        for request in requests:
            request.sampling = replace(request.sampling, max_new_tokens=most, eos_token_ids=())
        engine = self.kept.engine
        strategy = build_decoder(self.runner, config.decoding, config.kv, name=BASELINE)
        engine.begin(strategy)
        w = config.workload
        with self.shared.progress.task("continuations", w.batch_size * most) as advance:
            done = engine.decode(strategy, lambda ids, output, s: advance(output.num_tokens))
        for request, sampling in zip(requests, asked, strict=True):
            request.sampling = sampling
        return [list(request.output_ids) for request in done]

    def _end_of(self, request: Request, tokens: Sequence[int]) -> int:
        """The number of tokens up to the end of the request."""
        most = self.run.config.workload.num_new_tokens
        ends = request.sampling.eos_token_ids
        return next((n for n, token in enumerate(tokens[:most], 1) if token in ends), most)

    def _make_draft(self) -> DraftModel | None:
        models = self.shared.models
        return make_draft(self.run, self.groups, models, num_forks=self.room.num_forks)

    def _draft(
        self, runner: ModelRunner, positions: Sequence[Position], observer: PassObserver
    ) -> None:
        decoding = self.run.config.decoding
        gamma = decoding.max_gamma
        count = self.room.num_forks
        setup = DraftSetup(runner, decoding, self.run.config.kv, self.draft)
        assert decoding.drafter is not None, "something drafts"
        drafter = make_drafter(decoding.drafter, setup)
        steps = DecodeSteps(runner, drafter, observer.phases or nullcontext)
        admit_texts(runner, drafter, positions)
        for first in range(0, len(positions), count):
            some = positions[first : first + count]
            started = time.perf_counter()
            forks = self._forks(runner, some, gamma)
            texts = [position.request for position in some]
            fork_rows(runner, forks, texts)
            drafter.fork(forks, texts)
            see_last(runner, drafter, forks)
            batch = Batch(tuple(forks))
            steps.admit(batch, [gamma])
            drafts = steps.draft(batch, gamma).ids.tolist()
            steps.release(batch.rows)
            for row in batch.rows:
                runner.release(row)
            synchronize(self.device)
            tell(observer, some, drafts, time.perf_counter() - started)

    def _forks(
        self, runner: ModelRunner, positions: Sequence[Position], gamma: int
    ) -> list[Request]:
        """A request for each position, in rows that fork."""
        free = range(runner.num_texts, runner.num_rows)
        forks = []
        for row, position in zip(free, positions, strict=False):
            known = [*position.continuation[: position.number]]
            sampling = SamplingParams(len(known) + gamma)
            forks.append(Request(row, position.request.prompt_ids, sampling, known, row=row))
        return forks

    def _look_up(self, positions: Sequence[Position], observer: PassObserver) -> None:
        """Lookups at all positions of each text in turn, in whose order they learn."""
        decoding = self.run.config.decoding
        corpus = self.run.corpus
        w = self.run.config.workload
        length = WholeLookups(decoding.max_gamma)
        drafter = NgramDrafter(w.batch_size, decoding.max_gamma, self.device, corpus)
        for request, some in by_request(positions):
            started = time.perf_counter()
            known = Request(0, request.prompt_ids, request.sampling, row=request.row)
            drafter.admit([known])
            drafts = []
            for position in some:
                known.output_ids = [*position.continuation[: position.number]]
                drafter.plan([known], decoding.max_gamma, length)
                assert request.row is not None, "its text was prefilled"
                drafts.append([token for token, _ in drafter.proposals[request.row]])
            tell(observer, some, drafts, time.perf_counter() - started)


def admit_texts(runner: ModelRunner, drafter: Drafter, positions: Sequence[Position]) -> None:
    """Admit all texts at the ends of their prompts, as a run does, then go on to the ends of their
    continuations, as after steps without drafts. They themselves draft nothing there."""
    continuations = {position.request: position.continuation for position in positions}
    texts = [
        replace(request, output_ids=[*tokens[:1]]) for request, tokens in continuations.items()
    ]
    for text, tokens in zip(texts, continuations.values(), strict=True):
        assert text.row is not None, "texts have rows"
        num_cached = len(text.prompt_ids) + len(tokens) - 1
        runner.cache.advance([text.row], num_cached - runner.cache.lengths[text.row])
    drafter.admit(texts)
    for text, tokens in zip(texts, continuations.values(), strict=True):
        text.output_ids = [*tokens]
        drafter.prepare([text], 0)


def see_last(runner: ModelRunner, drafter: Drafter, forks: Sequence[Request]) -> None:
    """Let a drafter that observes verifications see the newest cached token of each fork, the last
    that one has committed."""
    rows = BatchRows.of(Batch(tuple(forks)).rows, runner.device)
    for observer in drafter.observers:
        rerun_tail(runner, rows, newest_cached(forks, 1, runner.device), observer)
    if drafter.observers:
        drafter.commit(rows, runner.cache.lengths_of(rows))


def by_request(positions: Sequence[Position]) -> Iterator[tuple[Request, list[Position]]]:
    for request in dict.fromkeys(position.request for position in positions):
        yield request, [position for position in positions if position.request is request]


def tell(
    observer: PassObserver,
    positions: Sequence[Position],
    drafts: Sequence[Sequence[int]],
    seconds: float,
) -> None:
    """Observe a step in which each position emits the next token of its text, whatever was
    drafted."""
    pairs = list(zip(positions, drafts, strict=True))
    output = StepOutput(
        token_ids=[[position.continuation[position.number]] for position in positions],
        draft_width=max(map(len, drafts)),
        num_accepted=[position.count(draft) for position, draft in pairs],
        num_drafted=[len(draft) for draft in drafts],
    )
    ids = [position.request.request_id for position in positions]
    observer.observe(ids, output, seconds)
