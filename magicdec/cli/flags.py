"""The command line: makes flags from the config's dataclasses, prints errors in one line and sets
the exit code.

Exit codes: 0 when the run is done and correct; 1 when outputs diverged, a rate regressed or the run
failed; 2 when the user can correct the error; 130 when interrupted. Heavy imports happen after the
flags are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import time
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from magicdec.config.choice import How
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import OutputSection
from magicdec.console import spinner
from magicdec.distributed.groups import Launch, read_launch
from magicdec.records.writing import check_writable

LEADER_FIRST_S = 20.0


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ValueError with one line instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def build_parser(config: RunConfig, description: str) -> Parser:
    """Make one flag for each field that declares one; the defaults are those of `config`."""
    parser = Parser(description=description, allow_abbrev=False)
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        if values is not None:
            add_section(parser, section.name, values)
    return parser


def add_section(
    parser: Parser, section: str, values: Any, only: Sequence[str] | None = None
) -> None:
    """Add the flags of one config section. Their defaults are in `values`. `only` names the fields
    that get a flag; None stands for all."""
    group = parser.add_argument_group(section)
    types = typing.get_type_hints(type(values))
    for field in dataclasses.fields(values):
        if field.metadata and (only is None or field.name in only):
            default = getattr(values, field.name)
            _add_flag(group, field, types[field.name], f"{section}.{field.name}", default)


def _add_flag(group: Any, field: Any, kind: Any, dest: str, default: Any) -> None:
    flags, text = field.metadata["flags"], field.metadata["help"]
    if kind is bool:
        # A flag of a field that is on by default turns it off (--no_baseline).
        group.add_argument(
            *flags, dest=dest, help=text, action="store_const", const=not default, default=default
        )
        return
    options: dict[str, Any] = {
        "dest": dest,
        "help": text if default is None else f"{text} [{default}]",
        "default": default,
    }
    if kind == tuple[int, ...] | None:
        group.add_argument(*flags, nargs="+", type=int, metavar="N", **options)
        return
    base = next((t for t in typing.get_args(kind) if t is not type(None)), kind)
    if field.metadata["choices"]:
        options["choices"] = field.metadata["choices"]
    else:
        options["metavar"] = {int: "N", float: "X"}.get(base, "NAME")
    group.add_argument(*flags, type=field.metadata["parse"] or base, **options)


def parse(config: RunConfig, argv: Sequence[str], description: str) -> RunConfig:
    """`config` with the values of the flags in `argv`. Raises ValueError, in one line, for a flag
    that does not exist or has a value that it cannot have."""
    parser = build_parser(config, description)
    parsed, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [o for action in parser._actions for o in action.option_strings]
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose from {' '.join(known)}"
        raise ValueError(f"unknown argument {unknown[0]}; {hint}")
    return read_sections(config, parsed)


def read_sections(config: RunConfig, parsed: argparse.Namespace) -> RunConfig:
    """`config` with the values of the flags that `add_section` made. Other flags are ignored."""
    sections: dict[str, dict[str, Any]] = {}
    for dest, value in vars(parsed).items():
        section, dot, name = dest.partition(".")
        if dot:
            value = tuple(value) if isinstance(value, list) else value
            sections.setdefault(section, {})[name] = value
    changed = {
        n: dataclasses.replace(getattr(config, n), **fields) for n, fields in sections.items()
    }
    return dataclasses.replace(config, **changed)


def main(config: RunConfig, description: str, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command that decodes. `config` has its strategy; the command line sets the rest."""
    launch = read_launch()
    try:
        parsed = parse(config, sys.argv[1:] if argv is None else argv, description)
        parsed.check(launch.world_size)
        if launch.rank == 0:
            check_outputs(parsed.output)
        with spinner("preparing", launch.rank == 0):
            from magicdec.setup.prepare import prepare

            prepared = prepare(parsed, launch)
    except ValueError as error:
        refuse(error, launch)
    except KeyboardInterrupt:
        sys.exit(130)
    announce_backend(prepared.config, launch)
    from magicdec.cli.report import conclude

    sys.exit(conclude(prepared))


def check_outputs(output: OutputSection) -> None:
    """Raises ValueError if the files of the run cannot be written."""
    check_writable("--results", Path(output.results))
    if output.save_tokens is not None:
        check_writable("--save_tokens", Path(output.save_tokens))


def announce_backend(config: ResolvedConfig, launch: Launch) -> None:
    """Tell the user when `auto` had to take slower kernels, and when kernels run in Triton's
    interpreter."""
    chosen = (
        ("--attention", config.attention.backend_choice),
        ("--elementwise", config.model.elementwise_choice),
    )
    for flag, choice in chosen if launch.rank == 0 else ():
        if choice.how is How.SECOND_BEST:
            print(f"{flag} {choice.why}", file=sys.stderr, flush=True)
        if choice.is_interpreted:
            print(f"{flag} {choice.name}: {choice.why}", file=sys.stderr, flush=True)


def refuse(error: ValueError, launch: Launch) -> NoReturn:
    """Print one line on rank 0 and exit with code 2. The other ranks wait until torchrun ends them,
    so that the line appears once and before torchrun's summary. A rank that is not ended was the
    only one to refuse (its host lacks a file, say), so it prints its line itself."""
    if launch.rank != 0:
        time.sleep(LEADER_FIRST_S)
    print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    sys.exit(2)
