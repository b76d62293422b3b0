"""A rank that is killed before it serves, while it does or when it has served: the others name it
and end."""

import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, Launch, save_checkpoint, tiny_transformer
from several_ranks import PROMISED_S, check_killed, read_records

from magicdec.distributed import shared_memory

FLAGS = (
    "--prefix_len",
    20,
    "--prefill_chunk",
    32,
    "--gen_len",
    4,
    "--num_requests",
    3,
    "--threads",
    1,
    "--dtype",
    "float32",
    "--out",
    "r.jsonl",
)
RING = ("recurrent", "--modes", "ring")
WHOLE = ("recurrent", "--modes", "tensor_parallel", "ring")
GLOO = ("--collectives", "gloo")
TIMED = (*RING, "--layer_split", "auto:2")
PIPELINE = ("pipeline", "--draft", "ngram", "--modes", "pipeinfer")
SERVING = (
    "recurrent",
    "--modes",
    "sequential",
    "inflight",
    "ring",
    "--num_requests",
    9,
    "--prefix_len",
    "uniform:20:110",
    "--gen_len",
    "uniform:4:20",
)
RUNS = (
    "pipeline",
    "--prefix_len",
    70,
    "--gen_len",
    12,
    "--draft",
    "ngram",
    "--layer_split",
    "0.5,0.5/head",
)
DRAFTS = (
    "pipeline",
    "--prefix_len",
    70,
    "--gen_len",
    12,
    "--draft",
    "self",
    "--pa",
    0,
    "--layer_split",
    "0.5,0.5/1.0",
    "--modes",
    "sequential",
    "pipeline+draft",
)
SHARED = ("--collectives", "shared_memory")
CASES = {  # (phase, killed rank, ranks, command and its flags)
    "preparing": ("preparing", 0, 3, RING),
    "timing, of the same stage": ("timing", 0, 4, TIMED),
    "timing, of another stage": ("timing", 3, 4, TIMED),
    "timing through gloo": ("timing", 1, 4, (*TIMED, *GLOO)),
    "starting": ("starting", 1, 3, RING),
    "grouping": ("grouping", 2, 3, WHOLE),
    "loading": ("loading", 1, 3, RING),
    "connecting": ("connecting", 1, 3, RING),
    "connecting through gloo": ("connecting through gloo", 0, 3, (*RING, *GLOO)),
    "closing": ("closing", 2, 3, RING),
    "serving": ("serving", 1, 3, (*SERVING, *SHARED)),
    "serving through gloo": ("serving", 0, 3, (*SERVING, *GLOO)),
    "serving, the first": ("serving", 0, 3, (*SERVING, *SHARED)),
    "serving, the last": ("serving", 2, 3, (*SERVING, *SHARED)),
    "serving through gloo, another": ("serving", 1, 3, (*SERVING, *GLOO)),
    "serving through gloo, the last": ("serving", 2, 3, (*SERVING, *GLOO)),
    "pipeline, preparing": ("preparing", 1, 3, PIPELINE),
    "pipeline, loading": ("loading", 2, 3, PIPELINE),
    "pipeline, connecting": ("connecting", 1, 3, PIPELINE),
    "pipeline, connecting through gloo": ("connecting through gloo", 2, 3, (*PIPELINE, *GLOO)),
    "pipeline, timing": ("timing runs", 1, 3, (*PIPELINE, "--layer_split", "auto")),
    "pipeline, serving": ("serving runs", 1, 2, (*RUNS, *SHARED)),
    "pipeline, serving through gloo": ("serving runs", 0, 2, (*RUNS, *GLOO)),
    "pipeline, serving drafts": ("serving drafts", 2, 3, (*DRAFTS, *SHARED)),
    "pipeline, serving drafts through gloo": ("serving drafts", 2, 3, (*DRAFTS, *GLOO)),
    "inflight, loading": ("loading", 1, 2, ("inflight", "--num_requests", 2)),
}
QUICK = (
    "loading",
    "serving",
    "serving through gloo",
    "pipeline, serving",
    "pipeline, serving drafts",
)
# While a pass is served, the records of the passes before it are there already.
PASSES_BEFORE = {"serving": ["sequential", "inflight"]}
PASSES_BEFORE |= {"serving runs": ["sequential"], "serving drafts": ["sequential"]}


def segments() -> set[Path]:
    return set(shared_memory.DIRECTORY.glob("magicdec-*"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(TINY, num_layers=4, vocab_size=2051)
    return save_checkpoint(tiny_transformer(config), tmp_path_factory.mktemp("deep"))


@pytest.mark.narrow(2)
@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.wide) for c in CASES]
)
def test_a_rank_that_is_killed_is_named_and_ends_all(
    case: str,
    launch: Launch,
    checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    phase, killed, num_ranks, (command, *flags) = CASES[case]
    monkeypatch.setenv("KILLED_RANK", str(killed))
    monkeypatch.setenv("KILLED_IN", f"{command}: {phase}")
    files = "--model", checkpoint, "--dataset", text_file
    before = segments()
    done = launch("distributed/killed_rank.py", *files, *FLAGS, *flags, num_ranks=num_ranks)
    check_killed(done, killed, num_ranks, tmp_path)
    assert segments() <= before, "shared memory is left behind"
    if phase in PASSES_BEFORE:
        names = [record["name"] for record in read_records(tmp_path / "r.jsonl")]
        assert names == PASSES_BEFORE[phase]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("command", "phase", "flags"),
    [
        ("run", "preparing", ("--gen_len", 8, "--B", 2)),
        ("run", "loading", ("--gen_len", 8, "--B", 2)),
        ("latency", "grouping", ("--B", 1, "--T", 1)),
    ],
)
def test_other_commands_name_it_too(
    command: str,
    phase: str,
    flags: tuple[object, ...],
    launch: Launch,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KILLED_RANK", "1")
    monkeypatch.setenv("KILLED_IN", f"{command}: {phase}")
    script = "distributed/killed_rank.py"
    sizes = ("--prefix_len", 60, "--threads", 1)
    done = launch(script, "--model", checkpoint, *sizes, *flags, num_ranks=3)
    check_killed(done, 1, 3, tmp_path)


@pytest.mark.wide
@pytest.mark.parametrize("torchrun", [False, True])
def test_the_launcher_names_it_too(
    torchrun: bool,
    launch: Launch,
    checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends the other ranks, often before they have said anything."""
    monkeypatch.setenv("KILLED_RANK", "1")
    monkeypatch.setenv("KILLED_IN", "recurrent: starting")
    words = ["--model", checkpoint, "--dataset", text_file, *FLAGS, *RING[1:]]
    script = "distributed/killed_rank.py"
    if torchrun:
        done = launch(script, *words, num_ranks=2, torchrun=True)
        assert "SIGKILL" in done.stderr and re.search(r"rank +: 1 ", done.stderr), done.stderr
    else:
        done = launch(script, *words, "--nproc", 2)
        assert done.stderr.splitlines()[-1] == "rank 1 was ended by SIGKILL", done.stderr
        assert done.returncode == 128 + signal.SIGKILL
    assert time.monotonic() - float((tmp_path / "killed_at").read_text()) < PROMISED_S
