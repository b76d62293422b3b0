"""The gate on the packaged demo models: today's acceptance against the committed baselines, for
every drafter and policy."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from conftest import ROOT, served_pairs

from magicdec.bench.gate.cases import Case, case_of
from magicdec.bench.gate.files import to_compare_with
from magicdec.bench.gate.measuring import run_cases, with_threads
from magicdec.config.run_config import RunConfig
from magicdec.records.comparison.compare import compare, exit_code
from magicdec.records.comparison.conditions import measured_thing
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord

COMMITTED = ROOT / "results" / "baselines" / "acceptance.jsonl"
BASELINES = load_records(to_compare_with(COMMITTED))


def find(drafter: str, policy: str | None, budget: int | None, gamma: int = 4) -> RunRecord:
    key = {"drafter": drafter, "policy": policy, "budget": budget, "gamma": gamma}
    return next(r for r in BASELINES if key.items() <= dict(measured_thing(r)).items())


def baseline_of(drafter: str, policy: str | None) -> RunRecord:
    return find(drafter, policy, None if policy in (None, "full") else 257)


def of_first_batch(record: RunRecord) -> RunRecord:
    """What a baseline says of the prompts of its first batch."""
    section = record.config["workload"]
    workload = record.workload
    num_batches = section["num_batches"]
    size = section["batch_size"]
    assert record.samples is not None and workload is not None and workload.sources is not None

    def cut(name: str, values: Any) -> Any:
        if name in ("output_hashes", "answer_scores"):  # by prompt
            return values and values[:size]
        is_by_batch = isinstance(values, list) and len(values) == num_batches
        return values[:1] if is_by_batch else values

    return replace(
        record,
        config=record.config | {"workload": section | {"num_batches": 1}},
        workload=replace(workload, num_prompts=size, sources=workload.sources[:size]),
        samples={
            name: type(each)(**{key: cut(key, values) for key, values in vars(each).items()})
            for name, each in record.samples.items()
        },
    )


def of_one_batch(config: Case) -> RunConfig:
    assert isinstance(config, RunConfig)
    return replace(config, workload=replace(config.workload, num_batches=1))


@pytest.fixture(scope="module")
def again(request: pytest.FixtureRequest) -> dict[tuple[str, str | None], RunRecord | str]:
    """The first batch of the very run that the config of each baseline describes, on one thread,
    for every pair of drafter and policy that is tested now."""
    here = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in here if hasattr(item, "callspec")]
    pairs = [(each["drafter"], each["policy"]) for each in params if "drafter" in each]
    cases = [of_one_batch(case_of(baseline_of(*pair))) for pair in pairs]
    configs = [with_threads(case, 1) for case in cases]
    found = dict(run_cases(list(enumerate(configs))))
    return {pair: found[number] for number, pair in enumerate(pairs)}


@pytest.mark.parametrize(
    ("drafter", "policy"),
    [
        pair if pair == ("self", "streaming_llm") else pytest.param(*pair, marks=pytest.mark.wide)
        for pair in sorted(served_pairs(), key=str)
    ],
    ids=str,
)
def test_acceptance_has_not_fallen(
    again: dict[tuple[str, str | None], RunRecord | str], drafter: str, policy: str | None
) -> None:
    found = again[drafter, policy]
    assert isinstance(found, RunRecord), found
    baseline = of_first_batch(baseline_of(drafter, policy))
    assert found.workload is not None and baseline.workload is not None
    assert found.workload.sources == baseline.workload.sources, "the same prompts"
    workload = replace(baseline.workload, sha256=found.workload.sha256)  # of fewer prompts
    (comparison,) = compare([found], [replace(baseline, workload=workload)])
    assert exit_code([comparison]) == 0, comparison
    if (drafter, policy) == ("self", "full"):
        assert comparison.rates == (1.0, 1.0)


def test_baselines_cover_every_budget_and_rise_with_it() -> None:
    for gamma in (2, 4):
        budgets = (33, 65, 129, 257, 513, None)
        records = [find("self", "streaming_llm" if b else "full", b, gamma) for b in budgets]
        rates = [record.metrics.draft_acceptance_rate for record in records if record.metrics]
        assert rates[-1] == 1.0
        assert all(a < b + 0.03 for a, b in pairwise(rates)), rates
        assert rates[0] < rates[3]
