"""The drivers from the command line, over 1, 2 and 3 ranks: same tokens, right records, whatever
the order of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, Drive, Launch, save_checkpoint, tiny_transformer
from several_ranks import check_numbers, read_records

FLAGS = (
    *("--B", 3, "--prefix_len", 80, "--gen_len", 40, "--num_batches", 2, "--warmup_batches", 0),
    *("--dtype", "float32"),
)
SPECULATION = ("--gamma", 3, "--streamingllm_budget", 24, "--num_sink_tokens", 4)


Words = tuple[object, ...]


@pytest.fixture
def tiny(tiny_checkpoint: Path, text_file: Path) -> Words:
    return "--model", tiny_checkpoint, "--dataset", text_file, *FLAGS


@pytest.fixture(scope="module")
def single() -> dict[str, list[list[int]]]:
    """Output tokens of one rank, filled by the first test that needs them."""
    return {}


@pytest.mark.parametrize(
    ("ranks", "collectives"),
    [
        ("0", "auto"),
        pytest.param("0 1", "shared_memory", marks=pytest.mark.wide),
        pytest.param("0 1", "gloo", marks=pytest.mark.wide),
        ("1 0", "auto"),
        pytest.param("0 1 2", "gloo", marks=pytest.mark.wide),
        ("2 0 1", "shared_memory"),
    ],
)
def test_every_rank_count_and_order_emits_the_same_tokens(
    ranks: str, collectives: str, drive: Drive, tiny: Words, single: dict[str, list[list[int]]]
) -> None:
    group = ranks.split()
    found = drive(
        "selfspec", *tiny, *SPECULATION, "--rank_group", *group, "--collectives", collectives,
        num_ranks=len(group), torchrun=ranks == "1 0",
    )  # fmt: skip
    (record,) = found.records
    assert record["status"] == "ok" and record["correctness"]["identical"] is True
    assert record["correctness"]["num_tokens"] == 6 * 40
    assert record["config"]["parallel"]["rank_group"] == list(map(int, group))
    assert record["environment"]["world_size"] == len(group)
    for samples in record["samples"].values():
        assert samples["threads"] == [[1] * len(group)] * 2, "of each batch"
    assert 0 < record["metrics"]["acceptance_rate"] < 1
    assert [len(sample["prompt_ids"]) for sample in found.saved] == [80] * 6
    assert found.tokens == single.setdefault("tokens", found.tokens)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_the_draft_length_that_pays(num_ranks: int, drive: Drive, tiny: Words) -> None:
    """Clocks decide, and differ between ranks: all follow the first. No ignored end tokens, so rows
    end apart."""
    flags = "--gamma", "auto", "--warmup_batches", 1
    found = drive("selfspec", *tiny, *SPECULATION, *flags, num_ranks=num_ranks)
    (record,) = found.records
    assert record["correctness"]["identical"] is True
    assert record["config"]["decoding"]["num_draft_tokens"] == "auto"
    assert "gamma auto" in found.stdout
    metrics, samples = record["metrics"], record["samples"]["speculative"]
    drafted = samples["num_drafted"]
    assert 0 <= metrics["mean_draft_tokens"] <= 8 and metrics["calibration_ms"] > 0
    assert all(0 <= count <= 8 for batch in drafted for count in batch)
    for batch, counts in zip(samples["num_accepted"], drafted, strict=True):
        assert [bool(step) for step in batch] == [count > 0 for count in counts]
    assert record["baseline_metrics"]["calibration_ms"] is None
    in_warm_up, in_batches = samples["warmup_calibration_ms"], samples["calibration_ms"]
    assert in_warm_up == metrics["warmup_calibration_ms"] > 0 and len(in_batches) == 2
    assert metrics["calibration_ms"] == in_warm_up + sum(in_batches)
    check_numbers(record)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.wide), 3])
def test_bfloat16_agrees_with_its_own_baseline(num_ranks: int, drive: Drive, tiny: Words) -> None:
    """With whatever kernels `auto` takes here; three ranks have shards of an odd width."""
    words = *tiny, *SPECULATION, "--dtype", "bfloat16", "--ignore_eos"
    (record,) = drive("selfspec", *words, num_ranks=num_ranks).records
    assert record["config"]["model"]["dtype"] == "bfloat16"
    assert record["correctness"]["num_tokens"] == 6 * 40
    if record["config"]["model"]["linear"] == "packed":
        assert record["correctness"]["identical"] is True


def test_without_a_compiler_auto_says_what_it_takes(
    drive: Drive, tiny: Words, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = drive("baseline", *tiny)
    assert found.stderr.count("--attention auto: grouped; native needs a C++ compiler") == 1
    (record,) = found.records
    assert record["config"]["attention"]["backend"] == "grouped"
    assert record["config"]["model"]["linear"] == "torch"


@pytest.mark.wide
def test_kv_heads_are_replicated_when_there_are_more_ranks(
    drive: Drive, text_file: Path, tmp_path: Path
) -> None:
    """MQA: three ranks, one KV head, which each of them holds."""
    config = replace(TINY, vocab_size=2051, num_kv_heads=1, qkv_bias=True, output_bias=True)
    directory = save_checkpoint(tiny_transformer(config), tmp_path / "mqa")
    words = "--model", directory, "--dataset", text_file, *FLAGS, *SPECULATION
    one, three = (drive("selfspec", *words, num_ranks=num_ranks).tokens for num_ranks in (1, 3))
    assert one == three


def test_the_baseline_driver_and_its_text(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    done = launch(
        "baseline_benchmark.py", "--model", tiny_checkpoint, "--dataset", text_file, "--B", 2,
        "--prefix_len", 50, "--max_len", 60, "--num_batches", 1, "--printoutput", "--threads", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--- sequence 0" in done.stdout and "--- sequence 1" in done.stdout
    (record,) = read_records(tmp_path / "results" / "runs.jsonl")
    assert record["correctness"]["reference"] is None and record["baseline_metrics"] is None
    assert record["metrics"]["acceptance_rate"] is None
    assert record["config"]["workload"]["gen_len"] == 10


def test_random_weights_make_no_acceptance_claim(
    launch: Launch, text_file: Path, tmp_path: Path
) -> None:
    done = launch(
        "selfspec_benchmark.py", "--model", "random:llama-68m", "--dataset", text_file, "--B", 1,
        "--prefix_len", 40, "--gen_len", 8, "--num_batches", 1, "--no_baseline",
        "--dtype", "float32", "--threads", 1,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / "results" / "runs.jsonl")
    assert record["workload"]["random_weights"] is True
    metrics = record["metrics"]
    assert metrics["acceptance_rate"] is None and metrics["acceptance_per_position"] is None
    assert metrics["verify_ms"] > 0
    assert record["correctness"]["reference"] is None
