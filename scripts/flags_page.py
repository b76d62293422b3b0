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

from magicdec.cli.commands import COMMANDS, start

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"
UNTITLED = ("options", "optional arguments", "positional arguments")
HEAD = """# Flags

<!-- made by scripts/flags_page.py --write; do not edit -->

Every flag of every command with its default. `magicdec COMMAND --help_all` prints the same, and
`--help` the flags that people use most. A dash means that there is no default. A flag that would do
nothing, such as `--gamma` without drafts, is refused.
"""
DRIVERS = """## baseline, selfspec, longspec

The commands of the original suite have the flags of `run`, except `--draft`. `baseline` drafts
nothing. `selfspec` has `--drafter` (`self` or `ngram`). In `longspec`, `--target` names the target
and `--model` the draft.

## download, convert

These are `model get` with `--repo_id ID` and `model convert` with `--checkpoint_dir DIR`.
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
            start(command)
        except _Built as built:
            return built.parser
    raise AssertionError(f"magicdec {command} builds no parser")


def page() -> str:
    """All of docs/flags.md."""
    parts = [HEAD]
    for command in COMMANDS:
        parts += described(f"## {command}", parser_of(command))
    return "\n".join([*parts, DRIVERS])


def described(heading: str, parser: argparse.ArgumentParser) -> list[str]:
    """A parser's flags under a heading, then those of each of its actions."""
    parts = [f"{heading}\n", f"{parser.description}\n", *groups(parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                parts += described(f"{heading} {name}", inner)
    return parts


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Every spelling of every flag, those of the parser's actions included."""
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*(options(inner) for inner in action.choices.values()))
    return found


def groups(parser: argparse.ArgumentParser) -> list[str]:
    """A table for each group of flags that has any."""
    tables = []
    for group in parser._action_groups:
        rows = [
            cells(action)
            for action in group._group_actions
            if action.dest not in ("help", "help_all")
            and not isinstance(action, argparse._SubParsersAction)
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
