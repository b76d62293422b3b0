"""What the readers of traces share: strict objects, whose errors name their place and key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from magicdec.output.files import first_error, lines_of, open_regular
from magicdec.workload.request_shapes import MOST_TOKENS

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Time = Annotated[float, Field(ge=0)]
Length = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
OutputLength = Annotated[int, Field(ge=0, le=MOST_TOKENS)]  # of 0, one token is asked for
OBJECT = TypeAdapter(dict[str, Any])  # of which keys are looked at before its type is known

T = TypeVar("T")
TAGS = ("call", "agent")  # of the parts of a trace that have several types


def object_in(adapter: TypeAdapter[T], text: bytes, place: str) -> T:
    """The object of a JSON text. Raises ValueError, naming place, key and value."""
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{place}: {first_error(error, TAGS)}") from None


def objects_of(adapter: TypeAdapter[T], path: Path) -> Iterator[tuple[str, T]]:
    """The objects of a file of JSON lines with their places, read as they are asked for. Raises
    OSError and ValueError."""
    for place, line in placed_lines(path):
        yield place, object_in(adapter, line, place)


def placed_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that are not empty, with their places. Raises OSError."""
    with open_regular(path) as file:
        for number, line in lines_of(file):
            yield f"{path}, line {number}", line


def check_order(place: str, key: str, value: float, before: float) -> None:
    """Raises ValueError for a time that is earlier than the one before it."""
    if value < before:
        raise ValueError(f"{place}{key} {value:g} is earlier than the one before it, {before:g}")
