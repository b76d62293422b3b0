"""The meaning of `--attention auto`, and of `--cuda_graphs`, which depends on the backend, known
only by its `Capabilities` and its place in `AUTO_BACKENDS`. Reading capabilities imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.config.capabilities import (
    Capabilities,
    capabilities_of,
    list_backends,
    policy_called,
)
from magicdec.config.choices.choice import Choice, How, asked_for, first_obstacle
from magicdec.config.machine import Machine, ModelTraits
from magicdec.config.sections import KVSection
from magicdec.names import (
    AUTO_BACKENDS,
    FULL_KV_POLICY,
    KV_DTYPES,
    PORTABLE_BACKEND,
    REFERENCE_BACKEND,
)


@dataclass(frozen=True)
class AttentionCase:
    """The demands of a run on a model's attention: dtype, most tokens of a row (`longest`), and the
    KV policy of self-speculation (None without)."""

    device: str
    dtype: str = "float32"
    model: ModelTraits = ModelTraits()
    longest: int = 0
    kv_policy: str | None = None

    def obstacle(self, capabilities: Capabilities, machine: Machine) -> str | None:
        """The reason why a backend cannot serve this case in useful time, or None."""
        name = capabilities.name
        window = self.model.sliding_window
        is_alibi_rounded = (self.model.has_alibi, self.dtype) == (True, "bfloat16")
        policy = None if self.kv_policy is None else policy_called(self.kv_policy)
        asks_weights = policy is not None and policy.needs_weights
        copies_codes = policy is not None and policy.reads_codes
        obstacles = {
            f"{name} is interpreted on a CPU": (
                capabilities.is_interpreted_on_cpu and self.device == "cpu"
            ),
            f"{name} rounds scores to bfloat16, too coarse for ALiBi": (
                capabilities.rounds_scores and is_alibi_rounded
            ),
            f"{name} does not return attention weights": (
                asks_weights and not capabilities.returns_weights
            ),
            f"{name} reads no cache of codes": copies_codes and not capabilities.reads_codes,
            f"{name} does not keep to a sliding window": (
                not capabilities.keeps_window and (window or self.longest) < self.longest
            ),
            f"{name} has no sink logits": not capabilities.keeps_sinks and self.model.has_sinks,
        }
        here = capabilities.obstacle(machine, self.device, self.model.head_dim, self.dtype)
        return here or first_obstacle(obstacles)


def choose_backend(value: str, machine: Machine, case: AttentionCase) -> Choice:
    """The attention backend. Raises ValueError if a named one cannot serve the machine or the
    model's heads; `setup.model_checks` refuses other gaps."""
    if value == "auto":
        return _first_that_serves(machine, case)
    capabilities = capabilities_of(value)
    obstacle = capabilities.obstacle(machine, case.device, case.model.head_dim, case.dtype)
    is_interpreted = capabilities.is_interpreted_on_cpu and case.device == "cpu"
    others = f"auto, {REFERENCE_BACKEND}, {PORTABLE_BACKEND}"
    return asked_for("--attention", value, obstacle, others, is_interpreted)


def _first_that_serves(machine: Machine, case: AttentionCase) -> Choice:
    obstacles: list[str] = []
    for name in AUTO_BACKENDS[case.device]:
        obstacle = case.obstacle(capabilities_of(name), machine)
        if obstacle is None:
            how = How.SECOND_BEST if obstacles else How.AUTO
            return Choice(name, "; ".join([f"auto: {name}", *obstacles]), how)
        obstacles.append(obstacle)
    raise AssertionError("the last backend of a device's line serves every case")


# Head sizes are multiples of these: codes of 8 bits in an entry of the cache, and dimensions that
# int4 keys fill up to twice as many whose transform repeats, so that what is filled up is read as
# zeros.
CODED_MULTIPLES = {"fp8": 4, "int8": 4, "int4": 8}


def choose_kv_dtype(value: str, dtype: str, backend: str, model: ModelTraits) -> str:
    """The dtype in which the cache of a run of `dtype` is stored; a record's config has its name in
    place of auto. Raises ValueError if the user asked for one that the backend cannot read."""
    if value in ("auto", dtype):
        return dtype
    check_codes(value, dtype, model)
    if not capabilities_of(backend).reads_codes:
        fitting = list_backends(lambda c: c.reads_codes)
        raise ValueError(
            f"--kv_dtype {value}: --attention {backend} does not read it; choose auto, or "
            f"--attention {' or '.join(fitting)}"
        )
    return value


def check_codes(value: str, dtype: str, model: ModelTraits) -> None:
    """Raises ValueError for a `--kv_dtype` of codes that no backend reads, or that cannot hold the
    model's keys."""
    check_keys(f"--kv_dtype {value}", value, model, "auto")
    if dtype != "bfloat16":
        raise ValueError(
            f"--kv_dtype {value}: it is for --dtype bfloat16, not {dtype}, whose last bits would "
            "decide which code a number has; choose auto"
        )


def check_keys(flag: str, value: str, model: ModelTraits, instead: str) -> None:
    if model.has_alibi:
        raise ValueError(
            f"{flag}: codes would round the positions of ALiBi, which lie in the keys; choose "
            f"{instead}"
        )
    multiple = CODED_MULTIPLES[value]
    if model.head_dim % multiple:
        raise ValueError(
            f"{flag}: head size {model.head_dim} is not a multiple of {multiple}; choose {instead}"
        )


def check_coded_copy(kv: KVSection, backend: str, kv_dtype: str, model: ModelTraits) -> None:
    """Raises ValueError if drafts of the section read a copy in codes that the backend does not
    read, that cannot hold the model's keys, or that have no fewer bits than the target's cache in
    `kv_dtype`."""
    if not policy_called(kv.policy).reads_codes:
        return
    policy = f"--kv_policy {kv.policy}"
    if not capabilities_of(backend).reads_codes:
        fitting = ", ".join(list_backends(lambda c: c.reads_codes))
        raise ValueError(
            f"--attention {backend} does not read the codes that drafts of {policy} read; choose "
            f"from auto, {fitting}"
        )
    copied = kv.draft_kv_dtype
    check_keys(f"{policy} --draft_kv_dtype {copied}", copied, model, "another policy")
    check_fewer_bits(kv.policy, copied, kv_dtype)


def check_fewer_bits(policy: str, copied: str, kv_dtype: str | None) -> None:
    """Raises ValueError for a copy with as many bits as the target's cache."""
    if kv_dtype in KV_DTYPES and KV_DTYPES[kv_dtype] <= KV_DTYPES[copied]:
        raise ValueError(
            f"--kv_policy {policy}: a copy in --draft_kv_dtype {copied} has no fewer bits than the "
            f"target's cache in --kv_dtype {kv_dtype}; choose --kv_policy {FULL_KV_POLICY}"
        )


def check_returns_weights(backend: str, policy: str) -> None:
    """Raises ValueError if the policy needs attention weights that the backend lacks."""
    if policy_called(policy).needs_weights and not capabilities_of(backend).returns_weights:
        fitting = ", ".join(list_backends(lambda c: c.returns_weights))
        raise ValueError(
            f"--attention {backend} does not return attention weights, which --kv_policy {policy} "
            f"needs; choose from auto, {fitting}"
        )


def choose_graphs(
    value: str,
    device: str,
    backends: Sequence[str],
    is_staged: bool = False,
    pa: float | None = None,
    has_states: bool = False,
) -> Choice:
    """Whether CUDA graphs are on, for the target's and a draft's `backends`. `has_states`: a model
    has layers with linear attention. Raises ValueError for impossible ones."""
    unfit = next((name for name in backends if not capabilities_of(name).can_be_recorded), None)
    obstacles = {
        f"--device {device} has none": device != "cuda",
        f"--attention {unfit} needs lengths on the host": unfit is not None,
        f"the host decides in each draft whether --pa {pa} stops it": bool(pa),
        "the steps of a pipeline are not captured": is_staged,
        "the host decides from where states of linear attention go on": has_states,
    }
    obstacle = first_obstacle(obstacles)
    if value != "auto":
        return asked_for("--cuda_graphs", value, obstacle if value == "on" else None, "auto, off")
    if obstacle:
        return Choice("off", f"auto: off, {obstacle}", How.SECOND_BEST)
    return Choice("on", "auto: on")
