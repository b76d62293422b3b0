"""Records what a call would launch on a GPU, without one. Launches of our Triton kernels are
recorded instead of executed, and torch's operators are counted when they are dispatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from magicdec.model.elementwise import triton as module

ALLOCATIONS = {"aten.new_empty", "aten.empty", "aten.empty_like", "aten._unsafe_view"}


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class Recorder:
    """Replaces the module of kernels."""

    launches: list[Launch] = field(default_factory=list)

    def __getattr__(self, kernel: str) -> Any:
        class Kernel:
            def __getitem__(_, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *args, **options: self.launches.append(
                    Launch(kernel, grid, args, options)
                )

        return Kernel()


def record_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """From now on our kernels are not run, but added to the list."""
    recorder = Recorder()
    monkeypatch.setattr(module, "kernels", lambda device: recorder)
    return recorder.launches


class Operators(TorchDispatchMode):
    """Counts torch's operators that launch a kernel, so not views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out, name = func(*args, **(kwargs or {})), str(func).rsplit(".", 1)[0]
        kinds = [value.alias_info for value in func._schema.returns]
        is_view = bool(kinds) and all(kind is not None and not kind.is_write for kind in kinds)
        if is_view and isinstance(out, Tensor):  # or a copy, as `to` and `reshape` may make
            is_view = out.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        if name.startswith("aten.") and not is_view and name not in ALLOCATIONS:
            self.counts[name] += 1
        return out
