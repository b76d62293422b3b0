"""How a field of a record describes itself: what it means, its unit, when it is null, and how a
table prints it. The documents and the table are made from these descriptions.

Must not know any particular record. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any

KEY = "recorded"


@dataclass(frozen=True)
class Recorded:
    """The description of one field."""

    meaning: str  # Markdown, for the documents
    unit: str = ""
    null: str | None = None  # when the value is null; None: never
    label: str = ""  # of its row in the table for people; empty: it has none
    digits: int = 0  # after the decimal point, in that row
    scale: float = (
        1.0  # what the printed number is multiplied with, so that it is in the label's unit
    )
    suffix: str = ""  # printed after the number
    choices: tuple[str, ...] = ()  # all that a string can be
    is_later: bool = False  # records that are older than the field lack its key
    by_chance: bool = False  # random weights make it a number of no meaning

    def show(self, value: Any) -> str:
        """`value`, which is not None, as the table prints it."""
        if isinstance(value, list):
            return " ".join(self.show(v) for v in value)
        return f"{value * self.scale:,.{self.digits}f}{self.suffix}"


def recorded(meaning: str, unit: str = "", *, default: Any = None, **more: Any) -> Any:
    """A dataclass field with its description (`Recorded`). A field that can be null is null by
    default."""
    description = Recorded(meaning, unit, **more)
    if description.null is None and default is None:
        return field(metadata={KEY: description})
    return field(default=default, metadata={KEY: description})


def description_of(item: dataclasses.Field[Any]) -> Recorded:
    found = item.metadata[KEY]
    assert isinstance(found, Recorded)
    return found


def described_fields(kind: type) -> list[tuple[str, Any, Recorded]]:
    """(key, type, description) of each field of a record's dataclass, in the order of the keys. The
    type is without `| None`, which the description tells."""
    hints = typing.get_type_hints(kind)
    return [
        (item.name, without_none(hints[item.name]), description_of(item))
        for item in dataclasses.fields(kind)
    ]


def without_none(hint: Any) -> Any:
    """`X` of `X | None`."""
    if not is_optional(hint):
        return hint
    (inner,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    return inner


def is_optional(hint: Any) -> bool:
    """Whether a type allows None."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return is_union and types.NoneType in typing.get_args(hint)
