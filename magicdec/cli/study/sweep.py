"""`magicdec sweep`: many runs in one command, from a study file or from flags with several values.

    magicdec sweep STUDY.toml
    magicdec sweep run --draft self ngram --B 1 4 8 --prefix_len 4096 16384 --gamma 2 4 auto
    magicdec sweep STUDY.toml --nproc 2

Owns the flags of the sweep itself; `flags.py` has those of its runs, `magicdec/study/` runs them.
Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from magicdec.cli.flags import refuse, run_on_ranks
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.study.flags import NAMES, Flags
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
)


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
