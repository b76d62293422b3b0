"""The properties of the measuring code by room, and faults that break them, for `plant_faults.py`
and its test."""

from __future__ import annotations

from faults import (
    choices,
    everywhere,
    figures,
    gate,
    gguf_families,
    heads,
    mixtures,
    planned,
    plans,
    prompts,
    recomputed,
    records,
    rings,
    runs,
    serving,
    simulator,
    sinks,
    sizes,
    speculation,
    verdict,
    weights,
    windows,
)

PROPERTIES = (
    *runs.PROPERTIES,
    *records.PROPERTIES,
    *figures.PROPERTIES,
    *serving.PROPERTIES,
    *rings.PROPERTIES,
    *speculation.PROPERTIES,
    *simulator.PROPERTIES,
    *gate.PROPERTIES,
    *choices.PROPERTIES,
    *verdict.PROPERTIES,
    *everywhere.PROPERTIES,
    *weights.PROPERTIES,
    *heads.PROPERTIES,
    *mixtures.PROPERTIES,
    *planned.PROPERTIES,
    *plans.PROPERTIES,
    *sinks.PROPERTIES,
    *sizes.PROPERTIES,
    *gguf_families.PROPERTIES,
    *prompts.PROPERTIES,
    *windows.PROPERTIES,
    *recomputed.PROPERTIES,
)
