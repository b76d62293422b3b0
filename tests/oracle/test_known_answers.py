"""Known answers from the command line to the record: both passes have the same score."""

from pathlib import Path
from statistics import fmean

import pytest
from conftest import Drive

from magicdec.model.tokenizer import load_tokenizer
from magicdec.runner.request import Request, SamplingParams
from magicdec.workload.answers import answer_scores
from magicdec.workload.workload import Wanted, build_workload

FLAGS = ("--B", 2, "--prefix_len", 1024, "--gen_len", 16, "--num_batches", 1)


@pytest.mark.parametrize(
    "dataset", [pytest.param("ruler:niah_single", marks=pytest.mark.wide), "recall"]
)
def test_a_run_scores_both_passes(dataset: str, drive: Drive) -> None:
    found = drive("selfspec", "--dataset", dataset, *FLAGS, "--warmup_batches", 0)
    plain, record = found.records
    saved = found.saved
    tokenizer = load_tokenizer(Path(__file__).parents[2] / "magicdec" / "demo" / "target")
    work = build_workload(dataset, tokenizer, 1, Wanted(1024, 2, 123, gen_len=16))
    assert [row["prompt_ids"] for row in saved] == [list(prompt) for prompt in work.prompts]
    requests = [Request(i, (), SamplingParams(16), ids) for i, ids in enumerate(found.tokens)]
    scores = answer_scores(work.answers, requests, tokenizer)
    assert scores is not None
    expected = fmean(scores)
    assert record["metrics"]["answer_score"] == expected
    assert plain["metrics"]["answer_score"] == expected
    assert "answer score" in found.stdout
