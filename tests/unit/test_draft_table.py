"""`magicdec plan --export`: draft lengths by batch size and context, for vLLM and for people."""

import csv
import json
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from conftest import ROOT, Command
from hypothesis import given
from hypothesis import strategies as st

from magicdec.cli.plan import PlanSection, main, make_draft_table, make_plan
from magicdec.predict.acceptance_file import drafting_of
from magicdec.predict.draft_table import DraftTable
from magicdec.predict.plan import PlanCell
from magicdec.records.reading import load_passes

BY_HAND = "--bandwidth 2039 --flops 312"
BASELINES = ROOT / "results" / "baselines" / "acceptance.jsonl"
AXES = st.sets(st.integers(2, 40), max_size=4).map(lambda values: [1, *sorted(values)])


def cell(batch_size: int, prefix_len: int, gamma: int) -> PlanCell:
    return PlanCell(
        batch_size=batch_size,
        prefix_len=prefix_len,
        gamma=gamma,
        budget=None,
        decode_ms=1.0,
        draft_ms=None,
        verify_ms=None,
        tokens_per_step=1.0,
        speedup=1.0 + gamma,
        begin_ms=0.0,
        net_speedup=1.0,
        break_even_gen_len=None,
    )


def entries_of(table: DraftTable) -> list[list[int]]:
    entries: list[list[int]] = json.loads(table.vllm())["num_speculative_tokens_per_batch_size"]
    return entries


@st.composite
def gammas(draw: st.DrawFn) -> dict[tuple[int, int], int]:
    places = list(product(draw(AXES), draw(AXES)))
    values = draw(st.lists(st.integers(0, 2), min_size=len(places), max_size=len(places)))
    return dict(zip(places, values, strict=True))


@given(gammas())
def test_ranges_have_neither_gaps_nor_overlaps(gammas: dict[tuple[int, int], int]) -> None:
    """Each batch size and context lies in one entry, which has the draft length of the nearest cell
    that is not larger. The entries are a grid, as vLLM wants it, and none could be left out."""
    most = 50
    table = DraftTable([cell(B, S, K) for (B, S), K in gammas.items()], most)
    entries = [e if len(e) == 5 else [*e[:2], 1, most, e[2]] for e in entries_of(table)]
    batch_sizes, prefix_lens = (sorted(set(axis)) for axis in zip(*gammas, strict=True))
    for B, S in product(range(1, batch_sizes[-1] + 1), range(1, most + 1)):
        (K,) = (e[4] for e in entries if e[0] <= B <= e[1] and e[2] <= S <= e[3])
        place = max(b for b in batch_sizes if b <= B), max(s for s in prefix_lens if s <= S)
        assert gammas[place] == K
    rows, columns = ({(e[i], e[i + 1]) for e in entries} for i in (0, 2))
    assert len(entries) == len(rows) * len(columns)
    lengths = {(e[0], e[2]): e[4] for e in entries}
    for low, high in pairwise(sorted(rows)):
        assert any(lengths[low[0], s] != lengths[high[0], s] for s, _ in columns)
    for low, high in pairwise(sorted(columns)):
        assert any(lengths[b, low[0]] != lengths[b, high[0]] for b, _ in rows)


def test_a_length_that_no_context_changes_has_entries_without_contexts() -> None:
    cells = [cell(B, S, K) for B, K in ((1, 3), (4, 3), (8, 0)) for S in (1, 100)]
    config = json.loads(DraftTable(cells, 200, {"method": "x"}).vllm())
    assert config == {
        "method": "x",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 7, 3], [8, 8, 0]],
    }
    nothing = json.loads(DraftTable([cell(1, 1, 0)], 9).vllm())
    assert nothing["num_speculative_tokens"] == 1, "vLLM refuses 0"
    assert nothing["num_speculative_tokens_per_batch_size"] == [[1, 1, 0]]


def test_the_command_writes_what_it_predicts(command: Command, tmp_path: Path) -> None:
    model = tmp_path / "vllm.json"
    lines = tmp_path / "people.csv"
    flags = (
        f"--model llama-3.1-8b --draft model:llama-3.2-1b {BY_HAND} --conditional_acceptance 0.7 "
        "--B 32 256 --prefix_len 4000 32000"
    ).split()
    code, out, err = command("plan", *flags, "--export", "vllm", model, "csv", lines)
    assert (code, err) == (0, "") and "predicted speedup" in out
    config = json.loads(model.read_text())
    assert config["method"] == "draft_model" and config["model"] == "meta-llama/Llama-3.2-1B"
    plan = make_plan(main.build_parser().read(flags)[PlanSection])
    rows = list(csv.DictReader(lines.read_text().splitlines()))
    assert [(int(r["batch_size"]), int(r["prefix_len"])) for r in rows] == list(
        product((1, 32, 256), (1, 4000, 32000))
    )
    entries = config["num_speculative_tokens_per_batch_size"]
    assert entries[0][:3:2] == [1, 1] and entries[-1][1:4:2] == [256, 131072]
    for row in rows:
        found = plan.predict(int(row["batch_size"]), int(row["prefix_len"]))
        assert int(row["K"]) == found.gamma and float(row["predicted_speedup"]) == found.speedup
        bounds = [int(row[name]) for name in ("bs_lo", "bs_hi", "ctx_lo", "ctx_hi")]
        assert [*bounds, found.gamma] in entries
        assert row["measured_K"] == row["measured_speedup"] == ""
    assert config["num_speculative_tokens"] == max(int(row["K"]) for row in rows)
    command("plan", *flags, "--prefix_len", "4000", "--export", "vllm", model)
    entries = json.loads(model.read_text())["num_speculative_tokens_per_batch_size"]
    lengths = {int(r["bs_lo"]): int(r["K"]) for r in rows if r["prefix_len"] == "4000"}
    assert {len(entry) for entry in entries} == {3}, "a single context is in no entry"
    assert all(lengths[low] == K for low, _, K in entries)


def test_measured_runs_stand_beside_predictions() -> None:
    """The fastest run of the file with this policy and dtype, at its place alone."""
    flags = f"{BY_HAND} --dtype float32 --acceptance {BASELINES} --B 8 --prefix_len 2048 4096"
    for policy in ("streaming_llm", "snapkv"):
        args = main.build_parser().read([*flags.split(), "--kv_policy", policy])[PlanSection]
        table = make_draft_table(args, make_plan(args))
        runs = [
            (r.config["decoding"]["gamma"], r.config["kv"]["budget"], r.metrics.speedup)
            for r in load_passes(BASELINES)
            if drafting_of(r.config) == ("self", policy, None, None)
            and r.metrics
            and r.metrics.speedup
            and r.config["workload"]["prefix_len"] == 4096
        ]
        best = max(runs, key=lambda run: run[2])
        assert table.measured[8, 4096] == best
        # Of one rank; of two ranks, and sampled, which have short prompts.
        assert set(table.measured) <= {(8, 4096), (4, 1024), (8, 1024)}
    for other in ("--dtype bfloat16", "--target_dtype int8"):
        args = main.build_parser().read(f"{flags} {other}".split())[PlanSection]
        assert make_draft_table(args, make_plan(args)).measured == {}, other


@pytest.mark.parametrize(
    "other",
    [{"drafter": "ngram+model"}, {"pa": 0.9}, {"draft_weights": "int4"}],
    ids=str,
)
def test_runs_that_draft_otherwise_are_not_measurements_of_a_plan(
    tmp_path: Path, other: dict[str, object]
) -> None:
    """However fast they are."""
    first = next(
        r
        for r in load_passes(BASELINES)
        if (r.config["decoding"]["drafter"], r.config["kv"]["policy"]) == ("model", "snapkv")
    )
    assert first.metrics is not None and first.metrics.speedup is not None
    fast = replace(
        first,
        metrics=replace(first.metrics, speedup=100.0),
        config=first.config | {"decoding": first.config["decoding"] | other},
    )
    path = tmp_path / "runs.jsonl"
    path.write_text(f"{first.to_json()}\n{fast.to_json()}\n")
    flags = f"{BY_HAND} --dtype float32 --draft model:demo-draft --acceptance {path} "
    flags += "--kv_policy snapkv --B 8 --prefix_len 4096"
    args = main.build_parser().read(flags.split())[PlanSection]
    runs = make_draft_table(args, make_plan(args)).measured
    assert [speedup for _, _, speedup in runs.values()] == [first.metrics.speedup]


def test_a_file_is_read_once_for_the_plan_and_all_tables(command: Command, tmp_path: Path) -> None:
    """So that what it says of its records is said once."""
    file = tmp_path / "r.jsonl"
    kinds = ("vllm", "csv")
    file.write_bytes(BASELINES.read_bytes())
    assert command("plan", *BY_HAND.split(), "--acceptance", "0.8", "--out", file).code == 0
    exports = [word for kind in kinds for word in (kind, tmp_path / kind)]
    code, _, err = command("plan", *BY_HAND.split(), "--acceptance", file, "--export", *exports)
    assert code == 0 and all((tmp_path / kind).exists() for kind in kinds)
    assert err.count("\n") == 1 and "other records are left out, 1 of kind plan" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--export vlm f", "--export vlm is not known; choose from vllm, csv"),
        ("--export vllm", "--export vllm: name a file to write to after it"),
        ("--export vllm a.json csv", "--export csv: name a file to write to after it"),
        ("--export csv .", "--export csv .: Is a directory; name a file to write to"),
        ("--export", "--export: expected at least one argument"),
        ("--export csv a.csv --B", "--B: expected at least one argument"),
        ("--export csv a.csv --prefix_len", "--prefix_len: expected at least one argument"),
    ],
)
def test_bad_input_is_refused(
    words: str, message: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command("plan", *f"{BY_HAND} --acceptance 0.8 {words}".split())
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
