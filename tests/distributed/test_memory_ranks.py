"""Ranks that read different amounts of free memory come to one verdict, before anything is made;
and what a run of two ranks says it held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Launch

FLAGS = (
    *("--B", 2, "--prefix_len", 80, "--gen_len", 8, "--num_batches", 1, "--warmup_batches", 0),
    *("--streamingllm_budget", 24, "--num_sink_tokens", 4),
)
PLACE = ("--dtype", "float32", "--threads", 1, "--linear", "torch")
GRID = ("--B", 1, 2, "--prefix_len", 40, 80, "--budget", 24, "--num_sink_tokens", 4)


@pytest.mark.narrow("values")
@pytest.mark.parametrize("command", ["selfspec", "latency"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_without_memory_ends_all_in_its_words(
    rank: str, command: str, launch: Launch, text_file: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("SCARCE_RANK", rank)
    flags = (*FLAGS, "--dataset", text_file) if command == "selfspec" else GRID
    script = "distributed/scarce.py"
    done = launch(script, command, *flags, *PLACE, num_ranks=2, notice_s=0.6)
    lines = [line for line in done.stderr.splitlines() if line.startswith("scarce.py: ")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert "on this host's 2 ranks" in lines[0] and "0.00 GB are free" in lines[0]
    assert not (tmp_path / "results").exists() and "memory  " not in done.stdout


def test_a_record_has_the_plan_beside_what_was_taken(
    launch: Launch, text_file: Path, tmp_path: Path
) -> None:
    for num_ranks in (1, 2):
        flags = (*FLAGS, "--dataset", text_file, *PLACE, "--out", "r.jsonl")
        done = launch("selfspec_benchmark.py", *flags, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
    one, two = (json.loads(s)["memory"] for s in (tmp_path / "r.jsonl").read_text().splitlines())
    assert one["kv_bytes"] == two["kv_bytes"] > 0 and one["weights_bytes"] < two["weights_bytes"]
    for found in (one, two):
        parts = ("weights", "kv", "draft_weights", "draft_kv", "working")
        assert found["total_bytes"] == sum(found[f"{part}_bytes"] for part in parts)
        assert found["process_bytes"] < found["peak_bytes"]
        assert found["free_bytes"] > found["total_bytes"]
    assert two["process_bytes"] > 1.5 * one["process_bytes"]
