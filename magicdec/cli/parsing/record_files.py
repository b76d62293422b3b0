"""Arguments that name files of records, and their records. A new kind of record is a line in
`TABLES`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.cli.parsing.parser import ParsedValues
from magicdec.config.setting import setting
from magicdec.names import RECORDS
from magicdec.records.reading import read_records
from magicdec.records.record import Record


@dataclass(frozen=True)
class RecordFilesSection:
    """The files, and the treatment of lines that are no records."""

    files: tuple[Path, ...] = setting(
        ..., "Files of records, as JSON lines.", "files", metavar="FILE"
    )
    strict: bool = setting(
        False,
        "Refuse a file with a line that is not a record; otherwise the line is skipped with a "
        "warning.",
    )


COMMITTED = Path("results/baselines/acceptance.jsonl")


@dataclass(frozen=True)
class BaselineFileSection:
    """The file of earlier records that new ones are compared with."""

    baseline: Path = setting(
        COMMITTED,
        "The baseline file; in `audit` with an earlier audit, of which the last counts. Where "
        "there is no file of the default name, `gate` reads the packaged one. Files of other kinds "
        "of CPU stand beside it: `FILE.amx.jsonl`, `.avx512_bf16` or `.avx2`; the one of this CPU "
        "is compared with and renewed.",
        other_defaults="none in audit",
    )


def read_every_kind(
    args: RecordFilesSection, kinds: Sequence[str] = tuple(RECORDS)
) -> Iterator[tuple[Path, Record]]:
    """Yields the records of these kinds with their files. Raises ValueError as `read_records` does,
    and if there is no record."""
    is_empty = True
    for path in args.files:
        for record in read_records(path, Record, args.strict):
            if record.kind in kinds:
                is_empty = False
                yield path, record
    if is_empty:
        files = ", ".join(map(str, args.files))
        raise ValueError(f"{files}: there are no records of kind {', '.join(kinds)}")


# What makes the tables of the records of one command, by the key `kind`; it is imported when it is
# needed. Runs are listed together (`bench/report/listing.py`).
TABLES = {
    "pass": "magicdec.bench.showing:tables",
    "latency": "magicdec.bench.latency.record:tables",
    "acceptance": "magicdec.bench.acceptance.record:tables",
    "audit": "magicdec.bench.audit.record:tables",
    "plan": "magicdec.predict.plan:tables",
    "simulation": "magicdec.predict.simulator.run:tables",
}


UNRECORDED = ("config", "out", "plot", "plot_ms")


def given_flags(values: ParsedValues) -> dict[str, Any]:
    """The user's flags as in a file of `--config`, without files to write: for the record of a
    prediction."""
    flags = {}
    for name, declaration in values.settings.items():
        section, _, key = name.partition(".")
        if name in values.given and key not in UNRECORDED:
            value = getattr(values.sections[section], key)
            parts = value if isinstance(value, tuple) else (value,)
            plain = [part if isinstance(part, int | float) else str(part) for part in parts]
            flags[declaration.flag.removeprefix("--")] = (
                plain if isinstance(value, tuple) else plain[0]
            )
    return flags
