"""What `--attention auto` becomes on CUDA: the fastest, by measurement, of the backends that can be
loaded and agree with the reference, over what a step of the run reads.

Owns the choice and its reason, which goes into the record. It is made once a run, on the leader's
device, after the process group has started; the other ranks take it over. Must not know how a
backend computes, nor what a step is made of.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from magicdec.autotune.attention_step import Step, draft_step, target_step
from magicdec.autotune.backend_timing import Measured, measure
from magicdec.config.capabilities import Capabilities, capabilities_of
from magicdec.config.checks import policy_called
from magicdec.config.choices.choice import Choice, How
from magicdec.config.machine import Machine
from magicdec.config.resolved import ResolvedConfig
from magicdec.decoding.cuda_graphs import CudaGraphs
from magicdec.decoding.recorder import Eager, Recorder
from magicdec.distributed.groups import Group
from magicdec.hardware.environment import missing_backends
from magicdec.memory.working_memory import max_tokens
from magicdec.model.config import ModelConfig
from magicdec.names import ATTENTION_BACKENDS, REFERENCE_BACKEND

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest output, or of 1


def settle(
    config: ResolvedConfig, target: ModelConfig, draft: ModelConfig | None, group: Group,
    device: torch.device,
) -> ResolvedConfig:  # fmt: skip
    """`config`, resolved, with measured names where a backend was left to be measured. Every rank
    of `group` calls it."""
    attention, section = config.attention, config.draft
    if attention.backend_choice.is_to_be_measured:
        chosen = _agreed(config, target, target_step(config, target), group, device)
        config = replace(config, attention=replace(attention, backend_choice=chosen))
    if section is not None and draft is not None and section.backend_choice.is_to_be_measured:
        chosen = _agreed(config, draft, draft_step(config, draft), group, device)
        config = replace(config, draft=replace(section, backend_choice=chosen))
    return config.resolve_graphs()


def _agreed(
    config: ResolvedConfig, model: ModelConfig, step: Step, group: Group, device: torch.device
) -> Choice:
    """The leader's choice for a step of a model, told to all and printed."""
    choice = None
    if group.index == 0:
        captures = config.decoding.cuda_graphs == "on"
        recorder: Recorder = CudaGraphs(device) if captures else Eager()
        candidates, left_out = list_candidates(config, model)
        choice = choose_fastest(
            candidates, left_out, step.name, lambda name: measure(name, step, device, recorder)
        )
        print(f"--attention {choice.why}", file=sys.stderr, flush=True)
    found = group.all_gather_object(choice)[0]
    assert found is not None, "the leader has chosen"
    return found


def list_candidates(config: ResolvedConfig, model: ModelConfig) -> tuple[list[str], dict[str, str]]:
    """(names to measure, why others are left out). Backends for other devices are in neither."""
    device = config.parallel.device
    missing = missing_backends(tuple(ATTENTION_BACKENDS))
    machine = Machine(num_cpus=1, has_compiler=True, missing_backends=missing)
    candidates, left_out = [], {}
    for name in ATTENTION_BACKENDS:
        capabilities = capabilities_of(name)
        obstacle = _obstacle(capabilities, machine, config, model)
        if obstacle is None:
            candidates.append(name)
        elif device in capabilities.devices:
            left_out[name] = obstacle
    recordable = [name for name in candidates if capabilities_of(name).can_be_recorded]
    graphs = config.decoding.cuda_graphs == "on"
    if graphs and (not config.decoding.graphs_choice.is_auto or len(recordable) > 1):
        why = "it needs lengths on the host, and no CUDA graph could hold it"
        left_out |= {name: why for name in candidates if name not in recordable}
        candidates = recordable
    return candidates, left_out


def _obstacle(
    capabilities: Capabilities, machine: Machine, config: ResolvedConfig, model: ModelConfig
) -> str | None:
    """Why a backend cannot serve this run; None where it can."""
    dtype, longest = config.model.dtype, max_tokens(config)
    is_self = config.decoding.drafter == "self"
    needs_weights = is_self and policy_called(config.kv.policy).needs_weights
    obstacles = {
        "it rounds scores to bfloat16, too coarse for ALiBi": (
            capabilities.rounds_scores and (model.positions, dtype) == ("alibi", "bfloat16")
        ),
        "it does not return attention weights": (
            needs_weights and not capabilities.returns_weights
        ),
        "it computes no draft trees": (
            config.decoding.tree is not None and not capabilities.supports_trees
        ),
        "it does not keep to a sliding window": (
            not capabilities.keeps_window and (model.sliding_window or longest) < longest
        ),
    }
    here = capabilities.obstacle(machine, config.parallel.device, model.cached_head_dim, dtype)
    return here or next((reason for reason, applies in obstacles.items() if applies), None)


def choose_fastest(
    candidates: Sequence[str],
    left_out: Mapping[str, str],
    step_name: str,
    measure_one: Callable[[str], Measured],
) -> Choice:
    """The fastest candidate over what `step_name` says, whose outputs are the
    reference's. What fails to load or to run is left out like `left_out`, and said."""
    reference = measure_one(REFERENCE_BACKEND)
    seconds, out = {REFERENCE_BACKEND: reference.seconds}, dict(left_out)
    for name in candidates:
        if name == REFERENCE_BACKEND:
            continue
        try:
            found = measure_one(name)
        except Exception as error:  # whatever a library or a compiler raises: it is no candidate
            out[name] = (str(error).strip() or type(error).__name__).splitlines()[0]
            continue
        if wrong := _difference(found.outputs, reference.outputs):
            out[name] = wrong
            continue
        seconds[name] = found.seconds
    fastest = min(seconds, key=lambda name: seconds[name])
    ranked = sorted(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{name} {1e3 * seconds[name]:.3f} ms" for name in ranked)
    reasons = "".join(f"; {name}: {why}" for name, why in out.items())
    why = f"auto: {times} a layer, for {step_name}{reasons}"
    return Choice(fastest, why, How.MEASURED)


def _difference(found: Sequence[Tensor], reference: Sequence[Tensor]) -> str | None:
    """What keeps outputs from being the reference's, if anything."""
    for ours, theirs in zip(found, reference, strict=True):
        off = float((ours.float() - theirs.float()).abs().max())
        largest = max(1.0, float(theirs.abs().max()))  # above 1 where few keys are averaged
        if not off < TOLERANCE[theirs.dtype] * largest:  # not a number is no agreement either
            return f"its output is {off:.1e} away from that of {REFERENCE_BACKEND}"
    return None
