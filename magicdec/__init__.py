"""A benchmark suite for long-context decoding. `from magicdec import LLM` serves requests from a
program; torch is imported only then."""

from __future__ import annotations

from typing import Any

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from magicdec.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
