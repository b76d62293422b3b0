"""The verdict over two ranks: both come to the same, and it is that of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Launch

LOSSY = pytest.param("lossy", "diverged", marks=pytest.mark.wide)


@pytest.mark.parametrize(("rule", "status"), [("exact", "ok_with_ties"), LOSSY])
def test_two_ranks_agree_on_the_verdict(
    rule: str, status: str, launch: Launch, tmp_path: Path
) -> None:
    """tests/oracle/test_verdict.py has the same verdicts of one rank."""
    done = launch("distributed/verdict.py", tmp_path, rule, num_ranks=2)
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert ours == theirs and ours[0] == status
    assert (ours[1]["num_excused"] > 0) == (ours[1]["num_diverged"] == 0) == (rule == "exact")
