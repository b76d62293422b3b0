"""DecodingStrategy: the protocol of all ways of decoding, named in `names.STRATEGIES`, and their
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from magicdec.names import STRATEGIES, load_named
from magicdec.runner.request import Batch, StepOutput
from magicdec.runner.sampling.model_tokens import AcceptanceRule
from magicdec.speculation.draft_length import DraftLength
from magicdec.speculation.drafter import DraftSetup
from magicdec.speculation.steps.logits_recorder import StepRecorder
from magicdec.speculation.steps.recorder import Eager, Recorder

Phase = Callable[[str], AbstractContextManager[object]]
"""A function from the name of a phase ("draft", "verify", ...) to a context that may time it.
`nullcontext` does not."""


@dataclass(frozen=True)
class Setup(DraftSetup):
    """The arguments of a strategy: those of a drafter, and more."""

    phase: Phase = nullcontext
    draft_length: DraftLength | None = None  # default: made from `decoding`
    recorder: Recorder = Eager()  # default: nothing is captured
    is_in_flight: bool = False  # requests join a running batch, and rows are used again
    logits_recorder: StepRecorder | None = None
    rule: AcceptanceRule | None = None  # default: what the target accepts is kept


class DecodingStrategy(Protocol):
    """A way of decoding. Requests may be admitted and released while others run."""

    def admit(self, batch: Batch) -> None:
        """Prepare for `batch`, whose texts were just prefilled. No step counts this time."""

    def step(self, batch: Batch) -> StepOutput:
        """Advance every request of `batch` by at least one token."""

    def release(self, rows: Sequence[int]) -> None:
        """Forget requests in `rows`, which have ended or left."""


def make_strategy(name: str, setup: Setup) -> DecodingStrategy:
    strategy: DecodingStrategy = load_named(STRATEGIES, name)(setup)
    return strategy
