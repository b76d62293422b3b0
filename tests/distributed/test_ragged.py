"""Ragged batches over 1, 2 and 3 ranks, MHA and GQA: the same tokens, speculated or not, greedy or
sampled, and the same drafts are accepted, also where ranks share a KV head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, Launch, save_checkpoint, tiny_transformer
from several_ranks import answer_of


@pytest.mark.parametrize(
    ("kv_heads", "ranks"),
    [
        pytest.param((2,), (1, 3), id="kv_heads0"),
        pytest.param((6, 3), (1, 2, 3), id="kv_heads1", marks=pytest.mark.wide),
    ],
)
def test_ragged_batches_over_ranks(
    kv_heads: tuple[int, ...], ranks: tuple[int, ...], launch: Launch, tmp_path: Path
) -> None:
    """Each launch decodes with all the models. test_matrix.py has two ranks in `make test`, too."""
    paths = []
    for heads in kv_heads:
        model = tiny_transformer(replace(TINY, num_kv_heads=heads))
        paths.append(save_checkpoint(model, tmp_path / str(heads)))
    outputs = []
    for num_ranks in ranks:
        outputs.append(answer_of(launch, "distributed/ragged.py", *paths, num_ranks=num_ranks))
    assert all(tokens == outputs[0] for tokens in outputs) and len(outputs[0]) == len(kv_heads)
    for of_model in outputs[0]:
        assert [len(tokens) for tokens in of_model[0]] == [40, 9, 40, 31]
