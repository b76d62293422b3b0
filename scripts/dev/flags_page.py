"""docs/flags.md, made from the parsers of the commands: every flag, and the flags of each command.

    python scripts/dev/flags_page.py           # prints it
    python scripts/dev/flags_page.py --write   # writes docs/flags.md

A test compares the two. Run it with `--write` after a setting was changed.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING
from pathlib import Path

from magicdec.cli.commands import COMMANDS, parser_of
from magicdec.cli.parsing.parser import Parser
from magicdec.config.setting import Declared

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"
HEAD = """# Flags

<!-- made by scripts/dev/flags_page.py --write; do not edit -->

Every flag, then the flags of each command. A flag means the same in every command that has it.
`magicdec COMMAND --help_all` prints the flags of one command, and `--help` those that people use
most. A dash means that there is no default. A flag that would do nothing, such as `--gamma` without
drafts, is refused.

## Vocabulary
"""
DRIVERS = """## baseline, selfspec, longspec

The commands of the original suite have the flags of `run`, except `--draft`. `baseline` drafts
nothing. `selfspec` has `--drafter` (`self` or `ngram`). In `longspec`, `--target` names the target
and `--model` the draft. The suite's own spellings `--streamingllm_budget`, `--draft_budget`,
`--draft_rank_group` and `--draft_group` are known there, and `--max_len`, which is `--prefix_len`
and `--gen_len` together (`magicdec/cli/drivers.py`).

## download, convert

These are `model get` with `--repo_id ID` and `model convert` with `--checkpoint_dir DIR`.
"""


def parsers() -> dict[str, Parser]:
    """The parser of every command, by name."""
    return {name: parser_of(name) for name in COMMANDS}


def concepts() -> dict[tuple[str, str], list[tuple[str, Declared]]]:
    """The settings of all commands by flag and meaning, each with the names of its commands."""
    rows: dict[tuple[str, str], list[tuple[str, Declared]]] = {}
    for name, parser in parsers().items():
        for setting in parser.settings.values():
            if setting.flag.startswith("-"):
                rows.setdefault((setting.flag, setting.setting.help), []).append((name, setting))
    return rows


def page() -> str:
    """All of docs/flags.md."""
    rows = [("flag", "values", "default", "meaning", "commands"), ("---",) * 5]
    rows += [vocabulary_row(uses) for _, uses in sorted(concepts().items())]
    parts = [HEAD, "".join(f"| {' | '.join(row)} |\n" for row in rows)]
    for name, parser in parsers().items():
        flags = " ".join(f"`{setting.flag}`" for setting in parser.settings.values())
        parts.append(f"## {name}\n\n{parser.description}\n" + (f"\n{flags}\n" if flags else ""))
    return "\n".join([*parts, DRIVERS])


def vocabulary_row(uses: list[tuple[str, Declared]]) -> tuple[str, str, str, str, str]:
    _, declaration = uses[0]
    meaning = declaration.setting.help.replace("|", "\\|").replace("<", "&lt;")
    default = shown(declaration)
    if declaration.setting.other_defaults:
        default += f"; {declaration.setting.other_defaults}"
    commands = ", ".join(name for name, _ in uses)
    return (
        f"`{declaration.flag}`",
        values_of([declaration for _, declaration in uses]),
        default,
        meaning,
        commands,
    )


def shown(declaration: Declared) -> str:
    default = declaration.default
    if default is None or default is MISSING or declaration.kind is bool:
        return "-"
    words = default if isinstance(default, tuple) else [default]
    return f"`{' '.join(map(str, words))}`"


def values_of(uses: list[Declared]) -> str:
    """What the flag takes: its choices, or the kind of value; empty for a switch."""
    first = uses[0]
    if first.kind is bool:
        return ""
    choices = dict.fromkeys(choice for use in uses for choice in use.setting.choices)
    kind = ", ".join(f"`{choice}`" for choice in choices) or first.metavar.replace("|", " or ")
    return f"{kind}; one or more" if any(use.is_list for use in uses) else kind


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page())
