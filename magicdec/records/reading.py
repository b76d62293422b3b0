"""Reads records: pydantic checks every line against its kind; errors name file and line."""

from __future__ import annotations

import gzip
import re
import shlex
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

from magicdec.names import RECORDS, load_named
from magicdec.output.console import printable
from magicdec.output.files import lines_of, nearest, no_such, open_regular
from magicdec.output.writing import is_intact
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import SCHEMA_VERSION, Record

R = TypeVar("R", bound=Record)
CONVERTIBLE = SCHEMA_VERSION - 1  # the version that `CONVERT` names a program for
MOST_UNREADABLE = 1000  # lines of a file that are no records; with more it is no file of records
CONVERT = "convert it with `python scripts/convert_records.py OLD NEW`, or "


class Unreadable(ValueError):
    """An error for a line that is no record, cut off in a crash or damaged, or for a file without
    any other."""


def load_passes(path: Path, is_strict: bool = False) -> list[PassRecord]:
    return list(read_records(path, PassRecord, is_strict))


def read_records(
    path: Path, record_type: type[R], is_strict: bool = False, kinds: Collection[str] = ()
) -> Iterator[R]:
    """Yields the records of one type in a file (of `Record`: of these `kinds`, or of every one),
    one at a time. Warns on stderr of lines that are no records, and says how many of other kinds
    were left out.

    Raises ValueError, one line, if the file cannot be read or has no record of the type, for
    another schema version, and with `is_strict` for a line that is no record.
    """
    for _, record in numbered_records(path, record_type, is_strict, kinds):
        yield record


def numbered_records(
    path: Path, record_type: type[R], is_strict: bool = False, kinds: Collection[str] = ()
) -> Iterator[tuple[int, R]]:
    """Yields records as `read_records` does, each with the number of its line, from 1. The
    exception is `Unreadable` if no line of the file is a record of any kind."""
    unreadable = list[str]()
    num_records = 0
    left_out = Counter[str]()
    own_kind = vars(record_type).get("kind")  # the default of the field; `Record` has none
    wanted = (own_kind,) if own_kind else kinds or tuple(RECORDS)
    for number, line in _lines(path):
        try:
            kind = _kind_at_start(line, wanted) or kind_of(line)
            if kind not in wanted:
                left_out[kind] += 1
                continue
            parsed = _parse_known(line, load_named(RECORDS, kind))
            check_seal(parsed, line)
            record = cast(R, parsed)
        except Unreadable as error:
            unreadable.append(f"{path}:{number}: {error}")
            if is_strict or len(unreadable) > MOST_UNREADABLE:
                break
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        else:
            num_records += 1
            yield number, record
    is_refused = is_strict or len(unreadable) > MOST_UNREADABLE
    if unreadable and (is_refused or not (num_records or left_out)):
        raise Unreadable(f"{unreadable[0]}; give a file of records (JSON lines)")
    counts = " and ".join(f"{count} of kind {kind}" for kind, count in left_out.items() if count)
    if sum(left_out.values()) and not num_records:
        raise ValueError(f"{path}: it has other records only, {counts}; see `magicdec table`")
    for problem in unreadable:
        print(f"{printable(problem)}; this line is skipped", file=sys.stderr)
    if counts:
        print(
            f"{path}: other records are left out, {counts}; see `magicdec table`", file=sys.stderr
        )


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-empty lines, with their numbers from 1, of a file that may be compressed (.gz).
    Raises ValueError if it cannot be read."""
    try:
        with open_regular(path) as raw:
            file = gzip.open(raw) if path.suffix == ".gz" else raw  # noqa: SIM115
            yield from lines_of(cast(IO[bytes], file))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        if isinstance(error, FileNotFoundError) and nearest(path) is not None:
            raise ValueError(f"{path}: {no_such(path, 'file')}") from None
        raise ValueError(f"{path}: {reason}; give a file of records (JSON lines)") from None


BEGINNING = re.compile(rb'\{"kind": "(\w+)", "schema_version": %d, ' % SCHEMA_VERSION)


def _kind_at_start(line: bytes, wanted: Collection[str]) -> str | None:
    """The kind of a wanted record, from the beginning of a line that this program wrote, so that
    the line is parsed once. None where `kind_of` must look, as for NaN, which is no JSON."""
    found = BEGINNING.match(line)
    if found is None or b"NaN" in line or b"Infinity" in line:
        return None
    kind = found[1].decode()
    return kind if kind in wanted else None


def kind_of(line: bytes) -> str:
    """The kind of a line's record. Raises Unreadable if it is no record, and ValueError for another
    schema version, with the command that makes it again."""
    try:
        raw = from_json(line.decode(), allow_inf_nan=False)
    except UnicodeDecodeError:
        raise Unreadable("not UTF-8 text") from None
    except ValueError as error:
        raise Unreadable(f"not a JSON record ({error})") from None
    if not isinstance(raw, dict):
        raise Unreadable("not a record; it is not an object")
    version = raw.get("schema_version")
    kind = raw.get("kind")
    if type(version) is not int:
        raise Unreadable(f"not a record; schema_version is {version}")
    if version != SCHEMA_VERSION:
        environment = raw.get("environment")
        argv = environment.get("argv") if isinstance(environment, dict) else None
        again = f": {shlex.join(map(str, argv))}" if isinstance(argv, list) else ""
        raise ValueError(
            f"schema_version is {version}, this program reads {SCHEMA_VERSION}; "
            f"{CONVERT if version == CONVERTIBLE else ''}measure it again{again}"
        )
    if not isinstance(kind, str) or kind not in RECORDS:
        raise Unreadable(f"not a record; its kind is {kind}, none of {', '.join(RECORDS)}")
    return kind


def _parse_known(line: bytes, record_type: type[R]) -> R:
    """`parse_line`, with the reason of `kind_of` for a line that is no record at all."""
    try:
        return parse_line(line, record_type)
    except Unreadable:
        kind_of(line)
        raise


def check_seal(record: Record, line: bytes) -> None:
    """Raises ValueError if the line of a record that the gate has measured was edited since."""
    if getattr(record, "is_logged", False) and not is_intact(line.decode()):
        raise ValueError(
            "this record was edited since `magicdec gate` wrote it (its seal is that of another "
            "content); restore it, or measure it again with `magicdec gate save`"
        )


def parse_line(line: bytes | str, record_type: type[R]) -> R:
    """The record in a line. Raises Unreadable if it is none of this type."""
    try:
        record: R = _adapter(record_type).validate_json(line, strict=True)  # type: ignore[arg-type]
        return record
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False)
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    key = "".join(parts).removeprefix(".")  # such as groups[0].step_ms[0]
    reasons = {
        "missing": f"it has no {key}",
        "assertion_error": first["msg"].removeprefix("Assertion failed, "),
    }
    reason = reasons.get(first["type"], f"{key} has another type")
    raise Unreadable(f"not a record; {reason}")


@cache
def _adapter(record_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(record_type)
