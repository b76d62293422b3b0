"""Fields of a config section that become command-line flags. Imports nothing of this package and no
torch.

Owns the metadata that connects a field with its flags. Must not know of any section.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any


def option(
    default: Any,
    help: str,
    *flags: str,
    choices: tuple[str, ...] | None = None,
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """A dataclass field that `cli.flags` turns into a command-line flag. `parse` makes a value of
    the text; by default this is the type of the field."""
    metadata = {"flags": flags, "help": help, "choices": choices, "parse": parse}
    return dataclasses.field(default=default, metadata=metadata)


def flag_of(section: Any, name: str) -> str:
    """The first spelling of the flag of that field, for messages."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    flag: str = fields[name].metadata["flags"][0]
    return flag


def count_or_auto(text: str) -> int | str:
    """A whole number, or the word auto."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not known; choose a whole number or auto"
        ) from None
