"""`magicdec recurrent` on several ranks: its records, stages of several ranks, and samples that
circulate through 2, 3 and 4 ranks with the tokens of one process."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from conftest import TINY, Launch, load, save_checkpoint, tiny_transformer
from distributed.ring import CASES, LENGTHS, MAX_TOKENS, RingCase, cases_of, requests_of
from several_ranks import answer_of, generate_alone, read_records
from tiny_families import MODELS, make_model

FLAGS = (
    *("--prefix_len", "uniform:20:110", "--prefill_chunk", 32, "--gen_len", "uniform:4:20"),
    *("--num_requests", 9, "--threads", 1, "--dtype", "float32", "--out", "r.jsonl"),
)
DRAFTS = "--draft", "ngram", "--gamma", 3


@pytest.mark.parametrize(
    ("num_ranks", "flags", "layers"),
    [
        pytest.param(1, ["--n_samples", 3], [2], marks=pytest.mark.wide),
        (
            2,
            [
                "--n_samples",
                6,
                "--B",
                2,
                "--layer_split",
                "0.5,0.5",
                "--plot",
                "gantt.png",
                *DRAFTS,
            ],
            [1, 1],
        ),
        pytest.param(
            4, ["--layer_split", "auto:2", "--collectives", "gloo"], [1, 1], marks=pytest.mark.wide
        ),
    ],
)
def test_every_pass_has_the_same_tokens_and_a_record(
    num_ranks: int,
    flags: list[object],
    layers: list[int],
    launch: Launch,
    tiny_checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
) -> None:
    where = "--model", tiny_checkpoint, "--dataset", text_file
    done = launch("recurrent_benchmark.py", *where, *FLAGS, *flags, num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "r.jsonl")
    several = ["tensor_parallel"] if num_ranks > 1 else []
    *names, last = ["sequential", "inflight", *several, "ring", "ring+draft"]
    assert [r["name"] for r in records] == names + ([last] if DRAFTS[0] in flags else [])
    assert all(r["status"] == "verified" and r["num_differing"] == 0 for r in records)
    assert all(r["reference"] == "sequential" and r["kind"] == "pass" for r in records)
    cores = len(os.sched_getaffinity(0))
    # It has the threads of those that wait, as far as there are cores for them.
    one_process = [min(num_ranks, cores)] + [0] * (num_ranks - 1)
    threads = [one_process] * 2 + [[1] * num_ranks] * (len(records) - 2)
    assert [r["groups"][0]["threads"] for r in records] == threads
    lengths = [[request["output_len"] for request in r["requests"]] for r in records]
    assert all(length == lengths[0] for length in lengths) and len(set(lengths[0])) > 2
    assert [r["details"] is None for r in records] == ["ring" not in r["name"] for r in records]
    drafted = records.pop() if DRAFTS[0] in flags else None
    ring = records[-1]["details"]
    assert ring["num_layers"] == layers and len(ring["busy"]) == len(layers)
    assert ring["tensor_parallel"] * len(layers) == num_ranks
    assert all(0 < busy <= 1 for busy in ring["busy"]) and min(ring["decode_ms"]) > 0
    assert ring["measured_round_ms"] > 0
    if num_ranks == 1 or ring["link_ms"] is not None:  # some stage was idle
        assert (ring["link_ms"] or 0) > 0 or num_ranks == 1
    header = 8 * (6 + ring["lane_size"])
    hidden = 48 * 4 * ring["lane_size"]
    assert ring["decode_hop_bytes"] == header + hidden
    if num_ranks > 1:  # prompts go to the last stage whole, and come home as one token
        prompts = [request["prompt_len"] for request in records[-1]["requests"]]
        assert len(set(prompts)) > 4, "prompts of several lengths"
        assert ring["sent_bytes"][0] > sum(prompts) * 48 * 4 > ring["sent_bytes"][1] > 0
    assert min(ring["queue_depth"]) >= 0 and max(ring["queue_depth"]) < 20
    assert min(ring["sent_messages"]) > sum(lengths[0]) / ring["lane_size"]
    assert (tmp_path / "gantt.png").exists() == ("--plot" in flags)
    assert records[-1]["config"]["parallel"]["rank_group"] == list(range(ring["tensor_parallel"]))
    assert records[-1]["config"]["decoding"]["drafter"] is None
    if drafted is not None:
        assert drafted["config"]["decoding"]["drafter"] == "ngram"
        check_drafts(drafted["details"], drafted["metrics"], lengths[0])


def check_drafts(ring: dict[str, Any], metrics: dict[str, Any], lengths: list[int]) -> None:
    """The ring whose messages carry up to 3 drafts of each row: none where nothing is repeated, as
    in most texts of a model with random weights."""
    drafted = metrics["num_draft_tokens"]
    rate = metrics["num_accepted_draft_tokens"] / drafted if drafted else None
    assert metrics["draft_acceptance_rate"] == rate
    assert sum(length - 1 for length in lengths) >= ring["tokens_per_round"] >= 1
    assert ring["draft_ms"] > 0
    header = 8 * (6 + 2 * ring["lane_size"])
    hidden = 48 * 4 * ring["lane_size"]
    assert ring["decode_hop_bytes"] in {header + hidden * (1 + n) for n in range(4)}


@pytest.fixture(scope="module")
def deep_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer for each of three stages."""
    config = replace(TINY, num_layers=3, vocab_size=2051, eos_token_ids=(2, 5))
    return save_checkpoint(tiny_transformer(config), tmp_path_factory.mktemp("deep"))


@pytest.mark.wide
def test_in_bfloat16_too_where_a_row_has_the_same_bits_in_any_batch(
    launch: Launch, deep_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """Two samples a message, beside one sample at a time and all at once in one process."""
    done = launch(
        "recurrent_benchmark.py",
        "--model",
        deep_checkpoint,
        "--dataset",
        text_file,
        *FLAGS,
        "--dtype",
        "bfloat16",
        "--attention",
        "native",
        "--linear",
        "packed",
        "--B",
        2,
        "--modes",
        "sequential",
        "inflight",
        "ring",
        num_ranks=3,
    )
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "r.jsonl")
    assert [r["name"] for r in records] == ["sequential", "inflight", "ring"]
    assert [(r["status"], r["num_differing"]) for r in records] == [("verified", 0)] * 3
    config = records[-1]["config"]
    assert config["model"]["dtype"] == "bfloat16" and records[-1]["details"]["lane_size"] == 2


@pytest.mark.wide
def test_a_thousand_samples_leave_nothing_behind(
    launch: Launch, deep_checkpoint: Path, tmp_path: Path
) -> None:
    """Threads, open files and memory stay as they are, except that every stage keeps a span of each
    message and the first one what it serves, and that the pages of ring buffers of 1 MB are
    touched one after the other, once. Allocations are counted, because resident memory moves by
    whole arenas of 1 MB. A leak grows in every interval, a buffer that a thread allocates or a
    table that doubles in one, so that the median interval decides."""
    done = launch(
        "distributed/watched_ring.py",
        "--model",
        deep_checkpoint,
        "--num_requests",
        1000,
        "--n_samples",
        6,
        "--prefix_len",
        "uniform:4:20",
        "--prefill_chunk",
        32,
        "--gen_len",
        6,
        "--ignore_eos",
        "--threads",
        1,
        "--dtype",
        "float32",
        "--modes",
        "ring",
        "--out",
        "r.jsonl",
        num_ranks=3,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        held = read_records(tmp_path / f"rank{rank}.jsonl")[4:]  # from the 500th sample on
        assert held[-1]["ended"] >= 1000 and len(held) >= 6
        assert len({sample["threads"] for sample in held}) == 1
        assert len({sample["files"] for sample in held}) == 1
        num_messages = 6 * (held[-1]["ended"] - held[0]["ended"])
        new_blocks = held[-1]["python_blocks"] - held[0]["python_blocks"]
        assert new_blocks < num_messages * (14 if rank == 0 else 5)
        growth = [b["native_kb"] - a["native_kb"] for a, b in pairwise(held)]
        assert median(growth) < (40 if rank == 0 else 16), growth
        assert held[-1]["anonymous_kb"] - held[0]["anonymous_kb"] < 4000
        assert all(sample["ring_kb"] == sample["shared_kb"] for sample in held)
        assert held[-1]["ring_kb"] == held[-3]["ring_kb"] < 2 * 1024 + 64


DEPTH = 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    llama, gpt2 = (tmp_path_factory.mktemp(name) for name in ("llama", "gpt2"))
    save_checkpoint(tiny_transformer(replace(TINY, num_layers=DEPTH)), llama)
    family, sizes = MODELS["gpt2"]
    make_model(family, sizes | {"n_layer": DEPTH, "n_inner": 96}).save_pretrained(gpt2)
    return [llama, gpt2]


@cache
def one_process(path: Path, case: RingCase) -> list[list[int]]:
    return generate_alone(load(path), requests_of(case), MAX_TOKENS)


@pytest.mark.wide
@pytest.mark.parametrize(
    "num_ranks", [*(pytest.param(n, marks=pytest.mark.wide) for n in (2, 4)), 3]
)
def test_the_tokens_are_those_of_one_process(
    num_ranks: int, launch: Launch, models: Sequence[Path]
) -> None:
    outputs = answer_of(launch, "distributed/ring.py", *models, num_ranks=num_ranks)
    assert num_ranks != 4 or set(cases_of(num_ranks, 0)) == set(CASES)
    for model, (path, model_outputs) in enumerate(zip(models, outputs, strict=True)):
        for case, tokens in zip(cases_of(num_ranks, model), model_outputs, strict=True):
            assert tokens == one_process(path, case), (path.name, case)
            assert len({len(token) for token in tokens}) > 4 and len(tokens) == len(LENGTHS)
