"""Writes the documentation of a record's fields, and their JSON Schema (draft 2020-12), from their
descriptions in the code.

    python scripts/dev/record_pages.py

updates the tables in the pages of `PAGES` and `docs/record.schema.json`. Each table is between the
lines `<!-- fields: MODULE:CLASS -->` and `<!-- end of fields -->`. Imports no torch.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from magicdec.records.pass_record import PassRecord

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("record.md",)
SCHEMA = "record.schema.json"
END = "<!-- end of fields -->"
TABLE = re.compile(rf"(<!-- fields: ([\w.]+):(\w+) -->\n).*?({END})", re.DOTALL)


class Untitled(GenerateJsonSchema):
    """pydantic's generator, without titles that repeat the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def main() -> None:
    """Update all these files."""
    for name in PAGES:
        path = DOCS / name
        path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / SCHEMA).write_text(schema_text(), encoding="utf-8")


def schema_text() -> str:
    """The schema of one line of a file of passes."""
    schema = {"$schema": Untitled.schema_dialect, **schema_of(PassRecord)}
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of a dataclass whose fields are described (`fields.recorded`)."""
    return TypeAdapter(kind).json_schema(schema_generator=Untitled)


def renewed(text: str) -> str:
    """The text of a page with its tables made anew from the code."""

    def table(match: re.Match[str]) -> str:
        kind = getattr(importlib.import_module(match[2]), match[3])
        return f"{match[1]}{table_of(kind)}{END}"

    return TABLE.sub(table, text)


def table_of(kind: type) -> str:
    """A table with one row for each field: its key, type and unit, meaning, and when it is
    null."""
    lines = ["| Key | Type, unit | Meaning | Null |", "|---|---|---|---|"]
    for key, schema in schema_of(kind)["properties"].items():
        shape = ", ".join(filter(None, (_shape(schema), schema.get("unit"))))
        null = schema.get("null", "never")
        lines.append(f"| `{key}` | {shape} | {schema['description']} | {null} |")
    return "\n".join(lines) + "\n"


def _shape(schema: dict[str, Any], plural: str = "") -> str:
    """The type of a value, such as `list of numbers`."""
    schema = schema.get("anyOf", [schema])[0]  # the other one is null
    shape = schema.get("type", "object")
    return f"list{plural} of {_shape(schema['items'], 's')}" if shape == "array" else shape + plural


if __name__ == "__main__":
    main()
