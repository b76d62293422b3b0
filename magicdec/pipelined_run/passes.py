"""Serves the requests of `magicdec pipeline` in each pass, on this rank: by one process, and by
pipelined speculation in each mode. A rank that has no part in a pass waits.

Owns what a rank loads and when it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from magicdec.config.choices.transport import NCCL
from magicdec.console import Progress
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.stages import StageGrid
from magicdec.distributed.start import make_stage_groups
from magicdec.hardware.environment import release_memory
from magicdec.hardware.threads import ThreadCount, use_threads
from magicdec.memory.plan import max_tokens
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.passes import Observe, serve_by_engine, serve_measured
from magicdec.pipeline.prepare import expected_threads, of_one_process
from magicdec.pipeline.stage import load_part
from magicdec.pipeline.tracing import Span, all_gather, clocks_of, gather_spans, gather_threads
from magicdec.pipelined_run.channels import Connections
from magicdec.pipelined_run.drafter import Drafter, LookupDrafter, ModelDrafter, ScriptedDrafter
from magicdec.pipelined_run.head import Drafted, Head, PipelineRank
from magicdec.pipelined_run.options import SCRIPTED_PROBABILITY
from magicdec.pipelined_run.prepare import PreparedPipeline
from magicdec.pipelined_run.stage import EmulatedPart, ModelPart, RunPart
from magicdec.pipelined_speculation.options import Counts
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.request import Request
from magicdec.sampling.coupled import CoupledSampling
from magicdec.serving.metrics import Served, StepCounts
from magicdec.setup.loading import LoadedModels, StagePart, make_draft
from magicdec.simulator.text import draw_ranks


@dataclass(frozen=True)
class Outcome(Served):
    """What happened beside the requests in a pass by stages: nothing of that for the baseline."""

    scheduled: Counts | None = None
    spans: Sequence[Sequence[Span]] | None = None  # of each rank
    drafted: Sequence[Drafted] | None = None


class Passes:
    """All ranks make it and serve the same passes together. The outcome of the first rank counts;
    it is None on the others."""

    def __init__(
        self, prepared: PreparedPipeline, device: torch.device, progress: Progress
    ) -> None:
        self.prepared, self.device, self.progress = prepared, device, progress
        launch, run, transport = prepared.run.launch, prepared.run, prepared.transport
        self.rank, layout = launch.rank, prepared.layout
        self.groups = make_stage_groups(
            launch, StageGrid(launch.world_size), device, prepared.whole.parallel.collectives,
            None if prepared.drafting is None else layout.draft_ranks, layout.groups,
        )  # fmt: skip
        width, dtype = run.source.config.hidden_size, getattr(torch, run.config.model.dtype)
        self.connections = Connections(
            layout, launch, None if transport is None else transport.headers,
            prepared.options.link, MessageForm(width, dtype, 0), device,
            NCCL if transport is not None and transport.payloads == NCCL else None,
        )  # fmt: skip
        self.models = LoadedModels(device, progress)
        self.sampling = CoupledSampling(run.config.sampling)
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
            outputs = [] if outcome is None else [r.output_ids for r in outcome.requests]
            self.expected = all_gather(outputs, launch.world_size)[0]
        threads = gather_threads(name, count, expected, launch)
        return None if outcome is None else replace(outcome, threads=threads)

    def close(self) -> None:
        if self.member is not None:
            self.member.close()

    def _baseline(self, observe: Observe, count: ThreadCount) -> Outcome:
        """One process; one request after the other."""
        run, shapes = self.prepared.run, self.prepared.options.shapes
        config, models = of_one_process(run.config, 1), LoadedModels(self.device, self.progress)
        chunk = config.attention.prefill_chunk
        served = serve_by_engine(
            run, config, Group((0,), 0), models, chunk, shapes, observe, count, is_coupled=True
        )
        return Outcome(served.requests, served.counts, served.begin_s)

    def _pipelined(
        self, member: PipelineRank, mode: str, observe: Observe, count: ThreadCount
    ) -> Outcome | None:
        run, options = self.prepared.run, self.prepared.options
        outcome: Outcome | None = None
        first_run = first_draft = 0

        def lead(head: Head) -> None:
            nonlocal outcome, first_run, first_draft

            def serve(requests: list[Request], counts: StepCounts, observe: Observe) -> None:
                chunk = run.config.attention.prefill_chunk
                head.serve(PipelinedScheduler(options.of_mode(mode), chunk), requests, observe)
                counts.moves = head.moves

            lanes = options.speculation.lanes
            served = serve_measured(run, options.shapes, serve, lanes, observe)
            first_run, first_draft = head.served_from
            outcome = Outcome(
                served.requests, served.counts, served.begin_s, scheduled=head.counts,
                drafted=head.drafted,
            )  # fmt: skip

        by_rank = gather_spans(member.serve(lead, count), clocks_of(run.launch))
        if outcome is None:
            return None
        counted = [[s for s in each if s.counts_from(first_run, first_draft)] for each in by_rank]
        return replace(outcome, spans=counted)

    def _join(self) -> PipelineRank:
        """Load what this rank computes, and connect it with the others."""
        options, layout = self.prepared.options, self.prepared.layout
        part = self._load_part() if len(layout.layers[self.rank]) else None
        drafter = None
        if options.needs_drafts and self.rank in layout.draft_ranks:
            drafter = self._make_drafter()
        wires = self.connections.connect(options.needs_drafts)
        return PipelineRank(self.rank, wires, part, drafter, self.device)

    def _load_part(self) -> RunPart:
        prepared, run = self.prepared, self.prepared.run
        layers, options = prepared.layout.layers[self.rank], prepared.options
        if options.emulate_stage_ms is not None:
            is_last = prepared.layout.group_of(self.rank)[0] == prepared.layout.stages[-1]
            return EmulatedPart(len(layers), options.emulate_stage_ms / 1e3, is_last)
        runner = load_part(
            run.config, run.source, self.groups.target, self.models, StagePart(layers, None),
            options.speculation.lanes, max_tokens(run.config),
        )  # fmt: skip
        return ModelPart(runner, self.sampling)

    def _make_drafter(self) -> Drafter:
        prepared, options = self.prepared, self.prepared.options
        if options.emulate_acceptance is not None:
            return self._scripted(options.emulate_acceptance)
        drafting = prepared.drafting
        if drafting is None:
            return LookupDrafter()
        config, group = drafting.config, self.groups.draft
        assert group is not None, "this rank drafts"
        groups = ParallelGroups(self.rank, prepared.layout.world_size, group, draft=group)
        draft = make_draft(drafting, groups, max_tokens(config), self.models)
        assert draft is not None, "a model drafts"
        vocab_size = drafting.source.config.vocab_size
        return ModelDrafter(draft, config.kv, vocab_size, self.sampling)

    def _scripted(self, acceptance: float) -> ScriptedDrafter:
        options, seed = self.prepared.options, self.prepared.run.workload.seed
        outputs = self.expected
        if outputs is None:  # of emulated stages
            outputs = [[s.prompt_len + i for i in range(s.output_len)] for s in options.shapes]
        ranks = [
            draw_ranks([acceptance], shape.output_len, seed + index)
            for index, shape in enumerate(options.shapes)
        ]
        return ScriptedDrafter(
            outputs,
            [shape.prompt_len for shape in options.shapes],
            ranks,
            [SCRIPTED_PROBABILITY],
            seconds=(options.emulate_draft_ms or 0.0) / 1e3,
        )
