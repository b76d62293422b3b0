"""Loads modules of Triton kernels: compiled for CUDA, interpreted on a CPU. Imports no other module
of the project.

Triton chooses between compiler and interpreter when it is first imported, so a process can use only
one of them.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def load_kernels(module: str, flag: str, device: str) -> ModuleType:
    """The kernels in `module` for a device of type `device`. Raises ValueError naming `flag`, the
    user's option, if Triton was imported in the other mode."""
    interpret = device == "cpu"
    if interpret and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    kernels = importlib.import_module(module)
    kinds = {type(value).__name__ for value in vars(kernels).values()}
    if ("InterpretedFunction" in kinds) != interpret:
        raise ValueError(
            f"{flag} --device {device}: TRITON_INTERPRET must be "
            f"{'1' if interpret else 'unset'} when triton is first imported; change it and restart"
        )
    return kernels


def next_power(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
