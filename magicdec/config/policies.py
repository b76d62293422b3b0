"""The properties of a KV policy that the config needs. Imports no torch itself, but loading a
policy does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from magicdec.names import FULL_KV_POLICY, KV_POLICIES, load_named


class DescribedPolicy(Protocol):
    """The members of `drafting.policies.policy.KVPolicy` that need no torch."""

    settings: tuple[str, ...]
    needs_weights: bool
    needs_verification: bool
    is_copied: bool
    can_roll: bool

    def check(self, kv: Any, num_draft_tokens: int, flag: str | None) -> None: ...


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
