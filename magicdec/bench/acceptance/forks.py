"""Forks: drafts at many positions of known texts at once. Each position is a row of one batch that
shares the blocks of its text, and no forward verifies: a draft is compared with how the text goes
on. The texts are the model's own, decoded once for all these drafts of a context.

This serves drafts that follow from the text (`inexact_reason`): those of the target itself or a
low-bit copy of it under a policy that chooses by lengths or at the end of the prompt, and those of
a draft model or a head with its whole cache; and lookups, which need no forward at all. Other
drafts are made step by step, and those of models whose layers keep states, which do not fork.

A sampled text is as probable whatever drafts its tokens (Leviathan et al., arXiv 2211.17192), and
says with which probability they were drafts: of a token x that a step has emitted and that follows
its accepted drafts, the step has drafted and accepted it with min(p(x), q(x)), and emitted it with
p(x), so that it is an accepted draft with min(1, q(x) / p(x)). A fork is given the text's own
tokens as drafts, for the q of each after those before; the p are those that the text was drawn
from.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from magicdec.config.capabilities import policy_called
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import NGRAM
from magicdec.hardware.timing import synchronize
from magicdec.kv.cache import BatchRows, upload
from magicdec.names import BASELINE, FULL_KV_POLICY
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch, Request, StepOutput
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import whole_logits
from magicdec.runner.sampling.sampling import probabilities
from magicdec.setup.loading import make_draft
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import ResolvedRun
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
from magicdec.speculation.steps.logits_recorder import JudgedStep, StepRecorder
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


def can_fork(run: ResolvedRun) -> bool:
    """Whether a draft at a position follows from the text, and what is accepted of it from how the
    text goes on, and no layer keeps states, of which a row has one alone."""
    models = run.models
    keep_states = models.target.mixers or (models.draft is not None and models.draft.mixers)
    return inexact_reason(run.config) is None and not keep_states


def num_forks(config: ResolvedConfig) -> int:
    """The rows of a batch of forks. Of a sampled draft each has as many distributions as tokens,
    which take as much memory as those of more rows with one."""
    w = config.workload
    num_distributions = config.decoding.max_gamma if config.sampling.temperature > 0 else 1
    return min(max(1, MOST_FORKS // num_distributions), w.batch_size * w.num_new_tokens)


@dataclass(frozen=True)
class DecodedText:
    """How a text goes on, past its end by as many tokens as a draft has: the first token, which is
    of the prefill, and all others, with the probabilities by which these were drawn if they are
    sampled."""

    tokens: list[int]
    chances: list[float] | None


@dataclass(frozen=True)
class Position:
    """A place in the continuation of a text: `number` tokens of it are known, the last of which is
    not cached yet."""

    request: Request
    continuation: DecodedText
    number: int

    @property
    def known(self) -> list[int]:
        return self.continuation.tokens[: self.number]

    def following(self, count: int) -> list[int]:
        return self.continuation.tokens[self.number : self.number + count]

    def chances(self, count: int) -> list[float]:
        """The probabilities of the `following` tokens, of a sampled text."""
        assert self.continuation.chances is not None, "the text is sampled"
        first = self.number - 1
        return self.continuation.chances[first : first + count]

    def count(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft lead the rest of the continuation."""
        pairs = zip(draft, self.following(len(draft)), strict=True)
        return next((n for n, (ours, own) in enumerate(pairs) if ours != own), len(draft))


@dataclass
class TextChances(StepRecorder):
    """A keeper of the probabilities by which each token of sampled texts was drawn, by request."""

    runner: ModelRunner
    rows: tuple[int, ...]
    found: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def wants(self, rows: Sequence[int]) -> list[int]:
        return [*range(len(rows))]

    def keep(self, step: JudgedStep) -> None:
        device = self.runner.device
        vocab_size = self.runner.model.config.vocab_size
        sampling = SamplingMetadata.of(step.requests, vocab_size, device, has_flaws=False)
        assert sampling.draws is not None, "the texts are sampled"
        whole = whole_logits(self.runner, step.logits, sampling)
        probs = probabilities(whole, sampling.draws.filters)[:, 0]
        ids = upload([ids_of_row[:1] for ids_of_row in step.verdicts.ids], device)
        for request, chance in zip(step.requests, probs.gather(1, ids)[:, 0].tolist(), strict=True):
            self.found[request.request_id].append(chance)


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
            for request, continuation in zip(requests, continuations, strict=True):
                tokens = continuation.tokens
                request.output_ids = tokens[: self._end_of(request, tokens)]
                numbers = range(1, len(request.output_ids))
                positions += [Position(request, continuation, number) for number in numbers]
            observer.begin(self.runners)
            if self.run.config.decoding.drafter == NGRAM:
                self._look_up(positions, observer)
            else:
                self._draft(self.runner, positions, observer)
        return SystemDetails()

    def _continue(self, requests: Sequence[Request]) -> list[DecodedText]:
        """How each text goes on, decoded without drafts. The rows keep the K and V of it."""
        assert self.runner is not None and self.kept is not None, "these prompts were kept"
        config = self.run.config
        most = config.workload.num_new_tokens + config.decoding.max_gamma
        asked = [request.sampling for request in requests]
        for request in requests:
            request.sampling = replace(request.sampling, max_new_tokens=most, eos_token_ids=())
        engine = self.kept.engine
        recorder = None
        if self.is_sampled:
            recorder = TextChances(self.runner, tuple(Batch(tuple(requests)).rows))
        strategy = build_decoder(
            self.runner, config.decoding, config.kv, name=BASELINE, logits_recorder=recorder
        )
        engine.begin(strategy)
        w = config.workload
        with self.shared.progress.task("continuations", w.batch_size * most) as advance:
            done = engine.decode(strategy, lambda ids, output, s: advance(output.num_tokens))
        for request, sampling in zip(requests, asked, strict=True):
            request.sampling = sampling
        chances = {} if recorder is None else recorder.found
        return [
            DecodedText([*request.output_ids], chances.get(request.request_id)) for request in done
        ]

    @property
    def is_sampled(self) -> bool:
        return self.run.config.sampling.temperature > 0

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
            if self.is_sampled:
                drafted = given_drafts(steps, batch, some, gamma)
            else:
                drafted = compared(some, steps.draft(batch, gamma).ids.tolist())
            steps.release(batch.rows)
            for row in batch.rows:
                runner.release(row)
            synchronize(self.device)
            tell(observer, some, drafted, time.perf_counter() - started)

    def _forks(
        self, runner: ModelRunner, positions: Sequence[Position], gamma: int
    ) -> list[Request]:
        """A request for each position, in rows that fork."""
        free = range(runner.num_texts, runner.num_rows)
        forks = []
        for row, position in zip(free, positions, strict=False):
            text = position.request
            most = position.number + gamma
            sampling = replace(text.sampling, max_new_tokens=most, eos_token_ids=())
            forks.append(Request(row, text.prompt_ids, sampling, position.known, row=row))
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
                known.output_ids = position.known
                drafter.plan([known], decoding.max_gamma, length)
                assert request.row is not None, "its text was prefilled"
                drafts.append([token for token, _ in drafter.proposals[request.row]])
            drafted = compared(some, drafts)
            if self.is_sampled:
                drafted = [noted.as_probable() for noted in drafted]
            tell(observer, some, drafted, time.perf_counter() - started)


def admit_texts(runner: ModelRunner, drafter: Drafter, positions: Sequence[Position]) -> None:
    """Admit all texts at the ends of their prompts, as a run does, then go on to the ends of their
    continuations, as after steps without drafts. They themselves draft nothing there."""
    continuations = {position.request: position.continuation.tokens for position in positions}
    texts = [replace(request, output_ids=tokens[:1]) for request, tokens in continuations.items()]
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


@dataclass(frozen=True)
class Drafted:
    """The number of tokens drafted at a position, and of those that were accepted; of a sampled
    text, the probabilities that the first 1, 2, ... are."""

    count: int
    accepted: int = 0
    acceptance: list[float] | None = None

    def as_probable(self) -> Drafted:
        """Of drafts that are not drawn: a token that is the text's was accepted, since the rest of
        p without it has no such token."""
        missed = self.count - self.accepted
        return Drafted(self.count, acceptance=[1.0] * self.accepted + [0.0] * missed)


def compared(positions: Sequence[Position], drafts: Sequence[Sequence[int]]) -> list[Drafted]:
    """Drafts compared with how the texts go on."""
    pairs = zip(positions, drafts, strict=True)
    return [Drafted(len(draft), position.count(draft)) for position, draft in pairs]


def given_drafts(
    steps: DecodeSteps, batch: Batch, positions: Sequence[Position], gamma: int
) -> list[Drafted]:
    """Drafts of the texts' own next tokens, by how probable it is that a step has accepted them."""
    device = steps.runner.device
    given = upload([position.following(gamma) for position in positions], device)
    probs = steps.draft_given(batch, given).probabilities
    assert probs is not None, "the texts are sampled"
    q = probs.gather(2, given.unsqueeze(2)).squeeze(2)
    p = upload([position.chances(gamma) for position in positions], device, torch.float64)
    acceptance = (q / p).clamp(max=1).cumprod(dim=1)
    return [Drafted(gamma, acceptance=row) for row in acceptance.tolist()]


def tell(
    observer: PassObserver,
    positions: Sequence[Position],
    drafted: Sequence[Drafted],
    seconds: float,
) -> None:
    """Observe a step in which each position emits the next token of its text, whatever was
    drafted."""
    acceptance = [noted.acceptance for noted in drafted if noted.acceptance is not None]
    output = StepOutput(
        token_ids=[position.following(1) for position in positions],
        draft_width=max(noted.count for noted in drafted),
        num_accepted=[noted.accepted for noted in drafted],
        num_drafted=[noted.count for noted in drafted],
        acceptance=acceptance or None,
    )
    ids = [position.request.request_id for position in positions]
    observer.observe(ids, output, seconds)
