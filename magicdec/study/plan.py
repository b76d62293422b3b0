"""StudyPlan: which cells of a study run, in which order, and what stays in memory between them. All
ranks agree on it before anything is loaded.

Owns the agreement. The leading rank alone reads the results file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch, exchange_texts
from magicdec.memory.check import needed
from magicdec.model.checkpoint.source import ModelSource
from magicdec.names import BASELINE
from magicdec.run.resident import Room
from magicdec.setup.prepare import Known
from magicdec.study.cells import (
    Cell,
    baseline_of,
    count_done,
    make_cell,
    make_cells,
    records_of,
)
from magicdec.study.order import cheapest, grouped, in_order
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

    @property
    def cells(self) -> list[Cell]:
        return list({cell.key: cell for cell in self.order}.values())


def make_plan(
    asked: Iterable[RunConfig], settings: Settings, launch: Launch, retries_failed: bool
) -> StudyPlan:
    """Raises ValueError as `make_cells` does, and for a results file that cannot be read."""
    cells = make_cells(asked, launch)
    references = make_references(cells, launch)
    every, seed = settings.baseline_every, settings.order_seed
    order = in_order(cells, references, seed, settings.repeats, every)
    known = list({cell.key: cell for cell in order}.values())
    stays = make_stays(known)
    todo: list[int] = []
    if launch.rank == 0:
        records = records_of(Path(settings.out), known)
        todo = left(order, count_done(records, retries_failed))
    mine = {
        "refusals": {cell.key: cell.refusal for cell in known},
        "kept": [key for key, stay in stays.items() if stay.room.is_kept],
        "todo": todo,
    }
    said = [json.loads(text) for text in exchange_texts(launch, json.dumps(mine))]
    agreed = {}
    for cell in known:
        refusal = next(filter(None, (s["refusals"][cell.key] for s in said)), "")
        agreed[cell.key] = replace(
            cell, prepared=None if refusal else cell.prepared, refusal=refusal
        )
    kept = set.intersection(*(set(s["kept"]) for s in said))
    stays = {
        key: replace(stay, room=replace(stay.room, is_kept=key in kept))
        for key, stay in stays.items()
    }
    return StudyPlan([agreed[cell.key] for cell in order], said[0]["todo"], stays)


def make_references(cells: Sequence[Cell], launch: Launch) -> list[Cell]:
    """The baselines of the study; for a target without any, that of its cheapest cell."""
    known = Known()
    found = [c for c in cells if c.found.config.decoding.strategy == BASELINE]
    for of_model in grouped(cells, lambda c: c.model_key):
        if cheapest(found, of_model[0]) is None:
            cell = cheapest(of_model, of_model[0])
            if cell is not None:
                found.append(make_cell(baseline_of(cell.found.config.asked), launch, known))
    return found


def left(order: Sequence[Cell], done: Counter[str]) -> list[int]:
    """The numbers of the runs that are not done. Of equal ones, the first count as done."""
    remaining, found = done.copy(), []
    for number, cell in enumerate(order):
        if remaining[cell.key] > 0:
            remaining[cell.key] -= 1
        else:
            found.append(number)
    return found


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
