"""RingPass: the requests of a command, served by the ring of stages, on this rank.

Owns a rank's part of the ring: its layers, its ends of the channels, and what it counts. Must not
know the other passes, nor what is computed from the time stamps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed

from magicdec.console import Progress
from magicdec.distributed.channel import MessageForm, connect_ring, time_round
from magicdec.distributed.groups import ParallelGroups
from magicdec.memory.working_memory import max_tokens
from magicdec.pipeline.emulated_link import DelayedSender
from magicdec.pipeline.emulation import EmulatedStage
from magicdec.pipeline.measured_pass import Outcome, RingUse, limits_of, serve_measured
from magicdec.pipeline.metrics import StageUse
from magicdec.pipeline.prepare import PreparedRing
from magicdec.pipeline.recurrent import RecurrentPipeline, most_under_way
from magicdec.pipeline.stage import Occupancy, Stage
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.serving.counts import StepCounts
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
    """All ranks make it and serve together. `stages` are the groups of this rank's stage."""

    def __init__(
        self,
        prepared: PreparedRing,
        stages: ParallelGroups,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self.prepared, self.stages, self.device, self.progress = prepared, stages, device, progress

    def serve(self, observe: Callable[[int], None]) -> Outcome | None:
        """Serve all requests. The outcome is None on a rank that is not of the first stage."""
        prepared, config, options = self.prepared, self.prepared.run.config, self.prepared.options
        stage, lane_size = self._load_stage(), options.asked.lane_size
        chunk, limits = config.attention.prefill_chunk, limits_of(prepared, stage.runner)
        dtype = next(stage.runner.model.parameters()).dtype
        form = MessageForm(prepared.run.source.config.hidden_size, dtype, lane_size)
        depth = most_under_way(options.num_lanes, lane_size, limits, chunk)
        # Whatever is on its way home must fit, since the first stage may be sending meanwhile.
        least = max(LEAST_CAPACITY, depth * form.num_bytes(lane_size))
        capacity = max(least, min(depth * form.num_bytes(chunk), MOST_CAPACITY))
        place = prepared.grid, self.stages.rank, form, depth, capacity
        ends = connect_ring(*place, prepared.whole.parallel.collectives)
        if (link := options.asked.link) is not None:
            ends = replace(ends, outbound=DelayedSender(ends.outbound, link, form))
        if self.stages.stage == 0:
            lanes = options.num_lanes, lane_size, limits, chunk
            return self._lead(RecurrentPipeline(stage, ends, *lanes), form, observe)
        for _ in ("warm-up", "links"):
            stage.serve(ends)
        sent, stage.occupancy = ends.outbound.num_bytes, Occupancy()
        stage.serve(ends)
        self._uses(stage, ends.outbound.num_bytes - sent)
        return None

    def _lead(
        self, pipeline: RecurrentPipeline, form: MessageForm, observe: Callable[[int], None]
    ) -> Outcome:
        """The part of the first stage."""
        stage, ends, num_stages = pipeline.stage, pipeline.ends, self.prepared.grid.num_stages
        options = self.prepared.options
        lane_size, rounds, sent = options.asked.lane_size, list[float](), 0

        def serve(requests: list[Request], counts: StepCounts, tell: Callable[[int], None]) -> None:
            pipeline.serve(requests, tell, counts.watch)
            pipeline.close()

        def time_links() -> None:
            nonlocal sent
            if num_stages > 1:
                rounds.extend(time_round(ends, form, lane_size, PROBES))
            pipeline.close()
            sent, stage.occupancy = ends.outbound.num_bytes, Occupancy()

        outcome = serve_measured(self.prepared, serve, options.n_samples, observe, time_links)
        uses = self._uses(stage, ends.outbound.num_bytes - sent)
        link_s = statistics.median(rounds) / num_stages if rounds else None
        return replace(outcome, ring=RingUse(uses, form.num_bytes(lane_size), link_s))

    def _load_stage(self) -> Stage:
        prepared, number = self.prepared, self.stages.stage
        config, source, layers = prepared.run.config, prepared.run.source, prepared.layers[number]
        part = StagePart(layers, has_ends=number == 0)
        kinds = kinds_of(config.model, config.model.target_dtype)
        models = LoadedModels(self.device, self.progress)
        model = models.get(source, self.stages.target, kinds, part)
        backend = make_backend(config.attention.backend)
        sizes = prepared.options.n_samples, max_tokens(config)
        executor = make_executor(kinds, model, self.stages.target)
        runner = ModelRunner(model, backend, self.stages.target, *sizes, executor=executor)
        emulated_ms = prepared.options.asked.emulate_stage_ms
        if emulated_ms is not None:
            return EmulatedStage(runner, model.is_last, seconds=emulated_ms / 1e3)
        return Stage(runner, model.is_last)

    def _uses(self, stage: Stage, num_bytes: int) -> list[StageUse]:
        """What the first rank of each stage counted. All ranks must call it."""
        spent = stage.occupancy
        counted = [spent.total_s, spent.waiting_s, spent.decode_s, spent.num_decodes, num_bytes]
        ours = torch.tensor(counted, dtype=torch.float64)
        grid = self.prepared.grid
        found = [torch.empty_like(ours) for _ in range(grid.world_size)]
        if grid.world_size == 1:
            found = [ours]
        else:
            torch.distributed.all_gather(found, ours)
        first = [found[grid.ranks_of(number)[0]].tolist() for number in range(grid.num_stages)]
        return [
            StageUse(total_s, waiting_s, decode_s, int(num_decodes), int(sent))
            for total_s, waiting_s, decode_s, num_decodes, sent in first
        ]
