"""Makes this rank's runners from checked models: loads the weights and allocates the caches.

Owns the choice of the runner for a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from magicdec.attention.backend import AttentionBackend, backend_class
from magicdec.config.resolved import ResolvedConfig, ResolvedModel
from magicdec.console import Progress
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.drafter import DraftModel
from magicdec.drafting.policies.policy import keep_queries, make_policy, standalone_kv_dtype
from magicdec.drafting.rolling_runner import RollingRunner
from magicdec.executor.executor import Executor
from magicdec.memory.plan import max_following
from magicdec.model.checkpoint.source import ModelSource, load_transformer
from magicdec.model.emulated import EmulatedModel
from magicdec.model.transformer import Transformer
from magicdec.names import ELEMENTWISE, load_named
from magicdec.runner import ModelRunner
from magicdec.setup.prepare import Prepared


@dataclass(frozen=True)
class StagePart:
    """What a stage of a pipeline has of a model. `has_ends`: whether it has the embedding, the
    final norm and the head; None: those of them that belong to its layers."""

    layers: range
    has_ends: bool | None


@dataclass(frozen=True)
class Kinds:
    """How a model is stored and computed. Activations are in `dtype`, matrices in `weights` (either
    `dtype` or int8). `linear` and `elementwise` name the kernels for matrix products and for the
    elementwise operations; `native_steps` is on or off."""

    dtype: str
    weights: str
    linear: str = "torch"
    elementwise: str = "torch"
    native_steps: str = "off"


def kinds_of(section: ResolvedModel, weights: str) -> Kinds:
    """The `Kinds` of a model in a run with that config section, with its matrices in `weights`."""
    return Kinds(section.dtype, weights, section.linear, section.elementwise, section.native_steps)


def load_model(
    source: ModelSource,
    group: Group,
    kinds: Kinds,
    device: torch.device,
    progress: Progress,
    part: StagePart | None = None,
) -> Transformer:
    """Load this rank's shard of a model, or of a part of it, that is sharded over `group`."""
    shard = Shard(group.index, group.size)
    with progress.task(f"loading {source.name} as {kinds.weights}", 1) as advance:
        model = load_kind(source, shard, kinds, device, part)
        advance()
    return model


def load_kind(
    source: ModelSource,
    shard: Shard,
    kinds: Kinds,
    device: torch.device,
    part: StagePart | None = None,
) -> Transformer:
    layers, has_ends = (None, None) if part is None else (part.layers, part.has_ends)
    dtype, is_int8 = getattr(torch, kinds.dtype), kinds.weights == "int8"
    model = load_transformer(
        source.config, source.weights, shard, layers, dtype, device, is_int8, has_ends
    )
    if kinds.linear == "packed":
        model.pack()
    model.use(load_named(ELEMENTWISE, kinds.elementwise)())
    return model


class LoadedModels:
    """The weights that this rank holds. A model is loaded once for each kind and group that it is
    asked for with, until it is dropped. With `emulated_s`, models sleep so many seconds in each
    forward, and nothing is loaded."""

    def __init__(
        self, device: torch.device, progress: Progress, emulated_s: float | None = None
    ) -> None:
        self.device, self.progress, self.emulated_s = device, progress, emulated_s
        # The source is kept too, because its identity is a part of the key.
        self._models: dict[tuple[object, ...], tuple[ModelSource, Transformer]] = {}

    def __len__(self) -> int:
        return len(self._models)

    def get(
        self, source: ModelSource, group: Group, kinds: Kinds, part: StagePart | None = None
    ) -> Transformer:
        """This rank's shard of a model, or of a part of it, that is sharded over `group`. Native
        steps read the same weights."""
        if self.emulated_s is not None:
            layers, has_ends = (None, None) if part is None else (part.layers, part.has_ends)
            like = torch.zeros(1, dtype=getattr(torch, kinds.dtype), device=self.device)
            shard = Shard(group.index, group.size)
            return EmulatedModel(
                source.config, shard, layers, has_ends, self.emulated_s, like
            ).eval()
        key = id(source), group.ranks, replace(kinds, native_steps="off"), part
        if key not in self._models:
            model = load_model(source, group, kinds, self.device, self.progress, part)
            self._models[key] = source, model
        return self._models[key][1]

    def drop_others(self, *sources: ModelSource | None) -> None:
        """Drop every model but these."""
        identities = [id(source) for source in sources]
        self._models = {key: value for key, value in self._models.items() if key[0] in identities}


def make_backend(name: str) -> AttentionBackend:
    return backend_class(name)()


def make_executor(kinds: Kinds, model: Transformer, group: Group) -> Executor | None:
    """What computes whole forwards of a model of these kinds; None without native steps."""
    is_native = kinds.native_steps == "on" and not isinstance(model, EmulatedModel)
    return Executor(model, group) if is_native else None


def make_target(
    config: ResolvedConfig,
    source: ModelSource,
    group: Group,
    models: LoadedModels,
    max_tokens: int,
    block_tokens: int | None = None,
    cache_tokens: int | None = None,
) -> ModelRunner:
    """A runner of the target for a batch of at most `max_tokens` tokens a row. `block_tokens` is
    the size of a block of its cache, and `cache_tokens` what the cache holds of all rows together,
    each rounded up; by default, every row has room for `max_tokens`."""
    kinds = kinds_of(config.model, config.model.target_dtype)
    model, backend = models.get(source, group, kinds), make_backend(config.attention.backend)
    num_rows = config.workload.batch_size
    size = backend.block_size(block_tokens or max_tokens)
    num_blocks = num_rows * -(-max_tokens // size)
    if cache_tokens is not None:
        num_blocks = -(-cache_tokens // size)
    return ModelRunner(
        model,
        backend,
        group,
        num_rows,
        max_tokens,
        executor=make_executor(kinds, model, group),
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        max_following=max_following(config, max_tokens),
    )


def make_draft(
    prepared: Prepared, groups: ParallelGroups, max_tokens: int, models: LoadedModels
) -> DraftModel | None:
    """The standalone draft model of a run; None if the run has none. Only the draft's ranks hold
    weights and a cache. Sequences have at most `max_tokens` tokens."""
    config, source = prepared.config, prepared.draft_source
    if config.draft is None or source is None:
        return None
    chunk = config.attention.prefill_chunk
    runner: ModelRunner | None = None
    policy = make_policy(config.kv)
    is_rolling = policy.can_roll
    if groups.draft is not None:
        kinds = kinds_of(config.model, config.draft.draft_dtype)
        kinds = replace(kinds, native_steps=config.draft.native_steps)
        model = models.get(source, groups.draft, kinds)
        backend, num_rows = make_backend(config.draft.backend), config.workload.batch_size
        executor, kv_dtype = (
            make_executor(kinds, model, groups.draft),
            standalone_kv_dtype(config.kv),
        )
        if policy.can_roll:
            tail = min(chunk, config.workload.prefix_len) + config.decoding.most_draft_tokens
            runner = RollingRunner(
                model, backend, groups.draft, num_rows, max_tokens, policy.rolling_rule(),
                kv_dtype, executor, max_tail=tail,
            )  # fmt: skip
        else:
            runner = ModelRunner(
                model, backend, groups.draft, num_rows, max_tokens, kv_dtype=kv_dtype,
                executor=executor, max_following=max_following(config, max_tokens),
            )  # fmt: skip
        keep_queries(runner, config.kv)
    first = groups.target.ranks.index(config.draft.rank_group[0])
    return DraftModel(runner, first, chunk, is_rolling)
