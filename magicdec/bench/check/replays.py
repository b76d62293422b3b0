"""The means to judge passes whose tokens differ, and to measure their forwards. Kept prompts are
rewound, and their outputs decoded again in batches; requests that arrived are served again by the
engine, in the shapes of both passes (`PrefilledMeans`, `ServedMeans`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from magicdec.bench.check.check import Replays
from magicdec.bench.check.forced import ForcedSteps
from magicdec.bench.check.forwards import measure_forwards
from magicdec.bench.check.output import PassOutput
from magicdec.bench.check.rounding import Gaps, WiderView, measure_gaps, view_of
from magicdec.bench.check.wider import WiderTexts, rows_of, wider_kinds
from magicdec.distributed.values import all_gather_values
from magicdec.model.transformer import Transformer
from magicdec.names import REFERENCE_BACKEND
from magicdec.output.console import Progress
from magicdec.records.correctness import ForwardErrors
from magicdec.runner.model_runner import ModelRunner, gather_vocab
from magicdec.runner.prefill import prefill
from magicdec.runner.request import Request, SamplingParams
from magicdec.runner.step_plan import PrefillChunk
from magicdec.setup.loading import load_model, make_backend
from magicdec.setup.model_plan import StagePart
from magicdec.setup.prepare import Prepared
from magicdec.speculation.steps.logits_recorder import KeptStep
from magicdec.systems.modes import Pass
from magicdec.systems.prefilled_batching import PrefilledBatching
from magicdec.systems.system import ReplayingSystem, System


class Means(Protocol):
    """What a check needs to judge a pass beside its reference. All ranks call it alike."""

    def forwards(self, reference: PassOutput, output: PassOutput) -> ForwardErrors | None:
        """The errors of the logits of both passes; None unless both have kept some."""

    def replays(self, reference: PassOutput, output: PassOutput) -> Replays | None:
        """The means to judge tokens that differ; None if the engine cannot replay both passes."""


def wider_part(
    run: Prepared, runner: ModelRunner, progress: Progress, part: StagePart = StagePart()
) -> Transformer:
    """This rank's weights of a runner's model or a part of it in a wider dtype, for torch's own
    operators."""
    kinds = wider_kinds(run.config)
    return load_model(run.source, runner.group, kinds, runner.device, progress, part)


def wider_runner(run: Prepared, runner: ModelRunner, progress: Progress) -> ModelRunner:
    """The wider model with a cache of one row."""
    model = wider_part(run, runner, progress)
    backend = make_backend(REFERENCE_BACKEND)
    return ModelRunner(model, backend, runner.group, 1, runner.max_tokens)


def wider_texts(
    run: Prepared,
    runner: ModelRunner,
    progress: Progress,
    hold: Callable[[Sequence[Request]], Sequence[int]] = rows_of,
) -> WiderTexts:
    load = partial(wider_part, run, runner, progress)
    return WiderTexts(runner, load, partial(make_backend, REFERENCE_BACKEND), hold)


# --- Of kept prompts.


@dataclass(frozen=True)
class PrefilledReplays:
    """`Replays` by the runner of a run, whose cache loses what it holds."""

    runner: ModelRunner
    make_wider: Callable[[], ModelRunner]  # makes a runner of one row in the wider dtype
    max_gamma: int  # the most draft tokens of a step
    prefill_chunk: int

    def gaps(self, requests: Sequence[Request]) -> list[Gaps]:
        return measure_gaps(self.runner, requests, self.max_gamma, self.prefill_chunk)

    def views(self, requests: Sequence[Request], pairs: Sequence[Tensor | None]) -> list[WiderView]:
        wider = self.make_wider()
        return [
            view_of(wider, request, self.prefill_chunk, wanted)
            for request, wanted in zip(requests, pairs, strict=True)
        ]


@dataclass(frozen=True)
class PrefilledMeans:
    """`Means` of a run. `last` has the newest group of each pass, whose prompts `keep` puts back
    where the cache has lost them; None where forwards are not measured: in a counted run, whose
    steps are all compared with an earlier run's, and where the last group is not whole."""

    progress: Progress
    last: tuple[PassOutput, PassOutput] | None
    keep: Callable[[], None]

    def forwards(self, reference: PassOutput, output: PassOutput) -> ForwardErrors | None:
        if self.last is None:
            return None
        self.keep()
        decode, verify = self.last
        assert decode.recorder is not None and verify.recorder is not None, "steps are watched"
        run, runner = run_of(output)
        texts = partial(wider_texts, run, runner, self.progress)
        pair = (decode.recorder, decode.requests), (verify.recorder, verify.requests)
        return measure_forwards(*pair, runner, texts, run.config.model.dtype)

    def replays(self, reference: PassOutput, output: PassOutput) -> Replays:
        run, runner = run_of(output)
        system = output.system
        assert isinstance(system, PrefilledBatching), "it has kept prompts"
        system.caches.forget()  # the replays take the place of a group
        config = run.config
        make_wider = partial(wider_runner, run, runner, self.progress)
        chunk = config.attention.prefill_chunk
        return PrefilledReplays(runner, make_wider, config.decoding.max_gamma, chunk)


def run_of(output: PassOutput) -> tuple[Prepared, ModelRunner]:
    assert isinstance(output.system, ReplayingSystem), "the engine has served the pass"
    assert output.system.runner is not None, "it is open"
    return output.system.run, output.system.runner


# --- Of requests that arrive.

SentGaps = tuple[list[list[int]], list[float]]
"""`OutputGaps` as ranks exchange them."""
OutputGaps = tuple[Tensor, Tensor]
"""The pairs [N, 2] and the gaps float64 [N] of an output."""


def whole(output: PassOutput) -> PassOutput:
    """The same with logits of the whole vocabulary, on the first rank alone. Every rank calls
    it."""
    recorder = output.recorder
    system = output.system
    runner = system.runner if isinstance(system, ReplayingSystem) else None
    if runner is None or recorder is None or runner.group.size == 1:
        return output
    steps = list[KeptStep]()
    for step in recorder.steps:
        logits = gather_vocab(step.logits, runner.vocab_places, runner.group)
        if runner.group.index == 0:
            steps.append(replace(step, logits=logits))
    return replace(output, recorder=replace(recorder, steps=steps) if steps else None)


def compare_forwards(
    system: System, reference: PassOutput, output: PassOutput, progress: Progress
) -> ForwardErrors | None:
    """The errors of two passes by the runner of `system`, which is open. None on a rank that has
    kept no steps of both. What is in the cache is lost. Every rank calls it."""
    runner = system.runner if isinstance(system, ReplayingSystem) else None
    first = reference.recorder
    second = output.recorder
    if runner is None or first is None or second is None:
        return None
    run = system.run
    hold = partial(hold_prompts, runner, run.config.attention.prefill_chunk)
    texts = partial(wider_texts, run, runner, progress, hold)
    pair = (first, reference.requests), (second, output.requests)
    errors = measure_forwards(*pair, runner, texts, run.config.model.dtype)
    empty(runner)
    return errors


def hold_prompts(runner: ModelRunner, chunk: int, requests: Sequence[Request]) -> Sequence[int]:
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


def engine_pass(system: System, serving_pass: Pass, systems: Sequence[System]) -> EnginePass | None:
    """What stands for a pass: the stages of a pipeline compute what an engine computes whose layers
    are shared by as many ranks. None if no other mode of the command is one, or another program has
    computed."""
    shape = system.step_shape(serving_pass)
    if isinstance(system, ReplayingSystem):
        shares = system.shares_prefixes
        return EnginePass(system, serving_pass.mode, shape.tokens, serving_pass.concurrency, shares)
    if system.is_external:
        return None
    for other in systems:
        if isinstance(other, ReplayingSystem) and other.ranks_of_layer == system.ranks_of_layer:
            mode = other.replay_mode(shape.rows)
            return EnginePass(other, mode, shape.tokens, serving_pass.concurrency)
    return None


KnownGaps = dict[tuple[EnginePass, tuple[int, ...]], list[OutputGaps]]
"""The gaps of the reference, whose outputs stay the same, by the requests that are replayed."""


@dataclass(frozen=True)
class ServedReplays:
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
            wider = wider_runner(run, runner, self.progress)
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
            request_pairs = None if pairs is None else dict(zip(outputs, pairs, strict=True))
            made = list[ForcedSteps]()

            def make(runner: ModelRunner) -> ForcedSteps:
                made.append(ForcedSteps(runner, outputs, engine.num_tokens, request_pairs))
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

    def _from_first(self, value: list, kind: type[list]) -> list:
        return all_gather_values(value, kind, self.world_size)[0]


def float64(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unanswered(requests: Sequence[Request]) -> list[Request]:
    """Requests for as many tokens as others have got. Later turns arrive as theirs did, but as soon
    as what they follow has ended."""
    made = dict[int, Request]()
    for request in requests:
        new = Request(
            request.request_id, request.prompt_ids, SamplingParams(len(request.output_ids))
        )
        if (turn := request.turn) is not None:
            after = (made.get(before.request_id) for before in turn.after)
            known = tuple(before for before in after if before is not None)
            new.turn = replace(turn, after=known, wait_s=0.0, at_s=0.0, root=None)
        made[request.request_id] = new
    return list(made.values())


@dataclass(frozen=True)
class ServedMeans:
    """`Means` of passes whose systems are opened in turn, by `open`. `compares_forwards` is not set
    for the gate, which compares passes with earlier ones. `wholes` has passes as `whole` makes
    them, by name; it is empty unless there are several systems."""

    open: Callable[[Pass], System]
    systems: Sequence[System]
    world_size: int
    progress: Progress
    compares_forwards: bool
    wholes: Mapping[str, PassOutput]
    known: KnownGaps = field(default_factory=dict)

    def forwards(self, reference: PassOutput, output: PassOutput) -> ForwardErrors | None:
        pair = reference, output
        if not self.compares_forwards or reference.name == output.name:
            return None
        if not all(measured.system.is_watched(measured.serving_pass) for measured in pair):
            return None
        if output.system is reference.system:
            return compare_forwards(output.system, *pair, self.progress)
        # One of them is on the first rank alone, and the other's ranks share the vocabulary.
        alone = min(
            (measured.system for measured in pair), key=lambda system: system.ranks_of_layer
        )
        whole_pair = self.wholes[reference.name], self.wholes[output.name]
        self.open(alone.passes[0])
        return compare_forwards(alone, *whole_pair, self.progress)

    def replays(self, reference: PassOutput, output: PassOutput) -> Replays | None:
        first, other = (
            engine_pass(tokens.system, tokens.serving_pass, self.systems)
            for tokens in (reference, output)
        )
        is_plain = all(request.sampling.is_plain for request in output.requests)
        if first is None or other is None or not is_plain:
            return None
        return ServedReplays(self.open, first, other, self.world_size, self.progress, self.known)
