"""Makes this rank's runners from checked models: loads weights and allocates caches."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from magicdec.attention.backend import AttentionBackend, backend_class
from magicdec.config.weight_formats import is_native
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.kv.layout import POOL_DTYPES
from magicdec.model.checkpoint.finite import WeightsRefused
from magicdec.model.checkpoint.quantization import low_bit_copy
from magicdec.model.checkpoint.source import ModelSource, load_transformer
from magicdec.model.draft_head import DraftHead
from magicdec.model.transformer import Transformer
from magicdec.names import ELEMENTWISE, NARROW, PACKED, load_named
from magicdec.output.console import Progress
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.hidden_states import HiddenStates, ReceivedStates
from magicdec.setup.model_plan import (
    Kinds,
    ModelPlan,
    StagePart,
    max_following,
    rewound_by_step,
)
from magicdec.setup.prepare import ResolvedRun
from magicdec.speculation.drafter import DraftModel
from magicdec.speculation.policies.policy import keep_queries, make_policy
from magicdec.speculation.rolling_runner import RollingRunner


def load_model(
    source: ModelSource,
    group: Group,
    kinds: Kinds,
    device: torch.device,
    progress: Progress,
    part: StagePart = StagePart(),
) -> Transformer:
    """This rank's shard, over `group`, of a model or a part of it. Raises WeightsRefused on all
    ranks of the group if one finds a value that is not finite."""
    shard = Shard(group.index, group.size)
    refusal = ""
    with progress.task(f"loading {source.name} as {kinds.weights}", 1) as advance:
        try:
            model = load_kind(source, shard, kinds, device, part)
        except WeightsRefused as error:
            refusal = str(error)
        for found in group.all_gather_values(refusal, str):
            if found:
                raise WeightsRefused(found)
        advance()
    return model


def load_kind(
    source: ModelSource,
    shard: Shard,
    kinds: Kinds,
    device: torch.device,
    part: StagePart = StagePart(),
) -> Transformer:
    dtype = getattr(torch, kinds.dtype)
    is_packed = kinds.linear in PACKED
    can_round = kinds.weights in NARROW and is_native(kinds.weights)
    stored_as = kinds.weights if can_round else None  # while it is read
    model = load_transformer(
        source.config, source.weights, shard, part.layers, dtype, device, stored_as, part.has_ends
    )
    if is_packed:
        model.pack(rounds=kinds.linear == "packed_a8")
    if not is_native(kinds.weights):
        model = low_bit_copy(model, kinds.weights, is_packed=False)
    model.use(load_named(ELEMENTWISE, kinds.elementwise)())
    return_freed_memory()
    return model


def return_freed_memory() -> None:
    """Return memory freed during loading to the system; glibc would keep much of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries lack it
    if trim is not None:
        trim(0)


class LoadedModels:
    """The weights that this rank holds, loaded once for each kind and group."""

    def __init__(self, device: torch.device, progress: Progress) -> None:
        self.device = device
        self.progress = progress
        # The source is kept too, because its identity is a part of the key.
        self._models: dict[tuple[object, ...], tuple[ModelSource, Transformer]] = {}

    def __len__(self) -> int:
        return len(self._models)

    def get(
        self, source: ModelSource, group: Group, kinds: Kinds, part: StagePart = StagePart()
    ) -> Transformer:
        """This rank's shard, over `group`, of a model or a part of it. Native steps read the same
        weights."""
        key = id(source), group.ranks, replace(kinds, native_steps="off"), part
        if key not in self._models:
            model = load_model(source, group, kinds, self.device, self.progress, part)
            self._models[key] = source, model
        return self._models[key][1]

    def get_copy(self, source: ModelSource, group: Group, plan: ModelPlan) -> Transformer | None:
        """The low-bit copy that self-speculation drafts with; None if the model itself drafts."""
        kinds = plan.copy_kinds
        if kinds is None:
            return None
        key = id(source), group.ranks, replace(kinds, native_steps="off"), "copy"
        if key not in self._models:
            model = self.get(source, group, plan.kinds)
            is_packed = kinds.linear in PACKED
            with self.progress.task(f"copying {source.name} as {kinds.weights}", 1) as advance:
                self._models[key] = source, low_bit_copy(model, kinds.weights, is_packed)
                return_freed_memory()
                advance()
        return self._models[key][1]

    def drop_others(self, *sources: ModelSource | None) -> None:
        identities = [id(source) for source in sources]
        self._models = {key: value for key, value in self._models.items() if key[0] in identities}


def make_backend(name: str) -> AttentionBackend:
    return backend_class(name)()


def make_executor(kinds: Kinds, model: Transformer, group: Group) -> Executor | None:
    return Executor(model, group) if kinds.native_steps == "on" else None


def make_runner(
    plan: ModelPlan, source: ModelSource, group: Group, models: LoadedModels
) -> ModelRunner:
    """The runner of this rank's part of a model, whose layers `group` shares."""
    model = models.get(source, group, plan.kinds, plan.part)
    copy = None
    if not plan.is_draft:
        copy = models.get_copy(source, group, plan)
    return with_copy(plan, runner_of(plan, model, group), copy)


def with_copy(plan: ModelPlan, runner: ModelRunner, copy: Transformer | None) -> ModelRunner:
    """The runner with a low-bit `copy` of its model that drafts, if there is one."""
    if copy is None or plan.copy_kinds is None:
        return runner
    executor = make_executor(plan.copy_kinds, copy, runner.group)
    return runner.with_draft_runner(runner.with_model(copy, executor))


def runner_of(plan: ModelPlan, model: Transformer, group: Group) -> ModelRunner:
    backend = make_backend(plan.backend)
    executor = make_executor(plan.kinds, model, group)
    if plan.rolling_rule is not None:
        return RollingRunner(
            model,
            backend,
            group,
            plan.num_rows,
            plan.tokens,
            plan.rolling_rule,
            executor=executor,
            num_blocks=plan.num_blocks,
            shares_prefixes=plan.shares_prefixes,
            host_tokens=plan.host_tokens,
            max_tail=plan.tail,
            most_rewound=plan.most_rewound,
            chunk=plan.config.attention.prefill_chunk,
        )
    runner = ModelRunner(
        model,
        backend,
        group,
        plan.num_rows,
        plan.tokens,
        kv_dtype=None if plan.coded_kv is None else POOL_DTYPES[plan.coded_kv],
        executor=executor,
        block_tokens=plan.block_tokens,
        num_blocks=plan.num_blocks,
        max_following=max_following(plan.config, plan.tokens),
        window_room=plan.window_room,
        state_room=plan.room_of_states,
        shares_prefixes=plan.shares_prefixes,
        host_tokens=plan.host_tokens,
        snapshots=plan.snapshots,
        forks=plan.forks,
    )
    if plan.state_layers:
        takes_tokens, _ = plan.ends
        shows_them = takes_tokens and max(plan.state_layers) <= plan.layers.stop
        kind = HiddenStates if shows_them else ReceivedStates
        runner.observers.append(kind.of(runner, plan.state_layers))
    return runner


def make_received_states(plan: ModelPlan, device: torch.device) -> ReceivedStates:
    """Room for the states of a plan's tokens where no runner computes them."""
    return ReceivedStates(
        plan.state_layers,
        num_rows=plan.num_rows,
        num_texts=plan.num_rows,
        max_tokens=plan.tokens,
        size=plan.model.hidden_size,
        dtype=getattr(torch, plan.kinds.dtype),
        device=device,
    )


def make_draft(
    run: ResolvedRun,
    groups: ParallelGroups,
    models: LoadedModels,
    row_tokens: int | None = None,
    goes_far_back: bool = False,
    target: ModelPlan | None = None,
    num_forks: int = 0,
    target_part: StagePart = StagePart(),
) -> DraftModel | None:
    """The standalone draft model of a run, None without one. Only its ranks hold weights and a
    cache, for rows of at most `row_tokens`, which are truncated by no more than a step appends
    unless one `goes_far_back`. It shares prefixes if the `target` does (`ModelPlan.beside`), and
    has `num_forks` more rows, which begin with blocks of others (`ModelPlan.with_forks`). A head
    shares matrices with the `target_part`."""
    config = run.config
    source = run.draft_source
    if config.draft is None or source is None:
        return None
    runner: ModelRunner | None = None
    if groups.draft is not None:
        plan = ModelPlan(
            config,
            source.config,
            groups.draft.ranks,
            groups.rank,
            is_draft=True,
            row_tokens=row_tokens,
            rewound=None if goes_far_back else rewound_by_step(config),
        )
        if target is not None:
            plan = plan.beside(target)
        plan = plan.with_forks(num_forks)
        runner = make_runner(plan, source, groups.draft, models)
        keep_queries(runner, config.kv)
        if isinstance(runner.model, DraftHead):
            target_plan = ModelPlan(config, run.source.config, groups.target.ranks, groups.rank)
            model = models.get(run.source, groups.target, target_plan.kinds, target_part)
            runner.model.share(model)
    first = groups.target.ranks.index(config.draft.rank_group[0])
    is_rolling = make_policy(config.kv).can_roll
    return DraftModel(runner, first, config.attention.prefill_chunk, is_rolling)
