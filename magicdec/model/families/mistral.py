"""Mistral: Llama with a sliding window (4096 if the field is missing, none if it is null)."""

from __future__ import annotations

from typing import Any

from magicdec.model.families import llama
from magicdec.model.families.family import Family
from magicdec.model.families.fields import Raw


def read(raw: Raw) -> dict[str, Any]:
    window = raw.get("sliding_window", 4096)
    own = {"output_bias": False, "sliding_window": int(window) if window else None}
    return llama.read(raw) | own


MISTRAL = Family(read)
