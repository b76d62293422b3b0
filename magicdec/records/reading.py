"""Reads records: every line becomes a `RunRecord`, or an error that names the file and the line.
Imports no torch.

Must not know how a value gets its type (`parsing`).
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from magicdec.records.parsing import parse_fields
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


RUN = "run"  # the kind of a record of a run, which has no key `kind`


class Unreadable(ValueError):
    """A line that is no record: cut off in a crash, or damaged."""


class OtherKind(Exception):
    """A line with a record of another kind than is read."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


def load_records(path: Path, is_strict: bool = False) -> list[RunRecord]:
    """All records of runs in a file, as `read_records` reads them."""
    return list(read_records(path, is_strict))


def read_records(
    path: Path, is_strict: bool = False, others: Counter[str] | None = None
) -> Iterator[RunRecord]:
    """The records of the runs in a file, as `read_lines` reads them."""
    return read_lines(path, parse_record, is_strict, others)


def read_lines(
    path: Path,
    parse: Callable[[Any], T],
    is_strict: bool = False,
    others: Counter[str] | None = None,
) -> Iterator[T]:
    """What `parse` makes of the JSON value of each line of a file, one after the other, so that a
    large file need not fit in memory. A line for which it raises `Unreadable` is skipped with a
    warning on stderr that names the file and the line, if the file holds records besides. With
    `is_strict` it is an error. Records of other kinds are counted in `others`; without it, a line
    on stderr says how many were left out, and a file that has only these is an error. Raises
    ValueError, one line, for these errors, for a file without any record among its lines, for a
    file that cannot be read, and what `parse` raises besides, such as for a record of another
    schema version."""
    unreadable, num_records, left_out = [], 0, Counter[str]()
    for number, line in _lines(path):
        try:
            record = parse(decode_line(line))
        except OtherKind as error:
            left_out[error.kind] += 1
            continue
        except Unreadable as error:
            unreadable.append(f"{path}:{number}: {error}")
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        else:
            num_records += 1
            yield record
            continue
        if is_strict:
            break
    if unreadable and (is_strict or not (num_records or left_out)):
        raise ValueError(f"{unreadable[0]}; give a file of records (JSON lines)")
    for problem in unreadable:
        print(f"{problem}; this line is skipped", file=sys.stderr)
    if others is not None:
        others.update(left_out)
    elif left_out:
        _say_left_out(path, left_out, bool(num_records))


def _say_left_out(path: Path, left_out: Counter[str], has_records: bool) -> None:
    """Raises ValueError if the file has nothing but records of other kinds."""
    counts = " and ".join(f"{count} of kind {kind}" for kind, count in left_out.items())
    if not has_records:
        raise ValueError(f"{path}: it has other records only, {counts}; see `magicdec table`")
    print(f"{path}: other records are left out, {counts}; see `magicdec table`", file=sys.stderr)


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


def check_kind(raw: Any, kind: str) -> None:
    """Raises Unreadable for what is not an object, and OtherKind for a record of another kind."""
    if not isinstance(raw, dict):
        raise Unreadable("not a record; it is not an object")
    if (other := raw.get("kind", RUN)) != kind:
        raise OtherKind(str(other))


def make_parser(record_type: Any) -> Callable[[Any], Any]:
    """Makes objects of a dataclass from JSON values. Its defaults say the `kind` and the
    `schema_version` of its records."""

    def parse(raw: Any) -> Any:
        check_kind(raw, record_type.kind)
        _check_version(raw, record_type.schema_version)
        try:
            return record_type(**parse_fields(record_type, raw, ""))
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
    this schema. This is `Unreadable`, unless it is a record of another schema version. Raises
    OtherKind for a record of another kind."""
    check_kind(raw, RUN)
    _check_version(raw, SCHEMA_VERSION)
    try:
        fields = parse_fields(RunRecord, raw, "")
        _check_config(fields["config"])
        has_metrics = (fields["metrics"], fields["baseline_metrics"]) != (None, None)
        status, samples = fields["status"], fields["samples"]
        checked = fields["correctness"], has_metrics, samples
        problem = contradiction(status, fields["error"], *checked)
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


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
