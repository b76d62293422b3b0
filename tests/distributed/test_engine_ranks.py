"""The engine over 1, 2 and 3 ranks emits the tokens of one: ragged batches, standalone drafts on
subgroups, requests that join and leave, steps that are replayed; and all ranks come to the same
verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, Launch, save_checkpoint, served_pairs, tiny_transformer
from several_ranks import answer_of, disturbed

LOSSY = pytest.param("lossy", "diverged", marks=pytest.mark.wide)


@pytest.mark.parametrize(
    ("kv_heads", "ranks"),
    [
        pytest.param((2,), ((1, "gloo"), (3, "shared_memory")), id="kv_heads0"),
        pytest.param(
            (3, 6), ((1, "gloo"), (2, "gloo"), (3, "shared_memory")), id="kv_heads1",
            marks=pytest.mark.wide,
        ),
    ],
)  # fmt: skip
def test_ragged_batches_over_ranks(
    kv_heads: tuple[int, ...], ranks: tuple[tuple[int, str], ...], launch: Launch, tmp_path: Path
) -> None:
    """MHA and GQA, greedy or sampled, speculated or not: the same tokens, and the same drafts are
    accepted, also where ranks share a KV head. Each launch decodes with all the models, and drafts
    with the first, a little disturbed, so that some of it is accepted. test_matrix.py has two ranks
    in `make test`, too."""
    models = [tiny_transformer(replace(TINY, num_kv_heads=heads)) for heads in kv_heads]
    paths = [save_checkpoint(model, tmp_path / str(i)) for i, model in enumerate(models)]
    draft = save_checkpoint(disturbed(models[0]), tmp_path / "draft")
    outputs = [
        answer_of(launch, "distributed/ragged.py", how, draft, *paths, num_ranks=num_ranks)
        for num_ranks, how in ranks
    ]
    assert all(found == outputs[0] for found in outputs) and len(outputs[0]) == len(kv_heads) + 1
    for of_model in outputs[0][:-1]:
        assert [len(tokens) for tokens in of_model[0]] == [40, 9, 40, 31]


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
    """tests/oracle/test_verdict.py has the same verdicts of one rank."""
    done = launch("distributed/verdict.py", tmp_path, rule, num_ranks=2)
    assert done.returncode == 0, done.stderr
    ours, theirs = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert ours == theirs and ours[0] == status
    assert (ours[1]["num_excused"] > 0) == (ours[1]["num_diverged"] == 0) == (rule == "exact")
