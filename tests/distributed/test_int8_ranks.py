"""int8 weights through the drivers: the same tokens over 1, 2 and 3 ranks, quantised while loading
or stored so; int8 drafts; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Drive, Launch

from magicdec.model.checkpoint.convert import convert, find_checkpoint, quantized

FLAGS = (
    *("--B", 2, "--prefix_len", 120, "--gen_len", 24, "--num_batches", 1, "--warmup_batches", 0),
    *("--gamma", 3, "--streamingllm_budget", 40, "--prefill_chunk", 64),
)
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def int8_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_checkpoint`, quantised by the converter."""
    out = tmp_path_factory.mktemp("int8")
    source = quantized(find_checkpoint("--checkpoint_dir", tiny_checkpoint))
    convert(source, out / "model.safetensors", None)
    return out


@pytest.fixture(scope="module")
def tokens_of_one_rank() -> dict[str, Any]:
    """Filled by the first test that needs them."""
    return {}


@pytest.mark.narrow("values")
@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_emit_the_tokens_of_one(
    num_ranks: int, is_stored: bool, drive: Drive, text_file: Path, tiny_checkpoint: Path,
    int8_checkpoint: Path, tokens_of_one_rank: dict[str, Any],
) -> None:  # fmt: skip
    """Speculation against its own baseline too, in float32 exactly."""
    model = ("--model", int8_checkpoint) if is_stored else ("--model", tiny_checkpoint)
    asked = () if is_stored else ("--target_dtype", "int8")
    flags = (*model, *asked, *FLOAT32, "--dataset", text_file)
    found = drive("selfspec", *FLAGS, *flags, num_ranks=num_ranks)
    (record,), tokens = found.records, found.tokens
    assert record["status"] == "ok" and record["correctness"]["identical"] is True
    section = record["config"]["model"]
    assert (section["dtype"], section["target_dtype"]) == ("float32", "int8")
    assert section["linear"] == "torch"
    assert tokens == tokens_of_one_rank.setdefault("tokens", tokens)
    if num_ranks == 1 and not is_stored:
        others = drive("selfspec", *FLAGS, *model, *FLOAT32, "--dataset", text_file)
        (plain,) = others.records
        assert plain["config"]["model"]["target_dtype"] == "float32" and others.tokens != tokens
        read = [r["baseline_metrics"]["bytes_read"] for r in (record, plain)]
        assert read[0] < 0.75 * read[1]


@pytest.mark.narrow("values")
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("target", ["float32", "int8"])
def test_an_int8_draft(target: str, num_ranks: int, drive: Drive) -> None:
    models = ("--target", "demo", "--model", "demo-draft", "--dataset", "demo", *FLOAT32)
    kinds = ("--draft_dtype", "int8", "--target_dtype", target)
    (record,) = drive("longspec", *FLAGS, *models, *kinds, num_ranks=num_ranks).records
    assert record["status"] == "ok" and record["correctness"]["identical"] is True
    config = record["config"]
    assert config["model"]["target_dtype"] == target and config["draft"]["draft_dtype"] == "int8"
    assert 0 < record["metrics"]["acceptance_rate"] < 1


def test_bfloat16_activations_and_the_largest_draft(drive: Drive) -> None:
    """The target's weights in int8 draft for it: most is accepted, where bfloat16 ones get all."""
    flags = ("--target", "demo", "--model", "demo", "--dataset", "demo", "--dtype", "bfloat16")
    kinds = ("--draft_dtype", "int8", "--draft_budget", -1)  # of all of the cache
    (record,) = drive("longspec", *FLAGS, *flags, *kinds, num_ranks=2).records
    assert record["config"]["model"]["target_dtype"] == "bfloat16"
    assert 0.7 < record["metrics"]["acceptance_rate"] < 1


def test_int8_checkpoints_are_not_dequantised(launch: Launch, int8_checkpoint: Path) -> None:
    stored = ("--model", int8_checkpoint)
    done = launch("selfspec_benchmark.py", *FLAGS, *stored, "--target_dtype", "bfloat16")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    expected = f"--target_dtype bfloat16: --model {int8_checkpoint} holds int8 weights; choose from"
    assert expected in done.stderr
    done = launch("longspec_benchmark.py", *FLAGS, *stored, "--draft_dtype", "float32")
    assert done.returncode == 2 and "--draft_dtype float32: --model" in done.stderr
