"""`magicdec sweep`: many runs in one command, from a study file or from flags with several values.

    magicdec sweep STUDY.toml
    magicdec sweep run --draft self ngram --B 1 4 8 --prefix_len 4096 16384 --gamma 2 4 auto
    magicdec sweep STUDY.toml --nproc 2

Owns the flags of the sweep itself and how those of a run become keys of a study; `magicdec/study/`
runs them.
Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from magicdec.cli.checkpoints.hub_models import with_local_models
from magicdec.cli.drivers import DRIVERS
from magicdec.cli.flags import build_parser, read_sections, refuse, run_on_ranks
from magicdec.cli.front import run
from magicdec.cli.parsing.ignored import why_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import read_launch
from magicdec.distributed.ranks import find_world_size
from magicdec.distributed.watching.watch import naming_lost
from magicdec.records.writing import check_writable
from magicdec.study.study import (
    MOST_CELLS,
    Grid,
    Settings,
    Study,
    checked,
    read_study,
    unknown,
)

RUN = "run"  # in which the flag --draft says what drafts
NAMES = (RUN, *DRIVERS)
# Flags that are for one run, or for all ranks of the command.
OF_ONE_RUN = ("save_tokens", "printoutput", "profile", "out", "results", "nproc", "config")
OF_HELP = ("h", "help", "help_all")


class Flags:
    """The flags of the driver of that name."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        self._parsers: dict[str, tuple[RunConfig, Parser]] = {}
        _, parser = self._parser({})
        self.actions = {
            option.lstrip("-"): action
            for action in parser._actions
            for option in action.option_strings
        }
        self.names = [name for name in self.actions if name not in (*OF_ONE_RUN, *OF_HELP)]

    def action(self, where: str, key: str) -> argparse.Action:
        if key in OF_ONE_RUN:
            raise ValueError(f"{where}: {key} is for one run, not for the runs of a study")
        if key not in self.names:
            raise ValueError(f"{where}: {unknown('flag', key, self.names)}")
        return self.actions[key]

    def configs(self, grid: Grid, world_size: int) -> Iterator[RunConfig]:
        """The config of each cell. A flag that does nothing in a cell keeps its default there, so
        that cells which differ in nothing else are one. Raises ValueError, naming the grid, for a
        flag that does nothing in any cell, and for what is wrong for every model."""
        dests = [self.action(grid.where, key).dest for key in grid.axes]
        for key, dest in zip(grid.axes, dests, strict=True):
            if dests.count(dest) > 1:
                raise ValueError(f"{grid.where}: {key} is a second spelling of another flag there")
        useless: dict[str, str] | None = None
        for values in grid.combinations():
            try:
                config, ignored = self.config(values)
                config.check(world_size)
            except ValueError as error:
                raise ValueError(f"{grid.where}: {error}") from None
            known = ignored if useless is None else useless
            useless = {dest: why for dest, why in known.items() if dest in ignored}
            yield config
        for key, dest in zip(grid.axes, dests, strict=True):
            if useless and dest in useless and key not in grid.shared:
                raise ValueError(f"{grid.where}: {key} does nothing here: {useless[dest]}")

    def config(self, values: dict[str, Any]) -> tuple[RunConfig, dict[str, str]]:
        """The config with these values, and the flags among them that it ignores, with the
        reasons. Raises ValueError as the driver does."""
        base, parser = self._parser(values)
        words = [word for key, value in values.items() for word in self.words(key, value)]
        parsed, given = parser.read(words)
        found = read_sections(base, parsed)
        ignored = {}
        for dest in sorted(dest for dest in given if "." in dest):
            reason = why_ignored(found, dest)
            if reason is not None:
                ignored[dest] = reason
        for dest in ignored:
            section, _, name = dest.partition(".")
            default = dataclasses.replace(
                getattr(found, section), **{name: getattr(getattr(base, section), name)}
            )
            found = dataclasses.replace(found, **{section: default})
        if found.decoding.drafter != "model":
            found = dataclasses.replace(found, draft=None)
        return with_local_models(found), ignored

    def words(self, key: str, value: Any) -> list[str]:
        """A value as words of a command line."""
        action, flag = self.actions[key], f"--{key}"
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"{flag} is true or false, not {value!r}")
            return [flag] if value else []
        if action.nargs == "+" and isinstance(value, list):
            return [flag, *map(str, value)]
        if not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise ValueError(f"{flag} {value!r} is neither a number nor text")
        return [f"{flag}={value}"]

    def _parser(self, values: dict[str, Any]) -> tuple[RunConfig, Parser]:
        """The config that the flags start from, and their parser."""
        draft = str(values.get("draft", run.SELF)) if self.driver == RUN else ""
        if draft not in self._parsers:
            if self.driver == RUN:
                base = run.config_of_draft(draft)
                self._parsers[draft] = base, run.build_parser(base)
            else:
                base = DRIVERS[self.driver]
                self._parsers[draft] = base, build_parser(base, "")
        return self._parsers[draft]


def main() -> NoReturn:
    """Run what is left of the study on all ranks; the first prints and writes."""
    launch = read_launch()
    try:
        args, study = parse(sys.argv[1:])
        asked = list(make_configs(study, find_world_size(args.nproc, launch)))
        if launch.rank == 0:
            check_writable("--out", Path(study.settings.out))
        run_on_ranks(args.nproc, sys.argv[1:], launch)
        from magicdec.study.plan import make_plan

        plan = make_plan(asked, study.settings, launch, args.retry_failed)
    except ValueError as error:
        refuse(error, launch)
    except KeyboardInterrupt:
        sys.exit(130)
    from magicdec.study.report import conclude, print_order

    if args.dry_run:
        if launch.rank == 0:
            print_order(plan)
        sys.exit(0)
    with naming_lost(launch):
        sys.exit(conclude(plan, study.settings, launch))


def build_own_parser() -> Parser:
    parser = Parser(
        description="Run every combination of several values of any flags, one record each. A run "
        "whose record is in the results file is not run again.",
        epilog=f"Any flag of {', '.join(NAMES)} takes several values.",
    )
    parser.add_argument(
        "study",
        nargs="*",
        metavar="STUDY.toml",
        help=f"A study file, or drivers ({', '.join(NAMES)}) followed by their flags with one or "
        "more values each.",
    )
    add, given = parser.add_argument, Settings()
    add("--out", "--results", metavar="FILE", default=None,
        help=f"The file that records are appended to. Default: the study's own, else "
        f"{given.out}.")  # fmt: skip
    add(
        "--nproc",
        type=int,
        metavar="N",
        help="Ranks to start on this host. Default: those that torchrun started, or one.",
    )
    add("--order_seed", type=int, metavar="N", help="Seed of the order of the runs. Default: 0.")
    add("--repeats", type=int, metavar="N", help="Times that each run is measured. Default: 1.")
    add("--baseline_every", type=int, metavar="N",
        help="Runs after which a baseline of the study is measured again, to see drift of the "
        f"machine. 0 never does so. Default: {given.baseline_every}.")  # fmt: skip
    add("--time_budget", type=float, metavar="MINUTES",
        help="Start no run that is not expected to end within this time. Default: no "
        "limit.")  # fmt: skip
    add("--retry_failed", action="store_true", help="Run again what has failed.")
    add("--dry_run", action="store_true", help="Print the runs in their order, and run nothing.")
    add("--yes", action="store_true", help=f"Allow more than {MOST_CELLS} runs.")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Study]:
    """The sweep's own flags, and the study. Raises ValueError, one line naming the flag or the file
    and the key."""
    parser = build_own_parser()
    own, axes = split(argv, [o for a in parser._actions for o in a.option_strings])
    args = parser.parse_args(own)
    names = args.study
    if len(names) == 1 and names[0].endswith(".toml"):
        if axes:
            raise ValueError(f"--{next(iter(axes))} belongs into {names[0]}, beside its grids")
        study = read_study(Path(names[0]), NAMES)
    else:
        study = Study(tuple(inline_grid(name, axes) for name in names))
    if not study.grids:
        raise ValueError(f"give a study file (.toml), or drivers of {', '.join(NAMES)}")
    named = {each.name for each in dataclasses.fields(Settings)}
    given = {k: v for k, v in vars(args).items() if k in named and v is not None}
    settings = dataclasses.replace(study.settings, **given)
    settings.check()
    if study.num_cells > MOST_CELLS and not args.yes:
        raise ValueError(
            f"the study has {study.num_cells} runs, more than {MOST_CELLS}; give --yes to run them"
        )
    return args, dataclasses.replace(study, settings=settings)


def split(argv: Sequence[str], own: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words of the sweep's own flags and its first arguments, and the values of each other
    flag by its name without dashes."""
    kept: list[str] = []
    axes: dict[str, list[str]] = {}
    place = kept
    for word in argv:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            place.append(word)
        elif name in own:
            place = kept
            place.append(word)
        else:
            place = axes.setdefault(name.removeprefix("--"), [])
            if equals:
                place.append(value)
    return kept, axes


def inline_grid(driver: str, axes: dict[str, list[str]]) -> Grid:
    if driver not in NAMES:
        raise ValueError(f"{driver} is no study file (.toml) and no driver; choose a driver from "
                         f"{', '.join(NAMES)}")  # fmt: skip
    flags = Flags(driver)
    values: dict[str, list[Any]] = {}
    for key, words in axes.items():
        action = flags.action(driver, key)
        if action.nargs == 0:
            values[key] = [True, *words]  # a switch takes no words; Flags.words refuses them
        else:
            values[key] = [words] if action.nargs == "+" else list(words)
    return checked(Grid(driver, driver, values))


def make_configs(study: Study, world_size: int) -> Iterator[RunConfig]:
    """The config of every cell. Raises ValueError, naming the grid, for what is wrong for every
    model."""
    for grid in study.grids:
        yield from Flags(grid.driver).configs(grid, world_size)
