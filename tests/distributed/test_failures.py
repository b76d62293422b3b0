"""What goes wrong: one line for what a user can mend, an end in time for what breaks, records
intact."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import HANG, ROOT, Command, Launch
from several_ranks import read_records

from magicdec.workload.ruler import TASKS

SMALL = (
    "--B",
    "2",
    "--prefix_len",
    "60",
    "--num_batches",
    "1",
    "--warmup_batches",
    "0",
    "--threads",
    "1",
)

DEFAULTS = {
    "selfspec": ("--prefix_len", 100),
    "baseline": ("--prefix_len", 100, "--model", "demo"),
    "longspec": (
        "--target",
        "demo",
        "--model",
        "demo-draft",
        "--dataset",
        "demo",
        "--prefix_len",
        300,
        "--gen_len",
        40,
    ),
}
# What a flag alone is refused for is in tests/unit/test_config.py and test_settings.py.
REFUSED: dict[str, list[tuple[list[object], str]]] = {
    "selfspec": [
        (["--model", "nope"], "demo, demo-draft, random:<preset>"),
        (["--model", "random:gpt-9"], "random:llama-3.1-8b"),
        (["--dataset", "nope"], "demo, pg19"),
        (["--prefix_len", 1000], "1024 positions"),
        (["--B", 500], "--dataset book.txt holds"),
        (["--drafter", "model"], "no draft is named here"),
        (
            ["--model", "demo", "--dtype", "float32", "--target_dtype", "bfloat16"],
            "--target_dtype bfloat16: weights that are not int8 or as they are stored have the "
            "--dtype of the run, float32",
        ),
        (
            [
                "--model",
                "random:bloom-7b1",
                "--dtype",
                "bfloat16",
                "--attention",
                "grouped",
                "--linear",
                "torch",
            ],
            "--attention grouped rounds scores to bfloat16",
        ),
    ],
    "longspec": [
        (["--model", "nope"], "--model 'nope' is not known"),
        (["--target", "nope"], "--target 'nope' is not known"),
        (
            ["--model", "random:llama-68m"],
            "--model random:llama-68m has a vocabulary of 32000 ids, --target demo of 2048",
        ),
        (["--prefix_len", 20470], "20480 positions of --target demo"),
        (
            ["--target", "random:bloom-7b1", "--model", "random:bloom-7b1", "--draft_budget", 50],
            "but --model random:bloom-7b1 has ALiBi; choose from full, snapkv",
        ),
    ],
    "baseline": [
        (
            ["--dataset", "ruler:qa"],
            f"'ruler:qa' is not known; choose from ruler:{', ruler:'.join(TASKS)}",
        ),
        (
            ["--dataset", "ruler:cwe"],
            "--prefix_len 100 is too short for --dataset ruler:cwe; it must be at least",
        ),
    ],
}


@pytest.mark.parametrize(
    ("driver", "args", "expected"),
    [(driver, *case) for driver, cases in REFUSED.items() for case in cases],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(
    driver: str,
    args: list[object],
    expected: str,
    command: Command,
    tiny_checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    files = ["--model", tiny_checkpoint, "--dataset", text_file] if driver == "selfspec" else []
    code, out, err = command(driver, *files, *DEFAULTS[driver], *args)
    assert (code, out) == (2, "") and err.count("\n") == 1 and expected in err, err
    assert not (tmp_path / "results").exists()


@pytest.mark.narrow(1)
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--rank_group", 0], "--rank_group 0: name all"),
        (["--model", "nope"], "--model 'nope'"),
    ],
)
def test_several_ranks_say_it_once(args: list[object], expected: str, launch: Launch) -> None:
    done = launch("selfspec_benchmark.py", *args, num_ranks=2, notice_s=0.6)
    assert done.returncode == 2
    assert sum(expected in line for line in done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.wide
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


@pytest.mark.parametrize(
    ("rank", "torchrun"),
    [("0", False), ("1", False), pytest.param("0", True, marks=pytest.mark.wide)],
)
def test_one_broken_rank_ends_all(
    rank: str,
    torchrun: bool,
    launch: Launch,
    tiny_checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under torchrun, and with the processes of tests/rank_server.py."""
    monkeypatch.setenv("BROKEN_RANK", rank)
    done = launch(
        "distributed/broken_rank.py",
        "--model",
        tiny_checkpoint,
        "--dataset",
        text_file,
        *SMALL,
        num_ranks=2,
        torchrun=torchrun,
    )
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
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RANK": "0"},
    )
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
    assert [record["status"] for record in records] == ["verified"] * 2
