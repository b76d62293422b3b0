"""Record: the envelope of every record, a JSON line that is appended and never rewritten, and the
statuses of a pass. docs/record.md is made from these classes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

from magicdec.output.writing import append_line, seal_of, to_json, with_seal
from magicdec.records.environment import Environment
from magicdec.records.fields import RecordPart, recorded

SCHEMA_VERSION = 4
R = TypeVar("R", bound="Record")


class Status(StrEnum):
    """What is known of the tokens of a pass."""

    VERIFIED = "verified"
    VERIFIED_WITH_TIES = "verified_with_ties"
    MISMATCH = "mismatch"
    UNVERIFIED = "unverified"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Record(RecordPart):
    """The fields of every record. A new kind needs a dataclass that derives from this one, a line
    in `names.RECORDS`, and a function that makes its tables (`TABLES` in
    `cli/parsing/record_files.py`)."""

    kind: str
    schema_version: Literal[4] = recorded(
        "version of the schema; records of another version are refused", default=SCHEMA_VERSION
    )
    status: str
    config: dict[str, Any] = recorded("the resolved configuration, in which no value is `auto`")

    @property
    def is_judged(self) -> bool:
        """Whether comparisons give a verdict on it; what else was measured they show."""
        return False

    def to_json(self) -> str:
        return to_json(self)

    @property
    def command(self) -> tuple[object, ...]:
        """A key that the records of one command share: of predictions their options and work."""
        return self.config.get("options"), self.config.get("work")

    @property
    def is_of_run(self) -> bool:
        """Whether `magicdec run` makes it again."""
        return False

    def repeats(self, others: Sequence[Record]) -> bool:
        """Whether it begins another command than these, with the same key."""
        return False


def commands_of(records: Iterable[R]) -> Iterator[list[R]]:
    """The records of each command: neighbours of one kind with one command line and start or, of
    predictions, equal options and work. The name of a pass that comes again begins another."""
    for _, group in groupby(records, lambda record: (record.kind, *record.command)):
        found: list[R] = []
        for record in group:
            if record.repeats(found):
                yield found
                found = []
            found.append(record)
        yield found


def records_of_type(records: Iterable[Record], record_type: type[R]) -> list[R]:
    """Those of one type, of records of several."""
    return [record for record in records if isinstance(record, record_type)]


@dataclass(frozen=True, kw_only=True)
class MeasuredRecord(Record):
    """The envelope of a record that was measured, not predicted."""

    environment: Environment = recorded("the machine, the software and the launch")

    @property
    def command(self) -> tuple[object, ...]:
        """A key that the records of one command share."""
        return self.environment.time_utc, self.environment.argv


def margin_field() -> Any:
    return recorded(
        "share of the acceptance rate whose loss `magicdec gate` still tolerates; 0: any loss is a "
        "regression",
        "0 to 1",
        null="except in the baselines of the gate",
    )


def seal_field() -> Any:
    return recorded(
        "hash of the rest of the line: the first 16 hexadecimal digits of its SHA-256. A line that "
        "was edited since `magicdec gate` wrote it is refused",
        null="except in the records of the gate",
    )


def sealed_json(record: Any) -> str:
    """The line of a record. A record with a seal gets the one of its content."""
    line = to_json(replace(record, seal=None))
    return line if record.seal is None else with_seal(line, seal_of(line))


def append_together(path: Path, records: Iterable[Record]) -> None:
    """Appends the records of a command at once, so that a file has all of them or none."""
    append_line(path, "\n".join(record.to_json() for record in records))


def append_records(flag: str, path: Path, records: Iterable[Record]) -> None:
    """Appends records. Raises ValueError, naming the flag, if that fails."""
    try:
        append_together(path, records)
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
