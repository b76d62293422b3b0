"""Collectives and channels between ranks: shared memory against gloo, every message arrives as it
was sent, a rank that dies is named, and nothing is left behind."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import TINY, Launch, save_checkpoint, tiny_transformer

from magicdec.distributed.groups import Group
from magicdec.runner.model_runner import gather_vocab


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Where the ranks have their shared files: other runs on this host have theirs in /dev/shm."""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_shared_memory_equals_gloo(num_ranks: int, launch: Launch, shared: Path) -> None:
    done = launch("distributed/exchange.py", shared, num_ranks=num_ranks)
    assert done.returncode == 0 and "OK" in done.stdout, done.stderr
    assert list(shared.iterdir()) == []


def test_a_dead_rank_is_noticed_and_leaves_nothing(launch: Launch, shared: Path) -> None:
    done = launch("distributed/exchange.py", shared, "die", num_ranks=2)
    assert done.returncode != 0 and "OK" not in done.stdout and "NOTICED" in done.stderr
    assert list(shared.iterdir()) == []


@pytest.mark.wide
def test_chains_of_more_rows_than_a_message_holds(launch: Launch, tmp_path: Path) -> None:
    """Ranks exchange the best token of each row between two drafts."""
    config = replace(TINY, num_layers=1, num_heads=2, num_kv_heads=2)
    checkpoint = save_checkpoint(tiny_transformer(config), tmp_path / "tiny")
    done = launch("distributed/many_rows.py", checkpoint, num_ranks=2)
    assert done.returncode == 0 and "OK" in done.stdout, done.stderr


def test_one_rank_has_the_whole_vocabulary() -> None:
    logits = torch.randn(2, 3, 97)
    assert gather_vocab(logits, [(0, 97)], Group((0,), 0)) is logits


@pytest.mark.parametrize(("collectives", "num_ranks"), [("gloo", 2), ("shared_memory", 3)])
def test_messages_arrive_as_they_were_sent(
    collectives: str, num_ranks: int, launch: Launch, shared: Path
) -> None:
    args = collectives, "check", shared
    done = launch("distributed/messages.py", *args, num_ranks=num_ranks)
    assert done.returncode == 0 and "OK" in done.stdout, done.stderr
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("collectives", ["gloo", "shared_memory"])
def test_all_ranks_name_the_one_that_was_killed(
    collectives: str, launch: Launch, shared: Path
) -> None:
    """Rank 1 has no connection with rank 2 on which it waits."""
    args = collectives, "kill", shared
    done = launch("distributed/messages.py", *args, num_ranks=3, timeout=30)
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOST: ")]
    assert done.returncode != 0 and len(lines) == 2, done.stderr
    assert all("2" in line and "ended" in line for line in lines), lines
    assert list(shared.iterdir()) == []
