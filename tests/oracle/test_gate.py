"""The gate on the packaged demo model: today's acceptance against the committed baselines."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from magicdec.analysis.compare import compare, measured_thing
from magicdec.bench.prepare import prepare
from magicdec.bench.record import load_records
from magicdec.bench.run import execute
from magicdec.config import RunConfig
from magicdec.distributed.groups import Launch
from magicdec.sections import (
    AttentionSection,
    DecodingSection,
    KVSection,
    ModelSection,
    OutputSection,
    ParallelSection,
    WorkloadSection,
)

BASELINES = load_records(ROOT / "results" / "baselines" / "acceptance.jsonl")
SECTIONS = {
    "model": ModelSection,
    "parallel": ParallelSection,
    "kv": KVSection,
    "attention": AttentionSection,
    "decoding": DecodingSection,
    "workload": WorkloadSection,
    "output": OutputSection,
}


def find(budget: int | None, gamma: int) -> dict[str, Any]:
    key = {"budget": budget, "gamma": gamma}
    return next(r for r in BASELINES if key.items() <= dict(measured_thing(r)).items())


def run_again(baseline: dict[str, Any], **model: Any) -> dict[str, Any]:
    """The very run that the record's own config describes."""
    saved = baseline["config"]
    sections = {name: kind(**saved[name]) for name, kind in SECTIONS.items()}
    sections["parallel"] = ParallelSection(rank_group=(0,))
    config = RunConfig(**sections)
    outcome = execute(prepare(config, Launch(0, 1, 0, 1)), is_leader=False)
    return json.loads(outcome.record.to_json())


@pytest.mark.parametrize("budget", [257, None])
def test_acceptance_has_not_fallen(budget: int | None) -> None:
    baseline = find(budget, 4)
    comparison = compare(run_again(baseline), BASELINES)
    assert comparison.problem is None, comparison
    if budget is None:
        assert comparison.differences["acceptance_rate"] == (1.0, 1.0)


def test_baselines_cover_every_budget_and_rise_with_it() -> None:
    for gamma in (2, 4):
        budgets = (33, 65, 129, 257, 513, None)
        rates = [find(b, gamma)["metrics"]["acceptance_rate"] for b in budgets]
        assert rates[-1] == 1.0
        assert all(a < b + 0.03 for a, b in pairwise(rates)), rates
        assert rates[0] < rates[3]


def test_a_full_budget_in_bfloat16_accepts_nearly_everything() -> None:
    config = RunConfig(
        model=ModelSection("demo", "bfloat16"),
        kv=KVSection("full"),
        decoding=DecodingSection("speculative", "self", 4, ignore_eos=True),
        workload=WorkloadSection("demo", batch_size=4, prefix_len=512, num_batches=1),
    )
    config = dataclasses.replace(
        config, workload=dataclasses.replace(config.workload, warmup_batches=0)
    )
    record = execute(prepare(config, Launch(0, 1, 0, 1)), is_leader=False).record
    assert record.status == "ok" and record.metrics is not None, record.correctness
    assert record.metrics["acceptance_rate"] >= 0.99


def test_records_of_other_models_are_not_compared(tmp_path: Path) -> None:
    baseline = find(257, 4)
    other = json.loads(json.dumps(baseline))
    other["workload"]["model_sha256"] = "0" * 64
    problem = compare(other, [baseline]).problem
    assert problem is not None and "not comparable: model fingerprint" in problem
