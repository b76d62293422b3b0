"""KVPolicy: what a draft reads of its context. A policy is one file of this folder and one line in
`names.KV_POLICIES`; whatever the suite has to know of a policy is a member of it. The simplest
one, `FullKV`, is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from magicdec.config.sections import KVSection
from magicdec.kv.prompt_queries import PromptQueries
from magicdec.kv.view import FULL, FullView, Visible
from magicdec.names import KV_POLICIES, load_named
from magicdec.runner.model_runner import ModelRunner
from magicdec.speculation.draft_kv import DraftKV


class KVPolicy(ABC):
    """Implementations are frozen dataclasses."""

    settings: ClassVar[tuple[str, ...]] = ()
    """Fields of `KVSection` that the policy reads, beside its name."""
    needs_weights: ClassVar[bool] = False
    """The target's backend has to return the attention weights of each verification."""
    needs_verification: ClassVar[bool] = False
    """The choice follows from verifications of the same cache, so that a standalone draft, which is
    never verified itself, cannot use it."""
    is_copied: ClassVar[bool] = False
    """Drafts read a copy, in a cache of its own."""
    can_roll: ClassVar[bool] = False
    """A standalone draft needs to keep no more than the budget (`RollingRunner`). Such a policy is
    a `SinksAndWindow`."""

    @classmethod
    @abstractmethod
    def build(cls, kv: KVSection) -> KVPolicy:
        """The policy with the settings of a run."""

    @classmethod  # noqa: B027 - most policies have nothing to check
    def check(cls, kv: KVSection, gamma: int, flag: str | None) -> None:
        """Raise ValueError, in one line, for settings that contradict each other. `flag` is the
        name of the budget's flag; None: the driver's."""

    @abstractmethod
    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        """What drafts of `runner`'s model read."""

    @abstractmethod
    def draft_reads(self, context: int) -> tuple[int, Visible]:
        """What a draft attends to after a context of so many tokens: the tokens that its cache
        holds, and the rule that says which of them it sees."""

    def copied_tokens(self, context: int) -> int:
        """Tokens of a context that the policy's own cache holds, 0 without one."""
        return 0

    @property
    def observed_tokens(self) -> int:
        """Newest tokens of a prompt whose queries the policy chooses by, so that prefill keeps
        them."""
        return 0

    def rerun_tokens(self, context: int) -> int:
        """Newest tokens of a text that run a second time, in all rows together, so that the policy
        sees what they attend to."""
        return 0

    def state_numbers(self, num_blocks: int, head_dim: int, queries_per_head: int) -> int:
        """Float32 numbers that the policy keeps for a layer and KV head of a row of so many blocks
        of WEIGHTS_BLOCK tokens, beside any copy of K and V."""
        return 0


@dataclass(frozen=True)
class FullKV(FullView, KVPolicy):
    """A draft reads every committed token. Self-speculation under it accepts every draft; for a
    standalone draft it is the default way to keep a cache."""

    @classmethod
    def build(cls, kv: KVSection) -> FullKV:
        return cls()

    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        return DraftKV(runner, self)

    def draft_reads(self, context: int) -> tuple[int, Visible]:
        return context, FULL


def check_sinks(kv: KVSection, flag: str | None) -> None:
    """The budget holds more than the attention sinks."""
    if kv.budget <= kv.num_sink_tokens:
        raise ValueError(
            f"{flag or '--budget'} {kv.budget} must be larger than "
            f"--num_sink_tokens {kv.num_sink_tokens}"
        )


def load_policy(name: str) -> type[KVPolicy]:
    """The class behind a policy's name."""
    policy: type[KVPolicy] = load_named(KV_POLICIES, name)
    return policy


def make_policy(kv: KVSection) -> KVPolicy:
    """The policy that a run's KV section names."""
    return load_policy(kv.policy).build(kv)


def make_draft_kv(runner: ModelRunner, kv: KVSection) -> DraftKV:
    """What drafts of `runner`'s model read in a run with that KV section."""
    return make_policy(kv).draft_kv(runner)


def keep_queries(runner: ModelRunner, kv: KVSection | None) -> None:
    """Let prefill keep the queries that the first choice of a policy is made by; None of them
    without a section. The low-bit copy that drafts for the runner reads them too."""
    num_tokens = 0 if kv is None else make_policy(kv).observed_tokens
    runner.prompt_queries = PromptQueries(num_tokens) if num_tokens else None
    if runner.drafting is not None:
        runner.drafting.prompt_queries = runner.prompt_queries
