"""The gate on the packaged demo models: today's acceptance against the committed baselines, for
every drafter and policy."""

from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import ROOT, served_pairs

from magicdec.bench.gate.cases import Case
from magicdec.bench.gate.files import to_compare_with
from magicdec.bench.gate.measuring import run_cases
from magicdec.records.comparison.compare import compare, exit_code
from magicdec.records.comparison.conditions import measured_thing
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes

COMMITTED = ROOT / "results" / "baselines" / "acceptance.jsonl"
NUM_PROMPTS = 2  # of 16: a step of other drafts is seen in any of them
BASELINES = [record for record in load_passes(to_compare_with(COMMITTED)) if record.shares_prefill]


def find(drafter: str, policy: str | None, budget: int | None, gamma: int = 4) -> PassRecord:
    key = {"drafter": drafter, "policy": policy, "budget": budget, "gamma": gamma}
    return next(r for r in BASELINES if key.items() <= dict(measured_thing(r)).items())


def baseline_of(drafter: str, policy: str | None) -> PassRecord:
    return find(drafter, policy, None if policy in (None, "full") else 257)


def num_first(record: PassRecord) -> int:
    """How many prompts of its first batch are decoded again: all where a step drafts otherwise if
    other rows are beside it, as lookups and models of their own do."""
    size: int = record.config["workload"]["batch_size"]
    return NUM_PROMPTS if record.config["decoding"]["drafter"] == "self" else size


def with_first_prompts(record: PassRecord) -> PassRecord:
    """What a baseline says of its first prompts."""
    count = num_first(record)
    section = record.config["workload"] | {"num_batches": 1, "batch_size": count}
    workload = record.workload
    assert workload is not None and workload.sources is not None
    # Totals are of all prompts of the group, and each step says what it read.
    group = replace(record.groups[0], num_requests=count, draft_kv_tokens=None, draft_rows=None)
    return replace(
        record,
        config=record.config | {"workload": section},
        workload=replace(workload, num_prompts=count, sources=workload.sources[:count]),
        requests=record.requests[:count],
        groups=[group],
    )


def first_prompts_of(record: PassRecord) -> Case:
    case = Case.from_record(record)
    section = replace(case.config.workload, num_batches=1, batch_size=num_first(record))
    return replace(case, config=replace(case.config, workload=section))


@pytest.fixture(scope="module")
def again(request: pytest.FixtureRequest) -> dict[tuple[str, str | None], PassRecord | str]:
    """The first prompts of the very pass that the config of each baseline describes, on one thread,
    for every pair of drafter and policy that is tested now."""
    here = [item for item in request.session.items if item.path == request.path]
    params = [item.callspec.params for item in here if hasattr(item, "callspec")]
    pairs = [(param["drafter"], param["policy"]) for param in params if "drafter" in param]
    cases = [first_prompts_of(baseline_of(*pair)).with_threads(1) for pair in pairs]
    found = dict(run_cases(list(enumerate(cases))))
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
    again: dict[tuple[str, str | None], PassRecord | str], drafter: str, policy: str | None
) -> None:
    found = again[drafter, policy]
    assert isinstance(found, PassRecord), found
    baseline = with_first_prompts(baseline_of(drafter, policy))
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
