"""The engine over 1, 2 and 3 ranks emits the tokens of one: every drafter under every KV policy,
ragged batches, standalone drafts on subgroups, requests that join and leave, steps that are
replayed; and all ranks come to the same verdict."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    TINY,
    Launch,
    make_requests,
    random_prompts,
    refusal,
    save_checkpoint,
    served_pairs,
    tiny_transformer,
)
from draft_heads import FITTED, fitted_head, is_head, made_mtp_head, write_head, write_mtp_head
from matrix import FEW_NEW, MAX_TOKENS, NUM_NEW, PROMPTS, Result, make_cases, make_mixed
from several_ranks import answer_of, disturbed, generate_alone

from magicdec.config.sections import NAMED, KVSection
from magicdec.names import DRAFTERS, EAGLE, KV_POLICIES

LOSSY = pytest.param("lossy", "mismatch", marks=pytest.mark.wide)


@pytest.mark.wide
@pytest.mark.parametrize(("rule", "status"), [("exact", "verified_with_ties"), LOSSY])
def test_two_ranks_agree_on_the_verdict(
    rule: str, status: str, launch: Launch, tmp_path: Path
) -> None:
    """tests/oracle/test_check.py has the same verdicts of one rank."""
    done = launch("distributed/verdict.py", tmp_path, rule, num_ranks=2)
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert ours == theirs and ours[0] == status
    assert (ours[1]["num_excused"] > 0) == (ours[1]["num_diverged"] == 0) == (rule == "exact")


def key(case: dict[str, Any]) -> tuple[Any, ...]:
    """What a case is, whatever the ranks."""
    names = ("drafter", "gamma", "pa", "steps", "is_sampled")
    return *(case[name] for name in names), *case["kv"].values()


@pytest.fixture(scope="module")
def results_of_one_rank() -> dict[int, list[Result]]:
    """By the number of KV heads; filled by the first test that needs them."""
    return {}


@pytest.mark.parametrize(
    ("num_ranks", "which", "kv_heads"),
    [
        pytest.param(1, "in turn", 3, id="1", marks=pytest.mark.wide),
        pytest.param(2, "not replayed", 3, id="2, not replayed"),
        pytest.param(2, "in turn", 3, id="2", marks=pytest.mark.wide),
        pytest.param(2, "other", 3, id="2, other groups", marks=pytest.mark.wide),
        pytest.param(3, "in turn", 2, id="3, which share KV heads", marks=pytest.mark.wide),
    ],
)
def test_every_drafter_and_policy_emits_the_baselines_tokens(
    num_ranks: int,
    which: str,
    kv_heads: int,
    launch: Launch,
    tmp_path: Path,
    results_of_one_rank: dict[int, list[Result]],
) -> None:
    """The draft model: the target's weights, a little disturbed, so that some of it is accepted."""
    target = tiny_transformer(replace(TINY, num_kv_heads=kv_heads))
    models = {"target": target, "draft": disturbed(target)}
    paths = [save_checkpoint(model, tmp_path / name) for name, model in models.items()]
    requests = make_requests(random_prompts(PROMPTS, 97), NUM_NEW)
    tokens = generate_alone(target, requests, MAX_TOKENS)
    texts = [[*r.prompt_ids, *ids] for r, ids in zip(requests, tokens, strict=True)]
    paths.append(tmp_path / "head")
    write_head(paths[-1], target.config, FITTED, weights=fitted_head(target, texts))
    paths.append(tmp_path / "mtp.safetensors")
    write_mtp_head(paths[-1], made_mtp_head(target, texts))
    found = answer_of(launch, "distributed/matrix.py", *paths, which, num_ranks=num_ranks)
    baseline, *results = (Result(**r) for r in found)
    assert len(results) == len(make_cases(num_ranks, which))
    assert baseline.tokens == tokens
    assert len({tuple(t[:9]) for t in baseline.tokens}) == len(NUM_NEW), "unlike texts"
    few = [tokens[:count] for tokens, count in zip(baseline.tokens, FEW_NEW, strict=True)]
    greedy = [r for r in results if not r.case["is_sampled"]]
    wrong = [r.case for r in greedy if r.tokens not in (baseline.tokens, few)]
    assert not wrong, wrong
    alone = {key(r.case): r for r in results_of_one_rank.setdefault(kv_heads, results)}
    for r in results:
        if r.case["steps"] == "native":
            check_acceptance(r, alone[key(r.case)])
        elif r.case["steps"] == "eager":
            assert r.tokens == alone[key(r.case)].tokens, ("another rank count", r.case)
    check_replayed([r for r in results if r.case["steps"] in ("eager", "replayed")])


def check_acceptance(found: Result, alone: Result) -> None:
    case = found.case
    is_lookup = case["drafter"] == "ngram"  # nothing is repeated
    assert found.num_drafted > 0 and (is_lookup or found.num_accepted > 0), ("of no use", case)
    reads_all = case["drafter"] == "self" and case["kv"]["policy"] == "full"
    assert (found.num_accepted == found.num_drafted) == reads_all, case
    ends_early = is_lookup or case["pa"] is not None
    assert (len(found.depths) > 1) == ends_early, (case, found.depths)
    # Rounding may turn a draft's near-tie; ranks that draft otherwise show.
    assert abs(found.acceptance - alone.acceptance) < 0.02, (case, alone.acceptance)


def check_replayed(results: list[Result]) -> None:
    """Sampled steps that are replayed emit the tokens of those that the host starts."""
    pairs = [(r.case["drafter"], r.case["kv"]["policy"]) for r in results]
    by_pair = list(zip(pairs, results, strict=True))
    eager = {pair: r.tokens for pair, r in by_pair if r.case["steps"] == "eager"}
    for pair, r in by_pair:
        assert (r.num_replayed > 3) == (r.case["steps"] == "replayed"), (pair, r.num_replayed)
        if r.case["is_sampled"]:
            # Of that pair only the greedy row, see oracle/test_replay.py.
            first = 3 if pair == ("model", "snapkv") else 0
            assert r.tokens[first:] == eager[pair][first:], pair


def test_the_table_is_complete() -> None:
    """A new policy or drafter without a row fails; so does a pair that was served and is not."""
    for num_ranks in (1, 2):
        cases = make_cases(num_ranks)
        pairs = {(c.drafter, None if c.drafter == "ngram" else c.kv.policy) for c in cases}
        mixed = {(drafter, kv.policy) for drafter, kv, _ in make_mixed((0,))}
        assert pairs == served_pairs() | mixed and {d for d, _ in pairs} == set(DRAFTERS)
    groups = {(0,), (1,), (1, 0)}
    assert {c.draft_ranks for c in cases if c.drafter == "model"} == groups
    drafts = [c for c in [*cases, *make_cases(2, "other")] if c.drafter in NAMED]
    policies = {policy for drafter, policy in served_pairs() if drafter == "model"}
    found = {(c.kv.policy, c.draft_ranks) for c in drafts if c.drafter == "model"}
    assert found == set(product(policies, groups))
    found = {(c.kv.policy, c.draft_ranks) for c in drafts if c.drafter == EAGLE}
    assert found == set(product(("full", "streaming_llm"), groups))


def test_no_more_is_refused_than_a_draft_that_nothing_verifies() -> None:
    for drafter, policy in product(DRAFTERS, KV_POLICIES):
        message = refusal(drafter, KVSection(policy)) or ""
        if drafter.endswith("model") and policy in ("verified", "retrieval", "quantised"):
            assert f"--kv_policy {policy}: a standalone draft is never verified itself" in message
        elif is_head(drafter) and policy not in ("full", "streaming_llm"):
            assert f"--kv_policy {policy}: a draft head keeps its whole cache" in message
        else:
            assert message == ""
