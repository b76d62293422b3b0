"""The tensors in the arguments and results of an operator. `torch.utils._pytree` finds them too,
but takes longer than most operators of the tests' models. So do calls of functions: what is no
container, as most arguments are, gets none here."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

CONTAINERS = list, tuple, dict


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, from left to right."""
    found: list[Tensor] = []
    add_tensors(value, found)
    return found


def add_tensors(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, CONTAINERS):
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, CONTAINERS):
                add_tensors(part, found)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Nested lists, tuples and dicts with `change` of each of their tensors in its place."""
    if isinstance(value, Tensor):
        return change(value)
    if not isinstance(value, CONTAINERS):
        return value
    changed = [
        change(part)
        if isinstance(part, Tensor)
        else map_tensors(change, part)
        if isinstance(part, CONTAINERS)
        else part
        for part in (value.values() if isinstance(value, dict) else value)
    ]
    if isinstance(value, dict):
        return dict(zip(value, changed, strict=True))
    return changed if isinstance(value, list) else tuple(changed)
