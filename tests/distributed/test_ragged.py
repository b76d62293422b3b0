"""Ragged batches over 1, 2 and 3 ranks: the same tokens, speculated or not, greedy or sampled, MHA
and GQA."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, Launch, save_checkpoint, tiny_transformer


@pytest.mark.parametrize(
    ("kv_heads", "rank_counts"),
    [(6, (1, 2, 3)), (3, (1, 3)), (2, (1, 2, 3))],  # 3 on 2 ranks: test_matrix.py
)
def test_ragged_batches_over_ranks(
    kv_heads: int, rank_counts: tuple[int, ...], launch: Launch, tmp_path: Path
) -> None:
    directory = save_checkpoint(
        tiny_transformer(replace(TINY, num_kv_heads=kv_heads)), tmp_path / "tiny"
    )
    outputs = []
    for num_ranks in rank_counts:
        done = launch("distributed/ragged.py", directory, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout.splitlines()[-1]))
    assert all(tokens == outputs[0] for tokens in outputs)
    assert [len(tokens) for tokens in outputs[0][0]] == [60, 9, 60, 41]
