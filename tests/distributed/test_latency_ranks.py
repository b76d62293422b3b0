"""Measuring over 1 and 2 ranks: the latency benchmark (rows complete, bytes as counted by hand,
nothing started for what cannot be), the exchange that a probe measures, and the memory that ranks
have and take."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TINY, Launch
from several_ranks import read_records

from magicdec.hardware.ceiling_file import load_machine

CONTEXTS = (30, 100)
ROWS = (1, 3)
BUDGETS = (24, 40)
GRID = (
    "--B",
    *ROWS,
    "--prefix_len",
    *CONTEXTS,
    "--T",
    1,
    2,
    5,
    "--repeats",
    3,
    "--warmup",
    1,
    "--kv_policy",
    "streaming_llm",
    "snapkv",
    "verified",
    "full",
    "--budget",
    *BUDGETS,
    "--num_sink_tokens",
    4,
    "--window_size",
    8,
    "--recent_window",
    8,
)
BACKENDS = ("sdpa", "grouped")
VISIBLE = {(30, 24): 24, (30, 40): 30, (100, 24): 24, (100, 40): 40}
# verified: sinks 4, the newest from the last multiple of 16 that leaves 8, blocks of 16 in the rest
VERIFIED = VISIBLE | {(30, 24): 4 + 14, (100, 24): 4 + 20, (100, 40): 4 + 20 + 16}


def expected_cells() -> list[tuple[Any, ...]]:
    """(B, context, phase, T, kv_policy, budget) of every row, in order."""
    target = [("decode", 1, None, None)]
    for T in (2, 5):
        target += [("verify", T, None, None), ("verify", T, "verified", None)]  # type: ignore
    policies = ("streaming_llm", "snapkv", "verified")
    drafts = [
        (phase, 1, policy, budget)
        for policy, budget in product(policies, BUDGETS)
        for phase in (("first_draft", "draft") if policy == "verified" else ("draft",))
    ]
    cells = [*target, *drafts, ("draft", 1, "full", None)]
    return [(*place, *cell) for place in product(ROWS, CONTEXTS) for cell in cells]


def weight_bytes(num_ranks: int) -> int:
    """Of all ranks, float32: every matrix once (of the embedding nothing), norms on each rank."""
    c = TINY
    vocab_size = 2051
    q = c.num_heads * c.head_dim
    kv = c.num_kv_heads * c.head_dim
    layer = c.hidden_size * (q + 2 * kv) + q * c.hidden_size + 3 * c.hidden_size * 80
    norms = (2 * c.num_layers + 1) * c.hidden_size
    return 4 * (c.num_layers * layer + vocab_size * c.hidden_size + num_ranks * norms)


def expected_bytes(row: dict[str, Any], num_ranks: int) -> int:
    seen = row["context"]
    if row["budget"] is not None:
        table = VERIFIED if row["kv_policy"] == "verified" else VISIBLE
        seen = table[row["context"], row["budget"]]
    kv_token = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 4
    return weight_bytes(num_ranks) + row["B"] * (seen + row["T"]) * kv_token


def documented_keys() -> list[str]:
    """The keys of a row in the order of docs/record.md."""
    text = (ROOT / "docs" / "record.md").read_text(encoding="utf-8")
    section = re.split(r"^#+ ", text.split("### `rows`\n")[1], flags=re.MULTILINE)[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.wide), 2])
def test_rows_cover_the_grid_and_say_what_was_read(
    num_ranks: int, launch: Launch, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """In a record for each attention backend."""
    done = launch(
        "latency_benchmark.py",
        "--model",
        tiny_checkpoint,
        *GRID,
        "--dtype",
        "float32",
        "--threads",
        1,
        "--attention",
        *BACKENDS,
        "--out",
        "new/l.json",
        num_ranks=num_ranks,
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "new" / "l.json").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [found["config"]["attention"]["backend"] for found in records] == list(BACKENDS)
    for found in records:
        check_record(found, num_ranks)
    num_places = len(ROWS) * len(CONTEXTS)
    assert done.stdout.count("draft, snapkv 24") == num_places * len(BACKENDS), "by one rank"
    assert [p.name for p in tmp_path.glob("**/l.*")] == ["l.json"]


def check_record(found: dict[str, Any], num_ranks: int) -> None:
    rows = found["rows"]
    keys = ("B", "context", "phase", "T", "kv_policy", "budget")
    assert [tuple(row[key] for key in keys) for row in rows] == expected_cells()
    for row in rows:
        assert row["tokens"] == row["B"] * row["T"]
        assert row["bytes"] == expected_bytes(row, num_ranks), row
        assert 0 < row["ms_p10"] <= row["ms_median"] <= row["ms_p90"]
        rate = row["bytes"] / row["ms_median"] * 1e3
        bandwidth = found["environment"]["read_bandwidth_bytes_per_s"]
        assert row["roofline_fraction"] == pytest.approx(rate / bandwidth)
    assert list(rows[0]) == documented_keys()
    assert found["environment"]["world_size"] == num_ranks
    assert found["config"]["model"]["dtype"] == "float32"
    assert found["config"]["grid"]["repeats"] == 3


@pytest.mark.wide
def test_what_the_model_cannot_do_is_refused(launch: Launch, tiny_checkpoint: Path) -> None:
    flags = "--model", tiny_checkpoint, "--prefix_len", 64, 1020, "--T", 1, 5
    done = launch("latency_benchmark.py", *flags, num_ranks=2)
    assert done.stdout == "" and done.returncode == 2
    message = "latency_benchmark.py: --prefix_len 1020 + --T 5 = 1025 exceeds the 1024"
    assert done.stderr.startswith(message)


@pytest.mark.wide
def test_two_ranks_measure_their_link(launch: Launch, tmp_path: Path) -> None:
    flags = ("--out", "machine.json", "--threads", 1)
    done = launch("distributed/short_probe.py", *flags, num_ranks=2)
    assert done.returncode == 0, done.stderr
    machine = load_machine(tmp_path / "machine.json")
    assert machine.description["world_size"] == 2 and machine.node_link is None
    assert machine.link is not None and machine.link.latency_s > 0
    assert done.stdout.count("written to machine.json") == 1, "by one rank"
    assert "all-reduce between ranks" in done.stdout


MEMORY_FLAGS = (
    "--B",
    2,
    "--prefix_len",
    80,
    "--gen_len",
    8,
    "--num_batches",
    1,
    "--warmup_batches",
    0,
    "--streamingllm_budget",
    24,
    "--num_sink_tokens",
    4,
)
PLACE = ("--dtype", "float32", "--threads", 1, "--linear", "torch")
MEMORY_GRID = ("--B", 1, 2, "--prefix_len", 40, 80, "--budget", 24, "--num_sink_tokens", 4)


@pytest.mark.narrow(1)
@pytest.mark.parametrize("command", ["selfspec", "latency"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_without_memory_ends_all_in_its_words(
    rank: str,
    command: str,
    launch: Launch,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SCARCE_RANK", rank)
    flags = (*MEMORY_FLAGS, "--dataset", text_file) if command == "selfspec" else MEMORY_GRID
    script = "distributed/scarce.py"
    done = launch(script, command, *flags, *PLACE, num_ranks=2, notice_s=0.6)
    lines = [line for line in done.stderr.splitlines() if line.startswith("scarce.py: ")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert "on this host's 2 ranks" in lines[0] and "0.00 GB are free" in lines[0]
    assert not (tmp_path / "results").exists() and "memory " not in done.stdout


@pytest.mark.wide
def test_a_record_has_the_plan_beside_what_was_taken(
    launch: Launch, text_file: Path, tmp_path: Path
) -> None:
    for num_ranks in (1, 2):
        flags = (*MEMORY_FLAGS, "--dataset", text_file, *PLACE, "--out", "r.jsonl")
        done = launch("selfspec_benchmark.py", *flags, num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "r.jsonl")
    assert [record["name"] for record in records] == ["static", "static+draft"] * 2
    one, two = (record["memory"] for record in records[1::2])
    assert one["kv_bytes"] == two["kv_bytes"] > 0 and one["weights_bytes"] < two["weights_bytes"]
    for found in (record["memory"] for record in records):
        parts = ("weights", "kv", "draft_weights", "draft_kv", "working")
        assert found["total_bytes"] == sum(found[f"{part}_bytes"] for part in parts)
        assert found["process_bytes"] < found["peak_bytes"]
        assert found["free_bytes"] > found["total_bytes"]
    assert two["process_bytes"] > 1.5 * one["process_bytes"]
