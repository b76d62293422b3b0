"""A benchmark suite for long-context decoding. `from magicdec import LLM` serves requests from a
program; torch is imported only then."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["LLM"]

# OpenMP reads this when torch is loaded: threads that wait for each other spin for a fraction of a
# millisecond, then sleep. By default they spin for many milliseconds. Beside other work on the same
# cores, every barrier would then take a time slice of the scheduler. Shorter waits would let them
# sleep between the forwards of a step, too.
SPIN_COUNT = "5000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from magicdec.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
