"""The verdict over two ranks: both come to the same, and it is that of one rank."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Launch


def test_two_ranks_agree_on_the_verdict(launch: Launch, tmp_path: Path) -> None:
    """tests/oracle/test_verdict.py has the same verdicts of one rank."""
    done = launch("distributed/verdict.py", tmp_path, num_ranks=2)
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert ours == theirs
    for rule, expected in (("exact", "ok_with_ties"), ("lossy", "diverged")):
        status, correctness = ours[rule]
        assert status == expected
        excused, diverged = correctness["num_excused"], correctness["num_diverged"]
        assert (excused > 0) == (diverged == 0) == (rule == "exact")
