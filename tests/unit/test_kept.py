"""A record that cannot be written costs neither the table nor what is measured after it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from magicdec.cli.serving import steps
from magicdec.cli.serving.recurrent import parse

from magicdec.distributed.groups import Launch


def test_a_lost_record_still_prints_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, line: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(steps, "append_line", full)
    words = "--modes sequential ring --num_requests 1 --prefix_len 8 --gen_len 2"
    out = tmp_path / "pipeline.jsonl"
    launch, argv = Launch(0, 1, 0, 1), [*words.split(), "--out", str(out)]
    code = steps.serve(parse(argv, launch), argv, launch)
    said = capsys.readouterr()
    assert code == 1 and "output tokens/s" in said.out
    lost = [line for line in said.err.splitlines() if line.endswith("the record is lost")]
    assert len(lost) == 2 and lost[0].startswith(f"--out {out}: No space left on device")
    assert f"0 records appended to {out}" in said.err
