"""Pipelined speculation on 2, 3 and 4 ranks has the tokens of one process, in every mode, with
every drafter, wherever the draft and the ends of the model are; and the command's records."""

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
import torch
from conftest import TINY, Launch, load, save_checkpoint, tiny_transformer
from distributed.speculation import (
    CASES,
    MAX_TOKENS,
    MODES,
    served_requests,
)
from several_ranks import answer_of, generate_alone, read_records

from magicdec.config.sections import SamplingSection

FLAGS = (
    "--prefix_len",
    70,
    "--prefill_chunk",
    32,
    "--gen_len",
    12,
    "--num_requests",
    3,
    "--threads",
    1,
    "--dtype",
    "float32",
    "--out",
    "r.jsonl",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A target, and a draft that is like it."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    model = tiny_transformer(replace(TINY, num_layers=5))
    save_checkpoint(model, target)
    for p in model.parameters():
        p.add_(torch.randn(p.shape) * 0.02 * p.std())
    save_checkpoint(model, draft)
    return [target, draft]


@cache
def one_process(path: Path, sampling: SamplingSection) -> list[list[int]]:
    return generate_alone(load(path), served_requests(sampling), MAX_TOKENS)


@pytest.mark.wide
@pytest.mark.parametrize(
    "num_ranks", [3, *(pytest.param(n, marks=pytest.mark.wide) for n in (2, 4))]
)
def test_the_tokens_are_those_of_one_process(
    num_ranks: int, launch: Launch, models: list[Path]
) -> None:
    outputs = answer_of(launch, "distributed/speculation.py", *models, num_ranks=num_ranks)
    for case, found in zip(CASES[num_ranks], outputs, strict=True):
        for mode, tokens in zip(MODES, found, strict=True):
            assert tokens == one_process(models[0], case.sampling), (case, mode)


def test_the_command_makes_a_record_of_each_mode_a_plot_and_a_trace(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    done = launch(
        "pipeline_benchmark.py",
        "--model",
        tiny_checkpoint,
        "--dataset",
        text_file,
        "--draft",
        "self",
        "--kv_policy",
        "snapkv",
        "--budget",
        90,
        "--layer_split",
        "auto/1.0",
        "--modes",
        "sequential",
        *MODES,
        "--pa",
        0,
        "--lanes",
        2,
        "--temperature",
        0.8,
        "--top_p",
        0.95,
        "--repetition_penalty",
        1.2,
        "--trace",
        "t.json",
        "--plot",
        "p.svg",
        *FLAGS,
        num_ranks=3,
    )
    assert done.returncode == 0, done.stderr
    assert "</svg>" in (tmp_path / "p.svg").read_text()
    records = read_records(tmp_path / "r.jsonl")
    assert [record["name"] for record in records] == ["sequential", *MODES]
    assert all(record["status"] == "verified" for record in records)
    assert all(record["kind"] == "pass" for record in records)
    one_process = [min(3, len(os.sched_getaffinity(0))), 0, 0]
    assert [record["groups"][0]["threads"] for record in records] == [one_process, *[[1, 1, 1]] * 3]
    assert all(record["config"]["sampling"]["top_p"] == 0.95 for record in records)
    splits = {record["config"]["workload"]["layer_split"] for record in records[1:]}
    assert splits == {"1,1/1.0"}, "two layers for two stages, in place of auto"
    assert "--layer_split 1,1/1.0: the stages are predicted to take" in done.stdout
    uses = [record["details"] for record in records[1:]]
    assert records[0]["details"] is None
    drafted = [record["metrics"]["num_draft_tokens"] for record in records[1:3]]
    assert drafted[0] is None and drafted[1] > 0
    assert [use["num_layers"] for use in uses] == [[1, 1, 0]] * 3
    assert uses[1]["draft_rank"] == 2 and uses[0]["draft_rank"] is uses[0]["draft_ms"] is None
    for use in uses:
        assert use["layers_computed"] + use["layers_skipped"] == 2 * use["runs"]
        assert all(0 <= busy <= 1 for busy in use["busy"]) and min(use["stage_ms"]) > 0
    accepted = records[2]["metrics"]["num_accepted_draft_tokens"]
    assert accepted == drafted[1], "its drafts read all of the short texts"
    assert all(record["config"]["kv"]["policy"] == "snapkv" for record in records[2:])
    assert records[2]["workload"]["draft"] == {
        key: records[2]["workload"][key] for key in ("model", "random_weights", "model_sha256")
    }
    assert "draft weights" in done.stdout and "draft KV" in done.stdout
    assert all(record["metrics"]["request_tokens_per_s"] > 0 for record in records)
    for record in records:
        requests = record["requests"]
        ends = sorted(request["finished_ms"] for request in requests[:2])
        is_alone = record is records[0]  # with one lane
        assert requests[2]["joined_ms"][0] >= ends[is_alone], "until then no lane was free"
        times = [request["first_token_ms"] - request["joined_ms"][0] for request in requests]
        speed = record["metrics"]["request_prefill_tokens_per_s"]
        assert speed == pytest.approx(fmean(70e3 / ms for ms in times))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    ranks = "rank 0: head, stage 0", "rank 1: stage 1", "rank 2: draft"
    assert names == {f"{mode}: requests" for mode in ("sequential", *MODES)} | {
        f"{mode}: {rank}" for mode in MODES for rank in ranks
    }


@pytest.mark.wide
def test_auto_divides_the_layers_by_times_that_the_ranks_measure(
    launch: Launch, text_file: Path, tmp_path: Path
) -> None:
    """Which layers is not known, but they are those that the line and the record say."""
    done = launch(
        "pipeline_benchmark.py",
        "--dataset",
        text_file,
        "--draft",
        "ngram",
        "--layer_split",
        "auto/head",
        "--modes",
        "sequential",
        "pipeline",
        "pipeinfer",
        *FLAGS,
        num_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "r.jsonl")
    assert [record["status"] for record in records] == ["verified"] * 3
    counts = records[-1]["details"]["num_layers"]
    assert sum(counts) == 6 and min(counts) >= 1
    split = f"{counts[0]},{counts[1]}/head"
    assert {record["config"]["workload"]["layer_split"] for record in records[1:]} == {split}
    assert f"--layer_split {split}: the stages are predicted to take" in done.stdout
