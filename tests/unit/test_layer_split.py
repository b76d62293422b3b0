"""--layer_split: every layer belongs to one stage, by a stated rule; and which rank is in which
stage."""

import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest

from magicdec.distributed.groups import Launch
from magicdec.distributed.layer_split import (
    StageTimes,
    balance,
    count_stages,
    is_auto,
    round_seconds,
    split_layers,
)
from magicdec.distributed.layout import StageGrid, make_grid
from magicdec.systems.stages.auto_split import RankTimes, choose_split


@pytest.mark.parametrize(
    ("text", "num_stages", "num_layers", "expected"),
    [
        ("0.25,0.25,0.5", 3, 8, [2, 2, 4]),
        ("10,12", 2, 22, [10, 12]),
        ("0.5,0.5", 2, 5, [2, 3]),  # equal remainders: the later stage
        ("0.34,0.33,0.33", 3, 10, [4, 3, 3]),  # 3.4, 3.3, 3.3: the largest remainder
        ("0.1,.9", 2, 7, [1, 6]),
        ("1.0", 1, 4, [4]),
        (None, 1, 4, [4]),
        (None, 3, 8, [2, 3, 3]),
        (None, 4, 4, [1, 1, 1, 1]),
    ],
)
def test_the_rule(text: str | None, num_stages: int, num_layers: int, expected: list[int]) -> None:
    found = split_layers(text, num_stages, num_layers)
    assert [len(layers) for layers in found] == expected
    assert [layer for layers in found for layer in layers] == list(range(num_layers))
    assert count_stages(text, num_stages) == num_stages


@pytest.mark.parametrize("num_layers", [3, 12, 22, 80])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_equal_shares_differ_by_at_most_one_layer(num_layers: int, num_stages: int) -> None:
    sizes = [len(layers) for layers in split_layers(None, num_stages, num_layers)]
    assert sum(sizes) == num_layers and sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2,3", "adds up to 5 layers; the model has 4"),
        ("0.5,0.4", "adds up to 0.9; shares add up to 1"),
        ("1,1,1,1,0", "names 5 stages for 4 layers"),
        ("4,0", "leaves stage 1 without a layer"),
        ("2,0.5", "is not known"),
        ("", "is not known"),
        ("2,2,", "is not known"),
        ("auto:0", "is not known"),
        ("mdi", "is not known"),
        ("auto", "--layer_split auto needs the times of stages"),
    ],
)
def test_bad_splits_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match="--layer_split") as refusal:
        split_layers(text, 2, 4)
    assert expected in str(refusal.value)


def test_ranks_of_a_grid() -> None:
    grid = make_grid("--layer_split 2,2,2", 3, 6)
    assert grid == StageGrid(3, 2)
    assert [grid.ranks_of(stage) for stage in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert [grid.stage_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert grid.edges() == [(0, 2), (1, 3), (2, 4), (3, 5), (4, 0), (5, 1)]
    assert StageGrid(1, 2).edges() == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_do_not_fit_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="names 3 ranks, but"):
        make_grid("--layer_split 2,2,2", 3, world_size)


@pytest.mark.parametrize(
    ("text", "world_size", "expected"),
    [("auto", 3, 3), ("auto:2", 4, 2), ("3,3", 4, 2)],
)
def test_a_rule_has_a_stage_for_each_rank_or_says_how_many(
    text: str, world_size: int, expected: int
) -> None:
    assert count_stages(text, world_size) == expected
    assert is_auto(text) == text.startswith("auto")


def slowest(counts: list[int], times: list[StageTimes]) -> float:
    return max(time.seconds(count) for count, time in zip(counts, times, strict=True))


@pytest.mark.parametrize("num_layers", [4, 5, 7, 11])
@pytest.mark.parametrize(
    "times",
    [
        [StageTimes(0.0, 1.0)] * 2,
        [StageTimes(2.4, 1.0), StageTimes(0.1, 1.0), StageTimes(0.1, 1.0)],  # the head
        [StageTimes(9.0, 1.0), StageTimes(0.1, 1.0)],
        [StageTimes(0.5, 1.0), StageTimes(0.1, 0.3), StageTimes(0.2, 2.5), StageTimes(0, 0.4)],
        [StageTimes(0.0, 1.0), StageTimes(0.0, 3.0)],
        [StageTimes(0.0, 0.0)] * 3,
    ],
)
def test_auto_has_the_fastest_slowest_stage_of_all_splits(
    times: list[StageTimes], num_layers: int
) -> None:
    every = [
        [b - a for a, b in pairwise((0, *cuts, num_layers))]
        for cuts in combinations(range(1, num_layers), len(times) - 1)
    ]
    found = split_layers("auto", len(times), num_layers, times)
    counts = [len(layers) for layers in found]
    assert counts in every and counts == balance(times, num_layers)
    assert slowest(counts, times) == min(slowest(other, times) for other in every)


def test_auto_of_equal_stages_and_of_one() -> None:
    assert balance([StageTimes(0.0, 1.0)] * 3, 8) == [2, 3, 3], "the later one gets the layer"
    assert split_layers("auto", 1, 4) == (range(4),), "without times"


def test_a_round_is_bound_by_the_slowest_stage_or_by_all() -> None:
    assert round_seconds([0.01, 0.02], [0.001, 0.003], 1) == pytest.approx(0.034)
    assert round_seconds([0.01, 0.02], [0.001, 0.003], 2) == pytest.approx(0.04)
    assert round_seconds([0.01], [0.0], 3) == pytest.approx(0.03)


def choose(
    monkeypatch: pytest.MonkeyPatch,
    others: list[dict[str, Any]],
    asked: str = "auto",
    stages: Sequence[Sequence[int]] = (),
    first: RankTimes | None = RankTimes(1e-3, 1e-4, 4e-3),
) -> Any:
    """`choose_split` on rank 0, which finds the times `first`, with what the other ranks say. By
    default there are two stages of equally many ranks."""
    ranks = 1 + len(others)

    def exchange(launch: Launch, text: str, topic: str) -> list[str]:
        return [text, *map(json.dumps, others)]

    monkeypatch.setattr("magicdec.systems.stages.auto_split.exchange_texts", exchange)
    launch = Launch(0, ranks, 0, 1)
    grid = StageGrid(2, ranks // 2)
    stages = stages or [grid.ranks_of(stage) for stage in range(2)]
    return choose_split(asked, stages, 12, launch, "given", lambda: first)


def facts(host: int, layer_s: float, own_s: float | None = None) -> dict[str, Any]:
    times = {"layer_s": layer_s, "fixed_s": 1e-4, "own_fixed_s": own_s}
    return {"asked": "auto", "host": host, "times": times}


def test_ranks_choose_one_split_by_the_times_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    equal = choose(monkeypatch, [facts(1, 1e-3)])
    assert equal.layer_split == "4,8" and equal.layers == (range(4), range(4, 12))
    assert equal.reason == (
        "the stages are predicted to take 8, 8.1 ms, from 1 ms a layer and 4, 0.1 ms beside layers "
        "(given)"
    )
    slow = choose(monkeypatch, [facts(1, 4e-3)])
    assert slow.layer_split == "9,3" and "1 to 4 ms a layer" in slow.reason
    # Ranks of one host count as equally fast, whatever noise one of them had.
    noisy = choose(monkeypatch, [facts(0, 1e-3, 4e-3), facts(0, 5e-3), facts(0, 1e-3)])
    assert noisy.layer_split == "4,8"
    # A stage is as slow as its slowest rank.
    mixed = choose(monkeypatch, [facts(1, 1e-3, 8e-3), facts(2, 1e-3), facts(3, 2e-3)])
    assert mixed.layer_split == "6,6"


def test_ends_of_the_model_count_on_the_stages_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first stage embeds, the last has the head; ranks without a stage have no times."""
    no_stage = {"asked": "auto", "host": 0, "times": None}
    others = [facts(0, 1e-3), facts(0, 1e-3, 5e-3), no_stage]
    stages = ((0,), (1,), (2,))
    first = RankTimes(1e-3, 1e-4, 2e-4)
    three = choose(monkeypatch, others, stages=stages, first=first)
    assert three.layer_split == "5,6,1" and "and 0.2, 0.1, 5 ms beside layers" in three.reason
    headless = choose(monkeypatch, others, stages=((1,), (2,)), first=None)
    assert headless.layer_split == "8,4" and "to take 8.1, 9 ms" in headless.reason
    slow = [facts(1, 3e-3), facts(2, 1e-3, 5e-3), no_stage]
    assert choose(monkeypatch, slow, stages=stages, first=first).layer_split == "7,2,3"


def test_ranks_that_cannot_choose_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--layer_split: rank 0 has auto, rank 1 has 6,6"):
        choose(monkeypatch, [{"asked": "6,6", "host": 1}])
    told = {"asked": "6,6", "host": 1}
    assert choose(monkeypatch, [told], "6,6").layer_split == "6,6"
