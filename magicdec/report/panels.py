"""Which points belong together in a figure. Runs differ in many settings; a panel shows those that
are equal in all settings but the ones that the figure is about."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import TypeVar

from magicdec.report.listing import LABELS
from magicdec.report.point import Point, Setting

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
UNITS = {"prefix_len": " tokens", "gen_len": " tokens"}


@dataclass(frozen=True)
class Value:
    """A number with the ends of what is drawn around it: its interval, or the range of repeated
    runs."""

    middle: float
    low: float
    high: float
    runs: int


@dataclass
class Panel:
    """Points that are equal in the settings `held`."""

    held: dict[str, Setting]
    points: list[Point] = field(default_factory=list)

    def series(self, name: Callable[[Point], K]) -> dict[K, list[Point]]:
        """The points by series, in the order of their names."""
        groups = group(self.points, name)
        return {key: groups[key] for key in sorted(groups, key=str)}


def group(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def make_panels(points: Sequence[Point], held: Sequence[str]) -> list[Panel]:
    """One panel for each combination of the settings `held`."""
    groups = group(points, lambda point: tuple(point.settings[key] for key in held))
    return [Panel(dict(zip(held, values, strict=True)), of) for values, of in groups.items()]


def richest(panels: list[Panel], places: Callable[[Point], Hashable], limit: int) -> list[Panel]:
    """At most `limit` panels: those whose points lie in the most different places, then those with
    the most points. They are ordered by their settings."""
    ranked = sorted(panels, key=lambda p: (-len(set(map(places, p.points))), -len(p.points)))
    return sorted(ranked[:limit], key=lambda panel: [rank(value) for value in panel.held.values()])


def rank(value: Setting) -> tuple[bool, float, str]:
    """Orders numbers before text, and numbers by size."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)  # type: ignore[arg-type]


def choose(series: Sequence[Iterable[str]], limit: int) -> list[str]:
    """At most `limit` series of several panels, in turn one of each, so that no panel is left
    empty."""
    turns = chain.from_iterable(zip_longest(*series))
    return list(dict.fromkeys(name for name in turns if name is not None))[:limit]


def varying(panels: Sequence[Panel]) -> list[str]:
    """The held settings that differ between panels."""
    keys = panels[0].held if panels else {}
    return [key for key in keys if len({panel.held[key] for panel in panels}) > 1]


def title(panel: Panel, keys: Iterable[str]) -> str:
    return ", ".join(said(key, panel.held[key]) for key in keys if panel.held[key] is not None)


def said(key: str, value: Setting) -> str:
    """A setting in words, such as `prefix 2048 tokens`."""
    name = LABELS.get(key, key).replace("_", " ")
    if key in ("model", "kv_policy", "device", "dtype"):
        return str(value)
    return f"{name} {value}{UNITS.get(key, '')}"


def common(panels: Sequence[Panel]) -> str:
    """The held settings that are the same in every panel, in words; empty if there are none."""
    keys = [key for key in (panels[0].held if panels else {}) if key not in varying(panels)]
    return title(panels[0], keys) if panels else ""


def summarize(values: Sequence[tuple[float, list[float] | None]]) -> Value:
    """The median of repeated runs with their range; one run alone with its interval, if it has
    one."""
    middles = [middle for middle, _ in values]
    middle = statistics.median(middles)
    if len(values) == 1 and values[0][1]:
        low, high = values[0][1]
        return Value(middle, low, high, 1)
    return Value(middle, min(middles), max(middles), len(values))
