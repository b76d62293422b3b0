"""PipeInfer: the system of stages that decode token by token, with one batch of drafts,
or with drafts that run ahead and are cancelled if wrong (PipeInfer, arXiv 2407.11798).

Owns what a rank loads and how ranks are connected. For `--layer_split auto` a stage is timed
without links, scheduler and drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import FIXED_GAMMA, SELF, DraftSection
from magicdec.distributed.channels.message import Kind, Message, MessageForm
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.layout import PipelineLayout, make_layout, make_stage_grid
from magicdec.distributed.start import make_stage_groups
from magicdec.engine.arrivals import Arrivals
from magicdec.output.console import Progress
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request
from magicdec.runner.sampling.coupled import CoupledSampling
from magicdec.setup.loading import (
    LoadedModels,
    make_draft,
    make_received_states,
    make_runner,
)
from magicdec.setup.memory_plan import model_plans_of
from magicdec.setup.model_plan import ModelPlan, StagePart, max_tokens
from magicdec.setup.prepare import Prepared, ResolvedRun, SetupCache
from magicdec.systems.modes import Pass
from magicdec.systems.pipeinfer import messages
from magicdec.systems.pipeinfer.declaration import PipeInferSettings
from magicdec.systems.pipeinfer.details import Observed, speculation_metrics
from magicdec.systems.pipeinfer.head import PipelineRank, connect_ranks
from magicdec.systems.pipeinfer.mtp_path_drafter import MtpPathDrafter
from magicdec.systems.pipeinfer.options import PIPELINE_WITH_DRAFT
from magicdec.systems.pipeinfer.path_drafter import (
    LookupPathDrafter,
    ModelPathDrafter,
    PathDrafter,
)
from magicdec.systems.pipeinfer.run_stage import CancelBoard, RunStage
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler
from magicdec.systems.pipeinfer.scripted_drafter import ScriptedPathDrafter
from magicdec.systems.stages.auto_split import (
    STEPS,
    DecodeStep,
    Timer,
    Timing,
    time_messages,
)
from magicdec.systems.stages.clocks import clocks_of, gather_spans
from magicdec.systems.stages.spans import SpanKind
from magicdec.systems.stages.staged import StagedSystem
from magicdec.systems.system import PassObserver, PassTrace, StepShape, SystemDetails

ENDS = StagePart(range(0), has_ends=True)  # the embedding, the final norm and the head


class PipeInfer(StagedSystem):
    """A pipeline with a head. `run.config` is of one stage without drafts; `drafting` is `run` with
    the draft model, if there is one."""

    settings: PipeInferSettings
    member: PipelineRank | None = None

    def prepare(self, run_config: RunConfig, cache: SetupCache) -> None:
        options = self.options
        gamma = run_config.decoding.gamma
        self.gamma = gamma if isinstance(gamma, int) else FIXED_GAMMA
        self.rank = self.launch.rank
        if options.emulate_acceptance is not None:
            run_config = run_config.without_drafts()
        models = self._find_models(run_config, cache)
        model = models.source.config
        world_size = self.launch.world_size
        layout = make_layout(self.settings.layer_split, world_size, model.num_layers)
        self.check_stages(models, layout.tensor_parallel, not all(map(len, layout.layers)))
        self.ranks_of_layer = layout.tensor_parallel
        config = self._place_draft(models, layout)
        run = self.complete(replace(models, config=config), cache)
        self.drafting: Prepared | None = None
        if run.draft_source is not None:  # what follows a prompt are the draft's own tokens
            draft_config = replace(config, capacity=config.capacity.without_outputs())
            self.drafting = replace(run, config=draft_config)
        self.run = replace(run, config=config.without_drafts())
        self.sampling = CoupledSampling(config.sampling)
        most = max(shape.output_len for shape in options.shapes) - 1
        gamma = min(self.gamma, most) if self.has_drafts else 0
        context = min(options.mean_context, model.max_length - 1 - gamma)
        step = DecodeStep(1, context, gamma)
        rows = "1 row" if gamma == 0 else f"{step.num_tokens} rows"
        timing = RunTiming(self.run, [layout.group_of(rank) for rank in layout.stages], step)
        layers = self.choose_layers(timing, f"runs of {rows} after {step.context} tokens")
        self.layout = layout.with_layers(layers)
        self.layers = self.layout.layers

    @property
    def past_end(self) -> int:
        """Tokens that a request may draft past the end of its output."""
        has_batches = any(serving_pass.name == PIPELINE_WITH_DRAFT for serving_pass in self.passes)
        return self.gamma if has_batches else 0

    def _find_models(self, run_config: RunConfig, cache: SetupCache) -> ResolvedRun:
        """The models for a row per lane, with room for drafts of a whole output, and beyond its end
        in synchronous speculation."""
        run_config = with_own_model(run_config)
        capacity = self.options.capacity(self.rows)
        gamma = capacity.after_longest_prompt + self.past_end
        decoding = replace(run_config.decoding, gamma=gamma)
        grid = make_stage_grid(self.settings.layer_split, self.launch.world_size)
        return self.find_part(
            replace(run_config, decoding=decoding), capacity, cache, grid.tensor_parallel
        )

    def _place_draft(self, models: ResolvedRun, layout: PipelineLayout) -> ResolvedConfig:
        ranks = layout.group_of(self.rank)
        config = models.config.on_ranks(ranks)
        draft = models.config.draft
        return replace(config, draft=draft and replace(draft, rank_group=(layout.draft_rank,)))

    def model_plans(self, serving_pass: Pass, rank: int) -> list[ModelPlan]:
        layers = self.layout.layers[rank]
        plans = list[ModelPlan]()
        if len(layers):
            config = self.run.config.on_ranks(self.layout.group_of(rank))
            (target,) = model_plans_of(config, self.run.models, rank)
            part = StagePart(layers)
            plans.append(replace(target, part=part, row_tokens=self.row_tokens, rewound=None))
        if self.has_mtp_head and rank == self.layout.draft_rank:
            plans.append(self._ends_plan())
        if self.drafting is not None:
            drafts = model_plans_of(self.drafting.config, self.run.models, rank)[1:]
            plans += [replace(draft, rewound=None) for draft in drafts]
        return plans

    @property
    def row_tokens(self) -> int:
        return max_tokens(self.run.config) + self.past_end

    @property
    def has_mtp_head(self) -> bool:
        """Whether a head drafts, from hidden states of the last stage."""
        return self.drafting is not None and self.drafting.config.decoding.has_mtp_head

    def _ends_plan(self) -> ModelPlan:
        """The matrices of the target that a head shares, and the states from which it drafts."""
        assert self.drafting is not None, "the head drafts"
        ranks = (self.layout.draft_rank,)
        config = self.drafting.config.on_ranks(ranks)
        model = self.drafting.source.config
        return ModelPlan(config, model, ranks, ranks[0], ENDS, row_tokens=self.row_tokens)

    def config_of(self, serving_pass: Pass) -> dict[str, Any]:
        config = super().config_of(serving_pass)
        config["decoding"]["gamma"] = self.gamma
        if serving_pass.is_drafting and self.drafting is not None:
            draft_config = self.drafting.config.to_dict()
            config |= {name: draft_config[name] for name in ("draft", "kv")}
        return config

    def open(self, serving_pass: Pass, device: torch.device, progress: Progress) -> None:
        """Load and connect this rank, once for all passes."""
        if self.member is not None:
            return
        run = self.run
        launch = self.launch
        layout = self.layout
        models = self.make_models(device, progress)
        groups = make_stage_groups(
            launch,
            layout.grid,
            device,
            run.config.parallel.collectives,
            None if self.drafting is None else (layout.draft_rank,),
        )
        stage = None
        drafter = None
        if len(layout.layers[self.rank]):
            runner = make_runner(
                self.model_plans(serving_pass, self.rank)[0], run.source, groups.target, models
            )
            stage = RunStage(runner, self.sampling)
        if self.has_drafts and self.rank == layout.draft_rank:
            drafter = self._make_drafter(groups.draft, models)
        width = run.source.config.hidden_size
        dtype = getattr(torch, run.config.model.dtype)
        connector = self.connector(MessageForm(width, dtype, 0), device)
        wires = connect_ranks(connector, layout, self.has_drafts)
        self.member = PipelineRank(self.rank, wires, stage, drafter, device)

    def step_shape(self, serving_pass: Pass) -> StepShape:
        return StepShape(1, 1 + (self.gamma if serving_pass.is_drafting else 0))

    @property
    def computes(self) -> bool:
        return self.member is not None and self.member.computes

    def serve(
        self, serving_pass: Pass, requests: Sequence[Request], observer: PassObserver
    ) -> SystemDetails:
        assert self.member is not None, "it was opened"
        if self.member.stage is not None:
            self.member.stage.send_states(self.has_mtp_head and serving_pass.is_drafting)
        scheduler = PipelinedScheduler(
            self.settings.options(serving_pass.name, self.gamma),
            self.run.config.attention.prefill_chunk,
        )
        arrivals = Arrivals(requests, serving_pass.concurrency)
        spans = self.member.serve(scheduler, arrivals, observer.observe, observer.threads)
        spans_of_ranks = gather_spans(spans, clocks_of(self.launch))
        observer.counts.moves = self.member.moves
        observer.counts.num_steps = scheduler.counts.runs
        if self.rank != 0 or not observer.is_measured:
            return SystemDetails()
        observed = Observed.from_requests(self.layout, spans_of_ranks, requests)
        prompts = frozenset(span.run for span in spans_of_ranks[0] if span.what is SpanKind.PROMPT)
        ranks = [f"rank {n}: {self.layout.describe(n)}" for n in range(len(spans_of_ranks))]
        return SystemDetails(
            speculation_metrics(observed, scheduler.counts, serving_pass.is_drafting),
            PassTrace(ranks, spans_of_ranks, {}, prompts),
        )

    def close(self) -> None:
        if self.member is not None:
            self.member.close()
        self.member = None

    def _make_drafter(self, group: Group | None, models: LoadedModels) -> PathDrafter:
        if self.options.emulate_acceptance is not None:
            (acceptance,) = self.options.emulate_acceptance
            return self._scripted(acceptance)
        if self.drafting is None:
            return LookupPathDrafter(self.run.corpus)
        config = self.drafting.config
        assert group is not None, "this rank drafts"
        groups = ParallelGroups(self.rank, self.layout.world_size, group, draft=group)
        draft = make_draft(self.drafting, groups, models, goes_far_back=True, target_part=ENDS)
        assert draft is not None, "a model drafts"
        if self.has_mtp_head:
            states = make_received_states(self._ends_plan(), models.device)
            return MtpPathDrafter(draft, config.kv, states, self.sampling)
        vocab_size = self.drafting.source.config.vocab_size
        return ModelPathDrafter(draft, config.kv, vocab_size, self.sampling)

    def _scripted(self, acceptance: float) -> ScriptedPathDrafter:
        """The drafter for stages that sleep."""
        shapes = self.options.shapes
        workload = self.run.workload
        return ScriptedPathDrafter.for_emulated_stages(
            acceptance,
            [min(len(p), s.prompt_len) for p, s in zip(workload.prompts, shapes, strict=False)],
            [shape.output_len for shape in shapes],
            self.run.source.config.vocab_size,
            workload.seed,
            (self.settings.emulate_draft_ms or 0.0) / 1e3,
            self.emulated_time,
        )


def with_own_model(run_config: RunConfig) -> RunConfig:
    """`run_config` with self-speculation as a draft model: the target with its own KV cache, in
    int8 if the target is and no other weights are asked for."""
    if run_config.decoding.drafter != SELF:
        return run_config
    target_weights = "int8" if run_config.model.target_dtype == "int8" else None
    weights = run_config.decoding.draft_weights or target_weights
    own = DraftSection(model=run_config.model.model)
    decoding = replace(run_config.decoding, drafter="model", draft_weights=weights)
    return replace(run_config, draft=own, decoding=decoding)


class RunTiming(Timing):
    """The timing of runs of `step.num_tokens` rows after `step.context` tokens; each run overwrites
    the last."""

    growth = 1

    def end_of(self, stage: int) -> StagePart | None:
        last = self.run.source.config.num_layers - 1
        if stage == 0:
            return StagePart(range(1), None)
        is_last = stage == len(self.stages) - 1
        return StagePart(range(last, last + 1), None) if is_last else None

    def timer(self, runner: ModelRunner, has_ends: bool, groups: ParallelGroups) -> Timer:
        stage = RunStage(runner, CoupledSampling(self.config.sampling), CancelBoard())
        return partial(time_part, stage, self.step)


def time_part(stage: RunStage, step: DecodeStep) -> float:
    num_rows = step.num_tokens
    run = messages.RunLaunch(
        run=0,
        request=0,
        lane=0,
        is_speculative=num_rows > 1,
        num_outputs=num_rows,
        num_committed=step.context,
        first=step.context,
        tokens=(1,) * num_rows,
    )
    model = stage.runner.model
    payload = None
    if not model.has_embedding:
        dtype = next(model.parameters()).dtype
        payload = torch.full((1, num_rows, model.config.hidden_size), 0.1, dtype=dtype)
    message = Message(Kind.HIDDEN, run.run, words=run.to_words(), payload=payload)
    return time_messages(stage, [message] * (STEPS + 1))
