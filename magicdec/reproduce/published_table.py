"""PublishedTable: a CSV file of published numbers, with the columns `predicted`, `measured`,
`interval` and `exists` that `magicdec reproduce` fills in; how its commands are run, one after the
other, each in a process of its own; and how it is printed.

The table is saved after each command, so that a command that fails or Ctrl-C loses nothing that was
measured before.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

from magicdec.distributed.ranks import run_command
from magicdec.records.writing import append_file, write_text
from magicdec.reproduce.magicdec_tables import (
    COLUMNS,
    TABLES,
    Missing,
    Row,
    at_demo_size,
    command_of,
    file_of,
    predict,
    read_measured,
)
from magicdec.tables import Column, Table, csv_text

FLAG = "--tables"  # names the folder
DEMO_SIZE = "demo size"  # the source of a line that was not published
NUMBERS = ("published", "predicted", "measured")
FILLED = (*NUMBERS, "interval", "exists", "source")  # the columns after those of the setting
ALL_COLUMNS = (*COLUMNS, *FILLED)
SHORT = {"prefix_len": "prefix", "batch_size": "B"}


class PublishedTable:
    """The table `name` of the folder. Its rows have `COLUMNS`, which say what was measured, and
    those of `FILLED`: a number that does not exist is empty, `exists` says why, and `interval` is
    the 95 % interval of what was measured. Raises ValueError if its file cannot be read, or has
    other columns."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.path = name, folder, folder / f"{name}.csv"
        self.about = TABLES[name]
        try:
            with file_of(folder, name).open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self.rows: list[Row] = list(reader)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{FLAG} {folder}: {self.path.name}: {why}") from None
        if tuple(reader.fieldnames or ()) != ALL_COLUMNS:
            expected = ",".join(ALL_COLUMNS)
            raise ValueError(f"{FLAG} {folder}: {self.path.name} needs the columns {expected}")

    def part(self, is_demo: bool) -> list[Row]:
        """The lines at demo size, or those that were published."""
        return [row for row in self.rows if (row["source"] == DEMO_SIZE) == is_demo]

    def predict(self) -> None:
        """Predict every published line anew."""
        for row in self.part(is_demo=False):
            self.refresh(row)

    def make_demo(self) -> None:
        """Make the lines at demo size from the published ones. Lines that become equal are one;
        what was measured before stays until it is measured again."""
        published, old_rows = self.part(is_demo=False), self.part(is_demo=True)
        demo: list[Row] = []
        for setting in map(at_demo_size, published):
            if any(setting.items() <= row.items() for row in demo):
                continue
            new_row = setting | dict.fromkeys(FILLED, "") | {"source": DEMO_SIZE}
            demo.append(next((r for r in old_rows if setting.items() <= r.items()), new_row))
            self.refresh(demo[-1])
        self.rows = [*published, *demo]

    def refresh(self, row: Row, unmeasured: str = "") -> None:
        """Predict a line anew, and write into `exists` which numbers it has and why it lacks
        others; `unmeasured` says why its command measured nothing."""
        is_demo = row["source"] == DEMO_SIZE
        needs = "a run" if is_demo else f"{row['ranks']} {row['hardware']} GPUs".lstrip()
        reasons = {
            "published": "the packaged models are not of the paper",
            "predicted": "the plan needs a probe of this machine",
            "measured": unmeasured or f"it needs {needs}",
        }
        if not is_demo:
            try:
                row["predicted"] = predict(row, self.folder)
            except Missing as reason:
                row["predicted"], reasons["predicted"] = "", str(reason)
        existing = ", ".join(name for name in NUMBERS if row[name])
        missing = [f"not {name}: {why}" for name, why in reasons.items() if not row[name]]
        row["exists"] = "; ".join(filter(None, [existing, *missing]))

    def commands(self, is_demo: bool) -> list[str]:
        """The words after `magicdec` that measure that part; lines may share a run."""
        return list(dict.fromkeys(command_of(row) for row in self.part(is_demo)))

    def measure(self, is_demo: bool, out: Path) -> int:
        """Measure one part of the table and save it. Every record is appended to `out`. Returns how
        many commands failed. Raises ValueError if a file cannot be written."""
        commands, num_failed = self.commands(is_demo), 0
        for number, command in enumerate(commands, start=1):
            print(f"{number}/{len(commands)}  magicdec {command}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                records = Path(folder, "records.jsonl")
                ended = run_command([*command.split(), "--out", records])
                error = f"its run ended with {ended.code}: {ended.error}" if ended.code else ""
                for row in self.part(is_demo):
                    if command_of(row) == command:
                        self.enter(row, records, error)
                append_file("--out", records, out)
            self.save()
            if error:
                print(f"  {error}", file=sys.stderr, flush=True)
                num_failed += 1
        return num_failed

    def enter(self, row: Row, records: Path, error: str) -> None:
        """Fill in what the command of a line measured: the file that it wrote, or why it failed."""
        row["measured"] = row["interval"] = ""
        try:
            if not error:
                row["measured"], row["interval"] = read_measured(row, records)
        except Missing as reason:
            error = str(reason)
        self.refresh(row, error)

    def save(self) -> None:
        """Raises ValueError if the file cannot be written."""
        rows = [[row[name] for name in ALL_COLUMNS] for row in self.rows]
        write_text(FLAG, self.path, csv_text([ALL_COLUMNS, *rows]))

    def print(self) -> None:
        """What was published, and below it what was measured with the packaged models."""
        print(f"{self.name}: {self.about}")
        for is_demo in (False, True):
            if rows := self.part(is_demo):
                print()
                self._as_table("the packaged models" if is_demo else "published size", rows).print()

    def _as_table(self, what: str, rows: list[Row]) -> Table:
        """The settings that differ between the lines, and the numbers; the settings that have one
        value in all lines stand in the title, such as `: ranks 8`."""
        values = {name: {row[name] for row in rows} for name in ALL_COLUMNS}
        shared = [name for name in COLUMNS if len(values[name]) == 1]
        settings_of_all = ", ".join(f"{name} {rows[0][name]}" for name in shared if rows[0][name])
        numbers = [name for name in (*NUMBERS, "interval") if values[name] != {""}]
        names = [*(name for name in COLUMNS if name not in shared), *numbers]
        return Table(
            [Column(SHORT.get(name, name), name in ("model", "draft"), name) for name in names],
            [[row[name] for name in names] for row in rows],
            above=[f"{what}: {settings_of_all}" if settings_of_all else what],
            is_framed=False,
        )


def print_tables(folder: Path) -> None:
    """Two lines for each table: what it shows, and how many of its lines have which numbers.
    Raises ValueError if one cannot be read."""
    for name in TABLES:
        table = PublishedTable(name, folder)
        published = table.part(is_demo=False)
        counts = [f"{sum(bool(row[number]) for row in published)} {number}" for number in NUMBERS]
        num_demo = sum(bool(row["measured"]) for row in table.part(is_demo=True))
        print(f"{name}: {table.about}\n    {', '.join(counts)}; {num_demo} at demo size")
