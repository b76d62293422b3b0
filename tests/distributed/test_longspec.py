"""Standalone drafts on subgroups of ranks: the same tokens whoever drafts; the driver from the
command line, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Launch, num_parameters, save_checkpoint, tiny_transformer
from identities import check_record
from several_ranks import answer_of, read_records

from magicdec.records.metrics import check_metrics
from magicdec.records.reading import load_records

FLAGS = (
    *("--B", 2, "--prefix_len", 300, "--gen_len", 40, "--num_batches", 2, "--warmup_batches", 0),
    *("--threads", 1, "--dtype", "float32", "--prefill_chunk", 64, "--out", "r.jsonl"),
)
DEMO = ("--target", "demo", "--model", "demo-draft", "--dataset", "demo")
WINDOW = ("--gamma", 3, "--streamingllm_budget", 100)


@pytest.fixture(scope="module")
def tokens_of_one_rank() -> dict[str, Any]:
    """Filled by the first test that needs them."""
    return {}


@pytest.mark.parametrize(
    ("num_ranks", "collectives"),
    [
        pytest.param(1, "gloo", marks=pytest.mark.wide),
        (2, "shared_memory"),
        pytest.param(3, "gloo", marks=pytest.mark.wide),
    ],
)
def test_drafts_of_every_subgroup_change_nothing(
    num_ranks: int,
    collectives: str,
    launch: Launch,
    tmp_path: Path,
    tokens_of_one_rank: dict[str, Any],
) -> None:
    """The draft: the target's weights, a little disturbed, so that some of it is accepted."""
    target = tiny_transformer()
    paths = [save_checkpoint(target, tmp_path / "target")]
    noise = tiny_transformer(seed=1).state_dict()
    target.load_state_dict({n: w + 0.04 * noise[n] for n, w in target.state_dict().items()})
    paths.append(save_checkpoint(target, tmp_path / "draft"))
    script = "distributed/standalone.py"
    tokens = answer_of(launch, script, *paths, collectives, num_ranks=num_ranks)
    assert tokens == tokens_of_one_rank.setdefault("tokens", tokens)
    assert [len(row) for row in tokens] == [24, 9, 24, 17]


@pytest.mark.parametrize(
    ("args", "draft_ranks", "heads"),
    [
        pytest.param(["--rank_group", 0, 1], [0], (2,), marks=pytest.mark.wide),
        pytest.param(["--rank_group", 1, 0], [1], (2,), marks=pytest.mark.wide),
        pytest.param(["--rank_group", 0, 1, "--draft_ranks", 1], [1], (2,), marks=pytest.mark.wide),
        (
            ["--rank_group", 0, 1, "--draft_group", 1, 0, "--kv_policy", "full", "--budget", -1],
            [1, 0],
            (1, 1),
        ),
        pytest.param(
            ["--draft_rank_group", 0, 1, "--draft_budget", -1],
            [0, 1],
            (1, 1),
            marks=pytest.mark.wide,
        ),
        (["--kv_policy", "snapkv", "--draft_budget", 80], [0], (2,)),
    ],
    ids=str,
)
def test_the_driver_on_two_ranks(
    args: list[object],
    draft_ranks: list[int],
    heads: tuple[int, ...],
    launch: Launch,
    tmp_path: Path,
) -> None:
    done = launch("longspec_benchmark.py", *DEMO, *FLAGS, *WINDOW, *args, num_ranks=2)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / "r.jsonl")
    assert record["status"] == "ok" and record["correctness"]["identical"] is True
    assert record["correctness"]["num_tokens"] == 2 * 2 * 40
    config, metrics = record["config"], record["metrics"]
    assert config["draft"]["rank_group"] == draft_ranks
    assert (config["draft"]["model"], config["model"]["model"]) == ("demo-draft", "demo")
    assert config["kv"]["policy"] == (
        "full" if -1 in args or "full" in args else config["kv"]["policy"]
    )
    assert record["workload"]["draft"]["model"] == "demo-draft"
    assert 0 < metrics["acceptance_rate"] < 1 and metrics["draft_prefill_ms"] > 0
    assert metrics["draft_prefill_ms"] == metrics["begin_ms"]
    assert record["baseline_metrics"]["begin_ms"] > 0
    assert record["baseline_metrics"]["draft_prefill_ms"] is None
    measured = load_records(tmp_path / "r.jsonl")[0]
    assert check_metrics(measured) == []
    check_record(measured)
    assert "standalone draft" in done.stdout


def test_the_bytes_of_the_drafts_forwards_count(launch: Launch, tmp_path: Path) -> None:
    """By hand, in one step: the target verifies once, the draft reads its weights gamma times."""
    flags = [*DEMO, *FLAGS, "--gamma", 3, "--draft_budget", -1, "--gen_len", 2, "--no_baseline"]
    done = launch("longspec_benchmark.py", *flags, "--B", 1, "--num_batches", 1, num_ranks=2)
    assert done.returncode == 0, done.stderr
    (record,) = read_records(tmp_path / "r.jsonl")
    sizes = {}
    for name in ("demo", "demo-draft"):
        config, weights = parameters(name)
        sizes[name] = weights, 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    (target, target_kv), (draft, draft_kv) = sizes["demo"], sizes["demo-draft"]
    # The two ranks share the target, but each reads its norms: those are counted twice.
    config, _ = parameters("demo")
    target += (2 * config.num_layers + 1) * config.hidden_size * 4
    expected = target + (300 + 4) * target_kv
    expected += sum(draft + (300 + n) * draft_kv for n in (1, 2, 3))
    assert record["metrics"]["bytes_read"] == expected


def parameters(name: str) -> tuple[Any, int]:
    """A demo model's config, and the bytes that a forward reads of its weights in float32."""
    from magicdec.model.checkpoint.source import find_model

    config = find_model("--model", name).config
    assert config.tie_word_embeddings, "the embedding is the head, read once"
    return config, 4 * num_parameters(config)


BAD_INPUT = {
    "not there": (["--draft_ranks", 1], "--draft_ranks 1 names rank 1, which does not exist"),
    "twice": (["--draft_group", 0, 0], "--draft_ranks 0 0 names a rank twice"),
    "empty": (["--draft_ranks"], "argument --draft_ranks"),
    "unknown draft": (["--model", "nope"], "--model 'nope' is not known"),
    "unknown target": (["--target", "nope"], "--target 'nope' is not known"),
    "budget": (["--draft_budget", 16], "--budget 16 must be larger than"),
    "another drafter": (["--drafter", "ngram"], "--model does nothing here: no other model"),
    "choosing anew": (["--kv_policy", "snapkv", "--reselect_every", 9], "--reselect_every 9"),
    "vocabulary size": (
        ["--model", "random:llama-68m"],
        "--model random:llama-68m has a vocabulary of 32000 ids, --target demo of 2048",
    ),
    "target's reach": (["--prefix_len", 20470], "20480 positions of --target demo"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(case: str, launch: Launch, tmp_path: Path) -> None:
    args, expected = BAD_INPUT[case]
    done = launch("longspec_benchmark.py", *DEMO, *FLAGS, *args)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and expected in done.stderr, done.stderr
    assert done.stdout == "" and not (tmp_path / "r.jsonl").exists()


def test_selfspec_has_no_draft_to_name(launch: Launch) -> None:
    done = launch("selfspec_benchmark.py", "--drafter", "model")
    assert done.returncode == 2 and "no draft is named here" in done.stderr
    done = launch("selfspec_benchmark.py", "--draft_ranks", 0)
    assert done.returncode == 2 and "unknown argument --draft_ranks" in done.stderr


def test_a_draft_of_short_reach_follows_a_long_text(launch: Launch, tmp_path: Path) -> None:
    """100 positions, 340 tokens of text: refused under full KV, which says what would serve;
    served by a rolling cache, if budget and chunk fit."""
    config = replace(TINY, vocab_size=2048, max_position_embeddings=100)
    directory = save_checkpoint(tiny_transformer(config), tmp_path / "short")
    flags = ["--target", "demo", "--model", directory, *FLAGS]
    for policy in ("full", "snapkv"):
        done = launch("longspec_benchmark.py", *flags, "--kv_policy", policy)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert "340 exceeds the 100 positions of the draft --model short" in done.stderr
        assert f"under --kv_policy {policy}; --kv_policy streaming_llm would serve" in done.stderr
    done = launch("longspec_benchmark.py", *flags, "--draft_budget", 50)
    assert done.returncode == 2, done.stderr
    assert "--budget 50 and the --prefill_chunk 64" in done.stderr
    done = launch("longspec_benchmark.py", *flags, "--draft_budget", 50, "--prefill_chunk", 50)
    assert done.returncode == 0, done.stderr


def test_other_tokenizers_are_refused(launch: Launch, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    config = replace(TINY, vocab_size=2048)
    directory = save_checkpoint(tiny_transformer(config), tmp_path / "foreign")
    (directory / "tokenizer.model").unlink()
    words = {f"w{i}": i for i in range(2048)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    done = launch("longspec_benchmark.py", "--target", "demo", "--model", directory, *FLAGS)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "the tokenizers of --model foreign and --target demo have different" in done.stderr


def test_heads_that_the_drafts_ranks_cannot_share(launch: Launch) -> None:
    done = launch("longspec_benchmark.py", *DEMO, *FLAGS, "--draft_ranks", 0, 1, 2, num_ranks=3)
    assert done.returncode != 0
    expected = "--draft_ranks 0 1 2, draft --model demo-draft: 3 ranks cannot share 2 attention"
    assert done.stderr.count(expected) == 1, done.stderr
