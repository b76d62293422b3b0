"""Speculation with trees of drafts is lossless, as with chains: exactly the baseline's greedy
tokens in float32. `test_sampled_speculation.py` has the distribution of sampled tokens, and
`tests/distributed/matrix.py` tests trees on several ranks."""

from functools import cache

import pytest
import torch
from conftest import (
    TINY,
    decode_both,
    make_draft,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)

from magicdec.attention.sdpa import SDPABackend
from magicdec.config.sections import KVSection, SamplingSection
from magicdec.runner.request import Request
from magicdec.speculation import draft_tree
from magicdec.speculation.draft_tree import draw_children, likeliest
from magicdec.speculation.drafter import DraftModel

Decoded = tuple[list[list[int]], list[list[int]], list[list[int]]]  # as `decode_both` returns

RAGGED, NUM_NEW = [5, 70, 1, 33], [45, 45, 9, 45]
TREE, MOST = "3,2,1", 3 + 6 + 6
KV_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 17, 4),
    KVSection("snapkv", 20, window_size=3, reselect_every=7),
    KVSection("verified", 40, 4),
    KVSection("retrieval", 40, 4),
]
PAIRS = [("self", kv) for kv in KV_SECTIONS] + [("model", kv) for kv in KV_SECTIONS[:3]]
by_pair = pytest.mark.parametrize(
    ("drafter", "kv"), PAIRS, ids=[f"{drafter}-{kv.policy}" for drafter, kv in PAIRS]
)


def ragged(
    section: SamplingSection = SamplingSection(), eos: tuple[int, ...] = ()
) -> list[Request]:
    return make_requests(random_prompts(RAGGED, TINY.vocab_size), NUM_NEW, eos, section)


def alternating(even: SamplingSection, odd: SamplingSection) -> list[Request]:
    """The same prompts, sampled in turns by one section and by the other."""
    pairs = zip(ragged(even), ragged(odd), strict=True)
    return [pair[index % 2] for index, pair in enumerate(pairs)]


def disturbed(kv: KVSection, noise: float) -> DraftModel:
    """A standalone draft that agrees with the target now and then: its weights with some noise."""
    model, other = tiny_transformer(), tiny_transformer(seed=1).state_dict()
    model.load_state_dict({n: w + noise * other[n] for n, w in model.state_dict().items()})
    size = len(RAGGED), 70 + 45 + MOST
    return make_draft(model, kv, *size, SDPABackend(), max_drafts=MOST)


def decoded(
    drafter: str, kv: KVSection, tree: str | None, requests: list[Request], has_baseline=True
) -> Decoded:
    """As `decode_both`; the depth of every tree is 3."""
    runner = make_runner(tiny_transformer(), len(RAGGED), 70 + 45 + MOST, SDPABackend())
    draft = disturbed(kv, noise=0.06) if drafter == "model" else None
    names = ("autoregressive", "speculative") if has_baseline else ("speculative",)
    given = {"drafter": drafter, "draft": draft, "names": names, "tree": tree}
    return decode_both(runner, requests, kv, 3, **given)


@cache
def greedy(drafter: str, kv: KVSection, tree: str | None) -> Decoded:
    """The ragged batch without penalties, which several tests compare with."""
    return decoded(drafter, kv, tree, ragged())


@by_pair
def test_trees_emit_the_baseline_tokens_and_accept_more_than_a_chain(
    drafter: str, kv: KVSection
) -> None:
    accepted = {}
    for tree in (None, TREE):
        baseline, ours, steps = greedy(drafter, kv, tree)
        assert ours == baseline and list(map(len, ours)) == NUM_NEW
        assert max(map(max, steps)) <= 3
        accepted[tree] = sum(map(sum, steps)) / sum(map(len, steps))
    if drafter == "self" and kv.policy == "full":
        assert accepted[None] == accepted[TREE] == 3
    else:
        assert accepted[None] + 0.05 < accepted[TREE] < 3


@pytest.mark.narrow("values")
@by_pair
def test_whichever_branch_is_accepted_the_next_draft_reads_the_same(
    drafter: str, kv: KVSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The children of each node in the reverse order are the same tree, in other places of the
    caches."""
    _, *expected = greedy(drafter, kv, TREE)

    def reverse(*args: object) -> torch.Tensor:
        return likeliest(*args).flip(2)

    monkeypatch.setattr(draft_tree, "likeliest", reverse)
    assert decoded(drafter, kv, TREE, ragged(), has_baseline=False)[1:] == tuple(expected)


@pytest.mark.narrow("values")
@by_pair
def test_a_tree_without_branches_is_the_chain(drafter: str, kv: KVSection) -> None:
    """The same drafts are proposed and accepted, in greedy rows and in sampled ones, with
    penalties."""
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.1}
    sections = [SamplingSection(temperature, **penalties) for temperature in (0.0, 1.3)]
    chain, tree = (
        decoded(drafter, kv, t, alternating(*sections), has_baseline=False)[1:]
        for t in (None, "1,1,1")
    )
    assert tree == chain and any(map(any, tree[1]))


@pytest.mark.parametrize("drafter", ["self", "model"])
def test_greedy_rows_beside_sampled_ones_and_with_penalties_are_the_baselines(drafter: str) -> None:
    kv = KVSection("streaming_llm", 17, 4)
    plain = SamplingSection(repetition_penalty=1.3, presence_penalty=0.2)
    baseline, ours, _ = decoded(drafter, kv, TREE, ragged(plain))
    assert ours == baseline
    sampled = SamplingSection(1.0, top_p=0.9)
    _, found, _ = decoded(drafter, kv, TREE, alternating(sampled, plain), has_baseline=False)
    assert found[1::2] == baseline[1::2]
    _, alone, _ = decoded(drafter, kv, TREE, ragged(sampled), has_baseline=False)
    assert found[::2] == alone[::2], "a row samples the same tokens in any batch"


def test_rows_end_at_an_end_token_within_a_path() -> None:
    kv = KVSection("streaming_llm", 34, 4)
    free, _, _ = greedy("self", kv, TREE)
    end = next(t for i, t in enumerate(free[0]) if i > 10 and t not in free[0][:i])
    baseline, ours, _ = decoded("self", kv, TREE, ragged(eos=(end,)))
    assert ours == baseline and ours[0] == free[0][: free[0].index(end) + 1]
    assert len(ours[0]) < 45


def test_children_are_drawn_without_replacement_and_then_by_score() -> None:
    probs = torch.tensor([[[0.5, 0.0, 0.5, 0.0]]], dtype=torch.float64)
    scores = torch.tensor([[[3.0, 1.0, 4.0, 2.0]]])
    for first, second in ((0, 2), (2, 0)):
        u = torch.full((1, 1, 4), 0.1 if first == 0 else 0.9, dtype=torch.float64)
        assert draw_children(probs, scores, u).flatten().tolist() == [first, second, 3, 1]
