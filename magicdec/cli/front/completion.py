"""`magicdec completion SHELL`: what a shell needs to complete commands, flags and their values.

    source <(magicdec completion bash)
    magicdec completion zsh > ~/.zfunc/_magicdec

shtab makes the script from the parsers of all commands, so nothing runs while a line is completed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from magicdec.cli.flags import exit_with
from magicdec.cli.parsing.parser import Parser
from magicdec.config.setting import setting

SHELLS = ("bash", "zsh", "tcsh")


@dataclass(frozen=True)
class CompletionSection:
    shell: str = setting(..., "The shell to complete in.", "shell", choices=SHELLS, metavar="SHELL")


def main() -> NoReturn:
    """`magicdec completion`"""
    exit_with(complete)


def complete() -> int:
    print(script_of(build_parser().read(sys.argv[1:])[CompletionSection].shell))
    return 0


def build_parser() -> Parser:
    return Parser(
        "Print a script for a shell, which then completes commands, flags and their values.",
        {"completion": CompletionSection},
    )


def script_of(shell: str) -> str:
    """The script for that shell."""
    import shtab

    from magicdec.cli.commands import ACTIONS, COMMANDS, GROUPS, parser_of

    root = argparse.ArgumentParser(prog="magicdec")
    commands = root.add_subparsers()
    for name, (text, _) in COMMANDS.items():
        parents = [complete_files(parser_of(name))] if name not in GROUPS else []
        command = commands.add_parser(name, help=text, parents=parents, add_help=False)
        actions = [action for action in ACTIONS if action.split()[0] == name]
        if actions:
            inner = command.add_subparsers()
            for action in actions:
                parents = [complete_files(parser_of(action))]
                inner.add_parser(action.split()[1], parents=parents, add_help=False)
    return str(shtab.complete(root, shell=shell))


def complete_files(parser: Parser) -> Parser:
    """The parser, whose flags that name files complete them."""
    import shtab

    for action in parser._actions:
        each = parser.settings.get(action.dest)
        if each is not None and (each.kind is Path or each.metavar in ("FILE", "DIR")):
            action.complete = shtab.DIR if each.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    return parser
