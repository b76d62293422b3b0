"""Replayed steps over two ranks: the sums over ranks are part of what is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Launch, save_checkpoint, served_pairs, tiny_transformer
from several_ranks import answer_of


@pytest.mark.parametrize("sampling", ["greedy", pytest.param("sampled", marks=pytest.mark.wide)])
def test_replayed_steps_of_two_ranks_emit_the_same_tokens(
    sampling: str, launch: Launch, tmp_path: Path
) -> None:
    paths = [
        save_checkpoint(tiny_transformer(seed=seed), tmp_path / str(seed)) for seed in range(2)
    ]
    results = answer_of(launch, "distributed/replayed.py", *paths, sampling, num_ranks=2)
    assert len(results) == 1 + len(served_pairs())
    baseline = results[0][2]
    assert [len(tokens) for tokens in baseline] == [10, 8, 4]
    for drafter, policy, eager, replayed, times in results:
        assert times > 3, (drafter, policy)
        if sampling == "greedy":
            assert eager == replayed == baseline, (drafter, policy)
        elif (drafter, policy) == ("model", "snapkv"):  # see oracle/test_replay_sampled.py
            assert eager[2] == replayed[2] == baseline[2], "the greedy row"
        else:
            assert replayed == eager, (drafter, policy)
