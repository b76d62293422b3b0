"""Channels between ranks: every kind of message arrives as it was sent, in order, and a rank that
is killed is named by all others."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Launch


@pytest.mark.parametrize(("collectives", "num_ranks"), [("gloo", 2), ("shared_memory", 3)])
def test_messages_arrive_as_they_were_sent(
    collectives: str, num_ranks: int, launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "shm").mkdir()
    args = collectives, "check", tmp_path / "shm"
    done = launch("distributed/messages.py", *args, num_ranks=num_ranks)
    assert done.returncode == 0 and "OK" in done.stdout, done.stderr
    assert list((tmp_path / "shm").iterdir()) == []


@pytest.mark.parametrize("collectives", ["gloo", "shared_memory"])
def test_all_ranks_name_the_one_that_was_killed(
    collectives: str, launch: Launch, tmp_path: Path
) -> None:
    """Rank 1 has no connection with rank 2 on which it waits."""
    (tmp_path / "shm").mkdir()
    args = collectives, "kill", tmp_path / "shm"
    done = launch("distributed/messages.py", *args, num_ranks=3, timeout=30)
    lines = [line for line in done.stderr.splitlines() if line.startswith("LOST: ")]
    assert done.returncode != 0 and len(lines) == 2, done.stderr
    assert all("2" in line and "ended" in line for line in lines), lines
    assert list((tmp_path / "shm").iterdir()) == []
