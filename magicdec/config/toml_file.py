"""TOML files of a user, with line numbers for messages. Imports no torch."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from magicdec.output.files import read_text


class TomlFile:
    """The keys and values of a file that `flag` names. Raises ValueError for another format."""

    def __init__(self, flag: str, path: Path) -> None:
        self.name = f"{flag} {path}".strip()
        try:
            self._text = read_text(path)
            self.values: dict[str, Any] = tomllib.loads(self._text)
        except OSError as error:
            raise ValueError(f"{self.name}: {error.strerror}; name a TOML file") from None
        except RecursionError:
            raise ValueError(f"{self.name} is not a TOML file: it is nested too deeply") from None
        except ValueError as error:  # not TOML, not UTF-8, or a number of too many digits
            raise ValueError(f"{self.name} is not a TOML file: {error}") from None

    def place_of(self, key: str, table: int | None = None) -> str:
        """The file and line of the first key or table of that name, or of the one in array table
        `table`, from 1 on."""
        written = re.compile(rf"\s*\[*[\"']?{re.escape(key)}[\"']?\s*[=\].]")
        count = 0
        for number, line in enumerate(self._text.splitlines(), 1):
            count += bool(re.match(r"\s*\[\[", line))
            if table in (None, count) and written.match(line):
                return f"{self.name}, line {number}"
        return self.name


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat keys and values as TOML, which JSON writes alike."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
