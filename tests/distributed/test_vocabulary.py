"""Logits of a sharded vocabulary are whole on every rank, whatever the shards and the order."""

from __future__ import annotations

import pytest
import torch
from conftest import Launch

from magicdec.distributed.groups import Group
from magicdec.sampling.model_tokens import gather_vocab


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_every_rank_has_the_whole_vocabulary(num_ranks: int, launch: Launch) -> None:
    done = launch("distributed/vocabulary.py", "gloo", "shared_memory", num_ranks=num_ranks)
    assert done.returncode == 0 and "OK" in done.stdout, done.stderr


def test_one_rank_has_it_already() -> None:
    logits = torch.randn(2, 3, 97)
    assert gather_vocab(logits, [(0, 97)], Group((0,), 0)) is logits
