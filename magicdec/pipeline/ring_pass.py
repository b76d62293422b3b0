"""RingPass: the requests of a command, served by the ring of stages, on this rank.

Owns a rank's part of the ring: its layers, its ends of the channels, and what it counts. Must not
know the other passes, nor what is computed from the time stamps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch

from magicdec.config.choices.transport import HOST_COPIES, NCCL
from magicdec.console import Progress
from magicdec.distributed.channels.connect import connect_ring, through_host, time_round
from magicdec.distributed.channels.device import DevicePayloads
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.groups import ParallelGroups
from magicdec.memory.working_memory import max_tokens
from magicdec.pipeline.emulation import DelayedSender, EmulatedStage, PaddedStage
from magicdec.pipeline.measured_pass import Outcome, RingUse, limits_of, serve_measured
from magicdec.pipeline.metrics import DraftCounts, StageUse
from magicdec.pipeline.prepare import PreparedRing
from magicdec.pipeline.recurrent import RecurrentPipeline, most_under_way
from magicdec.pipeline.speculation import make_speculation, num_drafts_of
from magicdec.pipeline.stage import Occupancy, Stage
from magicdec.pipeline.tracing import CountingEnds, RingTrace, gather
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.serving.metrics import StepCounts
from magicdec.setup.loading import (
    LoadedModels,
    StagePart,
    kinds_of,
    make_backend,
    make_executor,
)

PROBES = 100  # rounds that are timed without other messages
LEAST_CAPACITY, MOST_CAPACITY = 1 << 20, 1 << 24  # bytes of an edge in shared memory


class RingPass:
    """All ranks make it and serve together. `stages` are the groups of this rank's stage. With
    `drafts`, messages carry draft tokens."""

    def __init__(
        self,
        prepared: PreparedRing,
        stages: ParallelGroups,
        device: torch.device,
        progress: Progress,
        drafts: bool = False,
    ) -> None:
        self.prepared, self.stages, self.device, self.progress = prepared, stages, device, progress
        self.drafting = prepared.drafting if drafts else None
        self.num_drafts = 0
        if self.drafting is not None:
            self.num_drafts = num_drafts_of(self.drafting.config)
        # Tokens of a message of a whole lane that decodes.
        self.lane_tokens = prepared.options.asked.lane_size * (1 + self.num_drafts)

    def serve(self, observe: Callable[[int], None]) -> Outcome | None:
        """Serve all requests. The outcome is None on a rank that is not of the first stage."""
        prepared, config, options = self.prepared, self.prepared.run.config, self.prepared.options
        stage, lane_size = self._load_stage(), options.asked.lane_size
        limits = replace(limits_of(prepared, stage.runner), step_tokens=1 + self.num_drafts)
        chunk, dtype = config.attention.prefill_chunk, next(stage.runner.model.parameters()).dtype
        words = lane_size if self.drafting is None else 2 * lane_size
        form = MessageForm(prepared.run.source.config.hidden_size, dtype, words)
        transport, payloads = prepared.transport, None
        if transport is not None and transport.payloads == NCCL:
            payloads = DevicePayloads(self.device, NCCL)
            form = payloads.header_form(form)
        depth = most_under_way(options.num_lanes, lane_size, limits, chunk)
        # Whatever is on its way home must fit, since the first stage may be sending meanwhile.
        least = max(LEAST_CAPACITY, depth * form.num_bytes(self.lane_tokens))
        capacity = max(least, min(depth * form.num_bytes(chunk), MOST_CAPACITY))
        place = prepared.grid, prepared.run.launch, form, depth, capacity
        ends = connect_ring(*place, None if transport is None else transport.headers, payloads)
        if (link := options.asked.link) is not None:
            ends = replace(ends, outbound=DelayedSender(ends.outbound, link, form))
        if transport is not None and transport.payloads == HOST_COPIES:
            ends = through_host(ends, self.device)
        counting = CountingEnds(ends, is_first=self.stages.stage == 0)
        if self.stages.stage == 0:
            lanes, speculation = (options.num_lanes, lane_size, limits, chunk), None
            if self.drafting is not None:
                models = LoadedModels(self.device, self.progress)
                speculation = make_speculation(self.drafting, stage.runner, self.stages, models)
            pipeline = RecurrentPipeline(stage, counting.ends, *lanes, speculation=speculation)
            return self._lead(pipeline, counting, form, observe)
        for _ in ("warm-up", "links"):
            stage.serve(counting.ends)
        self._restart(stage, counting)
        stage.serve(counting.ends)
        self._gather(stage, counting)
        return None

    def _lead(
        self,
        pipeline: RecurrentPipeline,
        counting: CountingEnds,
        form: MessageForm,
        observe: Callable[[int], None],
    ) -> Outcome:
        """The part of the first stage."""
        stage, ends, num_stages = pipeline.stage, pipeline.ends, self.prepared.grid.num_stages
        options, speculation = self.prepared.options, pipeline.speculation
        rounds = list[float]()

        def serve(requests: list[Request], counts: StepCounts, tell: Callable[[int], None]) -> None:
            pipeline.serve(requests, tell, counts.watch)
            pipeline.close()

        def time_links() -> None:
            if num_stages > 1:
                rounds.extend(time_round(ends, form, self.lane_tokens, PROBES, self.device))
            pipeline.close()
            self._restart(stage, counting)
            pipeline.on_send = counting.begin
            if speculation is not None:
                speculation.counts = DraftCounts()

        shapes = options.asked.shapes
        outcome = serve_measured(
            self.prepared.run, shapes, serve, options.n_samples, observe, time_links
        )
        uses, trace = self._gather(stage, counting)
        link_s = statistics.median(rounds) / num_stages if rounds else None
        hop_bytes = form.num_bytes(self.lane_tokens)
        drafts = None if speculation is None else speculation.counts
        return replace(outcome, ring=RingUse(uses, hop_bytes, link_s, trace, drafts))

    def _restart(self, stage: Stage, counting: CountingEnds) -> None:
        """Begin to count what is measured."""
        stage.occupancy = Occupancy()
        counting.restart(self.prepared.options.asked.has_spans)

    def _gather(
        self, stage: Stage, counting: CountingEnds
    ) -> tuple[list[StageUse], RingTrace | None]:
        """What all stages counted; it is whole on the first rank alone. All ranks must call it."""
        return gather(self.prepared.run.launch, self.prepared.grid, stage.occupancy, counting)

    def _load_stage(self) -> Stage:
        prepared, number = self.prepared, self.stages.stage
        config, source, layers = prepared.run.config, prepared.run.source, prepared.layers[number]
        part = StagePart(layers, has_ends=number == 0)
        kinds = kinds_of(config.model, config.model.target_dtype)
        models = LoadedModels(self.device, self.progress)
        model = models.get(source, self.stages.target, kinds, part)
        backend = make_backend(config.attention.backend)
        sizes = prepared.options.n_samples, max_tokens(config) + self.num_drafts
        executor = make_executor(kinds, model, self.stages.target)
        runner = ModelRunner(model, backend, self.stages.target, *sizes, executor=executor)
        asked = prepared.options.asked
        if asked.emulate_stage_ms is not None:
            return EmulatedStage(runner, model.is_last, seconds=asked.emulate_stage_ms / 1e3)
        if asked.pad_stage_ms is not None:
            return PaddedStage(runner, model.is_last, seconds=asked.pad_stage_ms / 1e3)
        return Stage(runner, model.is_last)
