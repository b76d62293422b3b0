"""The tensors in the arguments and results of an operator. `torch.utils._pytree` finds them too,
but takes longer than most operators of the tests' models."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, from left to right."""
    found: list[Tensor] = []
    add_tensors(value, found)
    return found


def add_tensors(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for each in value:
            add_tensors(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            add_tensors(each, found)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Nested lists, tuples and dicts with `change` of each of their tensors in its place."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        changed = [map_tensors(change, each) for each in value]
        return changed if isinstance(value, list) else tuple(changed)
    if isinstance(value, dict):
        return {key: map_tensors(change, each) for key, each in value.items()}
    return value
