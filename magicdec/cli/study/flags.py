"""The flags of a driver as keys of a study: from the values of a cell to the config of its run.

Owns which flags a cell may have, and what a flag is that does nothing in some cells of a grid. Must
not know how a study is written or run.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from magicdec.cli.checkpoints.hub_models import with_local_models
from magicdec.cli.drivers import DRIVERS
from magicdec.cli.flags import build_parser, read_sections
from magicdec.cli.front import run
from magicdec.cli.parsing.ignored import why_ignored
from magicdec.cli.parsing.parser import Parser
from magicdec.config.run_config import RunConfig
from magicdec.study.study import Grid, unknown

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
