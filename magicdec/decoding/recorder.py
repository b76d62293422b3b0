"""Recorder: how a part of a decoding step is repeated.

With the identity recorder, the host runs its code each time. A capturing recorder (`cuda_graphs`)
keeps the work that the code starts on the device, and replays it. The code is the same for both.
Must not know what the work is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from magicdec.kv.forward_counts import ForwardCounts

Work = Callable[[], Tensor]


class Recorder(Protocol):
    @property
    def captures(self) -> bool:
        """Whether the host's code runs only while it is captured, and not in a replay."""
        ...

    def record(self, work: Work) -> Work:
        """A function that repeats `work` on the same tensors and returns its result. The next
        repetition of any work may overwrite that result. The caller has run `work` once before this
        call, and undoes what `work` changes while it is recorded."""
        ...


@dataclass(frozen=True)
class Eager:
    """The identity recorder: the host runs the work each time."""

    captures: ClassVar[bool] = False

    def record(self, work: Work) -> Work:
        return work


def record(
    recorder: Recorder, work: Work, state: Sequence[Tensor], counts: Sequence[ForwardCounts]
) -> Work:
    """As `recorder.record`, for work that changes the tensors of `state` and counts its forwards in
    `counts`.

    For a capturing recorder the work runs once beforehand, because a first call may compile kernels
    or allocate memory. Afterwards `state` and the counts are set back. Each replay adds to the
    counts, because the host does not see its forwards.
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

    # The default argument keeps `work` alive, and with it the tensors that the capture reads.
    def run(_reads: Work = work) -> Tensor:
        for each, added in zip(counts, done, strict=True):
            each.num_forwards += added.num_forwards
            each.num_tokens += added.num_tokens
        return replay()

    return run
