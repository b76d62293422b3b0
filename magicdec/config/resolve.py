"""Resolves a config: every `auto`, and every None that means a default, becomes a value. Reading
backend capabilities imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from magicdec.config.capacity import Capacity
from magicdec.config.choices.backend import (
    AttentionCase,
    check_coded_copy,
    check_returns_weights,
    choose_backend,
    choose_graphs,
    choose_kv_dtype,
)
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
from magicdec.config.machine import Machine, ModelTraits
from magicdec.config.resolved import (
    ResolvedAttention,
    ResolvedConfig,
    ResolvedDecoding,
    ResolvedDraft,
    ResolvedModel,
    ResolvedParallel,
    ResolvedWorkload,
    tokens_of_rows,
)
from magicdec.config.run_config import RunConfig
from magicdec.config.weight_formats import is_native


@dataclass(frozen=True)
class Placement:
    """The placement of models. `is_staged`: ranks are stages, whose steps are not captured, and one
    rank drafts. `is_alone`: a rank computes its layers and the draft without others."""

    is_staged: bool = False
    is_alone: bool = False


def resolve(
    config: RunConfig,
    machine: Machine,
    target: ModelTraits = ModelTraits(),
    draft: ModelTraits = ModelTraits(),
    placement: Placement = Placement(),
    capacity: Capacity | None = None,
) -> ResolvedConfig:
    """The config that runs on `machine`, with every `auto` decided. Its models hold `capacity`
    (None: a batch). Raises ValueError if the
    machine lacks what the user asked for, such as a device or a compiler."""
    device = choose_device(config.parallel.device, machine)
    dtype = choose_dtype(config, device, machine)
    is_staged = placement.is_staged
    decoding = config.decoding
    w = config.workload
    capacity = capacity or Capacity.for_batch(w)
    parallel = ResolvedParallel(
        config.parallel.rank_group or tuple(range(machine.world_size)),
        device,
        # A rank that computes alone exchanges nothing with others: it may share its GPU, as stages.
        choose_collectives(
            config.parallel.collectives, device, machine, is_staged or placement.is_alone
        ),
        choose_threads(config.parallel.threads, machine),
    )
    kv = config.kv.resolve()
    low_bit = decoding.draft_weights
    is_self = decoding.drafts_itself

    def backend_for(traits: ModelTraits, policy: str | None) -> Choice:
        case = AttentionCase(device, dtype, traits, tokens_of_rows(capacity, decoding), policy)
        return choose_backend(config.attention.backend, machine, case)

    backend = backend_for(target, kv.policy if is_self else None)
    kv_dtype = choose_kv_dtype(config.attention.kv_dtype, dtype, backend, target)
    collectives = None if placement.is_alone else parallel.collectives
    model = resolve_model(config, parallel, dtype, machine, backend, collectives, target)
    if is_self:
        check_returns_weights(backend, kv.policy)
        check_coded_copy(kv, backend, kv_dtype, target)
        check_copy(low_bit, model.target_dtype, config.model.native_steps)
    check_low_bit(low_bit, device, machine)
    section = None
    backends = [backend]
    if config.draft is not None:
        draft_backend = backend_for(draft, None)
        backends.append(draft_backend)
        shared = None if is_staged else collectives
        parts = StepParts(
            device,
            draft_backend,
            model.linear if is_native(low_bit) else "torch",
            model.elementwise,
            shared,
            machine.avoids_native_steps,
        )
        section = ResolvedDraft(
            config.draft.model,
            config.draft.rank_group or parallel.rank_group[: None if decoding.has_mtp_head else 1],
            draft_backend,
            choose_native_steps(config.model.native_steps, parts, draft.layer_obstacle),
            low_bit or dtype,
            draft.state_layers,
        )
    has_states = target.has_states or draft.has_states
    graphs = choose_graphs(
        decoding.cuda_graphs, device, backends, is_staged, decoding.pa, has_states
    )
    chosen = {"gamma": decoding.gamma_or_default, "cuda_graphs": graphs}
    sizes = {"gen_len": w.num_new_tokens, "num_batches": w.most_batches}
    return ResolvedConfig(
        run_config=config,
        capacity=capacity,
        model=model,
        draft=section,
        parallel=parallel,
        kv=kv,
        attention=ResolvedAttention(backend, config.attention.prefill_chunk, kv_dtype),
        decoding=ResolvedDecoding(**vars(decoding) | chosen),
        sampling=config.sampling,
        workload=ResolvedWorkload(**vars(w) | sizes),
        output=config.output,
    )


def resolve_model(
    config: RunConfig,
    parallel: ResolvedParallel,
    dtype: str,
    machine: Machine,
    backend: str,
    collectives: str | None,
    traits: ModelTraits,
) -> ResolvedModel:
    """The resolved target. A standalone draft has the same kind of linear layers. `collectives` are
    between the ranks that share a forward, None for one rank."""
    asked = config.model
    device = parallel.device
    weights = choose_weights("--target_dtype", asked.target_dtype, dtype)
    draft_dtypes = [] if config.draft is None else [config.decoding.draft_weights or dtype]
    linear = choose_linear(asked.linear, device, dtype, machine, [weights, *draft_dtypes])
    elementwise = choose_elementwise(asked.elementwise, device, dtype, linear, machine)
    parts = StepParts(
        device, backend, linear, elementwise, collectives, machine.avoids_native_steps
    )
    native_steps = choose_native_steps(asked.native_steps, parts, traits.layer_obstacle)
    return ResolvedModel(asked.model, dtype, linear, elementwise, native_steps, weights)


def choose_device(value: str, machine: Machine) -> str:
    """The device. Raises ValueError if the user asked for CUDA and none serves."""
    if value == "cuda" and not machine.has_cuda:
        obstacle = machine.gpu_obstacle or "no CUDA device here"
        raise ValueError(f"--device cuda: {obstacle}; choose from auto, cpu")
    if value == "auto":
        return "cuda" if machine.has_cuda else "cpu"
    return value


def choose_threads(value: int | None, machine: Machine) -> int:
    """Threads of a rank; by default the ranks of a host share its cores. Raises ValueError, naming
    the flag, for more threads than cores; one per rank is always allowed."""
    num_ranks = len(machine.local_ranks)
    cores = machine.num_cpus
    most = max(1, cores // num_ranks)
    if value is not None and value > most:
        raise ValueError(
            f"--threads {value}: the {num_ranks} ranks of this host would have {value * num_ranks} "
            f"threads on {cores} cores; give at most {most} each"
        )
    return most if value is None else value
