"""Random weights: all slices belong to one model, and only the tiles of a slice are generated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from checkpoint_files import CONFIG, CPU, expected_shard
from pretend_cuda import DEVICE, OnDevice, waits
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.random_weights import TILE_COLUMNS, RandomWeights
from magicdec.model.checkpoint.source import expected_shapes, load_transformer
from magicdec.model.checkpoint.weight_files import TILE_ROWS, Index

__all__ = ["waits"]  # a fixture

SHAPES = {
    "a.weight": (3 * TILE_ROWS + 7, 2 * TILE_COLUMNS + 5),
    "a.bias": (2 * TILE_COLUMNS + 3,),
    "input_layernorm.weight": (9,),
}


def whole(name: str) -> Tensor:
    return RandomWeights(SHAPES).read(name)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("a.weight", (slice(0, 1), slice(0, 1))),
        ("a.weight", (slice(200, 600), slice(1000, 2053))),
        ("a.weight", (slice(256, 512),)),
        ("a.weight", (slice(700, 775), slice(2048, 2050))),
        ("a.bias", (slice(1000, 2051),)),
        ("input_layernorm.weight", (slice(2, 5),)),
    ],
)
def test_random_slices_agree(name: str, index: Index) -> None:
    assert torch.equal(RandomWeights(SHAPES).read(name, index), whole(name)[index])


def test_random_values() -> None:
    matrix = whole("a.weight")
    bias = whole("a.bias")
    assert abs(matrix.std() - 0.02) < 1e-3 and abs(matrix.mean()) < 1e-3
    assert 0.01 < bias.std() < 0.03
    assert torch.equal(whole("input_layernorm.weight"), torch.ones(9))
    tiles = [matrix[:TILE_ROWS, :5], matrix[TILE_ROWS : 2 * TILE_ROWS, :5]]
    assert not torch.equal(*tiles), "each tile has a seed of its own"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_hold_shards_of_one_random_model(size: int) -> None:
    source = RandomWeights(expected_shapes(CONFIG))
    tensors = {name: source.read(name) for name in source.tensors}
    for rank in range(size):
        shard = Shard(rank, size)
        model = load_transformer(CONFIG, source, shard, None, torch.float32, CPU)
        expected = expected_shard(tensors, shard)
        torch.testing.assert_close(dict(model.state_dict()), expected, atol=0, rtol=0)


def test_weights_are_drawn_on_the_device(
    waits: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied there. The generator stands in for the GPU's."""
    make = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=CPU: make())
    source = RandomWeights(expected_shapes(CONFIG))
    place = CONFIG, source, Shard(1, 2), None, torch.bfloat16
    drawn, expected = (load_transformer(*place, device) for device in (DEVICE, CPU))
    assert not waits
    for name, tensor in drawn.state_dict().items():
        assert isinstance(tensor, OnDevice) and torch.equal(
            tensor.values, expected.state_dict()[name]
        ), name


def test_a_rank_makes_only_the_tiles_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    make_tile = RandomWeights._tile

    def count(self: RandomWeights, name: str, shape: Any, top: int, left: int) -> Tensor:
        made.append((top, left))
        return make_tile(self, name, shape, top, left)

    monkeypatch.setattr(RandomWeights, "_tile", count)
    index = (slice(TILE_ROWS + 1), slice(TILE_COLUMNS, TILE_COLUMNS + 9))
    RandomWeights(SHAPES).read("a.weight", index)
    assert sorted(made) == [(0, TILE_COLUMNS), (TILE_ROWS, TILE_COLUMNS)]
