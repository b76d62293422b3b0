"""Which cases `make test` runs: that they have every pair, and that nothing the project offers is
left to `make test-all` alone."""

import subprocess
import sys
from itertools import combinations, product

import pytest
from conftest import HANG, ROOT
from tiers import covering
from tiny_families import CLASSES, MODELS

from magicdec.names import ARCHITECTURES, ATTENTION_BACKENDS, DRAFTERS, KV_POLICIES, STRATEGIES

FILES = (
    "tests/distributed/test_engine_ranks.py",
    "tests/oracle/test_attention.py",
    "tests/oracle/test_families.py",
)


def test_the_kept_cases_have_every_pair_and_are_few() -> None:
    axes = {"a": range(5), "b": "xyz", "c": (True, False), "d": range(4)}
    cases = [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]
    kept = [cases[index] for index in sorted(covering(cases, 2))]
    for one, other in combinations(axes, 2):
        assert {(c[one], c[other]) for c in kept} == set(product(axes[one], axes[other]))
    assert len(kept) < len(cases) / 4
    assert len(covering(cases, 1)) == 5


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """What `make test` runs of FILES, as FILE::TEST[CASE]."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "not wide", *FILES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout
    return {line.rpartition("/")[2] for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.wide
def test_make_test_runs_every_policy_and_every_family(collected: set[str]) -> None:
    """And `make test-all` every policy with every family."""
    start = "test_families.py::test_self_speculation_changes_nothing["
    pairs = [case.removeprefix(start) for case in collected if case.startswith(start)]
    for family in MODELS:
        assert any(pair.startswith(f"{family}-") for pair in pairs), family
    for policy in KV_POLICIES:
        assert any(f"-{policy}-" in pair for pair in pairs), policy
    for family in MODELS:
        assert f"test_families.py::test_greedy_tokens_are_the_references[{family}]" in collected
        assert f"test_families.py::test_whole_sharded_and_staged[{family}]" in collected


@pytest.mark.wide
def test_make_test_runs_every_attention_backend(collected: set[str]) -> None:
    found = {case.partition("[")[2] for case in collected if "test_backend_equals_att" in case}
    for backend in ATTENTION_BACKENDS:
        assert any(case.startswith((f"{backend}-", f"{backend},")) for case in found), backend


@pytest.mark.wide
def test_make_test_runs_every_drafter_and_policy_over_ranks(collected: set[str]) -> None:
    """test_engine_ranks.py holds its own table to the names of drafters and policies."""
    test = "test_engine_ranks.py::test_every_drafter_and_policy_emits_the_baselines_tokens"
    ranks = {f"{test}[{ranks}]" for ranks in ("1", "2", "3, which share KV heads")}
    assert ranks | {"test_engine_ranks.py::test_the_table_is_complete"} <= collected
    assert set(STRATEGIES) == {"autoregressive", "speculative"}, "the two that matrix.py compares"
    assert set(DRAFTERS) == {"self", "model", "ngram", "ngram+self", "ngram+model"}


def test_every_architecture_has_a_tiny_family() -> None:
    names = {CLASSES.get(family, f"{family}ForCausalLM") for family, _ in MODELS.values()}
    assert names == set(ARCHITECTURES)
