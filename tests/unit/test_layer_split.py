"""--layer_split: every layer belongs to one stage, by a stated rule; and which rank is in which
stage."""

from __future__ import annotations

import pytest

from magicdec.distributed.layer_split import count_stages, split_layers
from magicdec.distributed.stages import StageGrid, make_grid


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
        ("0.9,0.1", "leaves stage 1 without a layer"),
        ("2,0.5", "is not known"),
        ("-1,5", "is not known"),
        ("nan,1.0", "is not known"),
        ("0.5;0.5", "is not known"),
        ("", "is not known"),
        ("2,2,", "is not known"),
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
    assert all(grid.previous(b) == a for a, b in grid.edges())
    assert StageGrid(1, 2).edges() == []


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_do_not_fit_are_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="names 3 stages"):
        make_grid("--layer_split 2,2,2", 3, world_size)
