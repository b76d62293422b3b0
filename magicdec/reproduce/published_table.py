"""PublishedTable: a CSV file of published numbers, with the columns `predicted`, `measured`,
`interval` and `exists` that `magicdec reproduce` fills in.

Owns the file and which of its lines are replaced. Must not know any system.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from magicdec.names import load_named
from magicdec.records.writing import write_text
from magicdec.reproduce.setting import TABLES, Finding, Setting

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

    @property
    def kept(self) -> Finding:
        """What was measured before."""
        if self.measured:
            return Finding(self.measured, interval=self.interval)
        return Finding(why_not=f"it needs {self.setting.needs}")

    def with_findings(self, predicted: Finding, measured: Finding | None = None) -> Line:
        """The line with these numbers and the reasons for those that are missing. Without
        `measured`, what was measured stays."""
        if measured is None:
            measured = self.kept
        published = Finding(self.published) if self.published else NOT_PUBLISHED
        found = {"published": published, "predicted": predicted, "measured": measured}
        there = [name for name, finding in found.items() if finding.value]
        missing = [f"not {name}: {f.why_not}" for name, f in found.items() if not f.value]
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
        self.name, self.folder = name, folder
        self.about, kind = TABLES[name]
        self.kind: type[Setting] = load_named({name: kind}, name)
        self.lines = list(self._read())

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.csv"

    @property
    def columns(self) -> tuple[str, ...]:
        return (*(field.name for field in fields(self.kind)), *NUMBERS)

    def _read(self) -> Iterator[Line]:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                rows = list(reader)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{FLAG} {self.folder}: {self.path.name}: {why}; the published tables are in "
                "results/paper of the repository"
            ) from None
        if tuple(reader.fieldnames or ()) != self.columns:
            expected = ",".join(self.columns)
            raise ValueError(f"{FLAG} {self.folder}: {self.path.name} needs the columns {expected}")
        for row in rows:
            numbers = {name: row.pop(name) for name in NUMBERS}
            yield Line(self.kind(**row), **numbers)

    def part(self, is_demo: bool) -> list[Line]:
        """The lines at demo size, or those that were published."""
        return [line for line in self.lines if line.is_demo == is_demo]

    def predict(self) -> None:
        """Predict every published line anew."""
        self.lines = [
            line if line.is_demo else line.with_findings(line.setting.predict(self.folder))
            for line in self.lines
        ]

    def make_demo(self) -> None:
        """Make the lines at demo size from the published ones. Lines that become equal are one;
        what was measured before stays until it is measured again."""
        before = {line.setting: line for line in self.part(is_demo=True)}
        published = self.part(is_demo=False)
        settings = dict.fromkeys(line.setting.at_demo_size() for line in published)
        demo = [before.get(setting, Line(setting, source=DEMO_SIZE)) for setting in settings]
        self.lines = [*published, *(line.with_findings(NO_DEMO_PREDICTION) for line in demo)]

    def commands(self, is_demo: bool) -> list[list[str]]:
        """The commands that measure that part. Several lines may come from one run."""
        found = dict.fromkeys(tuple(line.setting.command()) for line in self.part(is_demo))
        return [list(words) for words in found]

    def enter(self, command: list[str], is_demo: bool, records: Path, why_not: str) -> None:
        """Fill in what `command` measured: the file that it wrote, or why it failed."""
        for index, line in enumerate(self.lines):
            if line.is_demo == is_demo and line.setting.command() == command:
                found = Finding(why_not=why_not) if why_not else line.setting.read(records)
                predicted = NO_DEMO_PREDICTION
                if not is_demo:
                    predicted = line.setting.predict(self.folder)
                self.lines[index] = line.with_findings(predicted, found)

    def save(self) -> None:
        """Raises ValueError if the file cannot be written."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row_of(line) for line in self.lines)
        write_text(FLAG, self.path, text.getvalue())


def row_of(line: Line) -> dict[str, Any]:
    """All columns of a line."""
    own = {field.name: getattr(line.setting, field.name) for field in fields(line.setting)}
    return own | {name: getattr(line, name) for name in NUMBERS}
