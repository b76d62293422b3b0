"""`magicdec completion SHELL`: a script, made by shtab from all parsers, that completes commands,
flags and values without running anything.

    source <(magicdec completion bash)
    magicdec completion zsh > ~/.zfunc/_magicdec
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ParsedValues, Parser
from magicdec.config.setting import setting

SHELLS = ("bash", "zsh", "tcsh")


@dataclass(frozen=True)
class CompletionSection:
    shell: str = setting(..., "The shell to complete in.", "shell", choices=SHELLS, metavar="SHELL")


def print_script(values: ParsedValues) -> int:
    print(script_of(values[CompletionSection].shell))
    return 0


main = LoneCommand(
    print_script,
    "Print a script for a shell, which then completes commands, flags and their values.",
    {"completion": CompletionSection},
)


def script_of(shell: str) -> str:
    import shtab

    from magicdec.cli.commands import COMMANDS, parser_of

    root = argparse.ArgumentParser(prog="magicdec")
    parsers = {"": root}
    places = {"": root.add_subparsers()}
    for name, (text, _) in COMMANDS.items():
        group, _, action = name.rpartition(" ")  # `gate` is of no group, `gate save` of `gate`
        if group not in places:
            if group not in parsers:
                parsers[group] = places[""].add_parser(group, help=text, add_help=False)
            places[group] = parsers[group].add_subparsers()
        parents = [complete_files(parser_of(name))]
        place = places[group]
        parsers[name] = place.add_parser(action, help=text, parents=parents, add_help=False)
    return str(shtab.complete(root, shell=shell))


def complete_files(parser: Parser) -> Parser:
    import shtab

    for action in parser._actions:
        declaration = parser.settings.get(action.dest)
        if declaration is not None and (
            declaration.kind is Path or declaration.metavar in ("FILE", "DIR")
        ):
            action.complete = shtab.DIR if declaration.metavar == "DIR" else shtab.FILE  # type: ignore[attr-defined]
    return parser
