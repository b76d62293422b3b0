"""What implementations declare of themselves, by their names: where an attention backend, or an
implementation of the elementwise operations, can run, what it needs and what it supports; and what
a KV policy is like. Each implementation declares its own, in its own file. Imports no torch itself,
but asking for one imports its file, which does.
"""

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
    load_named,
)


def nothing_missing() -> None:
    """The `missing_parts` of an implementation that needs only torch."""


@dataclass(frozen=True)
class Requirements:
    """What an implementation needs of the machine and of the run. `name` is its name in
    `magicdec.names`; `missing_parts` says what is not installed, or None, and loads no library."""

    name: str
    devices: tuple[str, ...] = DEVICES
    dtypes: tuple[str, ...] = DTYPES
    needs_compiler: bool = False  # a C++ compiler
    missing_parts: Callable[[], str | None] = nothing_missing
    is_interpreted_on_cpu: bool = False  # Triton: correct there, but far too slow

    def unmet(
        self, machine: Machine, device: str, dtype: str, subject: str | None = None
    ) -> str | None:
        """Why it cannot run; None if it can. The sentence begins with `subject`, by default its
        name."""
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
    """The head sizes that a kernel supports. `name` completes the sentence "head size 72 is not
    ..."."""

    name: str
    sizes: Sequence[int]


@dataclass(frozen=True)
class Capabilities(Requirements):
    """What an attention backend supports (`AttentionBackend.capabilities`)."""

    head_sizes: HeadSizes | None = None  # None: all
    keeps_window: bool = True  # it supports the sliding window of a model
    returns_weights: bool = True  # it can return the attention weights of each block of keys
    can_be_recorded: bool = True  # in a CUDA graph; otherwise it needs exact lengths on the host
    is_part_of_native_steps: bool = False  # its kernels are those of `--native_steps`
    rounds_scores: bool = False  # to the dtype of the run: too coarse for ALiBi in bfloat16

    def obstacle(self, machine: Machine, device: str, head_dim: int, dtype: str) -> str | None:
        """Why it cannot serve a model with heads of this size on this machine; None if it can."""
        unmet = self.unmet(machine, device, dtype)
        if unmet or self.head_sizes is None or head_dim in self.head_sizes.sizes:
            return unmet
        return f"head size {head_dim} is not {self.head_sizes.name}"


def capabilities_of(name: str) -> Capabilities:
    """The capabilities of the attention backend of that name. Imports its file, which imports
    torch."""
    capabilities: Capabilities = load_named(ATTENTION_BACKENDS, name).capabilities
    return capabilities


def requirements_of(name: str) -> Requirements:
    """The requirements of the implementation of the elementwise operations of that name. Imports
    its file, which imports torch."""
    requirements: Requirements = load_named(ELEMENTWISE, name).requirements
    return requirements


def list_backends(fits: Callable[[Capabilities], Any]) -> list[str]:
    """The names of the attention backends that `fits` accepts, in the order of the name table."""
    return [name for name in ATTENTION_BACKENDS if fits(capabilities_of(name))]


class DescribedPolicy(Protocol):
    """The members of `drafting.policies.policy.KVPolicy` that need no torch."""

    settings: tuple[str, ...]
    needs_weights: bool
    needs_verification: bool
    is_copied: bool
    can_roll: bool

    def check(self, kv: Any, gamma: int, flag: str | None) -> None: ...


def policy_called(name: str) -> DescribedPolicy:
    """The policy class of that name. Imports its file, which imports torch."""
    policy: DescribedPolicy = load_named(KV_POLICIES, name)
    return policy


def policy_name(policy: str, budget: int) -> str:
    """A budget of -1 is the original suite's spelling of the full cache."""
    return FULL_KV_POLICY if budget == -1 else policy


def list_policies(fits: Callable[[DescribedPolicy], bool]) -> str:
    """The names of the KV policies that `fits` accepts, in the order of the name table."""
    return ", ".join(name for name in KV_POLICIES if fits(policy_called(name)))


MOST_WATCHED = 31  # new tokens of a forward whose attention weights every backend can sum


def check_standalone(policy: str) -> None:
    """A policy that chooses by verifications serves only self-speculation."""
    if policy_called(policy).needs_verification:
        fitting = list_policies(lambda p: not p.needs_verification)
        raise ValueError(
            f"--kv_policy {policy}: a standalone draft is never verified itself; "
            f"choose from {fitting}"
        )
