"""Checks of the user's values. Imports no torch itself, but asking a KV policy does.

`policy_called` and `list_policies` load the policies.

Every check raises ValueError with one line that names the flag, the value and what is allowed.
`run_config` uses them for a command line, and `request` for the arguments of a program.
"""

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


class SamplingValues(Protocol):
    """The fields that `SamplingSection` and `SamplingParams` have in common."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def seed(self) -> int: ...


def check_filters_act(values: SamplingValues) -> None:
    """Filters are refused with greedy decoding, which would ignore them."""
    for flag, value, off in (
        ("--top_k", values.top_k, 0),
        ("--top_p", values.top_p, 1),
        ("--min_p", values.min_p, 0),
    ):
        if values.temperature == 0 and value != off:
            raise ValueError(
                f"{flag} {value} does nothing at --temperature 0 (greedy); "
                "give a --temperature larger than 0"
            )


def check_lengths(prefix_len: int, gen_len: int | None, max_len: int | None) -> None:
    """The two flags for the generated length must agree, and it must be at least 1."""
    if gen_len is not None and max_len is not None and prefix_len + gen_len != max_len:
        raise ValueError(
            f"--max_len {max_len} is not --prefix_len {prefix_len} + "
            f"--gen_len {gen_len}; give one of the two"
        )
    if max_len is not None and max_len - prefix_len < 1:
        raise ValueError(
            f"--max_len minus --prefix_len is {max_len - prefix_len}; it must be at least 1"
        )
    if gen_len is not None and gen_len < 1:
        raise ValueError(f"--gen_len is {gen_len}; it must be at least 1")


def check_rank_group(
    flag: str, ranks: tuple[int, ...] | None, world_size: int, is_target: bool
) -> None:
    """A group names launched ranks, each once, in any order. The target's group names all of them.
    None is the default group."""
    if ranks is None:
        return
    shown = " ".join(map(str, ranks))
    launched = f"the launched ranks: {' '.join(map(str, range(world_size)))}"
    if not ranks:
        raise ValueError(f"{flag} names no rank; name some of {launched}")
    if len(set(ranks)) != len(ranks):
        which = "each" if is_target else "some"
        raise ValueError(f"{flag} {shown} names a rank twice; name {which} of {launched}")
    outside = [r for r in ranks if not 0 <= r < world_size]
    if outside:
        raise ValueError(
            f"{flag} {shown} names rank {outside[0]}, which does not exist; choose from {launched}"
        )
    if is_target and len(ranks) != world_size:
        raise ValueError(
            f"{flag} {shown} leaves out some of {launched}; the target group must be all of them"
        )


MOST_WATCHED = 31  # new tokens of a forward whose attention weights every backend can sum


class BudgetValues(Protocol):
    """The fields of a `KVSection` that `check_budget` reads."""

    @property
    def policy(self) -> str: ...
    @property
    def budget(self) -> int: ...


def check_budget(kv: BudgetValues, num_draft_tokens: int, flag: str | None = None) -> None:
    """The policy checks its budget and its other settings. `flag` is the budget's flag; by default
    it is that of the drivers."""
    policy_called(policy_name(kv.policy, kv.budget)).check(kv, num_draft_tokens, flag)


def check_draft_kv(value: str, drafter: str | None, policy: str) -> None:
    """Only a draft that has a KV cache of its own can store it in int8."""
    if value != "int8":
        return
    if drafter not in ("self", "model"):
        raise ValueError("--draft_kv_dtype int8: nothing here drafts with a KV cache; choose auto")
    if drafter == "self" and not policy_called(policy).is_copied:
        copying = list_policies(lambda p: p.is_copied)
        raise ValueError(
            f"--draft_kv_dtype int8: under --kv_policy {policy} self-speculation reads the "
            f"target's own cache; choose auto, or --kv_policy {copying}, which copies"
        )


def check_standalone(policy: str) -> None:
    """A policy that chooses by verifications serves only self-speculation."""
    if policy_called(policy).needs_verification:
        fitting = list_policies(lambda p: not p.needs_verification)
        raise ValueError(
            f"--kv_policy {policy}: a standalone draft is never verified itself; "
            f"choose from {fitting}"
        )
