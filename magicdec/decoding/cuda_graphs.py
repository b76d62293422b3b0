"""CUDA graphs as a `Recorder`: the work that a function starts on the device is captured, and then
started again in one call.

Owns the capture. Must not know what is captured. CUDA refuses to capture work that reads a value
back or copies from memory that is not pinned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CudaGraphs:
    """Graphs that share their memory: a result is valid until the next replay of any of them."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Raises RuntimeError, naming the flag, if the work cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # a thread of NCCL's goes on watching its streams
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, mode):
                result = work()
        except RuntimeError as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RuntimeError(f"--cuda_graphs on: {why}; choose off") from error

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
