"""Serves the requests of `magicdec recurrent` in each pass, on this rank: by the engine, in one
process or by tensor parallelism over all ranks, and by the ring of stages (`RingPass`). A rank that
has no part in a pass waits.

Every pass serves a few shortened requests first, unmeasured, and then all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed
from torch import Tensor

from magicdec.config.choices.collectives import HOST_COPIES, NCCL
from magicdec.config.resolved import ResolvedConfig
from magicdec.console import Progress
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.distributed.channels.connect import (
    DevicePayloads,
    connect_ring,
    through_host,
    time_round,
)
from magicdec.distributed.channels.message import MessageForm
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.start import make_groups, make_stage_groups
from magicdec.engine import Engine
from magicdec.hardware.environment import release_memory
from magicdec.hardware.threads import ThreadCount, use_threads
from magicdec.memory.plan import max_tokens
from magicdec.memory.sampler import MemorySampler
from magicdec.names import BASELINE, SEQUENTIAL
from magicdec.pipeline.emulation import DelayedSender, emulated
from magicdec.pipeline.metrics import DraftCounts, StageUse
from magicdec.pipeline.options import (
    BATCHED,
    RINGS,
    SPECULATIVE_RING,
    TENSOR_PARALLEL,
    WITH_CURVES,
)
from magicdec.pipeline.prepare import PreparedRing, expected_threads, of_one_process
from magicdec.pipeline.recurrent import RecurrentPipeline, most_under_way
from magicdec.pipeline.speculation import Speculation, make_speculation, num_drafts_of
from magicdec.pipeline.stage import Occupancy, Stage, load_part
from magicdec.pipeline.tracing import (
    CountingEnds,
    RingTrace,
    clocks_of,
    gather,
    gather_memory,
    gather_threads,
)
from magicdec.request import Request
from magicdec.scheduling.plan import Limits
from magicdec.serving.metrics import Served, StepCounts
from magicdec.serving.server import make_requests, shortened
from magicdec.setup.loading import LoadedModels, StagePart, make_target
from magicdec.setup.prepare import Prepared
from magicdec.workload.request_shapes import RequestShape

PROBES = 100  # rounds that are timed without other messages
LEAST_CAPACITY, MOST_CAPACITY = 1 << 20, 1 << 24  # bytes of an edge in shared memory

Observe = Callable[[int], None]
"""Is called with the number of tokens of every step."""
Serve = Callable[[list[Request], StepCounts, Observe], None]


@dataclass(frozen=True)
class RingUse:
    """What the ring measured beside the times of requests."""

    uses: list[StageUse]  # of the stages in order
    hop_bytes: int
    link_s: float | None
    trace: RingTrace | None = None
    drafts: DraftCounts | None = None


@dataclass(frozen=True)
class Outcome(Served):
    """`memory` has the samples of each rank's memory, [N, 2]: seconds and bytes. It is empty if
    they were not asked for."""

    ring: RingUse | None = None
    memory: Sequence[Tensor] = ()


def serve_measured(
    run: Prepared,
    shapes: Sequence[RequestShape],
    serve: Serve,
    rows: int,
    observe: Observe,
    after_warm_up: Callable[[], None] = lambda: None,
    is_coupled: bool = False,
) -> Outcome:
    """Serve the first requests once, shortened, so that what happens once is not measured. Then
    serve all. `serve` gets the requests, where to count steps, and `observe`."""
    config, prompts = run.config, run.workload.prompts
    ends = () if config.decoding.ignore_eos else run.source.config.eos_token_ids

    def arrived(shapes: Sequence[RequestShape]) -> list[Request]:
        begin_s = time.perf_counter()
        return make_requests(prompts, shapes, begin_s, config.sampling, ends, is_coupled)

    short = shortened(shapes[:rows], config.attention.prefill_chunk)
    serve(arrived(short), StepCounts(), lambda num_tokens: None)
    after_warm_up()
    requests, counts = arrived(shapes), StepCounts()
    begin_s = requests[0].arrived_s
    serve(requests, counts, observe)
    return Outcome(requests, counts, begin_s)


def serve_by_engine(
    run: Prepared,
    config: ResolvedConfig,
    group: Group,
    models: LoadedModels,
    prefill_tokens: int,
    shapes: Sequence[RequestShape],
    observe: Observe,
    count: ThreadCount,
    is_coupled: bool = False,
) -> Outcome:
    """Serve requests of these shapes without drafts by the engine on `group`, where they join and
    leave a running batch. A step prefills at most `prefill_tokens`. `count` measures meanwhile."""
    runner = make_target(config, run.source, group, models, max_tokens(config))
    limits = Limits(runner.max_tokens, prefill_tokens=prefill_tokens)

    def serve(requests: list[Request], counts: StepCounts, observe: Observe) -> None:
        setup = Setup(runner, config.decoding, config.kv, is_in_flight=True)
        Engine(runner, config.attention.prefill_chunk, limits).serve(
            make_strategy(BASELINE, setup), requests,
            lambda output, seconds: observe(sum(map(len, output.token_ids))), counts.watch,
        )  # fmt: skip

    with count.during():
        rows = config.workload.batch_size
        return serve_measured(run, shapes, serve, rows, observe, is_coupled=is_coupled)


class Passes:
    """All ranks make it and serve the same passes together."""

    def __init__(self, prepared: PreparedRing, device: torch.device, progress: Progress) -> None:
        self.prepared, self.device, self.progress = prepared, device, progress
        launch, parallel = prepared.run.launch, prepared.whole.parallel
        self.stages = make_stage_groups(launch, prepared.grid, device, parallel.collectives)
        self.everyone: ParallelGroups | None = None
        if TENSOR_PARALLEL in prepared.options.flags.passes:
            self.everyone = make_groups(launch, parallel.rank_group, device, parallel.collectives)

    def serve(self, name: str, observe: Observe) -> Outcome | None:
        """Serve all requests in the pass of that name; None on all ranks but the first. The memory
        of a pass with curves is sampled if that was asked for. Raises AssertionError if a rank has
        computed with other threads than its config says."""
        count, launch = ThreadCount(), self.prepared.run.launch
        memory: Sequence[Tensor] = ()
        if name in WITH_CURVES and self.prepared.options.flags.has_memory:
            with MemorySampler(self.device) as sampler:
                outcome = self._serve(name, observe, count)
            memory = gather_memory(sampler.samples, clocks_of(launch))
        else:
            outcome = self._serve(name, observe, count)
        is_one_process = name in (SEQUENTIAL, BATCHED)
        expected = expected_threads(self.prepared.whole.parallel, launch, is_one_process)
        threads = gather_threads(name, count, expected, launch)
        if outcome is None or launch.rank != 0:
            return None
        used = memory[:1] if is_one_process else memory  # the other ranks wait
        return replace(outcome, memory=used, threads=threads)

    def _serve(self, name: str, observe: Observe, count: ThreadCount) -> Outcome | None:
        prepared, options = self.prepared, self.prepared.options
        launch, parallel = prepared.run.launch, prepared.whole.parallel
        outcome: Outcome | None = None
        if name in RINGS:
            has_drafts = name == SPECULATIVE_RING
            ring = RingPass(prepared, self.stages, self.device, self.progress, has_drafts)
            with count.during():
                outcome = ring.serve(observe)
        elif name == TENSOR_PARALLEL:
            assert self.everyone is not None, "the pass was announced"
            outcome = self._engine(prepared.whole, self.everyone.target, observe, count)
        elif launch.rank == 0:  # with the threads of all ranks of the host, since these wait
            config = of_one_process(prepared.alone, 1 if name == SEQUENTIAL else options.n_samples)
            with use_threads(parallel.threads_on(launch.local_ranks)):
                outcome = self._engine(config, Group((0,), 0), observe, count)
        release_memory(self.device)
        if launch.world_size > 1:  # all ranks are done, and have given back what they do not use
            torch.distributed.barrier()
        return outcome

    def _engine(
        self, config: ResolvedConfig, group: Group, observe: Observe, count: ThreadCount
    ) -> Outcome:
        options, chunk = self.prepared.options, config.attention.prefill_chunk
        return serve_by_engine(
            self.prepared.run, config, group, LoadedModels(self.device, self.progress),
            options.prefill_tokens(self.prepared.grid.num_stages, chunk), options.flags.shapes,
            observe, count,
        )  # fmt: skip


class RingPass:
    """The requests of a command, served by the ring of stages. All ranks make it and serve
    together. `stages` are the groups of this rank's stage. With `drafts`, messages carry draft
    tokens."""

    def __init__(
        self,
        prepared: PreparedRing,
        stages: ParallelGroups,
        device: torch.device,
        progress: Progress,
        drafts: bool = False,
    ) -> None:
        self.prepared, self.stages, self.device = prepared, stages, device
        self.models = LoadedModels(device, progress)
        self.drafting = prepared.drafting if drafts else None
        self.num_drafts = 0 if self.drafting is None else num_drafts_of(self.drafting.config)
        # Tokens of a message of a whole lane that decodes.
        self.lane_tokens = prepared.options.flags.lane_size * (1 + self.num_drafts)

    def serve(self, observe: Observe) -> Outcome | None:
        """Serve all requests. The outcome is None on a rank that is not of the first stage."""
        prepared, options = self.prepared, self.prepared.options
        stage, lane_size = self._load_stage(), options.flags.lane_size
        chunk = prepared.run.config.attention.prefill_chunk
        limits = Limits(
            stage.runner.max_tokens,
            prefill_tokens=options.prefill_tokens(prepared.grid.num_stages, chunk),
            step_tokens=1 + self.num_drafts,
        )
        depth = most_under_way(options.num_lanes, lane_size, limits, chunk)
        form, counting = self._connect(stage, depth, chunk)
        if self.stages.stage == 0:
            speculation = None
            if self.drafting is not None:
                runner = stage.runner
                speculation = make_speculation(self.drafting, runner, self.stages, self.models)
            pipeline = RecurrentPipeline(
                stage, counting.ends, options.num_lanes, lane_size, limits, chunk,
                speculation=speculation,
            )  # fmt: skip
            return self._lead(pipeline, speculation, counting, form, observe)
        for _ in ("warm-up", "links"):
            stage.serve(counting.ends)
        self._restart(stage, counting)
        stage.serve(counting.ends)
        gather(prepared.run.launch, prepared.grid, stage.occupancy, counting)
        return None

    def _connect(self, stage: Stage, depth: int, chunk: int) -> tuple[MessageForm, CountingEnds]:
        """The ends of this rank, and the form of messages. At most `depth` of them are under way,
        whose prompts are of `chunk` tokens at most."""
        prepared, transport = self.prepared, self.prepared.transport
        width = prepared.run.source.config.hidden_size
        dtype = next(stage.runner.model.parameters()).dtype
        lane_size = prepared.options.flags.lane_size
        form = MessageForm(width, dtype, lane_size if self.drafting is None else 2 * lane_size)
        payloads: DevicePayloads | None = None
        if transport is not None and transport.payloads == NCCL:
            payloads = DevicePayloads(self.device, NCCL, width, dtype)
            form = payloads.header_form(form)
        # Whatever is on its way home must fit, since the first stage may be sending meanwhile.
        least = max(LEAST_CAPACITY, depth * form.num_bytes(self.lane_tokens))
        ends = connect_ring(
            prepared.grid, prepared.run.launch, form, depth,
            max(least, min(depth * form.num_bytes(chunk), MOST_CAPACITY)),
            None if transport is None else transport.headers, payloads,
        )  # fmt: skip
        if (link := prepared.options.flags.link) is not None:
            ends = replace(ends, outbound=DelayedSender(ends.outbound, link, form))
        if transport is not None and transport.payloads == HOST_COPIES:
            ends = through_host(ends, self.device)
        return form, CountingEnds(ends, is_first=self.stages.stage == 0)

    def _lead(
        self,
        pipeline: RecurrentPipeline,
        speculation: Speculation | None,
        counting: CountingEnds,
        form: MessageForm,
        observe: Observe,
    ) -> Outcome:
        """The part of the first stage."""
        prepared, options, stage = self.prepared, self.prepared.options, pipeline.stage
        num_stages, rounds = prepared.grid.num_stages, list[float]()

        def serve(requests: list[Request], counts: StepCounts, observe: Observe) -> None:
            pipeline.serve(requests, observe, counts.watch)
            pipeline.close()

        def time_links() -> None:
            if num_stages > 1:
                ends, num_tokens = pipeline.ends, self.lane_tokens
                rounds.extend(time_round(ends, form, num_tokens, PROBES, self.device))
            pipeline.close()
            self._restart(stage, counting)
            pipeline.on_send = counting.begin
            if speculation is not None:
                speculation.counts = DraftCounts()

        outcome = serve_measured(
            prepared.run, options.flags.shapes, serve, options.n_samples, observe, time_links
        )
        uses, trace = gather(prepared.run.launch, prepared.grid, stage.occupancy, counting)
        link_s = statistics.median(rounds) / num_stages if rounds else None
        drafts = None if speculation is None else speculation.counts
        ring = RingUse(uses, form.num_bytes(self.lane_tokens), link_s, trace, drafts)
        return replace(outcome, ring=ring)

    def _restart(self, stage: Stage, counting: CountingEnds) -> None:
        """Begin to count what is measured."""
        stage.occupancy = Occupancy()
        counting.restart(self.prepared.options.flags.has_spans)

    def _load_stage(self) -> Stage:
        prepared, options = self.prepared, self.prepared.options
        config, number = prepared.run.config, self.stages.stage
        part = StagePart(prepared.layers[number], has_ends=number == 0)
        runner = load_part(
            config, prepared.run.source, self.stages.target, self.models, part, options.n_samples,
            max_tokens(config) + self.num_drafts,
        )  # fmt: skip
        return emulated(runner, options.flags.emulate_stage_ms, options.flags.pad_stage_ms)
