"""Known answers from the command line to the record: both passes have the same score."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
from conftest import Launch

from magicdec.model.tokenizer import load_tokenizer
from magicdec.request import Request, SamplingParams
from magicdec.workload.answers import answer_scores
from magicdec.workload.ruler import TASKS
from magicdec.workload.workload import build_workload

FLAGS = ("--B", 2, "--prefix_len", 1024, "--gen_len", 16, "--num_batches", 1, "--threads", 1)


@pytest.mark.parametrize(
    "dataset", [pytest.param("ruler:niah_single", marks=pytest.mark.wide), "recall"]
)
def test_a_run_scores_both_passes(dataset: str, launch: Launch, tmp_path: Path) -> None:
    done = launch(
        "selfspec_benchmark.py", "--dataset", dataset, *FLAGS, "--out", "r.jsonl",
        "--save_tokens", "t.jsonl", "--warmup_batches", 0,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "r.jsonl").read_text())
    saved = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    tokenizer = load_tokenizer(Path(__file__).parents[2] / "magicdec" / "demo" / "target")
    work = build_workload(dataset, tokenizer, 1, 1024, 2, 123, gen_len=16)
    assert [row["prompt_ids"] for row in saved] == [list(prompt) for prompt in work.prompts]
    requests = [
        Request(i, (), SamplingParams(16), row["output_ids"]) for i, row in enumerate(saved)
    ]
    scores = answer_scores(work.answers, requests, tokenizer)
    assert scores is not None
    expected = fmean(scores)
    assert record["metrics"]["answer_score"] == expected
    assert record["baseline_metrics"]["answer_score"] == expected
    assert "answer score" in done.stdout


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("ruler:qa", f"'ruler:qa' is not known; choose from ruler:{', ruler:'.join(TASKS)}"),
        ("ruler:cwe", "--prefix_len 100 is too short for --dataset ruler:cwe; it must be at least"),
    ],
)
def test_refusals_are_one_line(dataset: str, message: str, launch: Launch, tmp_path: Path) -> None:
    done = launch("baseline_benchmark.py", "--dataset", dataset, *FLAGS, "--prefix_len", 100)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "results").exists()
