"""Study: a study file's grids of flags, and how to work through them. It knows no flag of a driver.
Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from magicdec.config.sections import OutputSection
from magicdec.config.setting import declared, same, setting
from magicdec.config.toml_file import TomlFile
from magicdec.names import most_like

MOST_CELLS = 10_000  # unless the user confirms more
S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class FlagGrid:
    """Every combination of the values of some flags, under one driver. `where` names the grid in
    messages. `axes` has values by a flag's name without dashes. `shared` flags are those of all
    grids, and need not do anything in this one. `places` are the flags' lines in a file."""

    where: str
    driver: str
    axes: dict[str, list[Any]]
    shared: frozenset[str] = frozenset()
    places: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, key: str) -> str:
        return self.places.get(key, self.where)

    @property
    def num_cells(self) -> int:
        return math.prod(map(len, self.axes.values()))

    def combinations(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))


@dataclass(frozen=True)
class Settings:
    out: str = same(OutputSection, "results")
    order_seed: int = setting(0, "Seed of the order of the runs.", least=0)
    repeats: int = setting(
        1,
        "Times that each run, or each forward, is measured.",
        least=1,
        other_defaults="20 in latency",
    )


@dataclass(frozen=True)
class SlurmOptions:
    """The demands of a study's jobs on Slurm: the table [slurm] of its file."""

    partition: str | None = setting(None, "Partition; Slurm's default if it is not given.")
    account: str | None = setting(None, "Account that is charged.")
    time: int = setting(60, "Minutes after which Slurm ends a job.", least=1)
    nodes: int = setting(1, "Nodes of a job, each with the ranks of --nproc.", least=1)
    gpus_per_node: int | None = setting(None, "GPUs on each node.", least=0)
    cpus_per_task: int | None = setting(None, "CPUs for the ranks of a node.", least=1)
    mem_gb: int | None = setting(None, "Memory on each node, in GiB.", least=1)
    more: tuple[str, ...] = setting(
        (), "Further options of sbatch, such as qos=high or exclusive.", can_be_empty=True
    )
    runs_per_job: int = setting(
        1, "Runs in a job. They share the model and their prompts, as in a study.", least=1
    )
    jobs_at_once: int = setting(256, "Jobs that may run at the same time.", least=1)
    retries: int = setting(3, "Times that a job is submitted again if Slurm ended it.", least=0)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `sbatch` by name, with underscores, without those of `more`."""
        own = ("partition", "account", "time", "nodes", "gpus_per_node", "cpus_per_task")
        values = {name: getattr(self, name) for name in own} | {"ntasks_per_node": 1}
        values["mem"] = None if self.mem_gb is None else f"{self.mem_gb}G"
        return {name: value for name, value in values.items() if value is not None}

    @property
    def more_options(self) -> dict[str, Any]:
        pairs = (each.removeprefix("--").partition("=") for each in self.more)
        return {name: value if equals else True for name, equals, value in pairs}

    @property
    def srun_options(self) -> list[str]:
        """Options that `srun` does not take from its job."""
        return [] if self.cpus_per_task is None else [f"--cpus-per-task={self.cpus_per_task}"]


@dataclass(frozen=True)
class Study:
    grids: tuple[FlagGrid, ...]
    settings: Settings = Settings()
    slurm: SlurmOptions = SlurmOptions()

    @property
    def num_cells(self) -> int:
        return sum(grid.num_cells for grid in self.grids)


def read_study(path: Path, drivers: Iterable[str]) -> Study:
    """The study of a TOML file. Raises ValueError, one line naming the file and the key."""
    file = TomlFile("", path)
    raw = dict(file.values)
    common = raw.pop("common", {})
    grids = raw.pop("grid", [])
    slurm = raw.pop("slurm", {})
    settings = _read(file, Settings, raw, ("common", "grid", "slurm"))
    if not isinstance(slurm, dict):
        raise ValueError(f"{path}: slurm must be a table of options of jobs, [slurm]")
    if not isinstance(common, dict):
        raise ValueError(f"{path}: common must be a table of flags, [common]")
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise ValueError(f"{path}: grid must be an array of tables, [[grid]]")
    if not grids:
        raise ValueError(f"{path}: it has no [[grid]]; give at least one, with its driver")
    return Study(
        tuple(
            _grid(file, number, common, grid, tuple(drivers))
            for number, grid in enumerate(grids, 1)
        ),
        settings,
        _read(file, SlurmOptions, slurm),
    )


def _read(file: TomlFile, section: type[S], raw: dict[str, Any], others: Sequence[str] = ()) -> S:
    settings = declared(section)
    values = {}
    for key, value in raw.items():
        if key not in settings:
            hint = most_like(key, [*settings, *others])
            raise ValueError(f"{file.place_of(key)}: unknown key {key}; {hint}")
        try:
            values[key] = settings[key].read(value)
        except ValueError as error:
            raise ValueError(f"{file.place_of(key)}: {error}") from None
    return section(**values)


def _grid(
    file: TomlFile,
    number: int,
    common: dict[str, Any],
    own: dict[str, Any],
    drivers: tuple[str, ...],
) -> FlagGrid:
    where = f"{file.name}: grid {number}"
    axes = common | own
    driver = axes.pop("driver", None)
    if driver not in drivers:
        raise ValueError(f"{where}: driver = {driver!r}; choose from {', '.join(drivers)}")
    values = {key: value if isinstance(value, list) else [value] for key, value in axes.items()}
    shared = frozenset(common.keys() - own.keys())
    places = {
        key: f"{file.place_of(key, None if key in shared else number)}: grid {number}"
        for key in values
    }
    return checked(FlagGrid(where, driver, values, shared, places))


def checked(grid: FlagGrid) -> FlagGrid:
    """Raises ValueError for a grid without cells, or with a value twice."""
    for key, values in grid.axes.items():
        if not values:
            raise ValueError(f"{grid.place_of(key)}: {key} is empty; give at least one value")
        twice = next((v for n, v in enumerate(values) if v in values[:n]), None)
        if twice is not None:
            where = grid.place_of(key)
            raise ValueError(f"{where}: {key} names {twice} twice; name each value once")
    return grid
