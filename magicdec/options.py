"""Fields that become command-line flags. Imports nothing of ours and no torch.

Owns how a flag hangs on a field of a config section. Must not know of any section.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def option(default: Any, help: str, *flags: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that `bench.cli` turns into a command-line flag."""
    metadata = {"flags": flags, "help": help, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(section: Any, name: str) -> str:
    """The first spelling of the flag of that field, for messages."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    flag: str = fields[name].metadata["flags"][0]
    return flag
