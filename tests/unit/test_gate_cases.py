"""The cases of the gate: what a baseline file runs again, and what a new file holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, Command, served_pairs
from synthetic_records import drawn, with_fields

from magicdec.bench.gate.cases import (
    STEP_COST,
    Subject,
    config_of,
    margin_of,
    name_of,
    quick,
    standard_cases,
)
from magicdec.bench.gate.measuring import shares_of
from magicdec.cli.drivers import RUN
from magicdec.config.sections import AttentionSection, ModelSection
from magicdec.names import DRAFTERS
from magicdec.records.comparison.conditions import (
    describe,
    first_difference,
    kind_of,
    measured_thing,
    method_of,
)
from magicdec.records.reading import load_records

BASELINES = load_records(ROOT / "results" / "baselines" / "acceptance.jsonl")


def test_the_committed_file_has_the_standard_cases() -> None:
    configs = standard_cases(Subject())
    again = [config_of(baseline) for baseline in BASELINES]
    assert len(again) == len(configs)
    for ours, config in zip(again, configs, strict=True):
        assert ours.kv.policy == config.kv.policy
        assert (ours.draft and ours.draft.model) == (config.draft and config.draft.model)
        assert ours.kv.budget == config.kv.budget or ours.kv.policy == "full"
        for name in ("drafter", "num_draft_tokens", "ignore_eos", "strategy", "step_cost"):
            assert getattr(ours.decoding, name) == getattr(config.decoding, name)
        for name in ("dataset", "prefix_len", "gen_len", "batch_size", "num_batches"):
            assert getattr(ours.workload, name) == getattr(config.workload, name)
    assert [b.margin for b in BASELINES] == [margin_of(config) for config in configs]


def test_a_case_has_the_name_that_runs_it() -> None:
    """The flags of `magicdec run`, without settings that have their default."""
    for baseline, config in zip(BASELINES, standard_cases(Subject()), strict=True):
        ran = RUN.read(describe(baseline).split())
        is_lookup = config.decoding.drafter == "ngram"  # which reads no cache
        assert is_lookup or ran.kv.resolve() == config.kv.resolve()
        assert (ran.draft and ran.draft.model) == (config.draft and config.draft.model)
        names = ["strategy", "drafter", "tree", "pa", "draft_weights"]
        for name in names + ["num_draft_tokens"] * (config.decoding.tree is None):
            assert getattr(ran.decoding, name) == getattr(config.decoding, name)
        assert ran.sampling == config.sampling
        assert describe(baseline) == name_of(config)
    other = with_fields(BASELINES[0], config__kv__num_sink_tokens=4, config__decoding__tree="3,2")
    assert describe(other).endswith("--budget 33 --num_sink_tokens 4 --tree 3,2")


def test_the_standard_cases_cover_every_drafter_and_policy() -> None:
    things = [dict(measured_thing(baseline)) for baseline in BASELINES]
    assert {(t["drafter"], t["policy"]) for t in things} >= served_pairs()
    assert {t["drafter"] for t in things} == set(DRAFTERS)
    assert len({describe(baseline) for baseline in BASELINES}) == len(BASELINES), "each once"


def test_the_standard_cases_cover_every_other_way_to_draft() -> None:
    """Once without a draft model, and once with it where it can."""
    ways = ("tree", "pa", "low-bit", "auto", "reselect", "sampled")
    kinds = [kind for baseline in BASELINES for kind in kind_of(baseline).split()]
    assert set(ways) <= set(kinds)
    lone = standard_cases(Subject(draft="none"))
    assert all(c.decoding.model_drafter != "model" for c in lone)
    given = [c for c in standard_cases(Subject()) if c.decoding.gamma == "auto"]
    assert given and all(c.decoding.step_cost is not None for c in given), "no time is measured"


def test_a_given_cost_leaves_a_case_as_a_record_and_comes_back() -> None:
    name = "--draft self --kv_policy streaming_llm --budget 257 --gamma auto"
    baseline = next(b for b in BASELINES if describe(b) == name)
    config = config_of(baseline)
    assert config.decoding.step_cost == STEP_COST
    assert first_difference(baseline, with_fields(baseline)) is None
    other = with_fields(baseline, config__decoding__step_cost=[0.5, 0.1])
    assert "step_cost [0.3, 0.1], was [0.5, 0.1]" in str(first_difference(baseline, other))


def test_budgets_that_hold_the_prompt_and_an_absent_draft_make_no_case() -> None:
    configs = standard_cases(Subject(prefix_len=200, draft="none"))
    assert {c.kv.budget for c in configs if c.kv.policy != "full"} == {33, 65, 129}
    assert all(c.draft is None and c.decoding.drafter != "model" for c in configs)


def test_only_a_target_that_drafts_for_itself_in_float32_has_no_margin() -> None:
    for dtype, expected in (("float32", {0.0, None}), ("bfloat16", {None})):
        configs = standard_cases(Subject(dtype=dtype))
        assert {margin_of(config) for config in configs} == expected


def test_what_auto_chose_is_left_to_auto_again() -> None:
    """So that a baseline can be run again where its kernels do not exist."""
    record = BASELINES[0]
    assert record.config["attention"]["backend_reason"].startswith("auto")
    config = config_of(record)
    assert config.attention.backend == AttentionSection().backend
    assert config.model.elementwise == ModelSection().elementwise
    assert config.model.dtype == "float32" and config.parallel.threads is None
    asked = json.loads(record.to_json())["config"]["attention"] | {"backend_reason": "asked for"}
    chosen = replace(record, config=record.config | {"attention": asked})
    assert config_of(chosen).attention.backend == record.config["attention"]["backend"]


def test_a_case_of_several_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="a baseline has 2 ranks; the gate runs cases of one rank"):
        config_of(with_fields(drawn(), environment__world_size=2))


def test_quick_has_one_case_for_each_method_and_other_way_to_draft() -> None:
    kinds = [kind_of(b) for b in quick(BASELINES)]
    assert len(set(kinds)) == len(kinds) and set(kinds) == set(map(kind_of, BASELINES))
    assert set(map(method_of, BASELINES)) <= {method_of(b) for b in quick(BASELINES)}


def test_the_gate_is_refused_without_baselines(tmp_path: Path, command: Command) -> None:
    (tmp_path / "empty").write_text("")
    for name, said in (("empty", "holds no records"), ("absent", "No such file")):
        code, _, err = command("gate", "--baseline", tmp_path / name)
        assert code == 2 and said in err and err.count("\n") == 1


@pytest.mark.parametrize("num_processes", [1, 2, 3, 50])
def test_every_case_has_one_process_and_few_with_other_prompts_stay_together(
    num_processes: int,
) -> None:
    cases = list(enumerate(map(config_of, BASELINES)))
    shares = shares_of(cases, num_processes)
    assert sorted(number for share in shares for number, _ in share) == [*range(len(cases))]
    assert len(shares) == min(num_processes, len(cases)) and all(shares)
    if num_processes == 2:
        sampled = [{config.sampling.temperature for _, config in share} for share in shares]
        assert sorted(map(len, sampled)) == [1, 2], "one process prefills for sampled cases"
