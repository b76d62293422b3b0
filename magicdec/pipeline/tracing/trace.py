"""What every stage of a ring did when: a span for each message that a stage computed.

The k-th span of every stage is that of the k-th message that the first stage sent, because
messages keep their order. So only the first stage knows, and notes, whose tokens a message has.
Imports no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

Span = tuple[float, float]  # begin and end in seconds
FORM = "d"  # double precision


@dataclass
class StageTrace:
    """The spans of one stage while requests are served, by its own clock. On the first stage a
    message that comes home also has a span of the head: logits, sampling and scheduling."""

    spans: array[float] = field(default_factory=lambda: array(FORM))  # begin, end, begin, ...
    head_spans: array[float] = field(default_factory=lambda: array(FORM))
    samples: list[Sequence[int]] = field(default_factory=list)  # of each message sent
    are_prompts: list[bool] = field(default_factory=list)
    _head_begin_s: float | None = None
    _begin_s: float = 0.0

    def begin(self, now_s: float) -> None:
        """The layers of a message are computed from now on."""
        self.end_head(now_s)
        self._begin_s = now_s

    def end(self, now_s: float) -> None:
        """The message that has begun is computed, and is sent next."""
        self.spans.extend((self._begin_s, now_s))

    def note(self, samples: Sequence[int], is_prompt: bool) -> None:
        """Whose tokens the message has that begins now. Only the first stage calls it."""
        self.samples.append(samples)
        self.are_prompts.append(is_prompt)

    def begin_head(self, now_s: float) -> None:
        self._head_begin_s = now_s

    def end_head(self, now_s: float) -> None:
        if self._head_begin_s is not None:
            self.head_spans.extend((self._head_begin_s, now_s))
            self._head_begin_s = None


@dataclass(frozen=True)
class RingTrace:
    """The spans of all stages by the clock of the first. `samples` and `are_prompts` are those of
    each message. `clock_error_s` is the largest possible error of the other stages' times; 0 if
    all ranks share the clock of one host."""

    stages: list[list[Span]]
    head: list[Span]
    samples: list[Sequence[int]]
    are_prompts: list[bool]
    clock_error_s: float


def spans_of(times_s: Sequence[float], ahead_s: float = 0.0) -> list[Span]:
    """The spans of a clock that is ahead of the first stage's by so much."""
    shifted = [at_s - ahead_s for at_s in times_s]
    return list(zip(shifted[::2], shifted[1::2], strict=True))
