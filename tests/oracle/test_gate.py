"""The gate on the packaged demo models: today's acceptance against the committed baselines, for
every drafter and policy."""

from dataclasses import replace
from itertools import pairwise

import pytest
from conftest import ROOT, served_pairs

from magicdec.gate.cases import config_of
from magicdec.gate.measuring import run_cases, with_threads
from magicdec.names import BASELINE
from magicdec.records.comparison.compare import compare, exit_code
from magicdec.records.comparison.conditions import measured_thing
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord

BASELINES = load_records(ROOT / "results" / "baselines" / "acceptance.jsonl")


def find(drafter: str, policy: str | None, budget: int | None, gamma: int = 4) -> RunRecord:
    key = {"drafter": drafter, "policy": policy, "budget": budget, "gamma": gamma}
    return next(r for r in BASELINES if key.items() <= dict(measured_thing(r)).items())


def baseline_of(drafter: str, policy: str | None) -> RunRecord:
    return find(drafter, policy, None if policy in (None, "full") else 257)


@pytest.fixture(scope="module")
def again(request: pytest.FixtureRequest) -> dict[tuple[str, str | None], RunRecord | str]:
    """The very run that the config of each baseline describes, on one thread, for every pair of
    drafter and policy that is tested now. The runs share a prefill and the first one's baseline
    pass, which takes longer than speculation: a run has one of its own only if it emitted other
    tokens."""
    here = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in here if hasattr(item, "callspec")]
    pairs = [(case["drafter"], case["policy"]) for case in cases if "drafter" in case]
    configs = [with_threads(config_of(baseline_of(*pair)), 1) for pair in pairs]
    lone = [replace(c, decoding=replace(c.decoding, baseline=False)) for c in configs[1:]]
    first, *others = (found for _, found in run_cases(list(enumerate([*configs[:1], *lone]))))
    found = [first, *(checked(record, first) for record in others)]
    missing = [(i, configs[i]) for i, record in enumerate(found) if record is None]
    found = [record or "compared with nothing" for record in found]
    for number, record in run_cases(missing):
        found[number] = record
    return dict(zip(pairs, found, strict=True))


def checked(record: RunRecord | str, first: RunRecord | str) -> RunRecord | None:
    """`record` with the check that its tokens are those of the baseline pass of `first`; None if
    they are not."""
    if not isinstance(record, RunRecord) or not isinstance(first, RunRecord):
        return None
    assert record.samples and first.samples and record.correctness and first.correctness
    expected = first.samples[BASELINE].output_hashes
    if record.samples["speculative"].output_hashes != expected:
        return None
    checks = {"reference": BASELINE, "identical": True, "num_excused": 0, "num_diverged": 0}
    return replace(record, correctness=replace(record.correctness, **checks))


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
    (comparison,) = compare([found], BASELINES)
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
