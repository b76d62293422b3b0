"""All-reduce through memory that the GPUs of one host map into each other: torch's symmetric
memory, one kernel a sum and no NCCL. What the original suite asked for with
ENABLE_INTRA_NODE_COMM=1.

Owns which of three ways a sum goes, by its size: in one shot every rank reads all others' values,
which takes the fewest steps; in two shots each sums a part and the parts are exchanged, which moves
less; what is larger than the buffer, or of a size that the kernels refuse, is NCCL's. Gathering is
NCCL's too.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

ONE_SHOT_BYTES = 128 << 10  # at most; inductor's own bound for the same choice
BUFFER_BYTES = 8 << 20
ALIGNMENT = 16  # bytes that a thread of the kernels moves at once
DTYPES = (torch.float32, torch.bfloat16)
OPERATIONS = ("one_shot_all_reduce", "two_shot_all_reduce_")


@dataclass(frozen=True)
class Kernels:
    """torch's: `operations` has the two sums; `buffer` makes a tensor of so many elements that the
    ranks of a group share."""

    operations: Any

    @classmethod
    def of_torch(cls) -> Kernels:
        return cls(torch.ops.symm_mem)

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device, group: str) -> Tensor:
        import torch.distributed._symmetric_memory as symmetric

        shared = symmetric.empty(count, dtype=dtype, device=device)
        symmetric.rendezvous(shared, group)  # type: ignore[arg-type]  # a name that is a str
        return shared


class SymmetricMemoryExchange:
    """Every rank of `handle` makes it, and calls it in the same order."""

    def __init__(
        self, handle: ProcessGroup, device: torch.device, kernels: Kernels | None = None
    ) -> None:
        self._handle, self._kernels = handle, kernels or Kernels.of_torch()
        self._buffers = {
            dtype: self._kernels.buffer(
                BUFFER_BYTES // dtype.itemsize, dtype, device, handle.group_name
            )
            for dtype in DTYPES
        }

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the group, in place. Both kernels end when every rank has read, so that the
        buffer may then be written again."""
        way, name = choose_way(x, self._handle.size()), self._handle.group_name
        if way == "nccl":
            dist.all_reduce(x, group=self._handle)
            return x
        shared = self._buffers[x.dtype][: x.numel()]
        shared.copy_(x.reshape(-1))
        operations = self._kernels.operations
        if way == "one_shot":
            total = operations.one_shot_all_reduce(shared, "sum", name)
        else:
            total = operations.two_shot_all_reduce_(shared, "sum", name)
        return x.copy_(total.view(x.shape))

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, stacked in front: [size, ...]."""
        out = torch.empty(self._handle.size(), *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather(list(out.unbind(0)), x.contiguous(), group=self._handle)
        return out


def choose_way(x: Tensor, num_ranks: int) -> str:
    """one_shot, two_shot or nccl."""
    num_bytes = x.numel() * x.element_size()
    if x.dtype not in DTYPES or not 0 < num_bytes <= BUFFER_BYTES or num_bytes % ALIGNMENT:
        return "nccl"
    if num_bytes <= ONE_SHOT_BYTES:
        return "one_shot"
    return "two_shot" if num_bytes % (ALIGNMENT * num_ranks) == 0 else "nccl"


def missing_parts(num_ranks: int) -> str | None:
    """What is not there for `num_ranks` GPUs of this host, if anything."""
    if not torch.cuda.is_available():
        return "no CUDA"
    if find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    lacks = [name for name in OPERATIONS if not hasattr(torch.ops.symm_mem, name)]
    if lacks:
        return f"torch {torch.__version__} lacks {', '.join(lacks)} of symmetric memory"
    gpus = range(min(num_ranks, torch.cuda.device_count()))
    for a in gpus:
        for b in gpus:
            if a != b and not torch.cuda.can_device_access_peer(a, b):
                return f"GPU {a} does not reach the memory of GPU {b}"
    return None
