"""`--config FILE`: the flags of a run as a TOML file, whose keys are the names of flags; and such a
file made from a record. Imports no torch.

Must not know what a flag means.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_config_file(path: Path) -> dict[str, Any]:
    """The keys and values of the file. Raises ValueError if it is not a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path} is not a TOML file: {error}") from None


def file_words(parser: argparse.ArgumentParser, path: Path) -> list[str]:
    """The file as words of a command line. Raises ValueError for a key that is no flag of
    `parser`, and for a value that a flag cannot have."""
    actions = {o.lstrip("-"): a for a in parser._actions for o in a.option_strings}
    words: list[str] = []
    for key, value in read_config_file(path).items():
        action = actions.get(key)
        if action is None or key in ("h", "help", "help_all", "config"):
            close = difflib.get_close_matches(key, actions, n=1)
            hint = f"did you mean {close[0]}?" if close else "see --help_all"
            raise ValueError(f"--config {path}: {key!r} is not the name of a flag; {hint}")
        words += _words(path, key, value, action)
    return words


def _words(path: Path, key: str, value: Any, action: argparse.Action) -> list[str]:
    """One key as words. A switch is true or false; false leaves it off."""
    flag = f"--{key}"
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"--config {path}: {key} is a switch; give true or false")
        return [flag] if value else []
    values = value if isinstance(value, list) and action.nargs == "+" else [value]
    if not values or any(isinstance(v, bool | list | dict) for v in values):
        kind = "a list of values" if action.nargs == "+" else "one value"
        raise ValueError(f"--config {path}: {key} is {value!r}; give {kind}")
    # `=` also carries a value that begins with a dash.
    first = [f"{flag}={values[0]}"] if action.nargs != "+" else [flag, str(values[0])]
    return [*first, *map(str, values[1:])]


def to_toml(values: dict[str, Any]) -> str:
    """Flat keys with numbers, texts, booleans and lists of numbers, as TOML. JSON writes these
    values in the same way."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
