"""All-reduce through torch's symmetric memory, which the GPUs of one host map into each other: one
kernel per all-reduce instead of NCCL. The original suite enables it with ENABLE_INTRA_NODE_COMM=1.

Owns the choice of the algorithm by message size. One-shot: every rank reads all other ranks'
values, which takes the fewest steps. Two-shot: each rank sums a part and the parts are exchanged,
which moves fewer bytes. NCCL: for messages larger than the buffer or of a size that the kernels do
not support. All-gather always uses NCCL.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

ONE_SHOT_BYTES = 128 << 10  # largest message for one-shot; the same limit as in torch inductor
BUFFER_BYTES = 8 << 20
ALIGNMENT = 16  # bytes per access of a thread in the kernels
DTYPES = (torch.float32, torch.bfloat16)
OPERATIONS = ("one_shot_all_reduce", "two_shot_all_reduce_")


@dataclass(frozen=True)
class Kernels:
    """torch's symmetric memory: `operations` has the two all-reduces, and `buffer` allocates a
    tensor of `count` elements that the ranks of a group share."""

    operations: Any

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        shared = symmetric.empty(count, dtype=dtype, device=device)
        symmetric.rendezvous(shared, group)  # type: ignore[arg-type]  # takes the group's name
        return shared


class SymmetricMemoryExchange:
    """One rank's collectives. All ranks of `handle` must create it and call it in the same
    order."""

    def __init__(
        self, handle: ProcessGroup, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        self._handle, self._kernels = handle, kernels or Kernels(torch.ops.symm_mem)
        self._buffers = {
            dtype: self._kernels.buffer(
                BUFFER_BYTES // dtype.itemsize, dtype, device, handle.group_name
            )
            for dtype in DTYPES
        }

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the group, in place. Both kernels end only when every rank has read, so the
        buffer may be overwritten afterwards."""
        algorithm, name = choose_algorithm(x, self._handle.size()), self._handle.group_name
        if algorithm == "nccl":
            dist.all_reduce(x, group=self._handle)
            return x
        shared = self._buffers[x.dtype][: x.numel()]
        shared.copy_(x.reshape(-1))
        operations = self._kernels.operations
        if algorithm == "one_shot":
            total = operations.one_shot_all_reduce(shared, "sum", name)
        else:
            total = operations.two_shot_all_reduce_(shared, "sum", name)
        return x.copy_(total.view(x.shape))

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, stacked: [size, ...]."""
        out = torch.empty(self._handle.size(), *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather(list(out.unbind(0)), x.contiguous(), group=self._handle)
        return out


def choose_algorithm(x: Tensor, num_ranks: int) -> str:
    """The all-reduce algorithm for x: one_shot, two_shot or nccl."""
    num_bytes = x.numel() * x.element_size()
    if x.dtype not in DTYPES or not 0 < num_bytes <= BUFFER_BYTES or num_bytes % ALIGNMENT:
        return "nccl"
    if num_bytes <= ONE_SHOT_BYTES:
        return "one_shot"
    return "two_shot" if num_bytes % (ALIGNMENT * num_ranks) == 0 else "nccl"


def missing_parts(num_ranks: int) -> str | None:
    """Why symmetric memory cannot be used with `num_ranks` GPUs of this host; None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA"
    if find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    missing = [name for name in OPERATIONS if not hasattr(torch.ops.symm_mem, name)]
    if missing:
        return f"torch {torch.__version__} lacks {', '.join(missing)} of symmetric memory"
    gpus = range(min(num_ranks, torch.cuda.device_count()))
    for a in gpus:
        for b in gpus:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"GPU {a} cannot access the memory of GPU {b}"
    return None
