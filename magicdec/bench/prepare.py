"""Prepares what `magicdec serve` measures: the systems of all modes, checked before any process
group starts, and before memory is allocated for more than the few layers that `--layer_split auto`
times.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from magicdec.config.run_config import RunConfig
from magicdec.distributed.groups import Launch
from magicdec.names import load_object
from magicdec.setup.memory_check import MemoryBudget, check_together, find_room
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.setup.prepare import Prepared, SetupCache, check_agreement, find_chat_texts
from magicdec.systems.declaration import Ranks
from magicdec.systems.modes import Pass
from magicdec.systems.options import ServeOptions
from magicdec.systems.system import System


@dataclass(frozen=True)
class PreparedServing:
    """The `systems` of all passes, which serve the same prompts. `memory` says in one line what the
    pass needs that needs most."""

    launch: Launch
    options: ServeOptions
    systems: Sequence[System]
    memory: str

    @property
    def run(self) -> Prepared:
        """The run of the first mode, whose prompts all modes serve."""
        return self.system_of(self.options.passes[0]).run

    def system_of(self, serving_pass: Pass) -> System:
        return next(system for system in self.systems if serving_pass in system.passes)


def prepare(run_config: RunConfig, options: ServeOptions, launch: Launch) -> PreparedServing:
    """Find and check the models, divide them, make the prompts and plan the memory. Raises
    ValueError, one line naming the flag, for errors that a user can correct."""
    cache = SetupCache()
    if options.replay is not None and options.replay.has_chats:
        options = options.with_texts(find_chat_texts(run_config, cache), run_config.workload.seed)
    by_system = dict[Hashable, list[Pass]]()
    # Stages first: they can read a checkpoint of which this host has a part.
    for serving_pass in sorted(
        options.passes, key=lambda serving_pass: serving_pass.ranks is not Ranks.STAGES
    ):
        instance = options.settings_of(serving_pass).instance_of(serving_pass, launch.world_size)
        place = serving_pass.system.name, instance
        by_system.setdefault(place, []).append(serving_pass)
    systems: list[System] = []
    for passes in by_system.values():
        kind: type[System] = load_object(passes[0].system.system)
        has_stages = passes[0].ranks is Ranks.STAGES
        config = without_draft_ranks(run_config) if has_stages else run_config
        systems.append(kind(options, options.settings_of(passes[0]), passes, launch))
        systems[-1].prepare(config, cache)
    first = systems[0].run
    room = find_room(first.config, launch, first.machine.num_gpus)
    memory = check_together(launch, partial(check_here, systems, room))
    prepared = PreparedServing(launch, options, systems, memory)
    check_equal_serving(prepared)
    return prepared


def without_draft_ranks(run_config: RunConfig) -> RunConfig:
    """`run_config` for stages, which say themselves where drafts are made."""
    draft = run_config.draft
    return replace(run_config, draft=draft and replace(draft, rank_group=None))


def check_here(systems: Sequence[System], room: MemoryBudget) -> str:
    """The line to print: what the ranks of this room need for the pass that needs most. Raises
    ValueError if that is more than is free."""
    plans: dict[Pass, MemoryPlan] = {}
    for system in systems:
        for serving_pass in system.passes:
            plans[serving_pass] = system.plan(serving_pass, room.ranks)
    serving_pass, plan = max(plans.items(), key=lambda item: item[1].total)
    if refusal := room.refusal(plan):
        (system,) = (system for system in systems if serving_pass in system.passes)
        others = f", or leave {serving_pass} out of --modes" if len(plans) > 1 else ""
        raise ValueError(
            f"--modes {serving_pass} needs {refusal}; {system.advice(serving_pass, room)}{others}"
        )
    return room.describe(plan, f" for {serving_pass}" if len(plans) > 1 else "")


def check_equal_serving(prepared: PreparedServing) -> None:
    """As `check_agreement`, for what serves requests: the split of its layers too."""
    facts: dict[str, Any] = prepared.options.describe()
    for name, settings in prepared.options.systems.items():
        facts[f"settings of {name}"] = settings.describe()
    for system in prepared.systems:
        transport = system.transport
        facts[f"layers of {system.names}"] = [len(layers) for layers in system.layers]
        facts[f"messages of {system.names}"] = None if transport is None else transport.describe()
    check_agreement(prepared.run, facts)
