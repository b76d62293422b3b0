"""MDILLM: the system whose requests circulate through a ring of stages, with or without drafts
(MDI-LLM, arXiv 2505.18164, section III). Owns loading, connections and measurements;
`RecurrentPipeline` owns the order of messages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from magicdec.config.run_config import RunConfig
from magicdec.distributed.channels.message import Ends, MessageForm
from magicdec.distributed.groups import ParallelGroups
from magicdec.distributed.layout import read_split
from magicdec.distributed.start import make_stage_groups
from magicdec.engine.arrivals import Arrivals
from magicdec.output.console import Progress
from magicdec.records.computing import percentile
from magicdec.runner.observers.draft_log import DraftLog
from magicdec.runner.request import Request
from magicdec.runner.step_plan import BatchLimits
from magicdec.setup.loading import LoadedModels, make_runner
from magicdec.setup.memory_plan import model_plans_of
from magicdec.setup.model_plan import ModelPlan, StagePart, max_tokens, rewound_by_step
from magicdec.setup.prepare import SetupCache
from magicdec.systems.mdi_llm.declaration import MDILLMSettings
from magicdec.systems.mdi_llm.details import (
    DraftCounts,
    MDILLMDetails,
    StageUse,
    ring_metrics,
    uses_of,
)
from magicdec.systems.mdi_llm.recurrent import (
    RecurrentPipeline,
    RingSpeculation,
    make_speculation,
    max_gamma_of,
    most_under_way,
)
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.mdi_llm.timing import RingTiming
from magicdec.systems.modes import Pass
from magicdec.systems.stages.auto_split import DecodeStep
from magicdec.systems.stages.clocks import gather_leaders
from magicdec.systems.stages.spans import Span, Spans
from magicdec.systems.stages.stage import StageLoop
from magicdec.systems.stages.staged import StagedSystem, check_split
from magicdec.systems.system import PassObserver, PassTrace, StepShape, SystemDetails

# bytes of an edge in shared memory
LEAST_CAPACITY = 1 << 20
MOST_CAPACITY = 1 << 24


class MDILLM(StagedSystem):
    """A ring of stages. `run.config` is of this rank's stage. A pass is opened anew if only it or
    the last one drafts, since drafts need room in messages and cache."""

    settings: MDILLMSettings
    groups: ParallelGroups | None = None
    models: LoadedModels | None = None
    opened: OpenRing | None = None

    def prepare(self, run_config: RunConfig, cache: SetupCache) -> None:
        options = self.options
        launch = self.launch
        self.grid = grid = self.settings.grid(launch.world_size)
        self.stage_number = grid.stage_of(launch.rank)
        self.num_samples = self.settings.rows(options, launch.world_size)
        self.ranks_of_layer = grid.tensor_parallel
        capacity = options.capacity(self.num_samples)
        models = self.find_part(run_config, capacity, cache, grid.tensor_parallel)
        check_split(read_split(self.settings.layer_split).stages, grid, models.source)
        self.check_stages(models, grid.tensor_parallel, grid.world_size < launch.world_size)
        config = models.config.on_ranks(grid.ranks_of(self.stage_number))
        if config.decoding.has_mtp_head:
            assert config.draft is not None, "the head drafts"
            config = replace(config, draft=replace(config.draft, rank_group=grid.ranks_of(0)))
        self.run = self.complete(replace(models, config=config), cache)
        step = DecodeStep(self.settings.batch_size, options.mean_context, max_gamma_of(config))
        tokens = f" and {step.gamma} drafts" if step.gamma else ""
        stages = [grid.ranks_of(stage) for stage in range(grid.num_stages)]
        self.layers = self.choose_layers(
            RingTiming(self.run, stages, step),
            f"messages of {step.rows} with {step.context} cached tokens{tokens} each",
        )

    @property
    def computes(self) -> bool:
        return self.launch.rank < self.grid.world_size

    def part(self, stage: int) -> StagePart:
        return StagePart(self.layers[stage], has_ends=stage == 0)

    def model_plans(self, serving_pass: Pass, rank: int) -> list[ModelPlan]:
        stage = self.grid.stage_of(rank)
        if stage >= self.grid.num_stages:
            return []
        config = self.run.config.on_ranks(self.grid.ranks_of(stage))
        if not serving_pass.is_drafting:
            config = config.without_drafts()
        target, *drafts = model_plans_of(config, self.run.models, rank)
        return [replace(target, part=self.part(stage), rewound=rewound_by_step(config)), *drafts]

    def open(self, serving_pass: Pass, device: torch.device, progress: Progress) -> None:
        if self.groups is None:
            collectives = self.run.config.parallel.collectives
            self.groups = make_stage_groups(self.launch, self.grid, device, collectives)
        if self.models is None:
            self.models = self.make_models(device, progress)
        if self.opened is None or self.opened.is_drafting != serving_pass.is_drafting:
            self.opened = None  # its memory is free before the next is allocated
            self.opened = OpenRing(self, serving_pass, self.groups, self.models)

    def step_shape(self, serving_pass: Pass) -> StepShape:
        max_gamma = max_gamma_of(self.run.config) if serving_pass.is_drafting else 0
        return StepShape(self.settings.batch_size, 1 + max_gamma)

    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        assert self.opened is not None, "it was opened"
        with observer.threads.during() if self.computes else nullcontext():
            return self.opened.serve(Arrivals(requests, serving_pass.concurrency), observer)

    def now(self) -> float:
        if self.opened is None or self.opened.pipeline is None:
            return super().now()
        return self.opened.pipeline.shared_clock.now()

    def close(self) -> None:
        self.opened = self.models = None


class OpenRing:
    """This rank's loaded and connected stage, None on a rank that waits. `pipeline` leads on the
    first stage."""

    def __init__(
        self, ring: MDILLM, serving_pass: Pass, groups: ParallelGroups, models: LoadedModels
    ) -> None:
        self.ring = ring
        self.groups = groups
        self.models = models
        self.is_drafting = is_drafting = serving_pass.is_drafting
        settings = ring.settings
        chunk = ring.run.config.attention.prefill_chunk
        self.max_gamma = max_gamma_of(ring.run.config) if is_drafting else 0
        # Tokens of a message of a whole lane that decodes.
        self.lane_tokens = settings.batch_size * (1 + self.max_gamma)
        self.max_tokens = max_tokens(ring.run.config.without_drafts()) + self.max_gamma
        # A head drafts from states that come home.
        self.has_mtp_head = is_drafting and ring.run.config.decoding.has_mtp_head
        self.stage = self._load_stage(serving_pass) if ring.computes else None
        limits = BatchLimits(
            self.max_tokens,
            # By default a chunk for each stage, so that the chunks of one prompt can keep all busy.
            prefill_tokens=settings.prefill_tokens or ring.grid.num_stages * chunk,
            step_tokens=1 + self.max_gamma,
        )
        self.num_lanes = ring.num_samples // settings.batch_size
        depth = most_under_way(self.num_lanes, settings.batch_size, limits, chunk)
        self.form, self.ends = self._connect(depth, chunk)
        self.pipeline: RecurrentPipeline | None = None
        self.speculation: RingSpeculation | None = None
        if self.stage is not None and ring.stage_number == 0:
            if is_drafting:
                runner = self.stage.runner
                self.speculation = make_speculation(ring.run, runner, groups, models, ring.part(0))
            self.pipeline = RecurrentPipeline(
                self.stage,
                self.ends,
                self.num_lanes,
                settings.batch_size,
                limits,
                chunk,
                speculation=self.speculation,
            )

    def _load_stage(self, serving_pass: Pass) -> Stage:
        ring = self.ring
        plan = ring.model_plans(serving_pass, ring.launch.rank)[0]
        runner = make_runner(plan, ring.run.source, self.groups.target, self.models)
        is_last = runner.model.is_last
        sends_states = self.has_mtp_head and is_last and not runner.model.has_head
        return Stage(runner, is_last, sends_states)

    def _connect(self, depth: int, chunk: int) -> tuple[MessageForm, Ends]:
        """The form of messages and this rank's ends, for `depth` messages under way and prompt
        chunks of `chunk` tokens."""
        ring = self.ring
        width = ring.run.source.config.hidden_size
        dtype = getattr(torch, ring.run.config.model.dtype)
        num_words = ring.settings.batch_size * (2 if self.is_drafting else 1)
        form = MessageForm(width, dtype, num_words)
        # Whatever is on its way home must fit, since the first stage may be sending meanwhile.
        sent_home = max(self.lane_tokens, chunk) if self.has_mtp_head else self.lane_tokens
        least = max(LEAST_CAPACITY, depth * form.num_bytes(sent_home))
        capacity = max(least, min(depth * form.num_bytes(chunk), MOST_CAPACITY))
        connector = ring.connector(form, self.models.device, depth, capacity)
        return form, connector.ring(ring.grid)

    def serve(self, arrivals: Arrivals, observer: PassObserver) -> SystemDetails:
        spans = Spans()
        before = self.ends.outbound.traffic
        launch = self.ring.launch
        grid = self.ring.grid
        pipeline = self.pipeline
        samples = list[list[int]]()
        prompts = set[int]()
        if self.speculation is not None:
            self.speculation.counts = DraftCounts()
            self.speculation.keep_log(DraftLog() if observer.is_logged else None)
        if pipeline is not None:
            pipeline.serve(arrivals, observer.observe, observer.watch)
            pipeline.close()
            spans = pipeline.spans
            samples = pipeline.samples
            prompts = pipeline.prompts
        elif self.stage is not None:
            StageLoop(self.stage, self.ends, spans).serve()
        sent = self.ends.outbound.traffic.since(before)
        stages, sent_by_stage, error_s = gather_leaders(launch, grid, spans, sent)
        if launch.rank != 0 or not observer.is_measured:
            return SystemDetails()
        trace = PassTrace(
            [f"stage {number}" for number in range(len(stages))],
            [sorted(stage, key=lambda span: span.begin_s) for stage in stages],
            dict(enumerate(samples)),
            frozenset(prompts),
            error_s,
        )
        uses = uses_of(stages, sent_by_stage, prompts)
        return SystemDetails(self._metrics(uses, list(arrivals), trace.spans), trace)

    def _metrics(
        self,
        uses: list[StageUse],
        requests: Sequence[Request],
        spans: Sequence[Sequence[Span]],
    ) -> MDILLMDetails:
        ring = self.ring
        gaps = [gap for request in requests for gap in request.gaps_ms()]
        return ring_metrics(
            [len(layers) for layers in ring.layers],
            ring.grid.tensor_parallel,
            (self.num_lanes, ring.settings.batch_size),
            uses,
            self.form.num_bytes(self.lane_tokens),
            percentile(gaps, 50),
            None if self.speculation is None else self.speculation.counts,
            sum(len(request.output_ids) - 1 for request in requests),
            spans,
        )
