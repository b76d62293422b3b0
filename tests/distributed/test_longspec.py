"""Standalone drafts on subgroups of ranks, from the command line, and what the driver refuses of
models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Command, Drive, Launch, num_parameters, save_checkpoint, tiny_transformer
from several_ranks import check_numbers

from magicdec.model.checkpoint.source import find_model

FLAGS = (
    "--B",
    2,
    "--prefix_len",
    300,
    "--gen_len",
    40,
    "--num_batches",
    2,
    "--warmup_batches",
    0,
    "--dtype",
    "float32",
    "--prefill_chunk",
    64,
)
DEMO = ("--target", "demo", "--model", "demo-draft", "--dataset", "demo")
WINDOW = ("--gamma", 3, "--streamingllm_budget", 100)


@pytest.mark.narrow(1)
@pytest.mark.parametrize(
    ("args", "draft_ranks", "policy"),
    [
        (["--rank_group", 1, 0], [1], "streaming_llm"),
        (["--draft_group", 1, 0, "--kv_policy", "full", "--budget", -1], [1, 0], "full"),
        (["--kv_policy", "snapkv", "--draft_budget", 80], [0], "snapkv"),
    ],
    ids=str,
)
def test_the_driver_on_two_ranks(
    args: list[object], draft_ranks: list[int], policy: str, drive: Drive
) -> None:
    found = drive("longspec", *DEMO, *FLAGS, *WINDOW, *args, num_ranks=2)
    plain, record = found.records
    assert record["status"] == "verified" and record["correctness"]["identical"] is True
    assert record["correctness"]["num_tokens"] == 2 * 2 * 40
    config = record["config"]
    metrics = record["metrics"]
    assert config["draft"]["rank_group"] == draft_ranks and config["kv"]["policy"] == policy
    assert (config["draft"]["model"], config["model"]["model"]) == ("demo-draft", "demo")
    assert record["workload"]["draft"]["model"] == "demo-draft"
    assert 0 < metrics["draft_acceptance_rate"] < 1 and metrics["draft_prefill_ms"] > 0
    assert metrics["draft_prefill_ms"] == metrics["begin_ms"]
    assert plain["metrics"]["begin_ms"] > 0
    assert plain["metrics"]["draft_prefill_ms"] is None
    check_numbers(plain, record)
    assert "standalone draft" in found.stdout


@pytest.mark.wide
def test_the_bytes_of_the_drafts_forwards_count(drive: Drive) -> None:
    """By hand, in one step: the target verifies once, the draft reads its weights gamma times."""
    flags = [*DEMO, *FLAGS, "--gamma", 3, "--draft_budget", -1, "--gen_len", 2, "--no_baseline"]
    (record,) = drive("longspec", *flags, "--B", 1, "--num_batches", 1, num_ranks=2).records
    sizes = {}
    for name in ("demo", "demo-draft"):
        config, weights = parameters(name)
        sizes[name] = weights, 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    target, target_kv = sizes["demo"]
    draft, draft_kv = sizes["demo-draft"]
    # The two ranks share the target, but each reads its norms: those are counted twice.
    config, _ = parameters("demo")
    target += (2 * config.num_layers + 1) * config.hidden_size * 4
    expected = target + (300 + 4) * target_kv
    expected += sum(draft + (300 + n) * draft_kv for n in (1, 2, 3))
    assert record["metrics"]["bytes_read"] == expected


def parameters(name: str) -> tuple[Any, int]:
    """A demo model's config, and the bytes that a forward reads of its weights in float32."""
    config = find_model("--model", name).config
    assert config.tie_word_embeddings, "the embedding is the head, read once"
    return config, 4 * num_parameters(config)


@pytest.mark.wide
def test_a_draft_of_short_reach_follows_a_long_text(
    launch: Launch, command: Command, tmp_path: Path
) -> None:
    """100 positions, 340 tokens of text: refused under full KV, which says what would serve;
    served by a rolling cache, if budget and chunk fit."""
    config = replace(TINY, vocab_size=2048, max_position_embeddings=100)
    directory = save_checkpoint(tiny_transformer(config), tmp_path / "short")
    flags = ["--target", "demo", "--model", directory, *FLAGS]
    code, _, err = command("longspec", *flags, "--kv_policy", "snapkv")
    assert code == 2 and err.count("\n") == 1
    assert "340 exceeds the 100 positions of the draft --model short" in err
    assert "under --kv_policy snapkv; --kv_policy streaming_llm would serve" in err
    code, _, err = command("longspec", *flags, "--draft_budget", 50)
    assert code == 2 and "--budget 50 and the --prefill_chunk 64" in err
    done = launch("longspec_benchmark.py", *flags, "--draft_budget", 50, "--prefill_chunk", 50)
    assert done.returncode == 0, done.stderr


def test_other_tokenizers_are_refused(command: Command, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = replace(TINY, vocab_size=2048)
    directory = save_checkpoint(tiny_transformer(config), tmp_path / "foreign")
    (directory / "tokenizer.model").unlink()
    words = {f"w{i}": i for i in range(2048)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    code, _, err = command("longspec", "--target", "demo", "--model", directory, *FLAGS)
    assert code == 2 and err.count("\n") == 1, err
    assert "the tokenizers of --model foreign and --target demo have different" in err


@pytest.mark.wide
def test_heads_that_the_drafts_ranks_cannot_share(launch: Launch) -> None:
    flags = *DEMO, *FLAGS, "--draft_ranks", 0, 1, 2
    done = launch("longspec_benchmark.py", *flags, num_ranks=3, notice_s=0.6)
    assert done.returncode != 0
    expected = "--draft_ranks 0 1 2, draft --model demo-draft: 3 ranks cannot share 2 attention"
    assert done.stderr.count(expected) == 1, done.stderr
