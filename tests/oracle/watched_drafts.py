"""Requests served on random schedules with dictated acceptance, and what their drafts read,
observed from outside; holds no tests itself.

What a draft reads is taken from the view that its attention gets. A policy that copies has cells of
its own: each is found again by its key among the keys of the context, bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
import torch
from conftest import (
    make_draft,
    make_requests,
    make_runner,
    pack,
    portable_backend,
    random_prompts,
    tiny_transformer,
)
from fake_clock import VirtualClock
from rounded import as_stored
from test_in_flight import RandomLength
from torch import Tensor

from magicdec.attention.native import NativeBackend
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.engine.engine import Engine
from magicdec.kv.layer_views import LayerViews
from magicdec.kv.view import KVView
from magicdec.model.config import ModelConfig
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.request import Batch, Request
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.runner.sampling.verification import Judgement, Verdicts
from magicdec.runner.step_plan import BatchLimits
from magicdec.speculation.copied_kv import CopiedKV
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries
from magicdec.speculation.steps import steps as steps_module
from magicdec.speculation.steps.speculative import Speculative
from magicdec.speculation.steps.steps import DecodeSteps
from magicdec.speculation.steps.strategy import Setup, make_strategy

NUM_REQUESTS = 6
NUM_ROWS = 3
SEED = 1
MOST_NEW = 30
MOST_DRAFTS = 4
MOST_RESERVED = 10  # tokens of a step; more than it drafts, so that requests are preempted
LENGTHS = (1, 9, 18, 40, 47, 64, 70, 96)
FOLLOWING = MOST_NEW + MOST_RESERVED + 2  # tokens after a prompt, drafts included
MAX_TOKENS = max(LENGTHS) + FOLLOWING

Positions = list[list[frozenset[int]]]
"""By layer and KV head."""


@dataclass(frozen=True)
class Admitted:
    text: tuple[int, ...]


@dataclass(frozen=True)
class Verified:
    """After `text`, the `chain` of its newest token and of drafts was verified, of which so many
    drafts were accepted."""

    text: tuple[int, ...]
    chain: tuple[int, ...]
    num_accepted: int


@dataclass(frozen=True)
class WatchedMeasure:
    """Drafts of as many tokens were timed, which changes nothing but that a choice that is due is
    made."""

    text: tuple[int, ...]
    asked: int


@dataclass(frozen=True)
class Forward:
    """A draft forward of one row, for which the policy chose among `committed` tokens of context.
    It read these positions before `end` - 1, the last of its own tokens."""

    committed: int
    begin: int  # position of its first token
    end: int
    read: Positions


@dataclass
class WatchedDraft:
    """After `text`, drafts were added to its newest token with these forwards, together the
    `chain`. `keys` [L, G, T, D] are those of the text in the target's cache."""

    text: tuple[int, ...]
    chain: tuple[int, ...]
    asked: int
    forwards: list[Forward]
    keys: Tensor


Event = Admitted | Verified | WatchedMeasure | WatchedDraft


@dataclass
class Watch:
    """The events of each request, in their order. `target` holds the requests; `sources` are what
    copies are made from, by the number of their cache."""

    target: ModelRunner
    events: dict[int, list[Event]] = field(default_factory=dict)
    sources: dict[int, ModelRunner] = field(default_factory=dict)
    forwards: dict[int, list[Forward]] = field(default_factory=dict)  # by row, of one draft
    drafting: ModelRunner | None = None  # within a draft forward
    is_measuring: bool = False

    def of(self, request: Request) -> list[Event]:
        return self.events.setdefault(request.request_id, [])

    def note(self, views: LayerViews, runner: ModelRunner) -> None:
        """A draft forward of `runner` is about to read `views`."""
        source = self.sources.get(id(runner.cache), runner)
        view = views.widest
        found = [
            positions_of(views.distinct[place], runner, source, layer, source is self.target)
            for layer, place in enumerate(views.windows.window_indices)
        ]
        for place, row in enumerate(view.rows):
            offset = 0 if runner.offsets is None else int(runner.offsets[row])
            own = view.query_positions()[place].tolist()
            forward = Forward(
                int(view.committed[place]) + offset,
                own[0] + offset,
                own[-1] + offset + 1,
                [
                    [frozenset(head_cells) for head_cells in layer_cells[place]]
                    for layer_cells in found
                ],
            )
            self.forwards.setdefault(row, []).append(forward)


def positions_of(
    view: KVView, runner: ModelRunner, source: ModelRunner, layer: int, is_target: bool
) -> list[list[list[int]]]:
    """The positions in the context that each row and KV head reads in a layer. `is_target`: the
    target itself drafts."""
    found = list[list[list[int]]]()
    number = runner.windows.numbers[layer]
    cells = view.key_positions(number).expand(-1, runner.cache.shape.num_kv_heads, -1)
    for place, row in enumerate(view.rows):
        own = [[cell for cell in head_cells if cell >= 0] for head_cells in cells[place].tolist()]
        if runner.offsets is not None:
            where = places_of_copies(view, runner, source, layer, place, is_target)
            own = [
                [where[g][cell] for cell in head_cells if cell < len(where[g])]
                + [cell + int(runner.offsets[row]) for cell in head_cells if cell >= len(where[g])]
                for g, head_cells in enumerate(own)
            ]
        assert all(len(set(head_cells)) == len(head_cells) for head_cells in own), (
            "nothing is read twice"
        )
        found.append(own)
    return found


def places_of_copies(
    view: KVView, runner: ModelRunner, source: ModelRunner, layer: int, place: int, is_target: bool
) -> list[list[int]]:
    """For each KV head, the position of each committed cell of a row of a copy: where the context
    has the same key and the same value, rounded as the copy stores them. What a standalone draft
    has appended itself since the choice is nowhere else, and lies in the order of the text."""
    row = torch.tensor([view.rows[place]])
    count = int(view.committed[place])
    assert runner.offsets is not None
    context = count + int(runner.offsets[row])
    copies, originals = (
        [tensor[0] for tensor in caches.read(layer, row, torch.arange(size)[None])]
        for caches, size in ((runner.caches, count), (source.caches, context))
    )
    equal = torch.ones(copies[0].shape[0], count, context, dtype=torch.bool)
    dtype = runner.cache.k.dtype
    for copy, original, are_keys in zip(copies, originals, (True, False), strict=True):
        rounded = as_stored(original, dtype, are_keys)  # K, V: [G, tokens, D]
        equal &= (copy[:, :, None] == rounded[:, None]).all(dim=3)
    is_found = equal.any(dim=2)
    offset = int(runner.offsets[row])
    assert is_found.all() or not is_target, "every cell holds what the context holds somewhere"
    places = torch.where(is_found, equal.int().argmax(dim=2), torch.arange(count) + offset)
    found: list[list[int]] = places.tolist()
    return found


def dictated(random: Random, vocab_size: int) -> Any:
    """In place of `judge`: rows accept as many drafts as chance has it, often none or all, and a
    random token follows."""
    real = steps_module.judge

    def judge(runner: ModelRunner, sampling: Any, proposal: Proposal, *args: Any) -> Judgement:
        found = real(runner, sampling, proposal, *args)
        drafts = proposal.ids
        if drafts.shape[1] == 0:
            return found
        following = torch.tensor([random.randrange(3, vocab_size) for _ in drafts])
        counts = proposal.counts or [drafts.shape[1]] * len(drafts)
        accepted = [random.choice((0, n, random.randint(0, n))) for n in counts]
        return Judgement.of(drafts, torch.tensor(accepted), following)

    return judge


@contextmanager
def watched(random: Random, vocab_size: int, source: ModelRunner) -> Iterator[Watch]:
    """What happens to requests that `source` holds, while acceptance is dictated."""
    watch = Watch(target=source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps_module, "judge", dictated(random, vocab_size))
        watch_views(patch, watch)
        watch_steps(patch, watch, source)
        yield watch


def watch_views(patch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Note the views that are made within draft forwards."""
    make_views = ModelRunner.make_views
    admit = CopiedKV.admit

    def made(runner: ModelRunner, *args: Any) -> LayerViews:
        views = make_views(runner, *args)
        if watch.drafting is not None:
            watch.note(views, watch.drafting)
        return views

    def admit_copies(kv: CopiedKV, requests: Sequence[Request]) -> None:
        admit(kv, requests)
        watch.sources[id(kv.runner.cache)] = kv.source

    patch.setattr(CopiedKV, "admit", admit_copies)
    patch.setattr(ModelRunner, "make_views", made)
    patch.setattr(ModelRunner, "forward", noted(watch, ModelRunner.forward))
    patch.setattr(ModelRunner, "draft", noted(watch, ModelRunner.draft))


def noted(watch: Watch, call: Any) -> Any:
    """A method of runners, within which views are those of drafts, if it drafts."""

    def run(runner: ModelRunner, batch: ForwardBatch, *args: Any) -> Any:
        watch.drafting = runner if batch.is_draft else None
        try:
            return call(runner, batch, *args)
        finally:
            watch.drafting = None

    return run


def watch_steps(patch: pytest.MonkeyPatch, watch: Watch, source: ModelRunner) -> None:
    """Note what is admitted, drafted and verified."""
    admit = Speculative.admit
    measure = Speculative.measure
    draft = DecodeSteps.draft
    verify = DecodeSteps.verify

    def admitted(strategy: Speculative, batch: Batch) -> None:
        for request in batch.requests:
            watch.of(request).append(Admitted(request.cached_ids))
        admit(strategy, batch)

    def drafted(steps: DecodeSteps, batch: Batch, count: int) -> Proposal:
        watch.forwards = {}
        proposal = draft(steps, batch, count)
        for request, ids in zip(batch.requests, proposal.ids.tolist(), strict=True):
            assert request.row is not None
            if watch.is_measuring:
                watch.of(request).append(WatchedMeasure(request.cached_ids, count))
                continue
            text = request.cached_ids
            row = torch.tensor([request.row])
            places = torch.arange(len(text))[None]
            layers = range(len(source.model.layers))
            keys = torch.stack([source.caches.read(layer, row, places)[0][0] for layer in layers])
            forwards = watch.forwards.get(request.row, [])
            chain = (request.last_token, *ids)
            watch.of(request).append(WatchedDraft(text, chain, count, forwards, keys))
        return proposal

    def verified(steps: DecodeSteps, batch: Batch, proposal: Proposal | None) -> Verdicts:
        texts = [(request.cached_ids, request.last_token) for request in batch.requests]
        verdicts = verify(steps, batch, proposal)
        if proposal is None or watch.is_measuring:
            return verdicts
        for place, request in enumerate(batch.requests):
            text, newest = texts[place]
            ids = proposal.ids[place].tolist()
            if proposal.counts is not None:
                ids = ids[: proposal.counts[place]]
            watch.of(request).append(Verified(text, (newest, *ids), verdicts.accepted[place]))
        return verdicts

    def measured(strategy: Speculative, batch: Batch) -> list[float]:
        watch.is_measuring = True
        try:
            return measure(strategy, batch)
        finally:
            watch.is_measuring = False

    patch.setattr(Speculative, "admit", admitted)
    patch.setattr(Speculative, "measure", measured)
    patch.setattr(DecodeSteps, "draft", drafted)
    patch.setattr(DecodeSteps, "verify", verified)


@dataclass(frozen=True)
class WatchedRun:
    """Served requests, and what happened to each of them."""

    requests: list[Request]
    watch: Watch
    runner: ModelRunner
    draft: DraftModel | None


def serve(
    config: ModelConfig,
    kv: KVSection,
    random: Random,
    *,
    is_native: bool = False,
    drafter: str = "self",
) -> WatchedRun:
    """Requests of random lengths that join and leave `NUM_ROWS` rows. Steps draft any number of
    tokens, also none."""
    prompts = random_prompts([random.choice(LENGTHS) for _ in range(NUM_REQUESTS)], 97, SEED)
    requests = make_requests(prompts, [random.randint(1, MOST_NEW) for _ in prompts])
    for request in requests:
        request.arrived_s = random.uniform(0, 8)
    runner = make_target(config, kv, is_native, random.random() < 0.5)
    draft = None
    if drafter.endswith("model"):
        draft = make_draft(
            tiny_transformer(config, SEED),
            kv,
            NUM_ROWS,
            MAX_TOKENS,
            chunk=8,
            max_drafts=MOST_DRAFTS,
            max_following=FOLLOWING,
        )
    drafting = runner if draft is None or draft.runner is None else draft.runner
    keep_queries(drafting, kv)
    draft_length: Any = RandomLength(random, per_row=random.random() < 0.5)
    decoding = DecodingSection("speculative", drafter, MOST_DRAFTS)
    setup = Setup(runner, decoding, kv, draft=draft, draft_length=draft_length, is_in_flight=True)
    shape = runner.cache.shape
    limits = BatchLimits(
        MAX_TOKENS,
        shape.block_size,
        shape.num_blocks if runner.num_blocks else None,
        1 + MOST_RESERVED,
        random.choice((None, 9)),
    )
    engine = Engine(runner, 64, limits, VirtualClock())
    with watched(random, config.vocab_size, runner) as watch:
        engine.serve(make_strategy("speculative", setup), requests)
    return WatchedRun(requests, watch, runner, draft)


def make_target(config: ModelConfig, kv: KVSection, is_native: bool, is_short: bool) -> ModelRunner:
    """`is_short`: of blocks, so that requests are preempted and join again with a longer text."""
    model = tiny_transformer(config, SEED)
    backend = NativeBackend() if is_native else portable_backend(kv)
    runner = make_runner(
        pack(model) if is_native else model, NUM_ROWS, MAX_TOKENS, backend, FOLLOWING
    )
    if is_native:
        runner = replace(runner, executor=Executor(model, runner.group))
    if is_short:
        size = backend.block_size(8)
        runner = replace(runner, block_tokens=8, num_blocks=1 - (-MAX_TOKENS // size))
    return runner
