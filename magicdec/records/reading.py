"""Reads records: every line becomes a `RunRecord`, or an error that names the file and the line.
Imports no torch.

The parser of a type is made once, because a report reads thousands of records. Unknown keys are
ignored, because older versions wrote keys that no longer exist. Keys that older records lack
(`is_later`) are read as null.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import typing
import zlib
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from magicdec.records.fields import described_fields
from magicdec.records.record import SCHEMA_VERSION, RunRecord, contradiction

# The keys of `config` that tables and comparisons need in every record.
CONFIG_KEYS = {
    "model": ("model", "dtype"),
    "parallel": ("device",),
    "kv": ("policy", "budget"),
    "decoding": ("strategy", "drafter", "num_draft_tokens", "ignore_eos"),
    "workload": ("batch_size", "prefix_len", "gen_len", "num_batches"),
}

T = TypeVar("T")
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


class Unreadable(ValueError):
    """A line that is no record: cut off in a crash, or damaged."""


def load_records(path: Path, is_strict: bool = False) -> list[RunRecord]:
    """All records of a file, as `read_records` reads them."""
    return list(read_records(path, is_strict))


def read_records(path: Path, is_strict: bool = False) -> Iterator[RunRecord]:
    """The records of the runs in a file, as `read_lines` reads them."""
    return read_lines(path, parse_record, is_strict)


def read_lines(
    path: Path, parse: Callable[[Any], T], is_strict: bool = False, most: int | None = None
) -> Iterator[T]:
    """What `parse` makes of the JSON value of each line of a file, one after the other, so that a
    large file need not fit in memory; at most the first `most`. A line for which it raises
    `Unreadable` is skipped with a warning on stderr that names the file and the line, if the file
    holds records besides. With `is_strict` it is an error. Raises ValueError, one line, for this,
    for a file without any record among its lines, for a file that cannot be read, and what `parse`
    raises besides, such as for a record of another schema version."""
    unreadable, num_records = [], 0
    for number, line in _lines(path):
        try:
            record = parse(decode_line(line))
        except Unreadable as error:
            unreadable.append(f"{path}:{number}: {error}")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        else:
            num_records += 1
            yield record
            if num_records == most:
                return
            continue
        if is_strict:
            break
    if unreadable and (is_strict or not num_records):
        raise ValueError(f"{unreadable[0]}; give a file of records (JSON lines)")
    for problem in unreadable:
        print(f"{problem}; this line is skipped", file=sys.stderr)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, counted from 1, of a file that may be compressed (.gz). Raises
    ValueError if the file cannot be read."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path}: {reason}; give a file of records (JSON lines)") from None


def decode_line(line: bytes) -> Any:
    """The JSON value of a line. Raises Unreadable."""
    try:
        return DECODER.decode(line.decode())
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not a JSON record ({error})") from None


def kind_of(raw: Any) -> str | None:
    """What wrote a record, from its JSON value; None for the record of a run. Raises
    Unreadable for what is not an object."""
    if not isinstance(raw, dict):
        raise Unreadable("not a record; it is not an object")
    kind = raw.get("kind")
    return kind if isinstance(kind, str) else None


def make_parser(kind: Any) -> Callable[[Any], Any]:
    """Makes objects of the dataclass `kind`, which has a `schema_version`, from JSON values."""

    def parse(raw: Any) -> Any:
        _check_version(raw, kind.schema_version)
        try:
            return kind(**_parse_fields(kind, raw, ""))
        except ValueError as error:
            raise Unreadable(f"not a record; {error}") from None

    return parse


def _check_version(raw: Any, version: int) -> None:
    found = raw.get("schema_version") if isinstance(raw, dict) else None
    if found != version:
        error = ValueError if type(found) is int else Unreadable
        raise error(f"schema_version is {found}, this program reads {version}")


def parse_record(raw: Any) -> RunRecord:
    """Make a record of a run from its JSON value. Raises ValueError, one line, if it is not one of
    this schema. This is `Unreadable`, unless it is a record of another schema version."""
    if isinstance(raw, dict) and (kind := kind_of(raw)) is not None:
        raise ValueError(f"it is a record of kind {kind}, not of a run")
    _check_version(raw, SCHEMA_VERSION)
    try:
        fields = _parse_fields(RunRecord, raw, "")
        _check_config(fields["config"])
        has_metrics = (fields["metrics"], fields["baseline_metrics"]) != (None, None)
        status, correctness = fields["status"], fields["correctness"]
        problem = contradiction(status, fields["error"], correctness, has_metrics)
        if problem is None and fields["workload"] is None and status != "failed":
            problem = "it has no workload"
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        raise Unreadable(f"not a record; {problem}")
    return RunRecord(**fields)


def _check_config(config: dict[str, Any]) -> None:
    """Raises ValueError if a needed key is missing."""
    for section, keys in CONFIG_KEYS.items():
        values = config.get(section)
        if not isinstance(values, dict):
            raise ValueError(f"it has no config.{section}")
        for key in keys:
            if key not in values:
                raise ValueError(f"it has no config.{section}.{key}")


def _parse_fields(kind: type, raw: Any, path: str) -> dict[str, Any]:
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
        return lambda raw, path: hint(**_parse_fields(hint, raw, f"{path}."))
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


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
