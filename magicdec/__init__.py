"""A benchmark suite for long-context decoding. `from magicdec import LLM` serves requests from a
program; torch is imported only then."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["LLM"]

# OpenMP reads this when torch is loaded: threads without work spin for about a millisecond, then
# sleep. That is longer than the host's work between two forwards, and by default they spin for many
# milliseconds, which they take from whatever else runs on the same cores. Within a forward threads
# share loops in a way of our own (`kernels/team.h`).
SPIN_COUNT = "30000"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from magicdec.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
