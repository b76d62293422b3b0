"""Serves the requests of `magicdec recurrent` in each pass, on this rank.

Owns how a pass is served: by one process, by tensor parallelism over all ranks, or by the ring.
Must not know what is computed from the time stamps. A rank that has no part in a pass waits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed

from magicdec.console import Progress
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.distributed.channel import MessageForm, connect_ring, time_round
from magicdec.distributed.groups import Group, ParallelGroups, make_groups, make_stage_groups
from magicdec.distributed.processes import Processes
from magicdec.engine import Engine
from magicdec.memory.working_memory import max_tokens
from magicdec.names import BASELINE
from magicdec.pipeline.emulated_link import DelayedSender
from magicdec.pipeline.emulation import EmulatedStage
from magicdec.pipeline.metrics import StageUse
from magicdec.pipeline.options import RING, SEQUENTIAL, TENSOR_PARALLEL
from magicdec.pipeline.prepare import PreparedRing, of_one_process
from magicdec.pipeline.recurrent import RecurrentPipeline, most_under_way
from magicdec.pipeline.stage import Occupancy, Stage
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.sampling.sampling import make_params
from magicdec.scheduling.plan import Limits
from magicdec.serving.counts import StepCounts
from magicdec.setup.loading import (
    LoadedModels,
    StagePart,
    kinds_of,
    make_backend,
    make_executor,
    make_target,
)

WARM_UP_TOKENS = 3
PROBES = 100  # rounds that are timed without other messages
LEAST_CAPACITY, MOST_CAPACITY = 1 << 20, 1 << 24  # bytes of an edge in shared memory


@dataclass(frozen=True)
class RingUse:
    """What the ring measured beside the times of requests."""

    uses: list[StageUse]  # of the stages in order
    hop_bytes: int
    link_s: float | None


@dataclass(frozen=True)
class Outcome:
    """All requests of a pass, finished, and what was counted meanwhile."""

    requests: list[Request]
    counts: StepCounts
    begin_s: float
    ring: RingUse | None = None


class Passes:
    """All ranks make it and serve the same passes together. The outcome of the first rank counts;
    it is None on a rank that has no requests."""

    def __init__(self, prepared: PreparedRing, device: torch.device, progress: Progress) -> None:
        self.prepared, self.device, self.progress = prepared, device, progress
        launch, parallel = prepared.run.launch, prepared.whole.parallel
        place = device, parallel.collectives
        self.stages = make_stage_groups(launch, prepared.grid, *place)
        self.everyone: ParallelGroups | None = None
        if TENSOR_PARALLEL in prepared.options.asked.passes:
            self.everyone = make_groups(launch, parallel.rank_group, *place)
        self.processes = Processes.of_ranks() if launch.world_size > 1 else Processes()

    def serve(self, name: str, observe: Callable[[int], None]) -> Outcome | None:
        """Serve all requests in the pass of that name."""
        launch = self.prepared.run.launch
        outcome = None
        if name == RING:
            outcome = self._ring(observe)
        elif name == TENSOR_PARALLEL:
            assert self.everyone is not None, "the pass was announced"
            rows = self.prepared.options.n_samples
            outcome = self._engine(self.everyone.target, rows, observe)
        elif launch.rank == 0:  # with all cores of the host, since the other ranks wait
            threads = self.prepared.whole.parallel.threads
            torch.set_num_threads(threads * launch.local_world_size)
            rows = 1 if name == SEQUENTIAL else self.prepared.options.n_samples
            outcome = self._engine(Group((0,), 0), rows, observe)
            torch.set_num_threads(threads)
        self._wait_for_all()
        return outcome

    def _engine(self, group: Group, rows: int, observe: Callable[[int], None]) -> Outcome:
        """By the engine, with requests that join and leave a running batch of `rows`."""
        run, config = self.prepared.run, self.prepared.whole
        if group.size == 1:
            config = of_one_process(config, rows)
        models, chunk = LoadedModels(self.device, self.progress), config.attention.prefill_chunk
        runner = make_target(config, run.source, group, models, max_tokens(config))
        limits = self._limits(runner)

        def serve(requests: list[Request], counts: StepCounts, tell: Callable[[int], None]) -> None:
            setup = Setup(runner, config.decoding, config.kv, is_in_flight=True)
            Engine(runner, chunk, limits).serve(
                make_strategy(BASELINE, setup), requests,
                lambda output, seconds: tell(sum(map(len, output.token_ids))), counts.watch,
            )  # fmt: skip

        return self._measured(serve, rows, observe)

    def _ring(self, observe: Callable[[int], None]) -> Outcome | None:
        prepared, config, options = self.prepared, self.prepared.run.config, self.prepared.options
        stage, lane_size = self._load_stage(), options.asked.lane_size
        chunk, limits = config.attention.prefill_chunk, self._limits(stage.runner)
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

        outcome = self._measured(serve, options.n_samples, observe, time_links)
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

    def _measured(
        self,
        serve: Callable[[list[Request], StepCounts, Callable[[int], None]], None],
        rows: int,
        observe: Callable[[int], None],
        after_warm_up: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Serve the first requests once, shortened, so that what happens once is not measured. Then
        serve all."""
        serve(self._requests(rows, is_warm_up=True), StepCounts(), lambda num_tokens: None)
        after_warm_up()
        requests, counts = self._requests(), StepCounts()
        begin_s = requests[0].arrived_s
        serve(requests, counts, observe)
        return Outcome(requests, counts, begin_s)

    def _requests(self, count: int | None = None, is_warm_up: bool = False) -> list[Request]:
        """The first `count` requests, which arrive now. Their random numbers follow from their
        places, so that they are the same in every pass."""
        run, now, made = self.prepared.run, time.perf_counter(), []
        decoding, chunk = run.config.decoding, run.config.attention.prefill_chunk
        ends = () if decoding.ignore_eos else run.source.config.eos_token_ids
        shapes = self.prepared.options.asked.shapes[:count]
        for i, (prompt, shape) in enumerate(zip(run.workload.prompts, shapes, strict=False)):
            num_new = min(shape.output_len, WARM_UP_TOKENS) if is_warm_up else shape.output_len
            params = make_params(run.config.sampling, num_new, ends, i)
            made.append(Request(i, prompt[:chunk] if is_warm_up else prompt, params))
            made[-1].arrived_s = now
        return made

    def _limits(self, runner: ModelRunner) -> Limits:
        """The same for the engine and for a lane, so that both prefill alike."""
        chunk = self.prepared.run.config.attention.prefill_chunk
        most = self.prepared.options.prefill_tokens(self.prepared.grid.num_stages, chunk)
        return Limits(runner.max_tokens, prefill_tokens=most)

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

    def _wait_for_all(self) -> None:
        """Wait until every rank is done with a pass. Raises PeerLost if one has ended."""
        if self.prepared.run.launch.world_size == 1:
            return
        try:
            torch.distributed.barrier()
        except RuntimeError as error:
            raise self.processes.lost(0, error) from None
