"""A record as a JSON Schema (draft 2020-12), made from its dataclasses. Imports no torch.

Must not know any particular record.
"""

from __future__ import annotations

import typing
from dataclasses import is_dataclass
from typing import Any

from magicdec.records.fields import Recorded, described_fields

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema_of(kind: type) -> dict[str, Any]:
    """The schema of one line of a file, which is one object of the dataclass `kind`."""
    return {"$schema": DIALECT, "title": kind.__name__, **_object(kind)}


def _object(kind: type) -> dict[str, Any]:
    fields = described_fields(kind)
    return {
        "type": "object",
        "properties": {key: _field(hint, description) for key, hint, description in fields},
        "required": [key for key, _, description in fields if not description.is_later],
    }


def _field(hint: Any, description: Recorded) -> dict[str, Any]:
    found: dict[str, Any] = {"description": description.meaning}
    if description.unit:
        found["unit"] = description.unit
    shape = _shape(hint)
    if description.choices:
        shape["enum"] = list(description.choices)
    if description.null is None:
        return found | shape
    return found | {"null": description.null, "anyOf": [shape, {"type": "null"}]}


def _shape(hint: Any) -> dict[str, Any]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _object(hint)
    if origin is list:
        return {"type": "array", "items": _shape(inner[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _shape(inner[1])}
    return {} if hint is Any else {"type": PLAIN[hint]}
