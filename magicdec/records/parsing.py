"""Makes typed values of JSON values: what a dataclass of a record holds, from the types of its
fields. Imports no torch.

The parser of a type is made once, because a report reads thousands of records. Unknown keys are
ignored, because older versions wrote keys that no longer exist. Keys that older records lack
(`is_later`) are read as null. Must not know of files, nor what a record means.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from itertools import chain
from typing import Any

from magicdec.records.fields import described_fields

Parse = Callable[[Any, str], Any]
"""Takes a value and its place in the record, and returns the parsed value. Raises ValueError,
naming the place, if the value has another type."""

# The types that a plain value of JSON may have, by the type of its field.
PLAIN: dict[Any, frozenset[type]] = {
    str: frozenset({str}),
    bool: frozenset({bool}),
    int: frozenset({int}),
    float: frozenset({float, int}),
}
LIST = frozenset({list})


def parse_fields(kind: type, raw: Any, path: str) -> dict[str, Any]:
    """Parse the fields of a dataclass. `path` names its place in the record and ends with a dot; it
    is empty for the record itself."""
    if not isinstance(raw, dict):
        raise ValueError(f"{path.rstrip('.')} is not an object")
    values = {}
    for key, parse, can_be_null, is_later in _fields_of(kind):
        if key not in raw and not is_later:
            raise ValueError(f"it has no {path}{key}")
        value = raw.get(key)
        if value is not None or not can_be_null:
            value = parse(value, path + key)
        values[key] = value
    return values


@cache
def _fields_of(kind: type) -> list[tuple[str, Parse, bool, bool]]:
    """(key, parser, whether it can be null, whether older records lack it) of each field."""
    return [
        (key, _parser_of(hint), description.null is not None, description.is_later)
        for key, hint, description in described_fields(kind)
    ]


@cache
def _parser_of(hint: Any) -> Parse:
    """The parser of a type: a plain value, a dataclass, a list or a dictionary."""
    if hint is Any:
        return lambda raw, path: raw
    if hint in PLAIN:
        return _plain_parser(PLAIN[hint])
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return lambda raw, path: hint(**parse_fields(hint, raw, f"{path}."))
    if typing.get_origin(hint) is list:
        return _list_parser(hint)
    assert typing.get_origin(hint) is dict, f"no field of a record has the type {hint}"
    return _dict_parser(typing.get_args(hint)[1])


def _plain_parser(kinds: frozenset[type]) -> Parse:
    def parse(raw: Any, path: str) -> Any:
        if type(raw) not in kinds:
            raise _has_another_type(path)
        return raw

    return parse


def _dict_parser(hint: Any) -> Parse:
    parse_value = _parser_of(hint)

    def parse(raw: Any, path: str) -> Any:
        if not isinstance(raw, dict):
            raise _has_another_type(path)
        return {key: parse_value(value, f"{path}.{key}") for key, value in raw.items()}

    return parse


def _list_parser(hint: Any) -> Parse:
    """Samples hold most of a record's numbers, in nested lists. Each level of them is checked at
    once; only a list that holds something else is walked, to name the place."""
    depth, innermost = 0, hint
    while typing.get_origin(innermost) is list:
        depth, (innermost,) = depth + 1, typing.get_args(innermost)
    kinds, parse_item = PLAIN.get(innermost), _parser_of(typing.get_args(hint)[0])

    def parse(raw: Any, path: str) -> Any:
        if not isinstance(raw, list):
            raise _has_another_type(path)
        if kinds is not None and _is_plain(raw, depth, kinds):
            return raw
        return [parse_item(value, f"{path}[{i}]") for i, value in enumerate(raw)]

    return parse


def _is_plain(raw: list[Any], depth: int, kinds: frozenset[type]) -> bool:
    """Whether `raw` holds lists in `depth` - 1 levels, and below them values of these types."""
    level = raw
    for _ in range(depth - 1):
        if not LIST.issuperset(map(type, level)):
            return False
        level = list(chain.from_iterable(level))
    return kinds.issuperset(map(type, level))


def _has_another_type(path: str) -> ValueError:
    return ValueError(f"{path} has another type")
