"""Forks: drafts at many positions of known texts at once. Each position is a row of one batch that
shares the blocks of its text, and no forward verifies: a draft is compared with how the text goes
on. The texts are the model's own, decoded once for all these drafts of a context.

This serves drafts that follow from the target's cache of the text, which are those of the target
itself or a low-bit copy of it under a policy that chooses by lengths, and lookups, which need no
forward at all. Another policy's state, or another model's cache, is made step by step. So are
sampled drafts, which the target's distribution after them judges, and not how a text goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from magicdec.attention.backend import backend_class
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import NGRAM, SELF, SamplingSection
from magicdec.distributed.groups import ParallelGroups
from magicdec.hardware.timing import synchronize
from magicdec.names import BASELINE
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch, Request, SamplingParams, StepOutput
from magicdec.setup.model_plan import ModelPlan
from magicdec.setup.prepare import Prepared
from magicdec.speculation.draft_length import WholeLookups
from magicdec.speculation.drafter import DraftSetup
from magicdec.speculation.model_drafter import SelfDrafter
from magicdec.speculation.ngram import NgramDrafter
from magicdec.speculation.policies.policy import make_policy
from magicdec.speculation.steps.build import build_decoder
from magicdec.speculation.steps.steps import DecodeSteps
from magicdec.systems.modes import Pass
from magicdec.systems.observer import PassObserver
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.systems.shared_prefill import CacheDemand, SharedPrefill
from magicdec.systems.system import SystemDetails

CONTINUATIONS = "continuations"  # the name of a result that drafts share
MOST_FORKS = 256  # rows of a batch, beside those of the texts
BLOCK = 16  # tokens of a block, of which a fork copies at most one; or what kernels ask for


def can_fork(config: ResolvedConfig) -> bool:
    """Whether a draft at a position follows from the text and the target's cache of it, and how
    many of its tokens are accepted from how the text goes on."""
    sampling = config.sampling
    if sampling != SamplingSection(seed=sampling.seed):  # also where penalties follow the drafts
        return False
    policy = make_policy(config.kv)
    by_length = not (policy.needs_weights or policy.is_copied or policy.observed_tokens)
    return config.decoding.drafter == NGRAM or (config.decoding.drafter == SELF and by_length)


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

    @property
    def num_cached(self) -> int:
        return len(self.request.prompt_ids) + self.number - 1

    def count(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft lead the rest of the continuation."""
        following = self.continuation[self.number : self.number + len(draft)]
        differ = (
            n for n, pair in enumerate(zip(draft, following, strict=True)) if len({*pair}) > 1
        )
        return next(differ, len(draft))


def blocks_of_forks(num_forks: int, num_texts: int, gamma: int, block: int) -> int:
    """The most blocks that forks of neighbouring positions of texts take for `gamma` drafts, beside
    those of the texts: one that is copied, and more for those whose drafts end in the next."""
    num_whole, rest = divmod(gamma, block)
    return num_forks * (1 + num_whole) + rest * (-(-num_forks // block) + num_texts)


def with_forks(plan: ModelPlan, num_forks: int) -> ModelPlan:
    """The plan with rows for forks of its texts. It keeps every token: all forks go back."""
    room = plan.config.capacity
    block = backend_class(plan.backend)().block_size(BLOCK)
    per_text = -(-plan.tokens // block)
    fork_blocks = blocks_of_forks(num_forks, room.rows, plan.config.decoding.max_gamma, block)
    return replace(
        plan,
        config=replace(plan.config, capacity=replace(room, rows=room.rows + num_forks)),
        row_tokens=plan.tokens,
        block_tokens=block,
        cache_tokens=(room.rows * per_text + fork_blocks) * block,
        rewound=None,
    )


class TextDrafts(PrefilledBatching):
    """Drafts beside texts that all drafts of a context share, in a cache that has rows for
    forks."""

    def __init__(
        self,
        prepared: Prepared,
        groups: ParallelGroups,
        device: torch.device,
        shared: SharedPrefill,
        room: CacheDemand,
    ) -> None:
        self.num_forks = room.num_forks
        super().__init__(prepared, groups, device, shared, room)

    def _plan_of(self, row_tokens: int, rewound: int | None = None) -> ModelPlan:
        plan = super()._plan_of(row_tokens, rewound)
        return with_forks(plan, self.num_forks) if self.num_forks else plan


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

    def _draft(
        self, runner: ModelRunner, positions: Sequence[Position], observer: PassObserver
    ) -> None:
        decoding = self.run.config.decoding
        gamma = decoding.max_gamma
        count = self.num_forks
        drafter = SelfDrafter.build(DraftSetup(runner, decoding, self.run.config.kv))
        steps = DecodeSteps(runner, drafter, observer.phases or nullcontext)
        for first in range(0, len(positions), count):
            some = positions[first : first + count]
            started = time.perf_counter()
            forks = self._fork(runner, some, gamma)
            drafter.admit(forks)
            steps.admit(Batch(tuple(forks)), [gamma])
            drafts = steps.draft(Batch(tuple(forks)), gamma).ids.tolist()
            self._join(runner, some, forks)
            synchronize(self.device)
            tell(observer, some, drafts, time.perf_counter() - started)

    def _fork(self, runner: ModelRunner, positions: Sequence[Position], room: int) -> list[Request]:
        """A request for each position, in a row that has the blocks of its text, and a copy of the
        last one if that is not full."""
        texts = {request.row for request in self.kept.engine.requests} if self.kept else set()
        free = [row for row in range(runner.num_rows) if row not in texts]
        forks = []
        for row, position in zip(free, positions, strict=False):
            request = position.request
            assert request.row is not None, "its text was prefilled"
            length = position.num_cached
            for cache in runner.caches.distinct:
                blocks = cache.blocks[request.row]
                num_whole = length // cache.shape.block_size
                cache.adopt(row, blocks[:num_whole])
                cache.allocate(row, length + room)
                if length % cache.shape.block_size:
                    cache.copy_block(blocks[num_whole], cache.blocks[row][num_whole])
            runner.cache.advance([row], length)
            known = [*position.continuation[: position.number]]
            forks.append(
                Request(row, request.prompt_ids, SamplingParams(len(known) + room), known, row=row)
            )
        return forks

    def _join(
        self, runner: ModelRunner, positions: Sequence[Position], forks: Sequence[Request]
    ) -> None:
        """Give the rows of forks back, but for the blocks of their texts."""
        rows = {position.request.row for position in positions}
        for cache in runner.caches.distinct:
            kept = {block for row in rows if row is not None for block in cache.blocks[row]}
            for fork in forks:
                assert fork.row is not None, "a fork has a row"
                cache.release(fork.row, kept)

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
