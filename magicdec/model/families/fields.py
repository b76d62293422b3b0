"""ConfigFields: the fields of a `config.json`, and readers of sizes, switches and activations.
Imports no torch.

Readers raise ValueError naming field, value and choices, or KeyError for a missing field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
LONGEST_VALUE = 60  # characters of a value that a message shows


class ConfigFields:
    """The fields of a JSON object, which remembers those read."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self._was_read = set[str]()

    def __getitem__(self, field: str) -> Any:
        self._was_read.add(field)
        return self._raw[field]

    def __contains__(self, field: str) -> bool:
        self._was_read.add(field)
        return field in self._raw

    def get(self, field: str, default: Any = None) -> Any:
        self._was_read.add(field)
        return self._raw.get(field, default)

    def unread(self) -> dict[str, Any]:
        return {
            field: value
            for field, value in self._raw.items()
            if field not in self._was_read and value is not None
        }

    def was_read(self) -> frozenset[str]:
        return frozenset(self._was_read)


# Of a model that is read from a file: families, predictions and tables have an entry for each.
LAYER_FIELDS = (
    "num_hidden_layers",
    "n_layer",
    "mtp_num_hidden_layers",
    "num_nextn_predict_layers",
)
MOST_LAYERS = 10_000


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def size(raw: ConfigFields, *fields: str, default: int | None = None) -> int:
    """A positive whole number in any of `fields`. With a default, all may be missing or null.
    Raises ValueError if two differ."""
    given = {field: raw.get(field) for field in fields}
    given = {field: value for field, value in given.items() if value is not None}
    field = next(iter(given), fields[0])
    value = raw[field] if default is None else given.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field} {shown(value)} is not a positive whole number")
    for other, stated in given.items():
        if stated != value:
            raise ValueError(f"{field} {value} and {other} {shown(stated)} contradict each other")
    if field in LAYER_FIELDS and value > MOST_LAYERS:
        raise ValueError(f"{field} {shown(value)} is over {MOST_LAYERS}")
    return value


def positive(raw: ConfigFields, field: str) -> float:
    """A positive finite number. Raises KeyError if missing."""
    value = raw[field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} {shown(value)} is not a number")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{field} {value} is not a positive finite number")
    return float(value)


def switch(raw: ConfigFields, field: str, default: bool) -> bool:
    value = raw.get(field, default)
    if value not in (True, False, None):
        raise ValueError(f"{field} {shown(value)} is not supported; choose from true, false")
    return bool(value)


def only(raw: ConfigFields, field: str, supported: Any) -> None:
    """Raise ValueError if the field has another value than `supported`."""
    value = raw.get(field)
    if value is not None and value != supported:
        raise ValueError(f"{field} {shown(value)} is not supported; choose from {supported}")


def activation(raw: ConfigFields, field: str, default: str) -> str:
    """ModelConfig's name of the GELU variant in `field`."""
    value = raw.get(field) or default
    if value not in GELUS:
        raise ValueError(f"{field} {shown(value)} is not supported; choose from {', '.join(GELUS)}")
    return GELUS[value]
