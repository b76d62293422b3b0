"""Resolves a config: every `auto`, and every None that means a default, becomes a value. Imports no
torch itself, but reading the capabilities of an attention backend does.
"""

from __future__ import annotations

import dataclasses

from magicdec.config.choices.backend import check_returns_weights, choose_backend
from magicdec.config.choices.choice import Choice
from magicdec.config.choices.collectives import choose_collectives
from magicdec.config.choices.layers import (
    StepParts,
    check_copy,
    check_low_bit,
    choose_dtype,
    choose_elementwise,
    choose_linear,
    choose_native_steps,
    choose_weights,
)
from magicdec.config.machine import Machine
from magicdec.config.resolved import (
    ResolvedAttention,
    ResolvedConfig,
    ResolvedDecoding,
    ResolvedDraft,
    ResolvedModel,
    ResolvedParallel,
    ResolvedWorkload,
)
from magicdec.config.run_config import RunConfig

LAYER_BY_LAYER = Choice("off")  # until all parts of a forward are known


def resolve(
    config: RunConfig,
    machine: Machine,
    head_dim: int = 64,
    draft_head_dim: int = 64,
    layer_obstacles: tuple[str | None, str | None] = (None, None),
    is_staged: bool = False,
) -> ResolvedConfig:
    """The config that runs on `machine`, for models with these head sizes. `layer_obstacles` says
    what in the layers of the target and of the draft native steps do not compute; None: nothing.
    `is_staged`: the ranks are stages of a pipeline, whose steps are not captured and which measure
    no backends.
    Raises ValueError if the machine lacks something that the user asked for, such as a device or a
    compiler."""
    device = choose_device(config.parallel.device, machine)
    dtype = choose_dtype(config, device, machine)
    parallel = ResolvedParallel(
        config.parallel.rank_group or tuple(range(machine.world_size)),
        device,
        choose_collectives(config.parallel.collectives, device, machine, is_staged),
        choose_threads(config.parallel.threads, machine),
    )

    def backend_for(head_dim: int) -> Choice:
        flag, has_tree = config.attention.backend, config.decoding.tree is not None
        return choose_backend(flag, device, machine, head_dim, dtype, has_tree, is_staged)

    backend, kv, low_bit = backend_for(head_dim), config.kv.resolve(), config.decoding.draft_weights
    model = resolve_model(config, device, dtype, machine)
    if config.decoding.model_drafter == "self":
        check_returns_weights(backend, kv.policy)
        check_copy(low_bit, model.target_dtype)
    check_low_bit(low_bit, device, machine)
    draft = None
    if config.draft is not None:
        draft = ResolvedDraft(
            config.draft.model,
            config.draft.rank_group or parallel.rank_group[:1],
            backend_for(draft_head_dim),
            LAYER_BY_LAYER,
            low_bit or dtype,
        )
    gamma = config.decoding.gamma
    w = config.workload
    sizes = {"gen_len": w.num_new_tokens, "max_len": None, "num_batches": w.most_batches}
    resolved = ResolvedConfig(
        run_config=config,
        model=model,
        draft=draft,
        parallel=parallel,
        kv=kv,
        attention=ResolvedAttention(backend, config.attention.prefill_chunk),
        decoding=ResolvedDecoding(**vars(config.decoding) | {"num_draft_tokens": gamma}),
        sampling=config.sampling,
        workload=ResolvedWorkload(**vars(w) | sizes),
        output=config.output,
    )
    collectives = parallel.collectives
    return with_steps(resolved, machine, layer_obstacles, collectives).resolve_graphs(is_staged)


def resolve_model(config: RunConfig, device: str, dtype: str, machine: Machine) -> ResolvedModel:
    """The target. Its linear layers are of the kind that a standalone draft has too."""
    asked = config.model
    weights = choose_weights("--target_dtype", asked.target_dtype, dtype)
    of_draft = [] if config.draft is None else [config.decoding.draft_weights or dtype]
    linear = choose_linear(asked.linear, device, dtype, machine, [weights, *of_draft])
    elementwise = choose_elementwise(asked.elementwise, device, dtype, linear, machine)
    return ResolvedModel(asked.model, dtype, linear, elementwise, LAYER_BY_LAYER, weights)


def with_steps(
    config: ResolvedConfig,
    machine: Machine,
    layer_obstacles: tuple[str | None, str | None],
    collectives: str | None = None,
) -> ResolvedConfig:
    """The config with native steps, or without them, for the target and the draft. Without
    `collectives` it is that of a rank that computes a model, or some of its layers, without the
    other ranks. The obstacles are as in `resolve`."""
    flag, model, draft = config.run_config.model.native_steps, config.model, config.draft
    parts = StepParts(
        config.parallel.device, config.attention.backend, model.linear, model.elementwise,
        collectives, machine.avoids_native_steps,
    )  # fmt: skip
    choice = choose_native_steps(flag, parts, layer_obstacles[0])
    if draft is not None:
        parts = dataclasses.replace(parts, backend=draft.backend)
        of_draft = choose_native_steps(flag, parts, layer_obstacles[1])
        draft = dataclasses.replace(draft, native_steps=of_draft)
    model = dataclasses.replace(model, native_steps=choice)
    return dataclasses.replace(config, model=model, draft=draft)


def choose_device(value: str, machine: Machine) -> str:
    """Raises ValueError if the user asked for CUDA and there is none that serves."""
    if value == "cuda" and not machine.has_cuda:
        obstacle = machine.gpu_obstacle or "no CUDA device here"
        raise ValueError(f"--device cuda: {obstacle}; choose from auto, cpu")
    if value == "auto":
        return "cuda" if machine.has_cuda else "cpu"
    return value


def choose_threads(value: int | None, machine: Machine) -> int:
    """By default the ranks of a host share its cores. Raises ValueError, naming the flag, if the
    ranks of this host would have more threads than it has cores. One thread for each rank is always
    allowed. Ranks of other hosts do not count."""
    num_ranks, cores = len(machine.local_ranks), machine.num_cpus
    most = max(1, cores // num_ranks)
    if value is not None and value > most:
        raise ValueError(
            f"--threads {value}: the {num_ranks} ranks of this host would have {value * num_ranks} "
            f"threads on {cores} cores; give at most {most} each"
        )
    return most if value is None else value
