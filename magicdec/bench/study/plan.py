"""StudyPlan: the cells of a study in their order, and which caches stay in memory. All ranks agree
on it before anything is loaded; the leading rank alone reads the results file.

Cells with one target run one after the other, so that it is loaded once; likewise cells with the
same prompts. Otherwise the order is random, from the study's seed, so that no setting is always
measured early or late.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from magicdec.bench.study.cells import StudyCell, config_key, make_cells, results_in
from magicdec.bench.study.study import Settings
from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch, exchange_texts
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import Status
from magicdec.setup.memory_check import needed
from magicdec.setup.prepare import check_agreement
from magicdec.systems.shared_prefill import CacheDemand

T = TypeVar("T")


@dataclass(frozen=True)
class StudyPlan:
    """A plan: `order` has every run, `todo` the numbers of those that are left."""

    order: list[StudyCell]
    todo: list[int]
    rooms: dict[str, CacheDemand]  # of the caches, by the key of the cell
    results: Path  # to which records are appended


def part_of(
    configs: Iterable[RunConfig], number: int, count: int, order_seed: int
) -> list[RunConfig]:
    """The runs of the part `number`, from 1, of `count` equal parts of a study, by the words that
    the user wrote, since `auto` may differ between machines. Runs with the same prompts come one
    after the other, in a random order of the groups."""
    distinct = [equal[0] for equal in grouped(configs, lambda c: c)]
    groups = grouped(distinct, lambda c: (c.model, c.parallel, c.workload))
    random.Random(order_seed).shuffle(groups)
    runs = [config for group in groups for config in group]
    return runs[len(runs) * (number - 1) // count : len(runs) * number // count]


def make_plan(
    configs: Iterable[RunConfig], settings: Settings, launch: Launch, retries_failed: bool
) -> StudyPlan:
    """The plan. Raises ValueError as `make_cells`, and for an unreadable results file."""
    cells = make_cells(configs, launch)
    results = Path(settings.out)
    for cell in {
        id(other.resolved.source): other for other in cells
    }.values():  # one for each target
        check_agreement(cell.resolved, {"runs of the study": [c.name for c in cells]})
    order = in_order(cells, settings)
    rooms = make_rooms(cells)
    todo: list[int] = []
    if launch.rank == 0:
        todo = left(order, results_in(results), retries_failed)
    mine = {
        "refusals": {cell.key: cell.refusal for cell in cells},
        "kept": [key for key, room in rooms.items() if room.is_kept],
        "todo": todo,
    }
    facts = [json.loads(text) for text in exchange_texts(launch, json.dumps(mine))]
    agreed = {}
    for cell in cells:
        refusal = next(filter(None, (rank_facts["refusals"][cell.key] for rank_facts in facts)), "")
        agreed[cell.key] = replace(cell, prepared=None, refusal=refusal) if refusal else cell
    kept_keys = set.intersection(*(set(rank_facts["kept"]) for rank_facts in facts))
    rooms = {key: replace(room, is_kept=key in kept_keys) for key, room in rooms.items()}
    return StudyPlan([agreed[cell.key] for cell in order], facts[0]["todo"], rooms, results)


def in_order(cells: Sequence[StudyCell], settings: Settings) -> list[StudyCell]:
    rng = random.Random(settings.order_seed)
    order = list[StudyCell]()
    for _ in range(settings.repeats):
        models = grouped(cells, lambda c: c.model_key)
        rng.shuffle(models)
        for model_cells in models:
            groups = grouped(model_cells, lambda c: c.prompts_key)
            rng.shuffle(groups)
            for group in groups:
                rng.shuffle(group)
                order += group
    return order


def grouped(cells: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    groups: dict[Hashable, list[T]] = {}
    for cell in cells:
        groups.setdefault(repr(key(cell)), []).append(cell)
    return list(groups.values())


def left(
    order: Sequence[StudyCell], records: Sequence[PassRecord], retries_failed: bool
) -> list[int]:
    """The numbers of runs that have not ended; of equal ones, the first count as done."""
    done = Counter(config_key(r.config) for r in records if is_done(r, retries_failed))
    numbers = []
    for number, cell in enumerate(order):
        done[cell.key] -= 1
        if done[cell.key] < 0:
            numbers.append(number)
    return numbers


def is_done(record: PassRecord, retries_failed: bool) -> bool:
    """Whether the run has ended. A failure is an end, unless it is to be tried again."""
    return not (retries_failed and record.status == Status.FAILED)


def make_rooms(cells: Sequence[StudyCell]) -> dict[str, CacheDemand]:
    """The caches of each cell, by its key. Every batch keeps its own where memory allows."""
    rooms = dict[str, CacheDemand]()
    able = [cell for cell in cells if cell.prepared is not None]
    for group in grouped(able, lambda c: (c.model_key, c.prompts_key)):
        is_kept = len(group) > 1 and all(has_room(cell) for cell in group)
        room = CacheDemand.of([cell.resolved.config for cell in group], is_kept)
        rooms |= dict.fromkeys((cell.key for cell in group), room)
    return rooms


def has_room(cell: StudyCell) -> bool:
    assert cell.prepared is not None, "only cells that can run are planned"
    free = cell.prepared.free
    config = cell.resolved.config
    asked = config.capacity
    if free is None:
        return True
    rows = asked.rows * config.workload.num_batches
    config = replace(config, capacity=replace(asked, rows=rows))
    return needed(config, cell.resolved.models, cell.resolved.launch).total <= free
