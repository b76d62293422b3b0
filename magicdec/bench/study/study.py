"""Study: a study file's grids of flags, and how to work through them. It knows no flag of a driver.
Imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from magicdec.config.sections import OutputSection
from magicdec.config.setting import declared, same, setting
from magicdec.config.toml_file import TomlFile
from magicdec.names import most_like
from magicdec.systems.options import ServeOptions

MOST_CELLS = 10_000  # unless the user confirms more
# What took the place of the jobs that a sweep submitted itself.
ARRAY_JOB = "an array job of the cluster runs a study, each task `magicdec sweep STUDY --part I/N`"


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
    repeats: int = same(ServeOptions, "repeats")


@dataclass(frozen=True)
class Study:
    grids: tuple[FlagGrid, ...]
    settings: Settings = Settings()

    @property
    def num_cells(self) -> int:
        return sum(grid.num_cells for grid in self.grids)


def read_study(path: Path, drivers: Iterable[str]) -> Study:
    """The study of a TOML file. Raises ValueError, one line naming the file and the key."""
    file = TomlFile("", path)
    raw = dict(file.values)
    common = raw.pop("common", {})
    grids = raw.pop("grid", [])
    if "slurm" in raw:
        raise ValueError(f"{file.place_of('slurm')}: [slurm] is gone: {ARRAY_JOB}")
    settings = _read(file, raw, ("common", "grid"))
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
    )


def _read(file: TomlFile, raw: dict[str, Any], others: Sequence[str]) -> Settings:
    settings = declared(Settings)
    values = {}
    for key, value in raw.items():
        if key not in settings:
            hint = most_like(key, [*settings, *others])
            raise ValueError(f"{file.place_of(key)}: unknown key {key}; {hint}")
        try:
            values[key] = settings[key].read(value)
        except ValueError as error:
            raise ValueError(f"{file.place_of(key)}: {error}") from None
    return Settings(**values)


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
