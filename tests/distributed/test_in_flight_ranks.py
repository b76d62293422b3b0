"""Requests that join and leave a running batch over 1 and 2 ranks: the first rank decides, and each
request emits the same tokens."""

from __future__ import annotations

from pathlib import Path

from conftest import Launch, save_checkpoint, tiny_transformer
from several_ranks import answer_of


def test_ranks_serve_the_same_requests_alike(launch: Launch, tmp_path: Path) -> None:
    path = save_checkpoint(tiny_transformer(), tmp_path / "model")
    outputs = []
    for num_ranks in (1, 2):
        outputs.append(answer_of(launch, "distributed/in_flight.py", path, num_ranks=num_ranks))
    expected = outputs[0][0]
    assert [len(tokens) for tokens in expected] == [20, 9, 20, 1, 14]
    assert all(tokens == expected for of_ranks in outputs for tokens in of_ranks)
