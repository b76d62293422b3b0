"""RunRecord: one JSON line a run, appended and never rewritten. Imports no torch. The schema is in
docs/record.md.

A record with metrics but without a passed check (or a stated absence of one) cannot be made;
failures are records too.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SCHEMA_VERSION = 1
ADDED = ("tolerance", "memory")  # keys that older records lack
STATUSES = ("ok", "diverged", "failed")


@dataclass(frozen=True)
class Correctness:
    """How the emitted tokens compare with the reference's. `reference` is None when nothing was
    compared."""

    reference: str | None
    identical: bool | None = None
    num_tokens: int | None = None
    first_divergence: dict[str, Any] | None = None
    num_excused: int | None = None
    num_diverged: int | None = None
    margin_bound: float | None = None

    @property
    def passed(self) -> bool:
        """Nothing to compare with, identical, or every difference settled as a tie."""
        return self.reference is None or bool(self.identical) or self.num_diverged == 0


@dataclass(frozen=True)
class RunRecord:
    status: str
    config: dict[str, Any]
    environment: dict[str, Any]
    error: str | None = None
    workload: dict[str, Any] | None = None
    correctness: Correctness | None = None
    metrics: dict[str, Any] | None = None
    baseline_metrics: dict[str, Any] | None = None
    samples: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    tolerance: dict[str, float] | None = None  # committed baselines: metric -> allowed drop
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status
        assert (self.error is not None) == (self.status == "failed"), "failed records say why"
        passed = self.correctness is not None and self.correctness.passed
        assert (self.status == "ok") == passed or self.status == "failed"
        assert self.status == "ok" or (self.metrics is None and self.baseline_metrics is None), (
            "performance may exist only where correctness passed"
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), allow_nan=False, sort_keys=False)


def append_record(path: Path, record: RunRecord) -> None:
    """Append one line in one write, and make sure that it is on disk. A cut-off last line of an
    earlier crash is closed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = record.to_json() + "\n"
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_records(path: Path) -> list[dict[str, Any]]:
    """All records of a file. Raises ValueError naming file and line for what is not a record of
    this schema."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ValueError(f"{path}: {reason}; give a file of records (JSON lines)") from None
    required = [f.name for f in dataclasses.fields(RunRecord) if f.name not in ADDED]
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a JSON record ({error})") from None
        version = record.get("schema_version") if isinstance(record, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{path}:{number}: schema_version is {version}, this program reads {SCHEMA_VERSION}"
            )
        missing = [name for name in required if name not in record]
        if missing:
            raise ValueError(f"{path}:{number}: not a record; it has no {missing[0]}")
        records.append(record)
    return records


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
