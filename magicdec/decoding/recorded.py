"""One piece of work, recorded: what has to be put back around it, and what is counted each time it
is replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from magicdec.decoding.strategy import Recorder
from magicdec.runner import ForwardCounts


def record(
    recorder: Recorder,
    work: Callable[[], Tensor],
    state: Sequence[Tensor],
    counts: Sequence[ForwardCounts],
) -> Callable[[], Tensor]:
    """A replay of `work` that also counts its forwards.

    The work is done once beforehand, for what is compiled or allocated at a first call; the tensors
    of `state`, all that it changes and the next replay would begin from, and `counts` are as before
    after that.
    """
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

    def run(_reads: object = work) -> Tensor:  # held: no recording keeps its tensors alive
        for each, added in zip(counts, done, strict=True):
            each.num_forwards += added.num_forwards
            each.num_tokens += added.num_tokens
        return replay()

    return run
