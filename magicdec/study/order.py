"""The order in which the cells of a study run.

Cells with one target run one after the other, so that it is loaded once; among these, cells with
the same prompts, so that they are prefilled once. The order of targets, of prompts, and of the
cells with the same prompts is random, from the study's seed: no setting is always measured early or
late. The cheapest baseline of each target is the first and the last of its cells, and runs again
in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from magicdec.study.cells import Cell

T = TypeVar("T")


def in_order(
    cells: Sequence[Cell], references: Sequence[Cell], seed: int, repeats: int, every: int
) -> list[Cell]:
    """Every cell `repeats` times, in as many rounds. `references` are baselines that may be
    repeated, whether they are among the cells or not. `every`: cells between two of them, if the
    prompts in the cache allow it; 0 for none."""
    rng, found = random.Random(seed), []
    for _ in range(repeats):
        for of_model in shuffled(grouped(cells, lambda c: c.model_key), rng):
            groups = shuffled(grouped(of_model, lambda c: c.prompts_key), rng)
            for group in groups:
                rng.shuffle(group)
            reference = cheapest(references, of_model[0])
            if every and reference is not None:
                found += with_reference(groups, reference, every)
            else:
                found += [cell for group in groups for cell in group]
    return found


def cheapest(references: Sequence[Cell], cell: Cell) -> Cell | None:
    """The baseline with the least work that has the same target as `cell`."""
    fitting = [r for r in references if r.model_key == cell.model_key and r.prepared is not None]
    return min(fitting, key=lambda r: r.work, default=None)


def with_reference(groups: Sequence[Sequence[Cell]], reference: Cell, every: int) -> list[Cell]:
    """The cells of the groups with the reference at the beginning, at the end, and after at least
    `every` cells: between groups, or within a group that has its prompts."""
    found, since = [reference], 0
    for group in groups:
        if since >= every:
            found.append(reference)
            since = 0
        for cell in group:
            if cell.key == reference.key:
                continue
            if since >= every and cell.prompts_key == reference.prompts_key:
                found.append(reference)
                since = 0
            found.append(cell)
            since += 1
    return [*found, reference] if since else found


def grouped(cells: Iterable[Cell], key: Callable[[Cell], object]) -> list[list[Cell]]:
    groups: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(repr(key(cell)), []).append(cell)
    return list(groups.values())


def shuffled(values: list[T], rng: random.Random) -> list[T]:
    rng.shuffle(values)
    return values
