"""Random weights: all slices belong to one model, and only the tiles of a slice are generated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoint_files import CONFIG, CPU, expected_shard
from torch import Tensor

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint.random_weights import TILE_COLUMNS, TILE_ROWS, RandomWeights
from magicdec.model.checkpoint.source import expected_shapes, find_model, load_transformer
from magicdec.model.checkpoint.weight_map import Piece

SHAPES = {
    "a.weight": (3 * TILE_ROWS + 7, 2 * TILE_COLUMNS + 5),
    "a.bias": (2 * TILE_COLUMNS + 3,),
    "input_layernorm.weight": (9,),
}


def whole(name: str) -> Tensor:
    shape = SHAPES[name]
    return RandomWeights(SHAPES).read(Piece(name, (0, shape[0]), None, shape))


@pytest.mark.parametrize(
    ("name", "rows", "columns"),
    [
        ("a.weight", (0, 1), (0, 1)),
        ("a.weight", (200, 600), (1000, 2053)),
        ("a.weight", (256, 512), None),
        ("a.weight", (700, 775), (2048, 2050)),
        ("a.bias", (1000, 2051), None),
        ("input_layernorm.weight", (2, 5), None),
    ],
)
def test_random_slices_agree(
    name: str, rows: tuple[int, int], columns: tuple[int, int] | None
) -> None:
    part = RandomWeights(SHAPES).read(Piece(name, rows, columns, SHAPES[name]))
    expected = whole(name)[slice(*rows)]
    expected = expected if columns is None else expected[:, slice(*columns)]
    assert torch.equal(part, expected)


def test_random_values() -> None:
    matrix, bias = whole("a.weight"), whole("a.bias")
    assert abs(matrix.std() - 0.02) < 1e-3 and abs(matrix.mean()) < 1e-3
    assert 0.01 < bias.std() < 0.03
    assert torch.equal(whole("input_layernorm.weight"), torch.ones(9))
    tiles = [matrix[:TILE_ROWS, :5], matrix[TILE_ROWS : 2 * TILE_ROWS, :5]]
    assert not torch.equal(*tiles), "each tile has a seed of its own"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_hold_shards_of_one_random_model(size: int) -> None:
    source = RandomWeights(expected_shapes(CONFIG))
    tensors = {
        name: source.read(Piece(name, (0, shape[0]), None, shape))
        for name, shape in expected_shapes(CONFIG).items()
    }
    for rank in range(size):
        shard = Shard(rank, size)
        model = load_transformer(CONFIG, source, shard, None, torch.float32, CPU)
        expected = expected_shard(tensors, shard)
        torch.testing.assert_close(dict(model.state_dict()), expected, atol=0, rtol=0)


def test_a_rank_makes_only_the_tiles_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    make_tile = RandomWeights._tile

    def count(self: RandomWeights, name: str, shape: Any, top: int, left: int) -> Tensor:
        made.append((top, left))
        return make_tile(self, name, shape, top, left)

    monkeypatch.setattr(RandomWeights, "_tile", count)
    piece = Piece(
        "a.weight", (0, TILE_ROWS + 1), (TILE_COLUMNS, TILE_COLUMNS + 9), SHAPES["a.weight"]
    )
    RandomWeights(SHAPES).read(piece)
    assert sorted(made) == [(0, TILE_COLUMNS), (TILE_ROWS, TILE_COLUMNS)]


def test_random_presets() -> None:
    source = find_model("--model", "random:llama-68m")
    assert source.is_random and source.tokenizer_directory is None
    assert source.name == "random:llama-68m" and source.config.name == "llama-68m"
