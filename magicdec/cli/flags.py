"""The command line: makes flags from the config's dataclasses, prints errors in one line and sets
the exit code.

Exit codes: 0 when the run is done and correct; 1 when outputs diverged, a rate regressed or the run
failed; 2 when the user can correct the error; 130 when interrupted. Heavy imports happen after the
flags are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from magicdec.cli.checkpoints.hub_models import with_local_models
from magicdec.cli.parsing.config_file import file_words
from magicdec.cli.parsing.ignored import drafts_only, why_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.config.choices.choice import How
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import OutputSection
from magicdec.console import spinner
from magicdec.distributed.groups import Launch, read_launch
from magicdec.distributed.ranks import find_world_size, is_other_start, start_ranks
from magicdec.distributed.watching.processes import report_error
from magicdec.distributed.watching.watch import naming_lost, stop_watching, watch_ranks
from magicdec.records.writing import check_directory, check_files

LEADER_FIRST_S = 20.0
# What `--help` shows; `--help_all` shows the rest.
EVERYDAY = (
    *("--model", "--target", "--draft", "--budget", "--kv_policy", "--gamma", "--dataset", "--B"),
    *("--prefix_len", "--gen_len", "--temperature", "--nproc", "--out", "--config"),
)


def build_parser(config: RunConfig, description: str) -> Parser:
    """Make one flag for each field that declares one; the defaults are those of `config`. The help
    leaves out flags that the command could only refuse."""
    parser = Parser(description=description, everyday=EVERYDAY)
    add_config_flag(parser)
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        if values is not None:
            add_section(parser, section.name, values)
    parser.hide(partial(drafts_only, config))
    return parser


def add_config_flag(parser: Parser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE",
        help="take flags from this TOML file, whose keys are their names; flags on the command "
        "line win")  # fmt: skip


def add_section(
    parser: Parser,
    section: str,
    values: Any,
    only: Sequence[str] | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Add the flags of one config section. Their defaults are in `values`. `only` names the fields
    that get a flag; None stands for all. `texts` has help texts by field, for a command in which a
    flag can do less than the field's own text says."""
    group = parser.add_argument_group(section)
    types = typing.get_type_hints(type(values))
    for field in dataclasses.fields(values):
        if field.metadata and (only is None or field.name in only):
            default, dest = getattr(values, field.name), f"{section}.{field.name}"
            text = (texts or {}).get(field.name, field.metadata["help"])
            _add_flag(group, field, types[field.name], dest, default, text)


def _add_flag(group: Any, field: Any, kind: Any, dest: str, default: Any, text: str) -> None:
    flags = field.metadata["flags"]
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
    """`config` with the values of the flags in `argv` and in the file that `--config` names. Raises
    ValueError, in one line, for a flag that does not exist, that has a value that it cannot have,
    or that would be ignored."""
    return read_flags(build_parser(config, description), config, argv)


def read_flags(parser: Parser, config: RunConfig, argv: Sequence[str]) -> RunConfig:
    """As `parse`, with a parser that was built for `config`."""
    parsed, typed = parser.read(argv)
    given, file = typed, parsed.config
    if file is not None:
        parsed, given = read_both(parser, file, argv)
    found = read_sections(config, parsed)
    for dest in vars(parsed):
        reason = why_ignored(found, dest) if dest in given and "." in dest else None
        message = f"{parser.flag_of(dest)} does nothing here: {reason}"
        if reason is not None and dest in typed:
            raise ValueError(f"{message}; leave it out")
        if reason is not None and is_working_leader(found):
            print(f"--config {file}: {message}", file=sys.stderr)
    return found


def is_working_leader(config: RunConfig) -> bool:
    """Whether this is the first rank, and it runs itself instead of starting ranks."""
    launch = read_launch()
    world_size = find_world_size(config.parallel.nproc, launch)
    return launch.rank == 0 and launch.world_size == world_size


def read_both(
    parser: Parser, file: Path, argv: Sequence[str]
) -> tuple[argparse.Namespace, set[str]]:
    """As `Parser.read`, of the flags in a file and of those in `argv`, which can be read alone."""
    words = file_words(parser, file)
    try:
        return parser.read([*words, *argv])
    except ValueError as error:
        raise ValueError(f"--config {file}: {error}") from None


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
    start(lambda words: parse(config, words, description), argv)


def start(
    read: Callable[[Sequence[str]], RunConfig], argv: Sequence[str] | None = None
) -> NoReturn:
    """Decode as `read` makes of the command line: on this rank, or on the ranks that `--nproc`
    starts. If another rank ends while this one needs it, every rank that is left names it."""
    launch, words = read_launch(), sys.argv[1:] if argv is None else argv
    with naming_lost(launch):
        try:
            parsed = read(words)
            parsed.check(find_world_size(parsed.parallel.nproc, launch))
            if launch.rank == 0:
                check_outputs(parsed.output)
            parsed = with_local_models(parsed)
            run_on_ranks(parsed.parallel.nproc, words, launch, partial(check_heads, parsed))
            watch_ranks(launch)
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


def run_on_ranks(
    nproc: int | None,
    words: Sequence[str],
    launch: Launch,
    check: Callable[[int], None] | None = None,
) -> None:
    """If `--nproc` asks for ranks that do not run yet, start this command as these ranks and exit
    with their exit code. Otherwise return. `check` refuses a number of ranks before they start, by
    raising ValueError."""
    if not is_other_start(nproc, launch):
        return
    name = sys.argv[0]
    program = ["-m", *name.split()] if name.startswith("magicdec ") else [name]
    assert nproc is not None, "it was asked for"
    if check is not None:
        check(nproc)
    sys.exit(start_ranks(nproc, [*program, *words]))


def check_outputs(output: OutputSection) -> None:
    """Raises ValueError if the files of the run cannot be written."""
    tokens = None if output.save_tokens is None else Path(output.save_tokens)
    check_files({"--out": Path(output.results), "--save_tokens": tokens})
    if output.profile is not None:
        check_directory("--profile", Path(output.profile))


def announce_backend(config: ResolvedConfig, launch: Launch) -> None:
    """Tell the user when `auto` had to take slower kernels or steps, and when kernels run in
    Triton's interpreter."""
    chosen = [
        ("--attention", config.attention.backend_choice),
        ("--elementwise", config.model.elementwise_choice),
        ("--native_steps", config.model.native_steps_choice),
    ]
    if config.draft is not None:
        chosen.append(("draft: --native_steps", config.draft.native_steps_choice))
    for flag, choice in chosen if launch.rank == 0 else ():
        if choice.how is How.SECOND_BEST:
            print(f"{flag} {choice.why}", file=sys.stderr, flush=True)
        if choice.is_interpreted:
            print(f"{flag} {choice.name}: {choice.why}", file=sys.stderr, flush=True)


def refuse(error: ValueError, launch: Launch) -> NoReturn:
    """Say why on rank 0, in one line, and exit with code 2. Under torchrun the line is left to
    torchrun, which prints it at the end of what it says. The other ranks wait until they are ended,
    so that the line appears once. A rank that is not ended was the only one to refuse (its host
    lacks a file, say), so it reports its line itself."""
    stop_watching()
    if launch.rank != 0:
        time.sleep(LEADER_FIRST_S)
    line = f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}"
    if not report_error(line):
        print(line, file=sys.stderr, flush=True)
    sys.exit(2)
