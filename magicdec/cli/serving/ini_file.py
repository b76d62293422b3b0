"""IniFile: an INI file whose entries know their line, so that a refusal names file, line and key.

Owns the syntax: `[section]`, `key = value`, and comments after `;` or `#`. Names are in any case.
Must not know any key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

COMMENTS = ";#"


@dataclass(frozen=True)
class Entry:
    """One key with its value. `place` names the file, the line and the key."""

    key: str
    text: str
    place: str

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"{self.place} = {self.text}: {why}")

    def integer(self, least: int = 0) -> int:
        """Raises ValueError if it is no whole number of at least `least`."""
        try:
            value = int(self.text)
        except ValueError:
            value = least - 1
        if value < least:
            raise self.refuse(f"it must be a whole number of at least {least}")
        return value

    def number(self, least: float = 0.0, most: float = math.inf) -> float:
        """Raises ValueError if it is no finite number from `least` to `most`."""
        try:
            value = float(self.text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            end = "" if most == math.inf else f" and at most {most:g}"
            raise self.refuse(f"it must be a number of at least {least:g}{end}")
        return value


class IniFile:
    """The sections of a file. Raises ValueError, naming `flag`, the file and the line, if it cannot
    be read or a line is malformed."""

    def __init__(self, flag: str, path: Path) -> None:
        self.name = f"{flag} {path}"
        self.sections: dict[str, dict[str, Entry]] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ValueError(f"{self.name}: {why}") from None
        section: dict[str, Entry] | None = None
        for number, line in enumerate(lines, 1):
            text = without_comment(line)
            place = f"{self.name}, line {number}"
            if text.startswith("[") and text.endswith("]"):
                section = self.sections.setdefault(text[1:-1].strip().lower(), {})
            elif text:
                self._add(section, text, place)

    def _add(self, section: dict[str, Entry] | None, text: str, place: str) -> None:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not key:
            raise ValueError(f"{place}: {text!r} is neither [section] nor key = value")
        if section is None:
            raise ValueError(f"{place}: {key} comes before the first [section]")
        if key.lower() in section:
            raise ValueError(f"{place}: {key} is in this section twice")
        section[key.lower()] = Entry(key.lower(), value, f"{place}: {key}")


def without_comment(line: str) -> str:
    """The line up to its comment. A `;` or `#` inside a word begins none."""
    for at, letter in enumerate(line):
        if letter in COMMENTS and (at == 0 or line[at - 1].isspace()):
            return line[:at].strip()
    return line.strip()
