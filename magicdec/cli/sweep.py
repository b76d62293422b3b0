"""`magicdec sweep`: many runs in one command, from a study file or from flags with several values.
`bench/study/` runs them. Heavy imports happen after the flags are read.

    magicdec sweep STUDY.toml --nproc 2
    magicdec sweep run --draft self ngram --B 1 4 8 --prefix_len 4096 16384 --gamma 2 4 auto
    magicdec sweep STUDY.toml --part $SLURM_ARRAY_TASK_ID/8     # in each of 8 tasks of a job
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from magicdec.bench.study.study import (
    ARRAY_JOB,
    MOST_CELLS,
    FlagGrid,
    Settings,
    Study,
    checked,
    read_study,
)
from magicdec.cli.drivers import DRIVERS
from magicdec.cli.flags import NO_RECORD, ended_at_once, refuse, run_on_ranks, say_interrupted
from magicdec.cli.parsing.ignored import why_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import ParallelSection
from magicdec.config.setting import declared, same, setting
from magicdec.distributed.groups import read_launch
from magicdec.distributed.ranks import find_world_size
from magicdec.distributed.watching.watch import naming_lost
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.names import most_like
from magicdec.output.writing import check_record_file

NAMES = tuple(DRIVERS)
# Flags that are for one run, or for all ranks of the command.
ONE_RUN_FLAGS = ("save_tokens", "printoutput", "verbose", "out", "nproc", "config")


class Flags:
    def __init__(self, driver: str) -> None:
        self.driver = DRIVERS[driver]
        self.parser = self.driver.build_parser()
        self.names = self.parser.names

    def name_of(self, where: str, key: str) -> str:
        if key in ONE_RUN_FLAGS:
            raise ValueError(f"{where}: {key} is for one run, not for the runs of a study")
        if (place := self.parser.gone.get(f"--{key}")) is not None:
            raise ValueError(f"{where}: {key} is gone: {place}")
        if key not in self.names:
            hint = most_like(key, sorted(self.names.keys() - set(ONE_RUN_FLAGS)))
            raise ValueError(f"{where}: unknown flag {key}; {hint}")
        return self.names[key]

    def configs(self, grid: FlagGrid, world_size: int) -> Iterator[RunConfig]:
        """The config of each cell. A flag that does nothing in a cell keeps its default, so that
        cells which differ in nothing else are one. Raises ValueError, naming the grid, for a flag
        that does nothing in any cell, and for errors of any model."""
        names = [self.name_of(grid.place_of(key), key) for key in grid.axes]
        useless: dict[str, str] | None = None
        for values in grid.combinations():
            try:
                config, ignored = self.config(values)
                config.check(world_size)
            except ValueError as error:
                raise ValueError(f"{grid.where}: {error}") from None
            reasons = ignored if useless is None else useless
            useless = {name: why for name, why in reasons.items() if name in ignored}
            yield config
        for key, name in zip(grid.axes, names, strict=True):
            if useless and name in useless and key not in grid.shared:
                raise ValueError(f"{grid.place_of(key)}: {key} does nothing here: {useless[name]}")

    def config(self, values: dict[str, Any]) -> tuple[RunConfig, dict[str, str]]:
        """The config with these values, and reasons for those that it ignores. Raises ValueError as
        the driver does."""
        used = dict(values)
        config = self.driver.config_of(self.parser.read([], used))
        ignored = {}
        for key in values:
            name = self.names[key]
            reason = why_ignored(config, name)
            if reason is not None:
                ignored[name] = reason
                del used[key]
        if ignored:
            config = self.driver.config_of(self.parser.read([], used))
        return with_local_models(config), ignored


def main() -> NoReturn:
    """Runs what is left of the study on all ranks; the first prints and writes."""
    launch = read_launch()
    try:
        with ended_at_once(launch):
            flags, study = parse(sys.argv[1:])
        configs = list(make_configs(study, find_world_size(flags.nproc, launch)))
        if launch.rank == 0:
            check_record_file("--out", Path(study.settings.out))
        kept = f"the same command goes on with the runs that are not in {study.settings.out}"
        run_on_ranks(flags.nproc, sys.argv[1:], launch, kept=kept)
        from magicdec.bench.study.plan import make_plan, part_of

        if flags.part is not None:
            configs = part_of(configs, *numbers_of(flags.part), study.settings.order_seed)
        plan = make_plan(configs, study.settings, launch, flags.retry_failed)
    except ValueError as error:
        refuse(error, launch)
    except KeyboardInterrupt:
        sys.exit(say_interrupted(launch, NO_RECORD))
    from magicdec.bench.study.progress import print_order
    from magicdec.bench.study.sweep import conclude

    if flags.dry_run:
        if launch.rank == 0:
            print_order(plan)
        sys.exit(0)
    with naming_lost(launch):
        sys.exit(conclude(plan, launch))


def read_part(text: str) -> str:
    """Raises ValueError for a text that is no I/N with I from 1 to N."""
    if re.fullmatch(r"\d{1,9}/\d{1,9}", text):
        number, count = numbers_of(text)
        if 1 <= number <= count:
            return text
    raise ValueError(f"{text} is no part; give I/N with I from 1 to N, such as 1/8 to 8/8")


def numbers_of(part: str) -> tuple[int, int]:
    number, _, count = part.partition("/")
    return int(number), int(count)


def file_of(out: Path, part: str) -> Path:
    """The results of a part, to which no other part writes."""
    number, count = numbers_of(part)
    return out.with_name(f"{out.stem}.{number}-of-{count}{out.suffix}")


@dataclass(frozen=True)
class SweepFlags(Settings):
    study: tuple[str, ...] = setting(
        (),
        f"A study file, or drivers ({', '.join(NAMES)}) followed by their flags with one or more "
        "values each.",
        "study",
        metavar="STUDY.toml",
        can_be_empty=True,
    )
    nproc: int | None = same(ParallelSection, "nproc")
    retry_failed: bool = setting(False, "Run again what has failed.")
    part: str | None = setting(
        None,
        "Run one of N equal parts of the study alone, as a task of an array job does. Its records "
        "go to a file of its own beside --out, such as runs.1-of-8.jsonl for 1/8.",
        metavar="I/N",
        parse=read_part,
    )
    dry_run: bool = setting(False, "Print the runs in their order, and run nothing.")
    yes: bool = setting(False, f"Allow more than {MOST_CELLS} runs.")


def build_parser() -> Parser:
    return Parser(
        "Run every combination of several values of any flags, one record each. A run whose record "
        "is in the results file is not run again.",
        {"sweep": SweepFlags()},
        epilog=f"Any flag of {', '.join(NAMES)} takes several values.",
        gone=dict.fromkeys(("--executor", "--print_sbatch", "--only"), ARRAY_JOB),
    )


def parse(argv: Sequence[str]) -> tuple[SweepFlags, Study]:
    """The sweep's own flags, and the study. Raises ValueError, one line naming the flag or the file
    and the key."""
    parser = build_parser()
    own, axes = split(argv, [o for action in parser._actions for o in action.option_strings])
    for name in axes:
        parser.refuse_gone(f"--{name}")
    values = parser.read(own)
    flags = values[SweepFlags]
    names = flags.study
    if len(names) == 1 and names[0].endswith(".toml"):
        if axes:
            raise ValueError(f"--{next(iter(axes))} belongs into {names[0]}, beside its grids")
        study = read_study(Path(names[0]), NAMES)
    else:
        study = Study(tuple(inline_grid(name, axes) for name in names))
    if not study.grids:
        raise ValueError(f"give a study file (.toml), or drivers of {', '.join(NAMES)}")
    typed = {
        name: getattr(flags, name) for name in declared(Settings) if f"sweep.{name}" in values.typed
    }
    settings = dataclasses.replace(study.settings, **typed)
    if flags.part is not None:
        settings = dataclasses.replace(settings, out=str(file_of(Path(settings.out), flags.part)))
    study = dataclasses.replace(study, settings=settings)
    if study.num_cells > MOST_CELLS and not flags.yes:
        raise ValueError(
            f"the study has {study.num_cells} runs, more than {MOST_CELLS}; give --yes to run them"
        )
    return flags, study


def split(argv: Sequence[str], own: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words of the sweep's own flags and first arguments, and the values of other flags by
    their names without dashes."""
    own_words: list[str] = []
    axes: dict[str, list[str]] = {}
    words = own_words
    for word in argv:
        name, equals, value = word.partition("=")
        if not word.startswith("--"):
            words.append(word)
        elif name in own:
            words = own_words
            words.append(word)
        else:
            words = axes.setdefault(name.removeprefix("--"), [])
            if equals:
                words.append(value)
    return own_words, axes


def inline_grid(driver: str, axes: dict[str, list[str]]) -> FlagGrid:
    if Path(driver).is_dir():
        raise ValueError(f"{driver} is a directory; name a study file (.toml)")
    if driver not in NAMES:
        raise ValueError(
            f"{driver} is no study file (.toml) and no driver; choose a driver from "
            f"{', '.join(NAMES)}"
        )
    flags = Flags(driver)
    values: dict[str, list[Any]] = {}
    for key, words in axes.items():
        declaration = flags.parser.settings[flags.name_of(driver, key)]
        if declaration.kind is bool:
            values[key] = [True, *words]  # a switch takes no words; reading it refuses them
        else:
            values[key] = [words] if declaration.is_list else list(words)
    return checked(FlagGrid(driver, driver, values))


def make_configs(study: Study, world_size: int) -> Iterator[RunConfig]:
    """The config of every cell. Raises ValueError, naming the grid, for errors of any model."""
    for grid in study.grids:
        yield from Flags(grid.driver).configs(grid, world_size)
