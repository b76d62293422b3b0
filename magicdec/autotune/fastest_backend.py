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
from magicdec.config.machine import (
    CUDA_ONLY,
    TO_BE_MEASURED,
    WITHOUT_GRAPHS,
    WITHOUT_MASS,
    WITHOUT_WINDOW,
    Machine,
    backend_obstacle,
)
from magicdec.config.run_config import RunConfig
from magicdec.decoding.cuda_graphs import CudaGraphs
from magicdec.distributed.groups import Group
from magicdec.hardware.environment import missing_backends
from magicdec.memory.working_memory import max_tokens
from magicdec.model.config import ModelConfig
from magicdec.names import ATTENTION_BACKENDS

REFERENCE = "sdpa"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # of the largest output, or of 1


def settle(
    config: RunConfig, target: ModelConfig, draft: ModelConfig | None, group: Group,
    device: torch.device,
) -> RunConfig:  # fmt: skip
    """`config`, resolved, with measured names where a backend was left to be measured. Every rank
    of `group` calls it."""
    attention, section = config.attention, config.draft
    if attention.backend_reason == TO_BE_MEASURED:
        step = target_step(config, target)
        name, reason = _agreed(config, target, step, group, device)
        config = replace(config, attention=replace(attention, backend=name, backend_reason=reason))
    if section is not None and draft is not None and section.backend_reason == TO_BE_MEASURED:
        step = draft_step(config, draft)
        name, reason = _agreed(config, draft, step, group, device)
        config = replace(config, draft=replace(section, backend=name, backend_reason=reason))
    return config.resolve_graphs()


def _agreed(
    config: RunConfig, model: ModelConfig, step: Step, group: Group, device: torch.device
) -> tuple[str, str]:
    """The leader's choice for a step of a model, told to all and printed."""
    choice = None
    if group.index == 0:
        recorder = CudaGraphs(device) if config.decoding.cuda_graphs == "on" else None
        candidates, left_out = list_candidates(config, model)
        choice = choose_fastest(
            candidates, left_out, step.name, lambda name: measure(name, step, device, recorder)
        )
        print(f"--attention {choice[1]}", file=sys.stderr, flush=True)
    found = group.all_gather_object(choice)[0]
    assert found is not None, "the leader has chosen"
    return found


def list_candidates(config: RunConfig, model: ModelConfig) -> tuple[list[str], dict[str, str]]:
    """(names to measure, why others are left out)."""
    device, dtype = config.parallel.device, config.model.dtype
    missing = missing_backends(("triton", *CUDA_ONLY))
    machine = Machine(num_cpus=1, has_compiler=True, missing_backends=missing)
    needs_mass = config.decoding.drafter == "self" and config.kv.policy == "verified"
    longest = max_tokens(config)
    candidates, left_out = [], {}
    for name in ATTENTION_BACKENDS:
        obstacle = backend_obstacle(name, device, machine, model.cached_head_dim, dtype)
        if needs_mass and name in WITHOUT_MASS:
            obstacle = obstacle or "it does not tell where the attention goes"
        if name in WITHOUT_WINDOW and (model.sliding_window or longest) < longest:
            obstacle = obstacle or "it does not keep to a sliding window"
        if name == "grouped" and (model.positions, dtype) == ("alibi", "bfloat16"):
            obstacle = "it rounds scores to bfloat16, too coarse for ALiBi"
        if obstacle is None:
            candidates.append(name)
        elif name != "native":
            left_out[name] = obstacle
    recordable = [name for name in candidates if name not in WITHOUT_GRAPHS]
    graphs = config.decoding.cuda_graphs == "on"
    if graphs and (config.decoding.cuda_graphs_reason == "asked for" or len(recordable) > 1):
        why = "it needs lengths on the host, and no CUDA graph could hold it"
        left_out |= {name: why for name in candidates if name in WITHOUT_GRAPHS}
        candidates = recordable
    return candidates, left_out


def choose_fastest(
    candidates: Sequence[str],
    left_out: Mapping[str, str],
    step_name: str,
    measure_one: Callable[[str], Measured],
) -> tuple[str, str]:
    """(name, why) of the fastest candidate over what `step_name` says, whose outputs are the
    reference's. What fails to load or to run is left out like `left_out`, and said."""
    reference = measure_one(REFERENCE)
    seconds, out = {REFERENCE: reference.seconds}, dict(left_out)
    for name in candidates:
        if name == REFERENCE:
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
    return fastest, f"auto: {times} a layer, for {step_name}{reasons}"


def _difference(found: Sequence[Tensor], reference: Sequence[Tensor]) -> str | None:
    """What keeps outputs from being the reference's, if anything."""
    for ours, theirs in zip(found, reference, strict=True):
        off = float((ours.float() - theirs.float()).abs().max())
        largest = max(1.0, float(theirs.abs().max()))  # above 1 where few keys are averaged
        if not off < TOLERANCE[theirs.dtype] * largest:  # not a number is no agreement either
            return f"its output is {off:.1e} away from that of {REFERENCE}"
    return None
