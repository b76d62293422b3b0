"""The gate on the packaged demo models: today's acceptance against the committed baselines, for
every drafter and policy."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, served_pairs

from magicdec.config.draft_section import DraftSection
from magicdec.config.model_section import ModelSection
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    OutputSection,
    ParallelSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.distributed.groups import Launch
from magicdec.records.comparison.compare import compare, exit_code
from magicdec.records.comparison.conditions import measured_thing
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.run.run import execute
from magicdec.setup.prepare import prepare

sys.path.insert(0, str(ROOT / "scripts"))
from acceptance import CASES, make_config

BASELINES = load_records(ROOT / "results" / "baselines" / "acceptance.jsonl")
SECTIONS = {
    "model": ModelSection,
    "draft": DraftSection,
    "parallel": ParallelSection,
    "kv": KVSection,
    "attention": AttentionSection,
    "decoding": DecodingSection,
    "sampling": SamplingSection,
    "workload": WorkloadSection,
    "output": OutputSection,
}


def find(drafter: str, policy: str | None, budget: int | None, gamma: int = 4) -> RunRecord:
    key = {"drafter": drafter, "policy": policy, "budget": budget, "gamma": gamma}
    return next(r for r in BASELINES if key.items() <= dict(measured_thing(r)).items())


def run_again(baseline: RunRecord) -> RunRecord:
    """The very run that the record's own config describes, on one thread."""
    saved = baseline.config
    sections: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        asked = {field.name for field in fields(kind)}  # a record also says why `auto` chose
        if saved[name]:
            sections[name] = kind(**{k: v for k, v in saved[name].items() if k in asked})
    sections["parallel"] = ParallelSection(rank_group=(0,), threads=1)
    config = RunConfig(**sections)
    return execute(prepare(config, Launch(0, 1, 0, 1)), is_leader=False).record


def test_the_baselines_cover_every_drafter_and_policy() -> None:
    things = [dict(measured_thing(baseline)) for baseline in BASELINES]
    assert {(t["drafter"], t["policy"]) for t in things} == served_pairs()
    assert len({tuple(t.items()) for t in things}) == len(BASELINES), "each thing once"


def test_the_table_that_renews_them_is_the_file() -> None:
    """A case of `scripts/acceptance.py` without a record, or the other way round, fails."""
    assert [make_config(case, "demo", None).kv.resolve() for case in CASES] == [
        replace(KVSection(**baseline.config["kv"]), draft_kv_dtype="auto") for baseline in BASELINES
    ]
    assert [(case.drafter, case.gamma) for case in CASES] == [
        (b.config["decoding"]["drafter"], b.config["decoding"]["num_draft_tokens"])
        for b in BASELINES
    ]


@pytest.mark.parametrize(
    ("drafter", "policy"),
    [
        pair if pair == ("self", "streaming_llm") else pytest.param(*pair, marks=pytest.mark.wide)
        for pair in sorted(served_pairs(), key=str)
    ],
    ids=str,
)
def test_acceptance_has_not_fallen(drafter: str, policy: str | None) -> None:
    baseline = find(drafter, policy, None if policy in (None, "full") else 257)
    (comparison,) = compare([run_again(baseline)], BASELINES)
    assert exit_code([comparison]) == 0, comparison
    if (drafter, policy) == ("self", "full"):
        assert comparison.rates == (1.0, 1.0)


def test_baselines_cover_every_budget_and_rise_with_it() -> None:
    for gamma in (2, 4):
        budgets = (33, 65, 129, 257, 513, None)
        records = [find("self", "streaming_llm" if b else "full", b, gamma) for b in budgets]
        rates = [record.metrics.acceptance_rate for record in records if record.metrics]
        assert rates[-1] == 1.0
        assert all(a < b + 0.03 for a, b in pairwise(rates)), rates
        assert rates[0] < rates[3]


def test_a_full_budget_in_bfloat16_accepts_nearly_everything() -> None:
    config = RunConfig(
        model=ModelSection("demo", "bfloat16"),
        parallel=ParallelSection(threads=1),
        kv=KVSection("full"),
        decoding=DecodingSection("speculative", "self", 4, ignore_eos=True),
        workload=WorkloadSection("demo", batch_size=4, prefix_len=512, num_batches=1),
    )
    config = dataclasses.replace(
        config, workload=dataclasses.replace(config.workload, warmup_batches=0)
    )
    record = execute(prepare(config, Launch(0, 1, 0, 1)), is_leader=False).record
    assert record.status == "ok" and record.metrics is not None, record.correctness
    assert (record.metrics.acceptance_rate or 0) >= 0.99


def test_records_of_other_models_are_not_compared(tmp_path: Path) -> None:
    baseline = find("self", "streaming_llm", 257)
    assert baseline.workload is not None
    weights = dataclasses.replace(baseline.workload, model_sha256="0" * 64)
    other = dataclasses.replace(baseline, workload=weights)
    (found,) = compare([other], [baseline])
    assert found.text == "not comparable: model demo has other weights"
