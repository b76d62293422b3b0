"""Loading modules of Triton kernels: compiled for CUDA, interpreted on a CPU. Imports nothing of
ours but the module that is asked for.

Triton decides which of the two when it is first imported, so that a process has one or the other.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType


def load_kernels(module: str, flag: str, device: str) -> ModuleType:
    """The kernels in `module`, for a `device` of that type. `flag` is what asked for them, for the
    message of the ValueError where the process has Triton the other way."""
    interpret = device == "cpu"
    if interpret and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    kernels = importlib.import_module(module)
    kinds = {type(value).__name__ for value in vars(kernels).values()}
    if ("InterpretedFunction" in kinds) != interpret:
        raise ValueError(
            f"{flag} --device {device}: TRITON_INTERPRET must be "
            f"{'1' if interpret else 'unset'} when triton is first imported; set it so"
        )
    return kernels


def next_power(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
