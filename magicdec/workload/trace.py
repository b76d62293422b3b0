"""A trace: the requests of a serving workload in a file of JSON lines.

Owns the format of a line. Must not know the text of the prompts. Imports no torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RequestShape:
    """When a request arrives, and its lengths in tokens: the keys of a line. `place` names the line
    that it is from, empty without a file."""

    arrival_ms: float
    prompt_len: int
    output_len: int
    place: str = ""


KEYS = ("arrival_ms", "prompt_len", "output_len")


def read_trace(flag: str, path: Path) -> list[RequestShape]:
    """The requests of the file in the order of arrival. Other keys of a line are ignored. Raises
    ValueError, naming the flag, the file, the line and the key, for what is malformed."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"{flag}: {path}: {reason}") from None
    shapes = [
        _shape(f"{flag}: {path}, line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not shapes:
        raise ValueError(f"{flag}: {path} has no requests")
    return sorted(shapes, key=lambda shape: shape.arrival_ms)


def _shape(place: str, line: str) -> RequestShape:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error.msg}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{place} is not a JSON object")
    for key in KEYS:
        if key not in values:
            raise ValueError(f"{place}: {key} is missing")
    arrival, prompt, output = (values[key] for key in KEYS)
    if not _is_number(arrival) or arrival < 0:
        raise ValueError(f"{place}: arrival_ms is {arrival!r}; it must be 0 or larger")
    for key, value in (("prompt_len", prompt), ("output_len", output)):
        if type(value) is not int or value < 1:
            text = f"{key} is {value!r}; it must be a whole number of at least 1"
            raise ValueError(f"{place}: {text}")
    return RequestShape(float(arrival), prompt, output, place)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
