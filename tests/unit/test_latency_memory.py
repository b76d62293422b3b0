"""The memory plan of a latency grid, held to the caches that its forwards make."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from conftest import TINY, make_runner, tiny_transformer

from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import AttentionSection, KVSection, ModelSection
from magicdec.distributed.groups import Launch
from magicdec.kv.cache import KVCache
from magicdec.latency.forwards import check_grid_memory, fill, make_forwards, plan_place
from magicdec.latency.record import Grid
from magicdec.memory.plan import Models

ALONE, MODELS = Launch(0, 1, 0, 1), Models(TINY)
DRAFTS = (
    KVSection("snapkv", 24, 4, window_size=8),
    KVSection("streaming_llm", 24, 4),
    KVSection("snapkv", 40, 4, window_size=8),
    KVSection("full", -1),
)
GRID = Grid((1, 3), (60, 200), (1, 5), DRAFTS, 1, 0)
CONFIG = resolve(
    RunConfig(model=ModelSection(dtype="float32"), attention=AttentionSection("grouped")),
    Machine(2),
)


@pytest.mark.parametrize("context", GRID.contexts)
@pytest.mark.parametrize("B", GRID.batch_sizes)
def test_caches_are_those_of_the_forwards(
    B: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    original = KVCache.__init__

    def record(cache: KVCache, *args: Any) -> None:
        original(cache, *args)
        made.append(cache.num_bytes)

    monkeypatch.setattr(KVCache, "__init__", record)
    runner = make_runner(tiny_transformer(), B, context + 5, max_following=5)
    list(make_forwards(runner, fill(runner, context), GRID, context))
    plan = plan_place(CONFIG, GRID, MODELS, ALONE, B, context)
    assert made[0] == plan.kv and sum(made[1:]) == plan.draft_kv and len(made) == 3


def test_the_largest_place_is_shown_and_what_does_not_fit_refused() -> None:
    totals = {
        (B, context): plan_place(CONFIG, GRID, MODELS, ALONE, B, context).total
        for B in GRID.batch_sizes
        for context in GRID.contexts
    }
    most = max(totals.values())
    line = check_grid_memory(CONFIG, GRID, MODELS, ALONE, most)
    assert "on this host at --B 3 --prefix_len 200; " in line and line.endswith("GB free")
    assert "not known" in check_grid_memory(CONFIG, GRID, MODELS, ALONE, None)
    with pytest.raises(
        ValueError, match=r"^--B 3 --prefix_len 200 needs .* are free; of the grid,"
    ):
        check_grid_memory(CONFIG, GRID, MODELS, ALONE, most - 1)
    with pytest.raises(ValueError, match=r"no cell of the grid would fit$"):
        check_grid_memory(CONFIG, GRID, MODELS, ALONE, min(totals.values()) - 1)


def test_a_grid_of_decodes_alone() -> None:
    grid = replace(GRID, new_tokens=(1,), drafts=DRAFTS[3:])
    plan = plan_place(CONFIG, grid, MODELS, ALONE, 3, 200)
    assert plan.kv == 3 * 201 * 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    assert plan.draft_kv == 0
