"""What goes wrong: one line for what a user can mend, an end in time for what breaks, records
intact."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, ROOT, Launch
from several_ranks import read_records

SMALL = (
    *("--B", "2", "--prefix_len", "60", "--num_batches", "1", "--warmup_batches", "0"),
    *("--threads", "1"),
)

BAD_INPUT = {
    "misspelt flag": (["--gama", 3], "--gamma"),
    "unknown model": (["--model", "nope"], "demo, demo-draft, random:<preset>"),
    "unknown preset": (["--model", "random:gpt-9"], "random:llama-3.1-8b"),
    "unknown dataset": (["--dataset", "nope"], "demo, pg19"),
    "unknown dtype": (["--dtype", "float8"], "choose from auto, float32, bfloat16"),
    "unknown backend": (["--attention", "nope"], "sdpa, grouped, native"),
    "unknown policy": (["--kv_policy", "nope"], "full, streaming_llm"),
    "rank twice": (["--rank_group", 0, 0], "--rank_group 0 0"),
    "rank not there": (["--rank_group", 1], "--rank_group 1"),
    "gamma": (["--gamma", 0], "--gamma 0"),
    "budget": (["--streamingllm_budget", 16], "--budget 16"),
    "positions": (["--prefix_len", 1000], "1024 positions"),
    "too few prefixes": (["--B", 500], "--dataset book.txt holds"),
    "not a number": (["--B", "four"], "--B"),
    "lengths": (["--prefix_len", 50, "--gen_len", 4, "--max_len", 60], "--max_len 60"),
    "batches": (["--num_batches", 0], "--num_batches 0"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(
    case: str, launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    args, expected = BAD_INPUT[case]
    defaults = ["--model", tiny_checkpoint, "--dataset", text_file, "--prefix_len", 100]
    done = launch("selfspec_benchmark.py", *defaults, *args)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and expected in done.stderr, done.stderr
    assert done.stdout == "" and not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--rank_group", 0], "--rank_group 0 leaves out"),
        (["--rank_group", 0, 2], "names rank 2"),
        (["--model", "nope"], "--model 'nope'"),
    ],
)
def test_several_ranks_say_it_once(args: list[object], expected: str, launch: Launch) -> None:
    done = launch("selfspec_benchmark.py", *args, num_ranks=2)
    assert done.returncode == 2
    assert sum(expected in line for line in done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--gamma", 0], "--gamma 0"),
        pytest.param(["--model", "nope"], "--model 'nope'", marks=pytest.mark.wide),
    ],
)
def test_under_torchrun_it_is_said_once_and_last(
    args: list[object], expected: str, launch: Launch
) -> None:
    done = launch("selfspec_benchmark.py", *args, num_ranks=2, torchrun=True)
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert sum(expected in line for line in lines) == 1 and "exitcode  : 2" in done.stderr
    assert expected in lines[-2] and set(lines[-1]) == {"="}, "torchrun's summary ends with it"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_broken_rank_ends_all(
    rank: str,
    launch: Launch,
    tiny_checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under torchrun, and with the processes of tests/rank_server.py."""
    monkeypatch.setenv("BROKEN_RANK", rank)
    done = launch(
        "distributed/broken_rank.py", "--model", tiny_checkpoint, "--dataset", text_file, *SMALL,
        num_ranks=2, torchrun=rank == "0",
    )  # fmt: skip
    assert done.returncode != 0 and "this rank broke" in done.stderr
    path = tmp_path / "results" / "runs.jsonl"
    if rank == "0":  # the leader could still write; it says what happened, and no performance
        (record,) = read_records(path)
        assert record["status"] == "failed" and "this rank broke" in record["error"]
        assert record["metrics"] is None
    else:
        for record in read_records(path) if path.exists() else []:
            assert record["status"] == "failed"


def test_interrupt_leaves_records_readable(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    flags = ["--model", tiny_checkpoint, "--dataset", text_file, *SMALL]
    script = ROOT / "tests" / "distributed" / "broken_rank.py"
    assert launch("selfspec_benchmark.py", *flags).returncode == 0
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, flags), "--gen_len", "900", "--ignore_eos"],
        cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "RANK": "0"},
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "DECODING" in line:
                break
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=HANG)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in rest, rest
    records = read_records(tmp_path / "results" / "runs.jsonl")
    assert [record["status"] for record in records] == ["ok"]
