"""CUDA graphs as a `Recorder`: what a piece of work starts on the device is kept, and started again
in one call.

Owns the capture. Must not know what is recorded. Work that reads a value back, or copies from
memory that is not pinned, is refused by CUDA while it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class CudaGraphs:
    """Graphs that share their memory: a result is good until the next replay of any of them."""

    captures = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Raises RuntimeError, naming the flag, for work that a graph cannot hold."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"  # other threads may go on: NCCL's watches its streams meanwhile
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
