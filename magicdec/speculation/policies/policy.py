"""KVPolicy: the part of its context that a draft reads. A policy is a file of this folder and a
line in `names.KV_POLICIES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from magicdec.config.sections import KVSection
from magicdec.kv.view import FullView
from magicdec.names import KV_POLICIES, load_named
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.prompt_queries import PromptQueries
from magicdec.speculation.draft_kv import DraftKV


class KVPolicy(ABC):
    """A rule for the tokens that a draft reads. Implementations are frozen dataclasses."""

    settings: ClassVar[tuple[str, ...]] = ()
    """Fields of `KVSection` that the policy reads, beside its name."""
    needs_weights: ClassVar[bool] = False
    """The target's backend has to return the attention weights of each verification."""
    needs_verification: ClassVar[bool] = False
    """The choice follows from verifications of the same cache, so that a standalone draft, which is
    never verified itself, cannot use it."""
    is_copied: ClassVar[bool] = False
    """Drafts read a copy, in a cache of its own."""
    reads_codes: ClassVar[bool] = False
    """The copy is in one of `KV_DTYPES`, which the attention backend has to read."""
    can_roll: ClassVar[bool] = False
    """A standalone draft needs to keep no more than the budget (`RollingRunner`). Such a policy is
    a `SinksAndWindow`."""

    @classmethod
    @abstractmethod
    def build(cls, kv: KVSection) -> KVPolicy:
        """The policy with the settings of a run."""

    @classmethod  # noqa: B027 - most policies have nothing to check
    def check(cls, kv: KVSection, gamma: int, flag: str | None) -> None:
        """Raise ValueError for contradictory settings. `flag` names the budget's flag; None: the
        driver's."""

    @abstractmethod
    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        """The KV that drafts of `runner`'s model read."""

    def copied_tokens(self, context: int) -> int:
        """Context tokens in the policy's own cache."""
        return 0

    @property
    def coded_copy(self) -> str | None:
        """The dtype of a copy of codes; None: the cache's own."""
        return None

    @property
    def observed_tokens(self) -> int:
        """Newest prompt tokens whose queries prefill keeps for the policy."""
        return 0

    def rerun_tokens(self, context: int) -> int:
        """Newest tokens of all rows that run again to observe attention."""
        return 0

    @property
    def chooses_again(self) -> bool:
        """Whether these run again while requests decode, and not after their prefill alone."""
        return False

    def state_numbers(self, num_blocks: int, head_dim: int, queries_per_head: int) -> int:
        """Float32 numbers of state for a layer and KV head of a row of `num_blocks` blocks of
        WEIGHTS_BLOCK tokens, without copied K and V."""
        return 0


@dataclass(frozen=True)
class FullKV(FullView, KVPolicy):
    """A policy that shows every committed token: the default of standalone drafts."""

    @classmethod
    def build(cls, kv: KVSection) -> FullKV:
        return cls()

    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        return DraftKV(runner, self)


def check_sinks(kv: KVSection, flag: str | None) -> None:
    if kv.budget <= kv.num_sink_tokens:
        raise ValueError(
            f"{flag or '--budget'} {kv.budget} must be larger than "
            f"--num_sink_tokens {kv.num_sink_tokens}"
        )


def load_policy(name: str) -> type[KVPolicy]:
    policy: type[KVPolicy] = load_named(KV_POLICIES, name)
    return policy


def make_policy(kv: KVSection) -> KVPolicy:
    return load_policy(kv.policy).build(kv)


def make_draft_kv(runner: ModelRunner, kv: KVSection) -> DraftKV:
    return make_policy(kv).draft_kv(runner)


def keep_queries(runner: ModelRunner, kv: KVSection | None) -> None:
    """Let prefill keep the queries by which the section's policy first chooses; without a
    section, none."""
    num_tokens = 0 if kv is None else make_policy(kv).observed_tokens
    runner.set_observer(PromptQueries, PromptQueries(num_tokens) if num_tokens else None)
