"""The cases of the gate: what a baseline file runs again, and what a new file holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command, served_pairs
from synthetic_records import with_fields

from magicdec.bench.gate.cases import (
    DRAFTING_MODE,
    LEAST_PROMPTS,
    STEP_COST,
    Case,
    Load,
    Subject,
    check_case,
    margin_of,
    options_of,
    quick,
    standard_cases,
)
from magicdec.bench.gate.files import read_baselines
from magicdec.bench.gate.measuring import prompts_of, shares_of
from magicdec.cli.drivers import RUN
from magicdec.config.sections import AttentionSection, ModelSection
from magicdec.names import DRAFTERS, KV_POLICIES, MTP, NGRAM_AND, WITHOUT_BUDGET
from magicdec.records.comparison.conditions import (
    describe,
    first_difference,
    kind_of,
    measured_thing,
    method_of,
)
from magicdec.records.drafted import EVERY_POSITION
from magicdec.records.reading import load_passes

COMMITTED = ROOT / "results" / "baselines" / "acceptance.jsonl"
EVERY = read_baselines(COMMITTED)
PASSES = load_passes(COMMITTED)
BASELINES = [baseline for baseline in PASSES if baseline.shares_prefill]


def standard_runs(subject: Subject = Subject()) -> list[Case]:
    """Those in whole batches."""
    cases = standard_cases(subject)
    return [case for case in cases if case.shares_prefill and not case.is_at_every_position]


def cases_at_every_position(subject: Subject = Subject()) -> list[Case]:
    return [case for case in standard_cases(subject) if case.is_at_every_position]


def test_files_of_other_kinds_of_cpu_have_the_same_cases() -> None:
    others = [*COMMITTED.parent.glob(f"{COMMITTED.stem}.*.jsonl")]
    assert others
    for path in others:
        assert [*map(describe, read_baselines(path))] == [*map(describe, EVERY)], path.name


def test_the_committed_file_has_the_standard_cases() -> None:
    cases = standard_runs()
    again = [Case.from_record(baseline) for baseline in BASELINES]
    assert len(again) == len(cases)
    for ours, config in zip([c.config for c in again], [c.config for c in cases], strict=True):
        assert ours.kv.policy == config.kv.policy
        assert (ours.draft and ours.draft.model) == (config.draft and config.draft.model)
        assert ours.kv.budget == config.kv.budget or ours.kv.policy == "full"
        for name in ("drafter", "gamma", "ignore_eos", "strategy", "step_cost"):
            assert getattr(ours.decoding, name) == getattr(config.decoding, name)
        for name in ("dataset", "prefix_len", "gen_len", "batch_size", "num_batches"):
            assert getattr(ours.workload, name) == getattr(config.workload, name)
    assert [case.mode for case in again] == [case.mode for case in cases]
    assert [b.margin for b in BASELINES] == [margin_of(case) for case in cases]


def test_every_system_that_drafts_has_a_case() -> None:
    """In the committed file and in that of any model, of which a quick gate runs one each."""
    cases = [case for case in standard_cases(Subject()) if not case.shares_prefill]
    served = [baseline for baseline in PASSES if not baseline.shares_prefill]
    assert [describe(baseline) for baseline in served] == [case.name for case in cases]
    modes = {"inflight+draft", "ring+draft", "pipeline+draft", "pipeinfer"}
    assert {case.mode for case in cases} == modes
    assert {f"mode {mode}" for mode in modes} <= set(map(kind_of, quick(EVERY)))
    for baseline, case in zip(served, cases, strict=True):
        again = Case.from_record(baseline)
        assert again.load == case.load and again.draft == case.draft
        assert options_of([again]) == options_of([case])
        assert again.config.kv.resolve() == case.config.kv.resolve()
        assert again.config.decoding == case.config.decoding
        assert again.config.workload == case.config.workload
        assert again.num_ranks == case.num_ranks == (1 if "inflight" in case.mode else 2)
    alone = standard_cases(Subject(draft="none", nproc=1))
    lookups = [case for case in alone if not case.shares_prefill]
    assert {case.draft for case in lookups} == {"self", "ngram"}
    assert {case.num_ranks for case in lookups} == {1}
    for case in (*cases, *lookups):
        check_case(case, num_cores=2)
    with pytest.raises(
        ValueError, match=r"--modes ring.draft .* 2 requests; a gate needs at least"
    ):
        check_case(replace(cases[2], load=Load(2)), num_cores=2)


def test_drafts_that_follow_from_the_text_are_cases_at_every_position() -> None:
    """Of one batch of short texts, a thousand positions; of which a quick gate judges one draft."""
    cases = cases_at_every_position()
    baselines = [baseline for baseline in EVERY if baseline.mode == EVERY_POSITION]
    assert [describe(baseline) for baseline in baselines] == [case.name for case in cases]
    assert [case.draft for case in cases] == ["self", "self", "ngram"]
    assert [kind_of(b) for b in quick(EVERY)].count(EVERY_POSITION) == 1
    for baseline, case in zip(baselines, cases, strict=True):
        again = Case.from_record(baseline)
        assert again.mode == case.mode and again.draft == case.draft
        assert again.config.decoding == case.config.decoding
        assert again.config.workload == case.config.workload
        assert len(baseline.verifications().every) == 1024
        check_case(again, num_cores=2)
    assert len({prompts_of(case) for case in cases}) == 1
    run = replace(cases[0], mode=DRAFTING_MODE)
    assert prompts_of(run) != prompts_of(cases[0]), "they share no prefill"
    few = cases_at_every_position(Subject(batch_size=2, prefix_len=200, gen_len=9))
    assert [case.draft for case in few] == ["self", "ngram"], "257 hold the whole prompt"
    workloads = [case.config.workload for case in few]
    assert {(w.batch_size, w.prefix_len, w.gen_len) for w in workloads} == {(4, 200, 9)}


def test_a_case_has_the_name_that_runs_it() -> None:
    """The flags of `magicdec run`, without settings that have their default."""
    for baseline, case in zip(BASELINES, standard_runs(), strict=True):
        config = case.config
        ran = RUN.read(describe(baseline).split())
        is_lookup = config.decoding.drafter == "ngram"  # which reads no cache
        assert is_lookup or ran.kv.resolve() == config.kv.resolve()
        assert (ran.draft and ran.draft.model) == (config.draft and config.draft.model)
        for name in ("strategy", "drafter", "pa", "draft_weights", "gamma"):
            assert getattr(ran.decoding, name) == getattr(config.decoding, name)
        assert ran.sampling == config.sampling
        assert describe(baseline) == case.name
    other = with_fields(BASELINES[0], config__kv__num_sink_tokens=4)
    assert describe(other).endswith("--budget 33 --num_sink_tokens 4 --gamma 2")


def test_the_standard_cases_cover_every_drafter_and_policy() -> None:
    things = [dict(measured_thing(baseline)) for baseline in BASELINES]
    # The packaged model of the cases has no head for multi-token prediction.
    pairs = {(drafter, policy) for drafter, policy in served_pairs() if drafter != MTP}
    assert {(t["drafter"], t["policy"]) for t in things} >= pairs
    assert {t["drafter"] for t in things} == set(DRAFTERS) - {MTP, f"{NGRAM_AND}{MTP}"}
    assert len({describe(baseline) for baseline in BASELINES}) == len(BASELINES), "each once"


def test_the_standard_cases_cover_every_other_way_to_draft() -> None:
    """Once without a draft model, and once with it where it can."""
    ways = ("pa", "low-bit", "auto", "reselect", "sampled")
    kinds = [kind for baseline in BASELINES for kind in kind_of(baseline).split()]
    assert set(ways) <= set(kinds)
    lone = standard_runs(Subject(draft="none"))
    assert all(c.config.decoding.model_drafter != "model" for c in lone)
    given = [c.config.decoding for c in standard_runs() if c.config.decoding.gamma == "auto"]
    assert given and all(d.step_cost is not None for d in given), "no time is measured"


def test_a_given_cost_leaves_a_case_as_a_record_and_comes_back() -> None:
    name = "--draft self --kv_policy streaming_llm --budget 257 --gamma auto"
    baseline = next(b for b in BASELINES if describe(b) == name)
    config = Case.from_record(baseline).config
    assert config.decoding.step_cost == STEP_COST
    assert first_difference(baseline, with_fields(baseline)) is None
    other = with_fields(baseline, config__decoding__step_cost=[0.5, 0.1])
    assert "step_cost [0.3, 0.1], was [0.5, 0.1]" in str(first_difference(baseline, other))


def test_budgets_that_hold_the_prompt_and_an_absent_draft_make_no_case() -> None:
    configs = [c.config for c in standard_runs(Subject(prefix_len=200, draft="none"))]
    assert {c.kv.budget for c in configs if c.kv.policy not in WITHOUT_BUDGET} == {33, 65, 129}
    assert all(c.draft is None and c.decoding.drafter != "model" for c in configs)


def test_only_a_target_that_drafts_for_itself_in_float32_has_no_margin() -> None:
    for dtype, expected in (("float32", {0.0, None}), ("bfloat16", {None})):
        cases = standard_cases(Subject(dtype=dtype))
        assert {margin_of(case) for case in cases} == expected


def test_what_auto_chose_is_left_to_auto_again() -> None:
    """So that a baseline can be run again where its kernels do not exist."""
    record = BASELINES[0]
    assert record.config["attention"]["backend_reason"].startswith("auto")
    config = Case.from_record(record).config
    assert config.attention.backend == AttentionSection().backend
    assert config.model.elementwise == ModelSection().elementwise
    assert config.model.dtype == "float32" and config.parallel.threads is None
    asked = json.loads(record.to_json())["config"]["attention"] | {"backend_reason": "asked for"}
    chosen = replace(record, config=record.config | {"attention": asked})
    assert (
        Case.from_record(chosen).config.attention.backend == record.config["attention"]["backend"]
    )


ON_RANKS = [b for b in BASELINES if b.environment.world_size > 1]


def test_a_case_of_several_ranks_is_run_on_as_many() -> None:
    policies = set(KV_POLICIES) - set(WITHOUT_BUDGET)
    apart = "--draft model:demo-draft --kv_policy full --gamma 4 --nproc 2 --draft_ranks 1"
    assert {b.config["kv"]["policy"] for b in ON_RANKS[:-1]} == policies
    assert describe(ON_RANKS[-1]) == apart
    for baseline in ON_RANKS:
        case = Case.from_record(baseline)
        parallel = case.config.parallel
        w = baseline.config["workload"]
        assert case.num_ranks == 2 and parallel.rank_group == (0, 1)
        assert parallel.collectives == "auto" and parallel.threads is None
        assert w["batch_size"] * w["num_batches"] == LEAST_PROMPTS
        assert case.name == describe(baseline)
    draft = Case.from_record(ON_RANKS[-1]).config.draft
    assert draft is not None and draft.rank_group == (1,)
    assert all("--nproc" not in describe(b) for b in BASELINES if b not in ON_RANKS)
    turned = with_fields(ON_RANKS[-1], config__parallel__rank_group=[1, 0])
    assert describe(turned).endswith("--nproc 2 --rank_group 1 0"), "the draft is on its first"


def test_the_user_chooses_the_ranks_of_the_new_cases() -> None:
    counts = [
        [case.num_ranks for case in standard_runs(Subject(nproc=nproc, batch_size=3))]
        for nproc in (1, 3)
    ]
    assert set(counts[0]) == {1} and counts[1] == counts[0] + [3] * len(ON_RANKS)
    last = standard_runs(Subject(nproc=3, batch_size=3))[-1].config
    assert last.draft is not None and last.draft.rank_group == (2,)
    assert last.workload.num_prompts == 6, "whole batches, of four prompts at least"
    assert last.parallel.device == "cpu"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment__world_size": 1000}, "1000 ranks are too many for "),
        ({"environment__world_size": 3}, "--rank_group 0 1: name all of the launched ranks, each"),
        ({"config__draft__rank_group": [2]}, "--draft_ranks 2: name some of the launched ranks"),
        ({"environment__world_size": 0}, "--nproc 0 is too small; it must be at least 1"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_the_case(
    fields: dict[str, Any],
    message: str,
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any process starts."""
    monkeypatch.setattr("magicdec.cli.gate.num_cores", lambda: 2)
    monkeypatch.setattr("magicdec.cli.gate.measure", None)
    path = tmp_path / "old.jsonl"
    baseline = with_fields(ON_RANKS[-1], **fields)
    path.write_text(replace(baseline, seal="").to_json() + "\n")
    for words in (("gate",), ("gate", "save")):
        code, _, err = command(*words, "--baseline", path)
        assert code == 2 and err.count("\n") == 1 and message in err, err
        assert "--draft model:demo-draft --kv_policy full --gamma 4" in err


def test_quick_has_one_case_for_each_method_and_other_way_to_draft() -> None:
    kinds = [kind_of(b) for b in quick(BASELINES)]
    assert len(set(kinds)) == len(kinds) and set(kinds) == set(map(kind_of, BASELINES))
    assert set(map(method_of, BASELINES)) <= {method_of(b) for b in quick(BASELINES)}


def test_the_gate_is_refused_without_baselines(tmp_path: Path, command: Command) -> None:
    (tmp_path / "empty").write_text("")
    for name, message in (("empty", "holds no records"), ("absent", "No such file")):
        code, _, err = command("gate", "--baseline", tmp_path / name)
        assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize("num_processes", [1, 2, 3, 50])
def test_every_case_has_one_process_and_few_with_other_prompts_stay_together(
    num_processes: int,
) -> None:
    cases = [(n, Case.from_record(b)) for n, b in enumerate(BASELINES) if b not in ON_RANKS]
    shares = shares_of(cases, num_processes)
    assert sorted(number for share in shares for number, _ in share) == [*range(len(cases))]
    assert len(shares) == min(num_processes, len(cases)) and all(shares)
    if num_processes == 2:
        sampled = [{case.config.sampling.temperature for _, case in share} for share in shares]
        assert sorted(map(len, sampled)) == [1, 2], "one process prefills for sampled cases"
