"""StudyPlan: which cells of a study run, in which order, and what stays in memory between them. All
ranks agree on it before anything is loaded.

Cells with one target run one after the other, so that it is loaded once; among these, cells with
the same prompts, so that they are prefilled once. The order of targets, of prompts, and of the
cells with the same prompts is random, from the study's seed: no setting is always measured early or
late. The cheapest baseline of each target is the first and the last of its cells, and runs again
in between.

Owns the agreement. The leading rank alone reads the results file.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch, exchange_texts
from magicdec.memory.check import needed
from magicdec.model.checkpoint.source import ModelSource
from magicdec.names import BASELINE
from magicdec.records.record import RunRecord
from magicdec.run.resident import Room
from magicdec.setup.prepare import Known
from magicdec.study.cells import (
    Cell,
    baseline_of,
    config_key,
    make_cell,
    make_cells,
    records_of,
)
from magicdec.study.study import Settings


@dataclass(frozen=True)
class Stay:
    """What stays in memory while a cell runs: the models, and the room of its caches."""

    sources: tuple[ModelSource, ...]
    room: Room


@dataclass(frozen=True)
class StudyPlan:
    """`order` has every run of the study, those included that are done. `todo` are their numbers
    that are left."""

    order: list[Cell]
    todo: list[int]
    stays: dict[str, Stay]  # by the key of the cell


def make_plan(
    configs: Iterable[RunConfig], settings: Settings, launch: Launch, retries_failed: bool
) -> StudyPlan:
    """Raises ValueError as `make_cells` does, and for a results file that cannot be read."""
    order = in_order(make_cells(configs, launch), launch, settings)
    known = list({cell.key: cell for cell in order}.values())
    stays = make_stays(known)
    todo: list[int] = []
    if launch.rank == 0:
        todo = left(order, records_of(Path(settings.out), known), retries_failed)
    mine = {
        "refusals": {cell.key: cell.refusal for cell in known},
        "kept": [key for key, stay in stays.items() if stay.room.is_kept],
        "todo": todo,
    }
    facts = [json.loads(text) for text in exchange_texts(launch, json.dumps(mine))]
    agreed = {}
    for cell in known:
        refusal = next(filter(None, (of_rank["refusals"][cell.key] for of_rank in facts)), "")
        agreed[cell.key] = replace(cell, prepared=None, refusal=refusal) if refusal else cell
    kept_keys = set.intersection(*(set(of_rank["kept"]) for of_rank in facts))
    stays = {
        key: replace(stay, room=replace(stay.room, is_kept=key in kept_keys))
        for key, stay in stays.items()
    }
    return StudyPlan([agreed[cell.key] for cell in order], facts[0]["todo"], stays)


def in_order(cells: Sequence[Cell], launch: Launch, settings: Settings) -> list[Cell]:
    """Every cell as often as it is to be repeated, in as many rounds. Baselines are repeated in
    between, whether they are among the cells or not."""
    references = make_references(cells, launch)
    rng, order = random.Random(settings.order_seed), list[Cell]()
    for _ in range(settings.repeats):
        models = grouped(cells, lambda c: c.model_key)
        rng.shuffle(models)
        for of_model in models:
            groups = grouped(of_model, lambda c: c.prompts_key)
            rng.shuffle(groups)
            for group in groups:
                rng.shuffle(group)
            order += with_reference(groups, cheapest(references, of_model[0]), settings)
    return order


def cheapest(references: Sequence[Cell], cell: Cell) -> Cell | None:
    """The baseline with the least work that has the same target as `cell`."""
    fitting = [r for r in references if r.model_key == cell.model_key and r.prepared is not None]
    return min(fitting, key=lambda r: r.work, default=None)


def with_reference(
    groups: Sequence[Sequence[Cell]], reference: Cell | None, settings: Settings
) -> list[Cell]:
    """The cells of the groups with the reference, if there is one, at the beginning, at the end,
    and after at least `baseline_every` cells (0: never): between groups, or within a group that has
    its prompts."""
    every = settings.baseline_every
    if reference is None or not every:
        return [cell for group in groups for cell in group]
    order, since = [reference], 0
    for group in groups:
        others = [cell for cell in group if cell.key != reference.key]
        for number, cell in enumerate(others):
            if since >= every and (not number or cell.prompts_key == reference.prompts_key):
                order.append(reference)
                since = 0
            order.append(cell)
            since += 1
    return [*order, reference] if since else order


def grouped(cells: Iterable[Cell], key: Callable[[Cell], object]) -> list[list[Cell]]:
    groups: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(repr(key(cell)), []).append(cell)
    return list(groups.values())


def make_references(cells: Sequence[Cell], launch: Launch) -> list[Cell]:
    """The baselines of the study; for a target without any, that of its cheapest cell."""
    known = Known()
    baselines = [c for c in cells if c.found.config.decoding.strategy == BASELINE]
    for of_model in grouped(cells, lambda c: c.model_key):
        if cheapest(baselines, of_model[0]) is None:
            cell = cheapest(of_model, of_model[0])
            if cell is not None:
                baselines.append(
                    make_cell(baseline_of(cell.found.config.run_config), launch, known)
                )
    return baselines


def left(order: Sequence[Cell], records: Sequence[RunRecord], retries_failed: bool) -> list[int]:
    """The numbers of the runs that have not run to their end. Of equal ones, the first count as
    done. A failure is an end, unless it is to be tried again."""
    unended = {"interrupted", "failed"} if retries_failed else {"interrupted"}
    done = Counter(config_key(r.config) for r in records if r.status not in unended)
    numbers = []
    for number, cell in enumerate(order):
        done[cell.key] -= 1
        if done[cell.key] < 0:
            numbers.append(number)
    return numbers


def make_stays(cells: Sequence[Cell]) -> dict[str, Stay]:
    """What stays while each cell runs, by the key of the cell. All models of the cells with one
    target stay, and every batch keeps its cache, where the memory has room for that. Otherwise the
    models of the cell alone do, and batches take turns in one cache."""
    stays = {}
    for of_model in grouped([cell for cell in cells if cell.prepared], lambda c: c.model_key):
        sources = {id(s): s for c in of_model for s in (c.found.source, c.found.draft) if s}
        drafts = {id(c.found.draft): c.prepared.plan.draft_weights for c in of_model if c.prepared}
        for group in grouped(of_model, lambda c: c.prompts_key):
            configs = [cell.found.config for cell in group]
            is_kept = len(group) > 1 and all(fits(c, True, drafts) for c in group)
            room = Room.of(configs, is_kept)
            for cell in group:
                has_room = fits(cell, is_kept, drafts)
                own = [s for s in (cell.found.source, cell.found.draft) if s]
                staying = tuple(sources.values() if has_room else own)
                stays[cell.key] = Stay(staying, room)
    return stays


def fits(cell: Cell, keeps_batches: bool, draft_weights: dict[int, int]) -> bool:
    """Whether a cell fits in the free memory beside all drafts of the study, with a cache for each
    batch or one for all."""
    assert cell.prepared is not None, "only cells that can run are planned"
    free, config, w = cell.prepared.free, cell.found.config, cell.found.config.workload
    if free is None:
        return True
    if keeps_batches:
        rows = w.batch_size * w.num_batches
        config = replace(config, workload=replace(w, batch_size=rows))
    others = sum(draft_weights.values()) - cell.prepared.plan.draft_weights
    return needed(config, cell.found.models, cell.found.launch).total + others <= free
