"""Descriptions of recorded fields, from which documentation, JSON Schema and tables are made."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from pydantic import ConfigDict

KEY = "recorded"
OverGroups = Callable[[list[Any]], Any]


class RecordPart:
    """A base of the dataclasses of a record. pydantic checks JSON against their types and ignores
    unknown keys."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Recorded:
    meaning: str  # Markdown, for the documents
    unit: str = ""
    null: str | None = None  # when the value is null; None: never
    label: str = ""  # label of its row in the printed table; empty: it has no row
    digits: int = 0  # digits after the decimal point in the printed table
    scale: float = 1.0  # the printed number is multiplied by this, to be in the unit of the label
    suffix: str = ""  # printed after the number
    choices: tuple[str, ...] = ()  # all possible values of a string
    by_chance: bool = False  # the number has no meaning if weights are random
    over_groups: OverGroups | None = None  # one value of those of several groups; None: all equal

    def show(self, value: Any) -> str:
        if isinstance(value, list):
            return " ".join(self.show(v) for v in value)
        return f"{value * self.scale:,.{self.digits}f}{self.suffix}"

    def show_between(self, value: Any, ends: list[Any] | None) -> str:
        """The text with an interval, if any. A list has one interval a value, empty where there is
        none."""
        if isinstance(value, list):
            intervals = ends or [None] * len(value)
            return " ".join(map(self.show_between, value, intervals))
        return f"{self.show(value)} {self.show_interval(*ends)}" if ends else self.show(value)

    def show_interval(self, low: float, high: float) -> str:
        bare = dataclasses.replace(self, suffix="")
        return f"[{bare.show(low)}, {bare.show(high)}]"


def recorded(meaning: str, unit: str = "", *, default: Any = None, **more: Any) -> Any:
    """A dataclass field with a `Recorded` description, which pydantic copies into the JSON Schema.
    A field that can be null is null by default."""
    about = Recorded(meaning, unit, **more)
    extra = {"unit": about.unit, "null": about.null, "enum": list(about.choices)}
    schema = {key: value for key, value in extra.items() if value}
    is_required = about.null is None and default is None
    return field(
        default=dataclasses.MISSING if is_required else default,
        metadata={KEY: about, "description": meaning, "json_schema_extra": schema},
    )


def description_of(item: dataclasses.Field[Any]) -> Recorded:
    description = item.metadata[KEY]
    assert isinstance(description, Recorded)
    return description


@cache
def described_fields(kind: type) -> list[tuple[str, Any, Recorded]]:
    """(key, type, description) of the fields of a dataclass, in order, the type without `|
    None`."""
    hints = typing.get_type_hints(kind)
    return [
        (item.name, without_none(hints[item.name]), description_of(item))
        for item in dataclasses.fields(kind)
    ]


def without_none(hint: Any) -> Any:
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    is_optional = typing.get_origin(hint) in (typing.Union, types.UnionType) and len(parts) == 1
    return parts[0] if is_optional else hint
