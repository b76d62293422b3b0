"""Processes: what fails because a rank has ended names that rank."""

from __future__ import annotations

import os
import subprocess

import pytest

from magicdec.distributed.processes import PeerLost, Processes


def test_a_failure_names_the_rank_that_has_ended() -> None:
    """While all ranks run, it stays what it is."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    with (
        pytest.raises(PeerLost, match=r"^rank 1 has ended$"),
        Processes((os.getpid(), ended.pid)).naming_ended(),
    ):
        raise RuntimeError("the connection is closed")
    with (
        pytest.raises(RuntimeError, match="the connection is closed") as caught,
        Processes((os.getpid(),)).naming_ended(),
    ):
        raise RuntimeError("the connection is closed")
    assert not isinstance(caught.value, PeerLost)
