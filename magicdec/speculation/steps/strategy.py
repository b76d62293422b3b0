"""DecodingStrategy: the protocol that every way of decoding follows, and the arguments from which a
strategy is built. The name table is `names.STRATEGIES`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from magicdec.names import STRATEGIES, load_named
from magicdec.runner.request import Batch, StepOutput
from magicdec.speculation.draft_length import DraftLength
from magicdec.speculation.drafter import DraftSetup
from magicdec.speculation.steps.recorder import Eager, Recorder
from magicdec.speculation.steps.witness import Witness

Phase = Callable[[str], AbstractContextManager[object]]
"""A function from the name of a phase ("draft", "verify", ...) to a context that may time it.
`nullcontext` does not."""


@dataclass(frozen=True)
class Setup(DraftSetup):
    """The arguments of a strategy, of which a drafter needs the first ones: the runner that holds
    the target, its sections of the config, and the standalone draft."""

    phase: Phase = nullcontext
    draft_length: DraftLength | None = None  # default: made from `decoding`
    recorder: Recorder = Eager()  # default: nothing is captured
    is_in_flight: bool = False  # requests join a running batch, and rows are used again
    witness: Witness | None = None  # keeps logits of steps


class DecodingStrategy(Protocol):
    """Each request is admitted, takes part in steps, and is released when it has left the batch.
    Requests may be admitted while others run."""

    def admit(self, batch: Batch) -> None:
        """Prepare for the requests of `batch`, whose texts were just prefilled. Its time is not
        part of a step."""

    def step(self, batch: Batch) -> StepOutput:
        """Advance every request of `batch` by at least one token."""

    def release(self, rows: Sequence[int]) -> None:
        """The requests in `rows` have ended, or must give their rows back."""


def make_strategy(name: str, setup: Setup) -> DecodingStrategy:
    """The strategy of that name."""
    strategy: DecodingStrategy = load_named(STRATEGIES, name)(setup)
    return strategy
