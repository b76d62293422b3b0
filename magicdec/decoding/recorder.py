"""Recorder: how a piece of a decoding step is started again and again.

The identity recorder has the host start it each time. A capturing recorder (`cuda_graphs`) keeps
what the piece starts on the device, and replays it. Both run the same code. Must not know what the
pieces are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from magicdec.runner import ForwardCounts

Work = Callable[[], Tensor]


class Recorder(Protocol):
    @property
    def captures(self) -> bool:
        """Whether the host's part of the work runs once, while it is captured, and never again."""
        ...

    def record(self, work: Work) -> Work:
        """A callable that repeats `work` on the same tensors and gives its result, which the next
        repetition of any work may overwrite. `work` ran once before; what it changes while it is
        recorded is undone by the caller."""
        ...


@dataclass(frozen=True)
class Eager:
    """The identity: the host starts the work each time."""

    captures: ClassVar[bool] = False

    def record(self, work: Work) -> Work:
        return work


def record(
    recorder: Recorder, work: Work, state: Sequence[Tensor], counts: Sequence[ForwardCounts]
) -> Work:
    """As `recorder.record`, for work that changes `state` and counts forwards in `counts`.

    For a capturing recorder the work runs once beforehand, since a first call may compile kernels
    or allocate memory; the tensors of `state` and the counts are put back afterwards. Each replay
    counts the forwards that the host does not see.
    """
    if not recorder.captures:
        return recorder.record(work)
    kept, before = [tensor.clone() for tensor in state], [each.copy() for each in counts]

    def restore() -> None:
        for tensor, value in zip(state, kept, strict=True):
            tensor.copy_(value)
        for each, earlier in zip(counts, before, strict=True):
            each.go_back(earlier)

    work()
    done = [each.minus(earlier) for each, earlier in zip(counts, before, strict=True)]
    restore()
    replay = recorder.record(work)
    restore()

    # `work` is held by the default: a capture does not keep the tensors alive that it reads.
    def run(_reads: Work = work) -> Tensor:
        for each, added in zip(counts, done, strict=True):
            each.num_forwards += added.num_forwards
            each.num_tokens += added.num_tokens
        return replay()

    return run
