"""`magicdec advise` on two ranks, which it starts itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, ROOT

from magicdec.hardware.ceiling_file import Link, MachineFile
from magicdec.names import DTYPES
from magicdec.records.reading import load_passes


@pytest.mark.wide
def test_two_ranks_measure_all_drafts_and_one_of_them_says_what_follows(
    tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    rates = dict.fromkeys(DTYPES, 1e10)
    machine = MachineFile(
        {"world_size": 2}, 1e10, rates, rates, rates, Link(1e-5, 1e10), None, rates, rates
    )
    machine.save(tmp_path / "machine.json")
    words = ["--model", tiny_checkpoint, "--dataset", text_file, "--nproc", "2"]
    words += ["--draft", "ngram", "self", "--budget", "40", "--prefix_len", "90", "--gen_len", "8"]
    words += ["--num_batches", "3", "--time", "10m", "--out", "r.jsonl"]
    done = subprocess.run(
        [sys.executable, "-m", "magicdec", "advise", *map(str, words)],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=HANG,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    records = load_passes(tmp_path / "r.jsonl")
    assert len(records) == 2 * done.stdout.count("\nrun        ") >= 10
    assert all(record.environment.world_size == 2 and record.passed for record in records)
    references = [record for record in records if record.is_reference]
    times = {tuple(str(group.step_ms) for group in record.groups) for record in references}
    counts = sorted(map(len, times))
    assert counts in ([3], [1, 3]), "some drafts may end after the first batch"
    assert len({own[0] for own in times}) == 1, "all have one baseline"
    assert done.stdout.count(": batches after the first") == len(
        [record for record in records if record.is_drafting and len(record.groups) == 1]
    )
    assert done.stdout.count("Speculation") == 1 and "--nproc 2" in done.stdout.splitlines()[-1]
