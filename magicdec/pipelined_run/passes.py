"""Serves the requests of `magicdec pipeline` in each pass, on this rank: by one process, and by
pipelined speculation in each mode.

Owns what a rank loads and when it serves. Must not know what is computed from the outcome. A rank
that has no part in a pass waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed

from magicdec.config.choices.transport import NCCL
from magicdec.console import Progress
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.distributed.channels.device import DevicePayloads
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.stages import StageGrid
from magicdec.distributed.start import make_stage_groups
from magicdec.engine import Engine
from magicdec.hardware.environment import release_memory
from magicdec.hardware.threads import ThreadCount, use_threads
from magicdec.memory.working_memory import max_tokens
from magicdec.names import BASELINE, SEQUENTIAL
from magicdec.pipeline.measured_pass import make_requests, serve_measured
from magicdec.pipeline.pass_memory import expected_threads, of_one_process
from magicdec.pipeline.tracing import gather_rows, gather_threads
from magicdec.pipelined_run.draft_model import ModelDrafter
from magicdec.pipelined_run.drafter import Drafter, LookupDrafter, ScriptedDrafter
from magicdec.pipelined_run.head import Drafted, Head
from magicdec.pipelined_run.options import SCRIPTED_PROBABILITY
from magicdec.pipelined_run.prepare import PreparedPipeline
from magicdec.pipelined_run.rank import Connections, HiddenForm, PipelineRank
from magicdec.pipelined_run.spans import Span, gather_spans
from magicdec.pipelined_run.stage import EmulatedPart, ModelPart, Part
from magicdec.pipelined_speculation.options import Counts
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.sampling.coupled import CoupledSampling
from magicdec.scheduling.plan import Limits
from magicdec.serving.metrics import Moves, StepCounts
from magicdec.setup.loading import (
    LoadedModels,
    StagePart,
    kinds_of,
    make_backend,
    make_draft,
    make_executor,
    make_target,
)
from magicdec.simulator.text import draw_ranks

Observe = Callable[[int], None]


@dataclass(frozen=True)
class Outcome:
    """All requests of a pass, finished, when each got its lane (`moves`, by its id), and what else
    happened meanwhile: nothing of that for the baseline. `threads` are those of each rank, as in a
    record."""

    requests: list[Request]
    moves: Mapping[int, Moves]
    counts: Counts | None = None
    spans: list[list[Span]] | None = None  # of each rank
    drafted: list[Drafted] | None = None
    threads: Sequence[int] = ()


class Passes:
    """All ranks make it and serve the same passes together. The outcome of the first rank counts;
    it is None on the others."""

    def __init__(
        self, prepared: PreparedPipeline, device: torch.device, progress: Progress
    ) -> None:
        self.prepared, self.device, self.progress = prepared, device, progress
        launch, parallel = prepared.run.launch, prepared.whole.parallel
        self.rank, transport = launch.rank, prepared.transport
        options, layout = prepared.options, prepared.layout
        place = StageGrid(launch.world_size), device, parallel.collectives
        draft_ranks = None if prepared.drafting is None else layout.draft_ranks
        self.draft_group = make_stage_groups(launch, *place, draft_ranks).draft
        headers = None if transport is None else transport.headers
        self.connections = Connections(layout, launch, headers, options.link, self._hidden())
        self.models = LoadedModels(device, progress)
        self.sampling = CoupledSampling(prepared.run.config.sampling)
        self.expected: list[list[int]] | None = None  # the tokens of the baseline
        self.member: PipelineRank | None = None

    def serve(self, name: str, observe: Observe) -> Outcome | None:
        """Serve all requests in the pass of that name. Raises AssertionError if a rank has computed
        with other threads than its config says."""
        launch, parallel = self.prepared.run.launch, self.prepared.run.config.parallel
        count, is_one_process = ThreadCount(), name == SEQUENTIAL
        expected = expected_threads(parallel, launch, is_one_process)
        outcome: Outcome | None = None
        if not is_one_process:
            self.member = self.member or self._join()
            outcome = self._pipelined(self.member, name, observe, count)
            expected = expected if self.member.computes else 0
        elif self.rank == 0:  # with the threads of all ranks of the host, since these wait
            with use_threads(parallel.threads_on(launch.local_ranks)):
                outcome = self._baseline(observe, count)
        if is_one_process:
            release_memory(self.device)
            self._tell_expected([] if outcome is None else outcome.requests)
        threads = gather_threads(name, count, expected, launch)
        return None if outcome is None else replace(outcome, threads=threads)

    def _hidden(self) -> HiddenForm | None:
        """Of hidden states that go from GPU to GPU; None if they go another way."""
        transport, run = self.prepared.transport, self.prepared.run
        if transport is None or transport.payloads != NCCL:
            return None
        dtype: torch.dtype = getattr(torch, run.config.model.dtype)
        return HiddenForm(DevicePayloads(self.device, NCCL), run.source.config.hidden_size, dtype)

    def close(self) -> None:
        if self.member is not None:
            self.member.close()

    def _baseline(self, observe: Observe, count: ThreadCount) -> Outcome:
        """One process; one request after the other."""
        run, options = self.prepared.run, self.prepared.options
        config = of_one_process(run.config, 1)
        models, chunk = LoadedModels(self.device, self.progress), config.attention.prefill_chunk
        runner = make_target(config, run.source, Group((0,), 0), models, max_tokens(config))
        limits = Limits(runner.max_tokens, prefill_tokens=chunk)

        def serve(requests: list[Request], counts: StepCounts, tell: Observe) -> None:
            setup = Setup(runner, config.decoding, config.kv, is_in_flight=True)
            Engine(runner, chunk, limits).serve(
                make_strategy(BASELINE, setup), requests,
                lambda output, seconds: tell(sum(map(len, output.token_ids))), counts.watch,
            )  # fmt: skip

        with count.during():
            outcome = serve_measured(run, options.shapes, serve, 1, observe, is_coupled=True)
        return Outcome(outcome.requests, outcome.counts.moves)

    def _tell_expected(self, requests: list[Request]) -> None:
        """Every rank learns the baseline's tokens."""
        shapes = self.prepared.options.shapes
        longest = max(shape.output_len for shape in shapes)
        lines = [[len(r.output_ids), *r.output_ids] for r in requests]
        padded = [line + [0] * (longest + 1 - len(line)) for line in lines]
        ours = torch.tensor(padded, dtype=torch.int64).view(-1, longest + 1)
        told = gather_rows(ours, self.prepared.layout.world_size)[0].tolist()
        self.expected = [line[1 : line[0] + 1] for line in told]

    def _pipelined(
        self, member: PipelineRank, mode: str, observe: Observe, count: ThreadCount
    ) -> Outcome | None:
        run, options = self.prepared.run, self.prepared.options
        chunk = run.config.attention.prefill_chunk
        outcome: Outcome | None = None
        first_run = first_draft = 0

        def lead(head: Head) -> None:
            nonlocal outcome, first_run, first_draft
            lanes = options.speculation.lanes
            warm_up = make_requests(run, options.shapes[:lanes], is_warm_up=True)
            head.serve(PipelinedScheduler(options.of_mode(mode), chunk), warm_up)
            first_run, first_draft = head.first_run, head.first_draft
            scheduler = PipelinedScheduler(options.of_mode(mode), chunk)
            requests = make_requests(run, options.shapes)
            head.serve(scheduler, requests, observe)
            outcome = Outcome(requests, head.moves, scheduler.counts, drafted=head.drafted)

        found = member.serve(lead, count)
        by_rank = gather_spans(found.found, run.launch)
        if outcome is None:
            return None
        kept = [[s for s in each if s.counts_from(first_run, first_draft)] for each in by_rank]
        return replace(outcome, spans=kept)

    def _join(self) -> PipelineRank:
        """Load what this rank computes, and connect it with the others."""
        options, layout = self.prepared.options, self.prepared.layout
        part = self._load_part() if self.rank in layout.stages else None
        drafter = None
        if options.needs_drafts and self.rank in layout.draft_ranks:
            drafter = self._make_drafter()
        wires = self.connections.connect(options.needs_drafts)
        return PipelineRank(self.rank, wires, part, drafter, self.device)

    def _load_part(self) -> Part:
        prepared, layers = self.prepared, self.prepared.layout.layers[self.rank]
        seconds = prepared.options.emulate_stage_ms
        if seconds is not None:
            is_last = self.rank == prepared.layout.stages[-1]
            return EmulatedPart(len(layers), seconds / 1e3, is_last)
        return ModelPart(self._runner(StagePart(layers, None)), self.sampling)

    def _make_drafter(self) -> Drafter:
        prepared, options = self.prepared, self.prepared.options
        if options.emulate_acceptance is not None:
            return self._scripted(options.emulate_acceptance)
        drafting = prepared.drafting
        if drafting is None:
            return LookupDrafter()
        config, group = drafting.config, self.draft_group
        assert group is not None, "this rank drafts"
        groups = ParallelGroups(self.rank, self.prepared.layout.world_size, group, draft=group)
        draft = make_draft(drafting, groups, max_tokens(config), self.models)
        assert draft is not None, "a model drafts"
        vocab_size = drafting.source.config.vocab_size
        return ModelDrafter(draft, config.kv, vocab_size, self.sampling)

    def _runner(self, part: StagePart) -> ModelRunner:
        """A runner of some of the target's layers, on this rank alone."""
        run, alone = self.prepared.run, Group((0,), 0)
        config = run.config
        kinds = kinds_of(config.model, config.model.target_dtype)
        model = self.models.get(run.source, alone, kinds, part)
        backend = make_backend(config.attention.backend)
        executor = make_executor(kinds, model, alone)
        sizes = self.prepared.options.speculation.lanes, max_tokens(config)
        return ModelRunner(model, backend, alone, *sizes, executor=executor)

    def _scripted(self, acceptance: float) -> ScriptedDrafter:
        options, seed = self.prepared.options, self.prepared.run.workload.seed
        lengths = [shape.prompt_len for shape in options.shapes]
        outputs = self.expected
        if outputs is None:  # of emulated stages
            outputs = [[s.prompt_len + i for i in range(s.output_len)] for s in options.shapes]
        ranks = [
            draw_ranks([acceptance], shape.output_len, seed + index)
            for index, shape in enumerate(options.shapes)
        ]
        draft_s = (options.emulate_draft_ms or 0.0) / 1e3
        return ScriptedDrafter(outputs, lengths, ranks, [SCRIPTED_PROBABILITY], draft_s)
