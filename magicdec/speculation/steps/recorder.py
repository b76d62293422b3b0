"""Recorder: repeats a part of a decoding step, by the host's code or as a replayed CUDA graph.

CUDA refuses to capture work that reads a value back or copies from unpinned memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from magicdec.config.sections import DecodingSection
from magicdec.kv.forward_counts import ForwardCounts

RecordedWork = Callable[[], Tensor]


class Recorder(Protocol):
    @property
    def captures(self) -> bool:
        """Whether the host's code runs only during capture."""

    def record(self, work: RecordedWork) -> RecordedWork:
        """A function that repeats `work` on the same tensors. Its result lasts until the next
        repetition of any work. The caller has run `work` once, and undoes its changes during
        recording."""


@dataclass(frozen=True)
class Eager:
    """A recorder that runs the work on the host each time."""

    captures: ClassVar[bool] = False

    def record(self, work: RecordedWork) -> RecordedWork:
        return work


def make_recorder(decoding: DecodingSection, device: torch.device) -> Recorder:
    return CudaGraphs(device) if decoding.cuda_graphs == "on" else Eager()


def record(
    recorder: Recorder, work: RecordedWork, state: Sequence[Tensor], counts: Sequence[ForwardCounts]
) -> RecordedWork:
    """`recorder.record` for work that changes `state` and counts its forwards in `counts`.

    Before a capture the work runs once, to compile kernels and allocate memory; then `state` and
    counts are restored. Replays add to the counts."""
    if not recorder.captures:
        return recorder.record(work)
    tensors = [tensor.clone() for tensor in state]
    before = [count.copy() for count in counts]

    def restore() -> None:
        for tensor, value in zip(state, tensors, strict=True):
            tensor.copy_(value)
        for current, earlier in zip(counts, before, strict=True):
            current.go_back(earlier)

    work()
    differences = [current.minus(earlier) for current, earlier in zip(counts, before, strict=True)]
    restore()
    replay = recorder.record(work)
    restore()

    # The default argument keeps `work` alive, and with it the tensors that the capture reads.
    def run(_reads: RecordedWork = work) -> Tensor:
        for current, difference in zip(counts, differences, strict=True):
            current.num_forwards += difference.num_forwards
            current.num_tokens += difference.num_tokens
        return replay()

    return run


class CudaGraphs:
    """A recorder of graphs that share memory: a result lasts until the next replay of any graph."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        # Steps and what they captured are a reference cycle. Those of an earlier pass hold a GPU's
        # memory until they are collected, which torch does not do before a capture.
        gc.collect()
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = None

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Capture `work`.

        Raises:
            RuntimeError: it cannot be captured. The current stream is restored.
        """
        graph, result = self._capture(work)
        if self._anchor is None:
            # torch ends a pool with its last graph and refuses to capture into it afterwards. The
            # graphs of a batch end with it, so one that nobody replays stays.
            self._anchor, _ = self._capture(lambda: torch.zeros(1, device=self._device))

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _capture(self, work: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        mode = "thread_local"  # a thread of NCCL's goes on watching its streams
        try:
            with no_collection(), torch.cuda.graph(graph, self._pool, self._stream, mode):
                result = work()
        except RuntimeError as error:
            # The end of a broken capture fails too, and then leaves the capture's stream current.
            torch.cuda.set_stream(stream)
            cause = first_error(error)
            why = (str(cause).strip() or type(cause).__name__).splitlines()[0]
            raise RuntimeError(f"--cuda_graphs on: {why}; choose off") from error
        return graph, result


@contextmanager
def no_collection() -> Iterator[None]:
    """Within it, no garbage is collected: graphs of earlier steps are garbage in cycles, and to
    free one invalidates the capture that is going on."""
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


def first_error(error: BaseException) -> BaseException:
    while not error.__suppress_context__ and error.__context__ is not None:
        error = error.__context__
    return error
