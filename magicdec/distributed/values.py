"""Python values that ranks exchange as JSON in tensors. Nothing is pickled: a pickle runs its
sender's code, and gloo takes connections from anyone."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def all_gather_values(
    value: T, kind: type[T], size: int, handle: ProcessGroup | None = None
) -> list[T]:
    """The value of each of `size` ranks. `kind` is made of numbers, texts, lists, tuples and
    dataclasses; `handle` None stands for all ranks. Raises ValueError for another kind."""
    if size == 1:
        return [value]
    hashable: Any = kind
    adapter = adapter_of(hashable)
    text = json.dumps(adapter.dump_python(value, mode="json", warnings="error"))
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device_of(handle))
    counts = gather(torch.tensor([len(data)], device=data.device), size, handle).flatten().tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=data.device)
    padded[: len(data)] = data
    parts = gather(padded, size, handle).cpu().numpy()
    return [
        adapter.validate_json(bytes(part[:count]))
        for part, count in zip(parts, counts, strict=True)
    ]


@cache
def adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def gather(x: Tensor, size: int, handle: ProcessGroup | None) -> Tensor:
    """Every rank's x, in rank order: [size, ...]."""
    out = torch.empty(size, *x.shape, dtype=x.dtype, device=x.device)
    dist.all_gather(list(out.unbind(0)), x, group=handle)
    return out


def device_of(handle: ProcessGroup | None) -> torch.device:
    is_on_gpu = dist.get_backend(handle) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
