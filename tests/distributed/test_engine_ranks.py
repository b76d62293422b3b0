"""The engine over 1, 2 and 3 ranks emits the tokens of one: every drafter under every KV policy,
ragged batches, standalone drafts on subgroups, requests that join and leave, steps that are
replayed; and all ranks come to the same verdict."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, Launch, refusal, save_checkpoint, served_pairs, tiny_transformer
from matrix import NUM_NEW, Result, make_cases, make_mixed
from several_ranks import answer_of, disturbed

from magicdec.config.sections import KVSection
from magicdec.names import DRAFTERS, KV_POLICIES

LOSSY = pytest.param("lossy", "diverged", marks=pytest.mark.wide)


@pytest.mark.parametrize(
    ("kv_heads", "ranks"),
    [
        pytest.param((2,), ((1, "gloo"), (3, "shared_memory")), id="kv_heads0"),
        pytest.param(
            (3, 6), ((1, "gloo"), (2, "shared_memory"), (3, "shared_memory")), id="kv_heads1",
            marks=pytest.mark.wide,
        ),
    ],
)  # fmt: skip
def test_ragged_batches_over_ranks(
    kv_heads: tuple[int, ...], ranks: tuple[tuple[int, str], ...], launch: Launch, tmp_path: Path
) -> None:
    """MHA and GQA, greedy or sampled, speculated or not: the same tokens, and the same drafts are
    accepted, also where ranks share a KV head. Each launch decodes with all the models, and drafts
    with the first, a little disturbed, so that some of it is accepted. The test of every
    drafter has two ranks in `make test`, too."""
    models = [tiny_transformer(replace(TINY, num_kv_heads=heads)) for heads in kv_heads]
    paths = [save_checkpoint(model, tmp_path / str(i)) for i, model in enumerate(models)]
    draft = save_checkpoint(disturbed(models[0]), tmp_path / "draft")
    outputs = [
        answer_of(launch, "distributed/ragged.py", how, draft, *paths, num_ranks=num_ranks)
        for num_ranks, how in ranks
    ]
    assert all(found == outputs[0] for found in outputs) and len(outputs[0]) == len(kv_heads) + 1
    for of_model in outputs[0][:-1]:
        assert [len(tokens) for tokens in of_model[0]] == [24, 9, 24, 19]


def test_ranks_serve_the_same_requests_alike(launch: Launch, tmp_path: Path) -> None:
    """Requests join and leave a running batch; the first rank decides."""
    path = save_checkpoint(tiny_transformer(), tmp_path / "model")
    outputs = []
    for num_ranks in (1, 2):
        outputs.append(answer_of(launch, "distributed/in_flight.py", path, num_ranks=num_ranks))
    expected = outputs[0][0]
    assert [len(tokens) for tokens in expected] == [20, 9, 20, 1, 14]
    assert all(tokens == expected for of_ranks in outputs for tokens in of_ranks)


@pytest.mark.parametrize("sampling", ["greedy", pytest.param("sampled", marks=pytest.mark.wide)])
def test_replayed_steps_of_two_ranks_emit_the_same_tokens(
    sampling: str, launch: Launch, tmp_path: Path
) -> None:
    """The sums over ranks are part of what is recorded."""
    paths = [
        save_checkpoint(tiny_transformer(seed=seed), tmp_path / str(seed)) for seed in range(2)
    ]
    results = answer_of(launch, "distributed/replayed.py", *paths, sampling, num_ranks=2)
    assert len(results) == 1 + len(served_pairs())
    baseline = results[0][2]
    assert [len(tokens) for tokens in baseline] == [10, 8, 4]
    for drafter, policy, eager, replayed, times in results:
        assert times > 3, (drafter, policy)
        if sampling == "greedy":
            assert eager == replayed == baseline, (drafter, policy)
        elif (drafter, policy) == ("model", "snapkv"):  # see oracle/test_replay.py
            assert eager[2] == replayed[2] == baseline[2], "the greedy row"
        else:
            assert replayed == eager, (drafter, policy)


@pytest.mark.parametrize(("rule", "status"), [("exact", "ok_with_ties"), LOSSY])
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
    return case["drafter"], case["gamma"], case["tree"], case["pa"], tuple(case["kv"].values())


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
        is_lookup = r.case["drafter"] == "ngram"  # nothing is repeated
        assert r.num_drafted > 0 and (is_lookup or r.num_accepted > 0), ("of no use", r.case)
        reads_all = r.case["drafter"] == "self" and r.case["kv"]["policy"] == "full"
        assert (r.num_accepted == r.num_drafted) == reads_all, r.case
        ends_early = is_lookup or r.case["pa"] is not None
        assert (len(r.depths) > 1) == ends_early, (r.case, r.depths)
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
        mixed = {(drafter, kv.policy) for drafter, kv, _ in make_mixed((0,))}
        assert pairs == served_pairs() | mixed and {d for d, _ in pairs} == set(DRAFTERS)
    assert {c.drafter for c in cases if c.tree} == {"self", "model"}
    groups = {(0,), (1,), (1, 0)}
    assert {c.draft_ranks for c in cases if c.drafter == "model"} == groups
    drafts = [c for c in [*cases, *make_cases(2, other_groups=True)] if c.drafter == "model"]
    policies = {policy for drafter, policy in served_pairs() if drafter == "model"}
    assert {(c.kv.policy, c.draft_ranks) for c in drafts} == set(product(policies, groups))


def test_no_more_is_refused_than_a_draft_that_nothing_verifies() -> None:
    for drafter, policy in product(DRAFTERS, KV_POLICIES):
        said = refusal(drafter, KVSection(policy)) or ""
        if drafter.endswith("model") and policy in ("verified", "retrieval"):
            assert f"--kv_policy {policy}: a standalone draft is never verified itself" in said
        else:
            assert said == ""
