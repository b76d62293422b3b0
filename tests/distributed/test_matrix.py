"""Every drafter under every KV policy on one rank and on two, the draft on all kinds of groups: the
baseline's float32 tokens, exactly, 110 of them a row, in a ragged batch."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import Launch, refusal, save_checkpoint, served_pairs, tiny_transformer
from matrix import NUM_NEW, Result, make_cases
from several_ranks import answer_of, disturbed

from magicdec.config.sections import KVSection
from magicdec.names import DRAFTERS, KV_POLICIES


def key(case: dict[str, Any]) -> tuple[Any, ...]:
    """What a case is, whatever the ranks."""
    return case["drafter"], case["gamma"], case["tree"], tuple(case["kv"].values())


@pytest.fixture(scope="module")
def of_one_rank() -> dict[str, list[Result]]:
    """Filled by the first test that needs them."""
    return {}


@pytest.mark.parametrize(
    ("num_ranks", "groups"),
    [
        pytest.param(1, "in turn", id="1"),
        pytest.param(2, "in turn", id="2"),
        pytest.param(2, "other", id="2, other groups", marks=pytest.mark.wide),
    ],
)
def test_every_drafter_and_policy_emits_the_baselines_tokens(
    num_ranks: int,
    groups: str,
    launch: Launch,
    tmp_path: Path,
    of_one_rank: dict[str, list[Result]],
) -> None:
    """The draft model: the target's weights, a little disturbed, so that some of it is accepted."""
    target = tiny_transformer()
    models = {"target": target, "draft": disturbed(target)}
    paths = [save_checkpoint(model, tmp_path / name) for name, model in models.items()]
    found = answer_of(launch, "distributed/matrix.py", *paths, groups, num_ranks=num_ranks)
    baseline, *results = (Result(**r) for r in found)
    assert len(results) == len(make_cases(num_ranks, groups == "other"))
    assert [len(tokens) for tokens in baseline.tokens] == NUM_NEW
    assert len({tuple(t[:9]) for t in baseline.tokens}) == len(NUM_NEW), "unlike texts"
    wrong = [r.case for r in results if r.tokens != baseline.tokens]
    assert not wrong, wrong
    for r in results:
        assert r.num_accepted > 0, ("of no use", r.case)
        reads_all = r.case["drafter"] == "self" and r.case["kv"]["policy"] == "full"
        assert (r.num_accepted == r.num_drafted) == reads_all, r.case
    first, *others = of_one_rank.setdefault("results", [baseline, *results])
    assert baseline.tokens == first.tokens, "another rank count, another text"
    # Rounding may turn a draft's near-tie; ranks that draft otherwise show.
    alone = {key(r.case): r.acceptance for r in others}
    for r in results:
        assert abs(r.acceptance - alone[key(r.case)]) < 0.02, (r.case, alone[key(r.case)])


def test_the_table_is_complete() -> None:
    """A new policy or drafter without a row fails; so does a pair that was served and is not."""
    for num_ranks in (1, 2):
        cases = make_cases(num_ranks)
        pairs = {(c.drafter, None if c.drafter == "ngram" else c.kv.policy) for c in cases}
        assert pairs == served_pairs()
    assert {c.drafter for c in cases if c.tree} == {"self", "model"}
    groups = {(0,), (1,), (1, 0)}
    assert {c.draft_ranks for c in cases if c.drafter == "model"} == groups
    drafts = [c for c in [*cases, *make_cases(2, other_groups=True)] if c.drafter == "model"]
    policies = {policy for drafter, policy in served_pairs() if drafter == "model"}
    assert {(c.kv.policy, c.draft_ranks) for c in drafts} == set(product(policies, groups))


def test_no_more_is_refused_than_a_draft_that_nothing_verifies() -> None:
    for drafter, policy in product(DRAFTERS, KV_POLICIES):
        said = refusal(drafter, KVSection(policy)) or ""
        if drafter == "model" and policy in ("verified", "retrieval"):
            assert f"--kv_policy {policy}: a standalone draft is never verified itself" in said
        else:
            assert said == ""
