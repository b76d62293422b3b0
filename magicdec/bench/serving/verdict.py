"""The verdict on a mode of `magicdec serve`: whether its tokens are right.

Steps that a witness has kept are judged again by their own logits, and their errors are compared
with those of the first mode. Tokens that differ from those of the first mode are judged as a run's
are (`bench/verdict/check.py`), by forwards of the engine in the shapes of both modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from magicdec.bench.verdict.check import check_outputs
from magicdec.bench.verdict.forced import ForcedSteps
from magicdec.bench.verdict.forwards import measure_forwards
from magicdec.bench.verdict.judgement import judge_again
from magicdec.bench.verdict.rounding import Gaps, WiderView, view_of
from magicdec.bench.verdict.wider import WiderTexts, rows_of, wider_kinds
from magicdec.distributed.values import all_gather_values
from magicdec.names import REFERENCE_BACKEND
from magicdec.output.console import Progress
from magicdec.records.correctness import Correctness, ForwardErrors, JudgedAgain
from magicdec.runner.model_runner import ModelRunner, gather_vocab
from magicdec.runner.prefill import prefill
from magicdec.runner.request import PromptAfter, Request, SamplingParams
from magicdec.runner.step_plan import PrefillChunk
from magicdec.setup.loading import load_model, make_backend
from magicdec.speculation.steps.logits_recorder import KeptStep, LogitsRecorder
from magicdec.systems.modes import Pass
from magicdec.systems.system import ReplayingSystem, System

SentGaps = tuple[list[list[int]], list[float]]
"""`OutputGaps` as ranks exchange them."""
OutputGaps = tuple[Tensor, Tensor]
"""The pairs [N, 2] and the gaps float64 [N] of an output."""


KeptPass = tuple[LogitsRecorder | None, Sequence[Request]]
"""The witness of a pass on this rank, if it has kept steps, and the requests."""


def judge_steps(system: System, kept: KeptPass) -> JudgedAgain | None:
    """The steps of a pass of `system`, judged again; None on a rank that has kept none. Every rank
    calls it."""
    witness, requests = kept
    if witness is None or not isinstance(system, ReplayingSystem) or system.runner is None:
        return None
    return judge_again(witness, requests, system.runner)


def compare_forwards(
    system: System, reference: KeptPass, judged: KeptPass, progress: Progress
) -> ForwardErrors | None:
    """The errors of two passes of `system`, which has just served the judged one. None on a rank
    that has kept no steps of both. What is in the cache is lost. Every rank calls it."""
    runner = system.runner if isinstance(system, ReplayingSystem) else None
    first, expected = reference
    second, found = judged
    if runner is None or first is None or second is None:
        return None
    run = system.run
    chunk = run.config.attention.prefill_chunk
    kinds = wider_kinds(run.config)
    load = partial(load_model, run.source, runner.group, kinds, runner.device, progress)
    backend = partial(make_backend, REFERENCE_BACKEND)
    texts = WiderTexts(runner, load, backend, partial(hold_prompts, runner, chunk))
    pair = (first, expected), (second, found)
    errors = measure_forwards(*pair, runner, lambda: texts, run.config.model.dtype)
    empty(runner)
    return errors


def whole(system: System, kept: KeptPass) -> KeptPass:
    """The same with logits of the whole vocabulary, on the first rank alone. Every rank calls
    it."""
    witness, requests = kept
    runner = system.runner if isinstance(system, ReplayingSystem) else None
    if runner is None or witness is None or runner.group.size == 1:
        return kept
    steps = list[KeptStep]()
    for step in witness.steps:
        logits = gather_vocab(step.logits, runner.vocab_places, runner.group)
        if runner.group.index == 0:
            steps.append(replace(step, logits=logits))
    return (replace(witness, steps=steps) if steps else None), requests


def hold_prompts(runner: ModelRunner, chunk: int, requests: Sequence[Request]) -> list[int]:
    """Prefill the prompts once more, since their rows have gone to others. In chunks of another
    size they would be rounded otherwise, which adds some 2 % to the errors of both passes."""
    empty(runner)
    texts = [replace(request, row=row, output_ids=[]) for row, request in enumerate(requests)]
    for row, text in enumerate(texts):
        runner.caches.allocate(row, text.num_cached)
    prefill(runner, PrefillChunk.whole(texts), chunk)
    return rows_of(texts)


def empty(runner: ModelRunner) -> None:
    for row in range(runner.num_rows):
        runner.release(row)
    runner.caches.forget_prefixes()


@dataclass(frozen=True)
class EnginePass:
    """The batches of the engine whose forwards are rounded as those of a judged pass: the batching
    `mode` of a system, the most tokens of a row in a step, the most requests in flight, and whether
    texts share prefixes, whose KV decode steps may have computed in place of a prefill."""

    system: ReplayingSystem
    mode: str
    num_tokens: int
    concurrency: int | None = None
    shares_prefixes: bool = False


def engine_pass(system: System, each: Pass, systems: Sequence[System]) -> EnginePass | None:
    """What stands for a pass: the stages of a pipeline compute what an engine computes whose layers
    are shared by as many ranks. None if no other mode of the command is one, or another program has
    computed."""
    shape = system.step_shape(each)
    if isinstance(system, ReplayingSystem):
        shares = system.shares_prefixes
        return EnginePass(system, each.mode, shape.tokens, each.concurrency, shares)
    if system.is_external:
        return None
    for other in systems:
        if isinstance(other, ReplayingSystem) and other.ranks_of_layer == system.ranks_of_layer:
            mode = other.replay_mode(shape.rows)
            return EnginePass(other, mode, shape.tokens, each.concurrency)
    return None


KnownGaps = dict[tuple[EnginePass, tuple[int, ...]], list[OutputGaps]]
"""The gaps of the reference, whose outputs stay the same, by the requests that are replayed."""


@dataclass(frozen=True)
class ModeReplays:
    """`Replays` of two passes, whose systems are opened in turn. All ranks call the methods with
    the same requests; ranks without a part of the engine wait, and get what the first has found."""

    open: Callable[[Pass], System]
    reference: EnginePass
    judged: EnginePass
    world_size: int
    progress: Progress
    known: KnownGaps

    def gaps(self, requests: Sequence[Request]) -> list[Gaps]:
        key = self.reference, tuple(request.request_id for request in requests)
        if key not in self.known:
            self.known[key] = self._replay(self.reference, requests, None)
        own = self.known[key]
        theirs = self._replay(self.judged, requests, [pairs for pairs, _ in own])
        return [
            Gaps(pairs, decode, verify)
            for (pairs, decode), (_, verify) in zip(own, theirs, strict=True)
        ]

    def views(self, requests: Sequence[Request], pairs: Sequence[Tensor | None]) -> list[WiderView]:
        runner = self._open(self.reference)
        found = list[tuple[list[float], list[float]]]()
        if runner is not None:
            run = self.reference.system.run
            chunk = run.config.attention.prefill_chunk
            wider = self._wider(runner)
            for request, wanted in zip(requests, pairs, strict=True):
                on_device = None if wanted is None else wanted.to(runner.device)
                view = view_of(wider, request, chunk, on_device)
                found.append((view.shortfalls.tolist(), view.gaps.tolist()))
        known = self._from_first(found, list[tuple[list[float], list[float]]])
        return [WiderView(*(float64(values) for values in view)) for view in known]

    def _replay(
        self, engine: EnginePass, requests: Sequence[Request], pairs: Sequence[Tensor] | None
    ) -> list[OutputGaps]:
        found = list[SentGaps]()
        if self._open(engine) is not None:
            outputs = {request.request_id: request.output_ids for request in requests}
            of_requests = None if pairs is None else dict(zip(outputs, pairs, strict=True))
            made = list[ForcedSteps]()

            def make(runner: ModelRunner) -> ForcedSteps:
                made.append(ForcedSteps(runner, outputs, engine.num_tokens, of_requests))
                return made[0]

            engine.system.replay(
                engine.mode,
                unanswered(requests),
                engine.num_tokens,
                make,
                engine.concurrency,
                engine.shares_prefixes,
            )
            noted = [made[0].found(number) for number in outputs]
            found = [(ids.tolist(), gaps.tolist()) for ids, gaps in noted]
        known = self._from_first(found, list[SentGaps])
        return [
            (torch.tensor(ids, dtype=torch.int64).view(-1, 2), float64(gaps)) for ids, gaps in known
        ]

    def _open(self, engine: EnginePass) -> ModelRunner | None:
        self.open(engine.system.passes[0])
        return engine.system.runner

    def _wider(self, runner: ModelRunner) -> ModelRunner:
        run = self.reference.system.run
        kinds = wider_kinds(run.config)
        model = load_model(run.source, runner.group, kinds, runner.device, self.progress)
        backend = make_backend(REFERENCE_BACKEND)
        return ModelRunner(model, backend, runner.group, 1, runner.max_tokens)

    def _from_first(self, value: list, kind: type[list]) -> list:
        return all_gather_values(value, kind, self.world_size)[0]


def float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unanswered(requests: Sequence[Request]) -> list[Request]:
    """Requests for as many tokens as others have got. Later turns arrive as theirs did."""
    made = dict[int, Request]()
    for request in requests:
        new = Request(
            request.request_id, request.prompt_ids, SamplingParams(len(request.output_ids))
        )
        before = None if request.previous is None else made.get(request.previous.request_id)
        if before is not None and request.turn is not None:
            new.prompt_ids = ()
            new.turn = replace(
                request.turn, previous=before, prompt_after=as_known(request.prompt_ids)
            )
        made[request.request_id] = new
    return list(made.values())


def as_known(prompt_ids: tuple[int, ...]) -> PromptAfter:
    """The prompt of a turn whose answers before it are known."""
    return lambda answers: prompt_ids


def check_mode(
    name: str, expected: Sequence[Request], found: Sequence[Request], replays: ModeReplays
) -> Correctness:
    """Compares outputs that differ with those of the mode `name`. All ranks call it; only the first
    must know the outputs."""
    size = replays.world_size
    # Later turns have prompts that follow from outputs.
    texts = [[(list(r.prompt_ids), r.output_ids) for r in side] for side in (expected, found)]
    known = all_gather_values(texts, list[list[tuple[list[int], list[int]]]], size)[0]
    ours, theirs = (
        [
            replace(request, prompt_ids=tuple(prompt), output_ids=output)
            for request, (prompt, output) in zip(side, of_side, strict=True)
        ]
        for side, of_side in zip((expected, found), known, strict=True)
    )
    asked = [pair for pair in zip(ours, theirs, strict=True) if is_asked_alike(*pair)]
    return check_outputs(name, [one for one, _ in asked], [other for _, other in asked], replays)


def is_asked_alike(expected: Request, found: Request) -> bool:
    """Whether both have the same prompt. A turn behind an answer that differs has another one, and
    then its answer shows nothing."""
    return expected.prompt_ids == found.prompt_ids
