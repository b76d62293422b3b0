"""`magicdec sweep`: a cell of a study is the lone run; what is shared, resumed and refused."""

import random
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import Launch

from magicdec.bench.measure import execute
from magicdec.bench.study import progress
from magicdec.bench.study import sweep as sweep_module
from magicdec.bench.study.cells import StudyCell, config_key, results_in
from magicdec.bench.study.plan import StudyPlan, make_plan, part_of
from magicdec.bench.study.progress import StudyProgress
from magicdec.bench.study.study import Settings
from magicdec.bench.study.sweep import Sweep
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    DraftSection,
    KVSection,
    ModelSection,
    ParallelSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.distributed import groups
from magicdec.engine.engine import Engine
from magicdec.hardware import timing
from magicdec.output.console import Silent
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes
from magicdec.setup import loading
from magicdec.setup import prepare as preparing
from magicdec.setup.prepare import prepare

ALONE = groups.Launch(0, 1, 0, 1)
BUDGET = 40
SINKS = 4


@pytest.fixture(autouse=True)
def _small_bandwidth_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BANDWIDTH_BYTES", 1 << 20)


@pytest.fixture
def base(tiny_checkpoint: Path, text_file: Path) -> RunConfig:
    return RunConfig(
        model=ModelSection(str(tiny_checkpoint), "float32"),
        parallel=ParallelSection(device="cpu", threads=1),
        kv=KVSection("streaming_llm", BUDGET, SINKS, window_size=8),
        attention=AttentionSection(prefill_chunk=32),
        decoding=DecodingSection("speculative", "self", 2),
        workload=WorkloadSection(
            str(text_file), batch_size=2, prefix_len=90, gen_len=12, warmup_batches=0
        ),
    )


def variants(base: RunConfig) -> list[RunConfig]:
    """Cells that share their prompts: every policy and drafter, and several numbers of drafts."""
    policies = ("streaming_llm", "snapkv", "verified", "retrieval", "full")
    longer = replace(base, decoding=replace(base.decoding, gamma=5))
    wider = replace(base.kv, policy="snapkv", window_size=16)
    lookup = replace(base.decoding, drafter="ngram")
    draft = DraftSection(base.model.model)
    standalone = replace(base.decoding, drafter="model")
    return [
        replace(base, decoding=DecodingSection()),
        *(replace(c, kv=replace(c.kv, policy=p)) for c in (base, longer) for p in policies),
        replace(base, kv=wider),
        replace(base, decoding=lookup),
        replace(base, draft=draft, decoding=standalone),
        replace(base, draft=draft, decoding=standalone, kv=replace(base.kv, policy="full")),
    ]


def run_study(asked: list[RunConfig], path: Path) -> tuple[StudyPlan, list[PassRecord]]:
    plan = make_plan(asked, Settings(str(path)), ALONE, retries_failed=False)
    sweep = Sweep(plan, ALONE, StudyProgress(Silent(), plan))
    sweep.run()
    return plan, sweep.records


def untimed(record: PassRecord) -> dict[str, Any]:
    """A record without times, without what is derived from them, and without the machine."""
    found = asdict(record)
    del found["environment"], found["config"]["output"]
    for key in ("free_bytes", "process_bytes", "peak_bytes"):
        del found["memory"][key]
    found["metrics"] = {key: found["metrics"][key] for key in METRICS}
    for part in (*found["groups"], *found["requests"]):
        for key in [key for key in part if key.endswith("_ms") or key == "peak_memory_bytes"]:
            del part[key]
    return found


METRICS = (
    "draft_acceptance_rate",
    "mean_acceptance_length",
    "acceptance_per_position",
    "bytes_read",
    "mean_draft_tokens",
    "tokens_per_verification",
    "kv_tokens_read",
)


def test_a_cell_is_the_lone_run(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every token, count and byte, in float32, in whatever order the cells run; with the weights
    loaded once and the prompts prefilled once."""
    asked = variants(base)
    loads: list[object] = []
    prefills: list[object] = []
    load_kind = loading.load_kind
    prefill = Engine.prefill
    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_kind", lambda *a: (loads.append(a), load_kind(*a))[1])
        patch.setattr(Engine, "prefill", lambda *a: (prefills.append(a), prefill(*a))[1])
        plan, records = run_study(asked, tmp_path / "runs.jsonl")
    assert len(records) == len(asked) == len(plan.order)
    assert len(loads) == 1, "the draft is the same model here"
    assert len(prefills) == base.workload.most_batches
    kept = {room.kv.window_size for room in plan.rooms.values() if room.kv is not None}
    assert kept == {16}, "the queries that prefill keeps serve the widest window"
    check_lone(asked, records)


def check_lone(asked: list[RunConfig], records: list[PassRecord]) -> None:
    """The records of these configs are those of lone runs."""
    found = {config_key(record.config): record for record in records}
    for config in asked:
        lone = execute(prepare(config, ALONE)).record
        assert lone.passed
        assert untimed(found[config_key(lone.config)]) == untimed(lone)


@pytest.mark.wide
def test_sampled_cells_are_lone_runs_too(base: RunConfig, tmp_path: Path) -> None:
    sampled = replace(base, sampling=SamplingSection(temperature=0.8))
    asked = [
        base,
        sampled,
        replace(sampled, kv=replace(base.kv, policy="snapkv")),
        replace(base, workload=replace(base.workload, gen_len=9)),
        replace(base, workload=replace(base.workload, batch_size=1)),
    ]
    _, records = run_study(asked, tmp_path / "runs.jsonl")
    check_lone(asked, records)


def test_a_failing_cell_is_a_record_and_the_study_goes_on(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cells after it prefill anew. Without `--retry_failed` it is not run again."""
    asked = variants(base)[:4]
    execute_in = sweep_module.execute_in

    def fails_for_one(session: Any, prepared: Any, *rest: Any) -> Any:
        if prepared.config.kv.policy == "snapkv":
            raise RuntimeError("no such luck")
        return execute_in(session, prepared, *rest)

    monkeypatch.setattr(sweep_module, "execute_in", fails_for_one)
    _, records = run_study(asked, tmp_path / "runs.jsonl")
    failed = [r for r in records if r.status == "failed"]
    assert [r.error for r in failed] == ["RuntimeError: no such luck"] and len(records) == 4
    assert failed[0].config["kv"]["policy"] == "snapkv" and failed[0].workload is not None
    written = (tmp_path / "runs.jsonl").read_text().splitlines()
    asked_for = [record.to_json() for record in records]
    assert [line for line in written if line in asked_for] == asked_for
    others = [record for record in load_passes(tmp_path / "runs.jsonl") if record.is_reference]
    assert len(written) == len(records) + len(others) and len(others) == 2
    monkeypatch.setattr(sweep_module, "execute_in", execute_in)
    _, records = run_study(asked, tmp_path / "runs.jsonl")
    assert records == []
    settings = Settings(str(tmp_path / "runs.jsonl"))
    again = make_plan(asked, settings, ALONE, retries_failed=True)
    assert [again.order[n].resolved.config.kv.policy for n in again.todo] == ["snapkv"]


def test_cells_that_do_not_fit_are_records_that_say_so(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = prepare(base, ALONE).plan.total
    monkeypatch.setattr(preparing, "free_device_memory", lambda *_: need + (1 << 20))
    sizes = [(2, 90), (1, 10_000), (60, 90), (500, 90)]
    asked = [
        replace(base, workload=replace(base.workload, batch_size=B, prefix_len=length))
        for B, length in sizes
    ]
    _, records = run_study(asked, tmp_path / "runs.jsonl")
    errors = {r.config["workload"]["batch_size"]: r.error for r in records}
    for B, expected in (
        (1, "exceeds the 1024 positions"),
        (60, "GB are free"),
        (500, "prefixes"),
    ):
        assert expected in str(errors.pop(B))
    assert errors == {2: None} and len(results_in(tmp_path / "runs.jsonl")) == 4
    assert {r.status for r in records} == {"verified", "failed"}


def test_caches_stay_only_where_the_memory_allows(
    base: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan covers a cache for each batch. Without room for it, batches take turns, and the
    tokens are the same."""
    asked = variants(base)[:3]
    plan = make_plan(asked, Settings(), ALONE, False)
    assert all(room.is_kept for room in plan.rooms.values())
    needs = [c.prepared.plan.total for c in plan.order if c.prepared is not None]
    monkeypatch.setattr(preparing, "free_device_memory", lambda *_: max(needs))
    plan = make_plan(asked, Settings(), ALONE, False)
    assert not any(room.is_kept for room in plan.rooms.values())
    _, records = run_study(asked, tmp_path / "runs.jsonl")
    check_lone(asked[1:2], records)


def test_the_order_is_seeded_and_keeps_together_what_shares_a_prefill(base: RunConfig) -> None:
    asked = [
        replace(c, workload=replace(c.workload, batch_size=b, gen_len=g))
        for c in variants(base)
        for b in (1, 2)
        for g in (6, 7)
    ]

    def order(seed: int, repeats: int = 1) -> list[StudyCell]:
        return make_plan(asked, Settings(order_seed=seed, repeats=repeats), ALONE, False).order

    cells = order(0)
    first = [cell.key for cell in cells]
    assert first == [cell.key for cell in order(0)]
    assert first != [cell.key for cell in order(1)]
    assert Counter(first) == Counter(cell.key for cell in order(1))
    prompts = [repr(cell.prompts_key) for cell in cells]
    changes = sum(a != b for a, b in pairwise(prompts))
    assert changes == 4 - 1, "four groups of cells with the same prompts"
    policies = [c.resolved.config.kv.policy for c in cells[: len(asked) // 4]]
    assert policies != sorted(policies), "not in the order in which they are written"
    assert set(Counter(cell.key for cell in order(0, repeats=3)).values()) == {3}


@pytest.mark.parametrize("count", [1, 3, 8, 100])
def test_parts_are_the_study_and_share_prefills(base: RunConfig, count: int) -> None:
    """Each run is in one part, also one that is asked for twice; no part is more than a run larger
    than another."""
    asked = [
        replace(c, workload=replace(c.workload, batch_size=b, prefix_len=length))
        for c in variants(base)
        for b in (1, 2)
        for length in (50, 60, 70)
    ]
    parts = [part_of(asked + asked[:9], number + 1, count, 0) for number in range(count)]
    runs = [config for part in parts for config in part]
    assert sorted(map(repr, runs)) == sorted(map(repr, asked))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    prompts = [repr(config.workload) for config in runs]
    assert sum(a != b for a, b in pairwise(prompts)) == 6 - 1, "six groups with the same prompts"
    others = [config for n in range(count) for config in part_of(asked, n + 1, count, 1)]
    assert [c.workload for c in others] != [c.workload for c in runs], "by the seed"


def test_the_time_that_is_left_is_that_of_runs_like_those_before(
    base: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of five equal cells takes 10 s, and the first also 90 s for what all share."""
    plan, (record, *_) = run_study(variants(base)[1:6], tmp_path / "runs.jsonl")
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = StudyProgress(Silent(), plan)
    assert str(shown.left) == ""
    for number, cell in enumerate(plan.order[:3]):
        shown.begin(number, cell)
        clock[0] += 100 if number == 0 else 10
        shown.end(record)
        assert bool(str(shown.left)) == (number > 0)
    assert str(shown.left) == ", about 20 s left"


GRID = """
out = "runs.jsonl"
[common]
model = "{model}"
dataset = "{text}"
dtype = "float32"
threads = 1
prefix_len = 60
gen_len = 4
num_batches = 1
warmup_batches = 0
num_sink_tokens = 2
window_size = 4
[[grid]]
driver = "selfspec"
kv_policy = ["streaming_llm", "snapkv"]
draft_budget = [20, 30]
gamma = [1, 2]
B = [1, 2]
"""
NUM_CELLS = 16


@pytest.mark.wide
def test_a_study_that_is_killed_and_started_again_has_each_record_once(
    launch: Launch,
    tiny_checkpoint: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed while it writes the record of a random cell, interrupted in another, then left to
    end."""
    (tmp_path / "study.toml").write_text(GRID.format(model=tiny_checkpoint, text=text_file))
    rng = random.Random(0)
    path = tmp_path / "runs.jsonl"
    kill_at = rng.randint(2, NUM_CELLS // 2)
    monkeypatch.setenv("KILL_AT", str(kill_at))
    assert launch("small_sweep.py", "study.toml").returncode == -9
    assert not path.read_text().endswith("\n"), "the last record is torn"
    monkeypatch.delenv("KILL_AT")
    monkeypatch.setenv("INTERRUPT_AT", "5")
    interrupted = launch("small_sweep.py", "study.toml")
    assert interrupted.returncode == 130 and "Traceback" not in interrupted.stderr
    assert f"{kill_at - 1 + 4} of {NUM_CELLS} runs done" in interrupted.stderr
    monkeypatch.delenv("INTERRUPT_AT")
    done = launch("small_sweep.py", "study.toml")
    assert done.returncode == 0, done.stderr
    assert f"{NUM_CELLS} of {NUM_CELLS} runs done" in done.stderr
    records = results_in(path)
    assert len(records) == NUM_CELLS and {r.status for r in records} == {"verified"}
    assert len({config_key(record.config) for record in records}) == NUM_CELLS


def test_tasks_of_an_array_job_run_a_study_in_parts(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """A part of which two runs are left goes on with these, one without runs ends at once, and the
    study itself goes on with what its parts have measured."""
    grid = GRID.format(model=tiny_checkpoint, text=text_file).replace("B = [1, 2]", "B = 1")
    (tmp_path / "study.toml").write_text(grid)
    first, second = (tmp_path / f"runs.{number}-of-2.jsonl" for number in (1, 2))
    assert launch("small_sweep.py", "study.toml", "--part", "1/2").returncode == 0
    whole = first.read_text()
    assert len(whole.splitlines()) == 8 and not second.exists()
    first.write_text("".join(whole.splitlines(keepends=True)[:4]))
    again = launch("small_sweep.py", "study.toml", "--part", "1/2")
    assert "4 runs, 2 of them done before" in again.stderr
    assert len(first.read_text().splitlines()) == 8
    (tmp_path / "runs.jsonl").write_text(first.read_text())
    done = launch("small_sweep.py", "study.toml")
    assert "8 runs, 4 of them done before" in done.stderr
    records = results_in(tmp_path / "runs.jsonl")
    assert len({config_key(record.config) for record in records}) == len(records) == 8
    empty = launch("small_sweep.py", "study.toml", "--part", "1/100")
    assert empty.returncode == 0 and "0 of 0 runs done" in empty.stderr


@pytest.mark.wide
def test_ranks_share_a_study(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    flags = ("--model", tiny_checkpoint, "--dataset", text_file, "--dtype", "float32")
    small = ("--prefix_len", 60, "--gen_len", 6, "--num_batches", 1, "--warmup_batches", 0)
    done = launch(
        "small_sweep.py",
        "selfspec",
        *flags,
        *small,
        "--streamingllm_budget",
        20,
        "--B",
        1,
        2,
        900,
        "--gamma",
        1,
        3,
        "--out",
        "s.jsonl",
        num_ranks=2,
    )
    assert done.returncode == 1, "two cells need more prompts than there are"
    records = results_in(tmp_path / "s.jsonl")
    assert Counter(r.status for r in records) == {"verified": 4, "failed": 2}
    assert {r.environment.world_size for r in records} == {2}
    before = (tmp_path / "s.jsonl").read_text()
    again = launch(
        "small_sweep.py",
        "selfspec",
        *flags,
        *small,
        "--streamingllm_budget",
        20,
        "--B",
        1,
        2,
        "--gamma",
        1,
        3,
        "--out",
        "s.jsonl",
        num_ranks=2,
    )
    assert again.returncode == 0 and (tmp_path / "s.jsonl").read_text() == before
