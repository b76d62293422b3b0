"""Launches of interpreted Triton kernels as operators of torch's, which a recorder sees: a launch
is recorded with its numbers as they were then, and replayed on what its tensors hold by then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


class Launches:
    """Stands where a module of kernels does; `made` has the names of those that were made or made
    again."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        self._given: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = []
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernels, name)
        return _Kernel(self, name) if type(found).__name__ == "InterpretedFunction" else found

    def start(self, name: str, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        others = tuple(Tensor if isinstance(arg, Tensor) else arg for arg in args)
        self._given.append((name, grid, others, options))
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        torch.ops.magicdec_tests.launch(tensors, len(self._given) - 1)

    def make(self, tensors: list[Tensor], number: int) -> None:
        (name, grid, args, options), current = self._given[number], iter(tensors)
        self.made.append(name)
        getattr(self._kernels, name)[grid](
            *(next(current) if arg is Tensor else arg for arg in args), **options
        )


class _Kernel:
    def __init__(self, launches: Launches, name: str) -> None:
        self.launches, self.name = launches, name

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **options: self.launches.start(self.name, grid, args, options)


@contextmanager
def dispatched(kernels: ModuleType) -> Iterator[Launches]:
    """One at a time."""
    launches = Launches(kernels)
    library = torch.library.Library("magicdec_tests", "DEF")
    library.define("launch(Tensor(a!)[] tensors, int number) -> ()")
    library.impl("launch", launches.make, "CPU")
    try:
        yield launches
    finally:
        library._destroy()
