"""StreamingLLM (arXiv 2309.17453, section 3.2): attention sinks and a window of the newest tokens;
as a draft: MagicDec, arXiv 2408.11049, section 4. Keys keep their original positions, since drafts
read the target's own cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from magicdec.config.sections import KVSection
from magicdec.kv.view import SinksAndWindow
from magicdec.runner.model_runner import ModelRunner
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.policies.policy import KVPolicy, check_sinks


@dataclass(frozen=True)
class StreamingLLM(SinksAndWindow, KVPolicy):
    """A policy that shows `num_sink_tokens` sinks and the newest `budget - num_sink_tokens`
    tokens."""

    settings: ClassVar[tuple[str, ...]] = ("budget", "num_sink_tokens")
    can_roll: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.num_sink_tokens < self.budget:
            raise ValueError(
                f"KV budget {self.budget} must be larger than {self.num_sink_tokens} sink tokens"
            )

    @classmethod
    def build(cls, kv: KVSection) -> StreamingLLM:
        return cls(kv.num_sink_tokens, kv.budget)

    @classmethod
    def check(cls, kv: KVSection, gamma: int, flag: str | None) -> None:
        check_sinks(kv, flag)

    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        return DraftKV(runner, self)
