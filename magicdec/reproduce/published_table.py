"""PublishedTable: a CSV file of published numbers, with the columns `predicted`, `measured`,
`interval` and `exists` that `magicdec reproduce` fills in; and how its commands are run, one after
the other, each in a process of its own.

Owns the file, which of its lines are replaced, and what is kept when a command fails or Ctrl-C ends
all: the table is saved after each command. Must not know any system.
"""

from __future__ import annotations

import csv
import shlex
import sys
import tempfile
from dataclasses import dataclass, fields, replace
from pathlib import Path

from magicdec.distributed.ranks import run_command
from magicdec.names import load_named
from magicdec.records.writing import append_file, write_text
from magicdec.reproduce.setting import TABLES, Finding, Setting
from magicdec.tables import csv_text

FLAG = "--tables"  # names the folder
DEMO_SIZE = "demo size"  # the source of a line that was not published
NOT_PUBLISHED = Finding(why_not="the packaged models are not of the paper")
NO_DEMO_PREDICTION = Finding(why_not="the plan needs a probe of this machine")


@dataclass(frozen=True)
class Line:
    """One line of a table. A number that does not exist is empty, and `exists` says why.
    `interval` is the 95 % interval of what was measured, empty if it has none."""

    setting: Setting
    published: str = ""
    predicted: str = ""
    measured: str = ""
    interval: str = ""
    exists: str = ""
    source: str = ""

    @property
    def is_demo(self) -> bool:
        return self.source == DEMO_SIZE

    def with_findings(self, folder: Path, measured: Finding | None = None) -> Line:
        """The line with a new prediction, what was measured, and the reasons for what is missing.
        Without `measured`, what was measured before stays."""
        predicted = NO_DEMO_PREDICTION if self.is_demo else self.setting.predict(folder)
        if measured is None:
            why_not = "" if self.measured else f"it needs {self.setting.needs}"
            measured = Finding(self.measured, why_not, self.interval if self.measured else "")
        published = Finding(self.published) if self.published else NOT_PUBLISHED
        findings = {"published": published, "predicted": predicted, "measured": measured}
        there = [name for name, finding in findings.items() if finding.value]
        missing = [f"not {name}: {f.why_not}" for name, f in findings.items() if not f.value]
        return replace(
            self,
            predicted=predicted.value,
            measured=measured.value,
            interval=measured.interval,
            exists="; ".join([*filter(None, [", ".join(there)]), *missing]),
        )


NUMBERS = tuple(field.name for field in fields(Line) if field.name != "setting")


class PublishedTable:
    """The table `name` of the folder. Raises ValueError if its file cannot be read, or has other
    columns than its system's lines."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.path = name, folder, folder / f"{name}.csv"
        self.about, place = TABLES[name]
        kind: type[Setting] = load_named({name: place}, name)
        self.columns = (*kind.COLUMNS, *NUMBERS)
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{FLAG} {folder}: {self.path.name}: {why}; the published tables are in "
                "results/paper of the repository"
            ) from None
        if tuple(reader.fieldnames or ()) != self.columns:
            expected = ",".join(self.columns)
            raise ValueError(f"{FLAG} {folder}: {self.path.name} needs the columns {expected}")
        self.lines = [Line(kind.of(row), **{name: row[name] for name in NUMBERS}) for row in rows]

    def part(self, is_demo: bool) -> list[Line]:
        """The lines at demo size, or those that were published."""
        return [line for line in self.lines if line.is_demo == is_demo]

    def predict(self) -> None:
        """Predict every published line anew."""
        self.lines = [
            line if line.is_demo else line.with_findings(self.folder) for line in self.lines
        ]

    def make_demo(self) -> None:
        """Make the lines at demo size from the published ones. Lines that become equal are one;
        what was measured before stays until it is measured again."""
        before = {line.setting: line for line in self.part(is_demo=True)}
        published = self.part(is_demo=False)
        settings = dict.fromkeys(line.setting.at_demo_size() for line in published)
        demo = [before.get(setting, Line(setting, source=DEMO_SIZE)) for setting in settings]
        self.lines = [*published, *(line.with_findings(self.folder) for line in demo)]

    def commands(self, is_demo: bool) -> list[list[str]]:
        """The commands that measure that part. Several lines may come from one run."""
        commands = dict.fromkeys(tuple(line.setting.command()) for line in self.part(is_demo))
        return [list(words) for words in commands]

    def enter(self, command: list[str], is_demo: bool, records: Path, why_not: str) -> None:
        """Fill in what `command` measured: the file that it wrote, or why it failed."""
        for index, line in enumerate(self.lines):
            if line.is_demo == is_demo and line.setting.command() == command:
                measured = Finding(why_not=why_not) if why_not else line.setting.read(records)
                self.lines[index] = line.with_findings(self.folder, measured)

    def measure(self, is_demo: bool, out: Path) -> int:
        """Measure one part of the table and save it. Every record is appended to `out`. Returns how
        many commands failed. Raises ValueError if a file cannot be written."""
        commands, num_failed = self.commands(is_demo), 0
        for number, command in enumerate(commands, start=1):
            print(f"{number}/{len(commands)}  {shown(command)}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                records = Path(folder, "records.jsonl")
                ended = run_command([*command, "--out", records])
                why_not = f"its run ended with {ended.code}: {ended.error}" if ended.code else ""
                self.enter(command, is_demo, records, why_not)
                append_file("--out", records, out)
            self.save()
            if why_not:
                print(f"  {why_not}", file=sys.stderr, flush=True)
                num_failed += 1
        return num_failed

    def save(self) -> None:
        """Raises ValueError if the file cannot be written."""
        rows = [list(row_of(line).values()) for line in self.lines]
        write_text(FLAG, self.path, csv_text([self.columns, *rows]))


def shown(command: list[str]) -> str:
    return shlex.join(["magicdec", *command])


def row_of(line: Line) -> dict[str, str]:
    """All columns of a line."""
    return line.setting.to_dict() | {name: getattr(line, name) for name in NUMBERS}
