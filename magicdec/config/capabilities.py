"""The declarations of implementations by name: needs and features of attention backends and
elementwise operations, and traits of KV policies. Imports no torch, but looking a name up does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from magicdec.config.choices.choice import first_obstacle
from magicdec.config.machine import Machine
from magicdec.names import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    ELEMENTWISE,
    FULL_KV_POLICY,
    KV_POLICIES,
    WITHOUT_BUDGET,
    load_named,
)


def nothing_missing() -> None:
    """The `missing_parts` of an implementation that needs only torch."""


@dataclass(frozen=True)
class Requirements:
    """The needs of an implementation, named as in `magicdec.names`. `missing_parts` says what is
    not installed, or None, without loading a library."""

    name: str
    devices: tuple[str, ...] = DEVICES
    dtypes: tuple[str, ...] = DTYPES
    needs_compiler: bool = False  # a C++ compiler
    missing_parts: Callable[[], str | None] = nothing_missing
    is_interpreted_on_cpu: bool = False  # Triton: correct there, but far too slow

    def unmet(
        self, machine: Machine, device: str, dtype: str, subject: str | None = None
    ) -> str | None:
        """The reason why it cannot run, about `subject` (default: its name), or None."""
        it = subject or self.name
        obstacles = {
            f"{it} is for --device {self.devices[0]}": device not in self.devices,
            machine.missing_backends.get(self.name, ""): self.name in machine.missing_backends,
            f"{it} is for --dtype {self.dtypes[0]}, not {dtype}": dtype not in self.dtypes,
            f"{it} needs a C++ compiler (on Debian: apt install g++)": (
                self.needs_compiler and not machine.has_compiler
            ),
        }
        return first_obstacle(obstacles)


@dataclass(frozen=True)
class HeadSizes:
    """The head sizes of a kernel. `name` completes "head size 72 is not ..."."""

    name: str
    sizes: Sequence[int]


@dataclass(frozen=True)
class Capabilities(Requirements):
    """The features of an attention backend (`AttentionBackend.capabilities`)."""

    head_sizes: HeadSizes | None = None  # None: all
    reads_codes: bool = False  # it reads a KV cache that is stored in `KV_DTYPES`
    keeps_window: bool = True  # it supports the sliding window of a model
    keeps_sinks: bool = True  # it computes the sink logits of a model
    returns_weights: bool = True  # it can return the attention weights of each block of keys
    can_be_recorded: bool = True  # in a CUDA graph; otherwise it needs exact lengths on the host
    is_part_of_native_steps: bool = False  # its kernels are those of `--native_steps`
    rounds_scores: bool = False  # to the dtype of the run: too coarse for ALiBi in bfloat16

    def obstacle(self, machine: Machine, device: str, head_dim: int, dtype: str) -> str | None:
        """The reason why it cannot serve such heads on this machine, or None."""
        unmet = self.unmet(machine, device, dtype)
        if unmet or self.head_sizes is None or head_dim in self.head_sizes.sizes:
            return unmet
        return f"head size {head_dim} is not {self.head_sizes.name}"


def capabilities_of(name: str) -> Capabilities:
    capabilities: Capabilities = load_named(ATTENTION_BACKENDS, name).capabilities
    return capabilities


def requirements_of(name: str) -> Requirements:
    """The requirements of an implementation of the elementwise operations. Imports torch."""
    requirements: Requirements = load_named(ELEMENTWISE, name).requirements
    return requirements


def list_backends(fits: Callable[[Capabilities], Any]) -> list[str]:
    """Fitting attention backends, in the order of the name table."""
    return [name for name in ATTENTION_BACKENDS if fits(capabilities_of(name))]


class DescribedPolicy(Protocol):
    """The members of `KVPolicy` that need no torch."""

    settings: tuple[str, ...]
    needs_weights: bool
    needs_verification: bool
    is_copied: bool
    reads_codes: bool
    can_roll: bool

    def check(self, kv: Any, gamma: int, flag: str | None) -> None: ...


def policy_called(name: str) -> DescribedPolicy:
    policy: DescribedPolicy = load_named(KV_POLICIES, name)
    return policy


def policy_name(policy: str, budget: int) -> str:
    """The policy; a budget of -1 is the original suite's full cache."""
    return FULL_KV_POLICY if budget == -1 and policy not in WITHOUT_BUDGET else policy


def list_policies(fits: Callable[[DescribedPolicy], bool]) -> str:
    """Fitting KV policies, in the order of the name table."""
    return ", ".join(name for name in KV_POLICIES if fits(policy_called(name)))


MOST_WATCHED = 31  # new tokens of a forward whose attention weights every backend can sum


def check_standalone(policy: str) -> None:
    """Raises ValueError for a policy that chooses by verifications, which a standalone draft never
    has."""
    if policy_called(policy).needs_verification:
        fitting = list_policies(lambda p: not p.needs_verification)
        raise ValueError(
            f"--kv_policy {policy}: a standalone draft is never verified itself; "
            f"choose from {fitting}"
        )
