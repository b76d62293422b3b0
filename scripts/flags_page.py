"""docs/flags.md, made from the parsers that the commands build.

    python scripts/flags_page.py           # prints it
    python scripts/flags_page.py --write   # writes docs/flags.md

A test compares the two. Run it with `--write` after a flag or its help text was changed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from magicdec.cli.commands import COMMANDS

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"
RUNS = ("baseline", "selfspec", "longspec")
UNTITLED = ("options", "optional arguments", "positional arguments")
HEAD = """# Flags

<!-- made by scripts/flags_page.py --write; do not edit -->

Every flag of every command with its default. `magicdec COMMAND --help` prints the same. A dash
means that there is no default.

## baseline, selfspec, longspec

The three commands have the same flags. The defaults here are those of `selfspec`. `baseline` has no
drafter. In `longspec` the drafter is `model`, `--model` names the draft, and the flags under
"longspec alone" are added.
"""


class _Built(Exception):
    """Carries a parser out of the command that built it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser of `magicdec COMMAND`, caught before it reads any argument."""

    def stop(parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise _Built(parser)

    with (
        patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        patch.object(sys, "argv", [f"magicdec {command}"]),
    ):
        try:
            COMMANDS[command][1]()
        except _Built as built:
            return built.parser
    raise AssertionError(f"magicdec {command} builds no parser")


def page() -> str:
    """All of docs/flags.md."""
    run = parser_of("selfspec")
    flags = {option for action in run._actions for option in action.option_strings} - {"--model"}
    parts = [HEAD, *groups(run)]
    parts += ["## longspec alone\n", *groups(parser_of("longspec"), known=flags)]
    for command in COMMANDS:
        if command not in RUNS:
            parser = parser_of(command)
            parts += [f"## {command}\n", f"{parser.description}\n", *groups(parser)]
    return "\n".join(parts)


def groups(parser: argparse.ArgumentParser, known: set[str] | None = None) -> list[str]:
    """A table for each group of flags that has any, `known` ones left out."""
    tables = []
    for group in parser._action_groups:
        rows = [
            cells(action)
            for action in group._group_actions
            if action.dest != "help" and not set(action.option_strings) & (known or set())
        ]
        if rows:
            title = "" if group.title in UNTITLED else f"### {group.title}\n\n"
            lines = [("flag", "values", "default", "meaning"), ("---",) * 4, *rows]
            tables.append(title + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return tables


def cells(action: argparse.Action) -> tuple[str, str, str, str]:
    """The row of one flag."""
    default = "-" if action.default is None or action.nargs == 0 else shown(action.default)
    meaning = (action.help or "").replace("|", "\\|").replace("<", "&lt;")
    for end in (f" [{default.strip('`')}]", f"[{default.strip('`')}]"):
        meaning = meaning.removesuffix(end)
    names = ", ".join(f"`{name}`" for name in action.option_strings or [action.dest])
    return names, values(action), default, meaning


def shown(default: Any) -> str:
    words = default if isinstance(default, (list, tuple)) else [default]
    return f"`{' '.join(map(str, words))}`"


def values(action: argparse.Action) -> str:
    """What the flag takes: its choices, or the kind of value; empty for a switch."""
    if action.nargs == 0:
        return ""
    kind = ", ".join(f"`{choice}`" for choice in action.choices or ())
    kind = kind or str(action.metavar or action.dest.upper())
    return f"{kind}; one or more" if action.nargs == "+" else kind


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page())
