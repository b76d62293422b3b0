"""Writes the documentation of a record's fields, and their JSON Schema (draft 2020-12), from their
descriptions in the code.

    python -m magicdec.records.document

updates the tables in the pages of `PAGES` and `docs/record.schema.json`. Each table is between the
lines `<!-- fields: MODULE:CLASS -->` and `<!-- end of fields -->`. Imports no torch.
"""

from __future__ import annotations

import importlib
import json
import re
import typing
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from magicdec.records.fields import Recorded, described_fields
from magicdec.records.record import RunRecord

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "record.md", "latency.md", "serving.md", "pipeline.md", "pipelined_speculation.md"
SCHEMA = "record.schema.json"
END = "<!-- end of fields -->"
TABLE = re.compile(rf"(<!-- fields: ([\w.]+):(\w+) -->\n).*?({END})", re.DOTALL)
DIALECT = "https://json-schema.org/draft/2020-12/schema"
SINGULAR = {str: "string", int: "integer", float: "number", bool: "boolean"}


def main() -> None:
    """Update all these files."""
    for name in PAGES:
        path = DOCS / name
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / SCHEMA).write_text(schema_text(), encoding="utf-8")


def schema_text() -> str:
    return json.dumps(schema_of(RunRecord), indent=1, ensure_ascii=False) + "\n"


def renewed(text: str) -> str:
    """The text of a page with its tables made anew from the code."""
    return TABLE.sub(lambda found: f"{found[1]}{table_of(_class(found[2], found[3]))}{END}", text)


def table_of(kind: type) -> str:
    """A table with one row for each field: its key, type and unit, meaning, and when it is
    null."""
    lines = ["| Key | Type, unit | Meaning | Null |", "|---|---|---|---|"]
    for key, hint, description in described_fields(kind):
        null = "never" if description.null is None else description.null
        shape = type_text(hint, description)
        lines.append(f"| `{key}` | {shape} | {description.meaning} | {null} |")
    return "\n".join(lines) + "\n"


def type_text(hint: Any, description: Recorded) -> str:
    """The type and the unit of a field, such as `list of numbers, ms`."""
    shape = _shape(hint)
    return f"{shape}, {description.unit}" if description.unit else shape


def _shape(hint: Any, is_plural: bool = False) -> str:
    origin = typing.get_origin(hint)
    if origin is list:
        inner = _shape(typing.get_args(hint)[0], is_plural=True)
        return f"list{'s' * is_plural} of {inner}"
    if origin is typing.Literal:
        hint = type(typing.get_args(hint)[0])
    shape = "object" if is_dataclass(hint) or origin is dict else SINGULAR[hint]
    return f"{shape}{'s' * is_plural}"


def _class(module: str, name: str) -> type:
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, type)
    return found


def schema_of(kind: type) -> dict[str, Any]:
    """The schema of one line of a file, which is one object of the dataclass `kind`."""
    schema = TypeAdapter(kind).json_schema()
    parts = {kind.__name__: schema} | schema["$defs"]
    for part in parts_of(kind):
        properties = parts[part.__name__]["properties"]
        for key, _, description in described_fields(part):
            properties[key].pop("title", None)
            properties[key] = description.add_to_schema(properties[key])
    return {"$schema": DIALECT, **schema}


def parts_of(kind: type) -> list[type]:
    """The dataclass `kind` and those that its fields hold, each once."""
    parts, waiting = [], [kind]
    while waiting:
        part = waiting.pop()
        if is_dataclass(part) and part not in parts:
            parts.append(part)
            waiting += [hint for _, hint, _ in described_fields(part)]
        else:
            waiting += typing.get_args(part)
    return parts


if __name__ == "__main__":
    main()
