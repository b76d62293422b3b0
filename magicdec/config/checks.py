"""The KV policies by name, and the checks of what a user wants of one. Imports no torch itself, but
loading a policy does.

Every check raises ValueError with one line that names the flag, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from magicdec.names import FULL_KV_POLICY, KV_POLICIES, load_named

if TYPE_CHECKING:
    from magicdec.config.sections import KVSection


class DescribedPolicy(Protocol):
    """The members of `drafting.policies.policy.KVPolicy` that need no torch."""

    settings: tuple[str, ...]
    needs_weights: bool
    needs_verification: bool
    is_copied: bool
    can_roll: bool

    def check(self, kv: KVSection, num_draft_tokens: int, flag: str | None) -> None: ...


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


def check_budget(kv: KVSection, num_draft_tokens: int, flag: str | None = None) -> None:
    """The policy checks its budget and its other settings. `flag` is the budget's flag; by default
    it is that of the drivers."""
    policy_called(policy_name(kv.policy, kv.budget)).check(kv, num_draft_tokens, flag)


def check_standalone(policy: str) -> None:
    """A policy that chooses by verifications serves only self-speculation."""
    if policy_called(policy).needs_verification:
        fitting = list_policies(lambda p: not p.needs_verification)
        raise ValueError(
            f"--kv_policy {policy}: a standalone draft is never verified itself; "
            f"choose from {fitting}"
        )
