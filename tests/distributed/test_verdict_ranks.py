"""Modes on two ranks whose sums are rounded otherwise than on one: their tokens differ, and the
rounding of the command explains it."""

import json
from pathlib import Path

import pytest
from conftest import Launch

WORDS = (
    "--model",
    "demo",
    "--dtype",
    "bfloat16",
    "--attention",
    "sdpa",
    "--linear",
    "torch",
    "--native_steps",
    "off",
    "--draft",
    "ngram",
    "--num_requests",
    6,
    "--arrival",
    "burst",
    "--prefix_len",
    96,
    "--gen_len",
    32,
    "--B",
    3,
)


@pytest.mark.wide
@pytest.mark.parametrize(
    "modes",
    [
        ("tensor_parallel", "inflight", "pipeline", "pipeline+draft"),
        pytest.param(("inflight", "tensor_parallel+draft"), marks=pytest.mark.wide),
    ],
    ids=["all ranks first", "one rank first"],
)
def test_rounding_explains_what_differs_between_ranks(
    modes: tuple[str, ...], launch: Launch, tmp_path: Path
) -> None:
    """The engine on both ranks, and on the first alone, also in place of stages."""
    out = tmp_path / "modes.jsonl"
    words = (*WORDS, "--modes", *modes, "--threads", 1, "--out", out)
    done = launch("pipeline_benchmark.py", *words, num_ranks=2)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["name"] for record in records] == list(modes)
    first, *others = records
    assert first["status"] == "verified" and first["correctness"]["judged_again"]["num_wrong"] == 0
    assert {record["status"] for record in others} <= {"verified", "verified_with_ties"}
    # The first rank alone computed one of the first two, and stages have kept no logits.
    first_forwards, forwards, *stage_forwards = (
        record["correctness"]["forwards"] for record in records
    )
    assert first_forwards is None and not any(stage_forwards)
    assert forwards["num_measured"] == forwards["num_positions"] > 100
    assert 0.8 < forwards["error_ratio"] < 1.25 and forwards["hidden_error"] < 0.05
    differing = [record for record in others if record["status"] == "verified_with_ties"]
    assert differing, "rounding makes some tokens differ"
    for record in differing:
        correctness = record["correctness"]
        assert 0 < record["num_differing"] == correctness["num_excused"]
        assert correctness["expected_differing"] > 0 and correctness["margin_bound"] > 0
