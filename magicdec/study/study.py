"""Study: many runs that one command measures, as the user wrote them: grids of flags and how to
work through them. Imports no torch.

Owns what a study file may hold. Must not know any flag of a driver.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_CELLS = 10_000  # unless the user confirms more


@dataclass(frozen=True)
class Grid:
    """Every combination of the values of some flags, under one driver. `where` names it in
    messages. `axes` has the values of each flag, by its name without dashes. `shared` flags are
    those of all grids, and need not do anything in this one."""

    where: str
    driver: str
    axes: dict[str, list[Any]]
    shared: frozenset[str] = frozenset()

    @property
    def num_cells(self) -> int:
        number = 1
        for values in self.axes.values():
            number *= len(values)
        return number

    def combinations(self) -> Iterator[dict[str, Any]]:
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))


@dataclass(frozen=True)
class Settings:
    """How a study is worked through."""

    out: str = "results/runs.jsonl"
    order_seed: int = 0
    repeats: int = 1
    baseline_every: int = 10
    time_budget: float | None = None  # minutes

    def check(self) -> None:
        """Raise ValueError, one line naming the flag, for a value out of its range."""
        for name, least in (("order_seed", 0), ("repeats", 1), ("baseline_every", 0)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"--{name} {value} is too small; it must be at least {least}")
        if self.time_budget is not None and not self.time_budget > 0:
            raise ValueError(f"--time_budget {self.time_budget} must be more than 0 minutes")


@dataclass(frozen=True)
class Study:
    grids: tuple[Grid, ...]
    settings: Settings = Settings()

    @property
    def num_cells(self) -> int:
        """Cells that are written; equal ones are counted each time."""
        return sum(grid.num_cells for grid in self.grids)


def read_study(path: Path, drivers: Iterable[str]) -> Study:
    """The study of a TOML file. Raises ValueError, one line naming the file and the key."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a study file (TOML)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML ({error})") from None
    common, grids = raw.pop("common", {}), raw.pop("grid", [])
    settings = _settings(path, raw)
    if not isinstance(common, dict):
        raise ValueError(f"{path}: common must be a table of flags, [common]")
    if not isinstance(grids, list) or not all(isinstance(grid, dict) for grid in grids):
        raise ValueError(f"{path}: grid must be an array of tables, [[grid]]")
    if not grids:
        raise ValueError(f"{path}: it has no [[grid]]; give at least one, with its driver")
    found = [
        _grid(f"{path}: grid {number}", common, grid, tuple(drivers))
        for number, grid in enumerate(grids, 1)
    ]
    return Study(tuple(found), settings)


def _settings(path: Path, raw: dict[str, Any]) -> Settings:
    kinds: dict[str, type | tuple[type, ...]] = {"out": str, "time_budget": (int, float)}
    names = [each.name for each in dataclasses.fields(Settings)]
    for key, value in raw.items():
        if key not in names:
            raise ValueError(f"{path}: {unknown('key', key, [*names, 'common', 'grid'])}")
        if not isinstance(value, kinds.get(key, int)) or isinstance(value, bool):
            raise ValueError(f"{path}: {key} = {value!r} has another type")
    settings = Settings(**raw)
    try:
        settings.check()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return settings


def _grid(
    where: str, common: dict[str, Any], own: dict[str, Any], drivers: tuple[str, ...]
) -> Grid:
    axes = common | own
    driver = axes.pop("driver", None)
    if driver not in drivers:
        raise ValueError(f"{where}: driver = {driver!r}; choose from {', '.join(drivers)}")
    values = {key: value if isinstance(value, list) else [value] for key, value in axes.items()}
    return checked(Grid(where, driver, values, frozenset(common.keys() - own.keys())))


def checked(grid: Grid) -> Grid:
    """Raises ValueError for a grid without cells, or with a value twice."""
    for key, values in grid.axes.items():
        if not values:
            raise ValueError(f"{grid.where}: {key} is empty; give at least one value")
        twice = next((v for n, v in enumerate(values) if v in values[:n]), None)
        if twice is not None:
            raise ValueError(f"{grid.where}: {key} names {twice} twice; name each value once")
    return grid


def unknown(what: str, key: str, known: Iterable[str]) -> str:
    """The message about a name that does not exist."""
    names = sorted(known)
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(names)}"
    return f"unknown {what} {key}; {hint}"
