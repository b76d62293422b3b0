"""The verification rule token by token: which drafts are accepted, what is sampled after a
rejection, and the cases in which rounding matters."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from magicdec.runner.request import SamplingParams
from magicdec.runner.sampling.metadata import Filters
from magicdec.runner.sampling.model_tokens import Proposal, join
from magicdec.runner.sampling.randomness import Purpose, uniforms
from magicdec.runner.sampling.sampling import probabilities, sample
from magicdec.runner.sampling.verification import acceptance_of, count_accepted, residual, verify


def exact(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_residual_distribution_after_a_rejection() -> None:
    p = exact([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]])
    q = exact([[[0.2, 0.7, 0.1]]])
    drafts = torch.tensor([[1]])
    zero = torch.tensor([0])
    one = torch.tensor([1])
    torch.testing.assert_close(residual(drafts, q, p, zero), exact([[0.75, 0.0, 0.25]]))
    torch.testing.assert_close(residual(drafts, None, p, zero), exact([[5 / 7, 0.0, 2 / 7]]))
    assert torch.equal(residual(drafts, q, p, one), p[:, 1]), "the bonus is the target's"


def test_the_acceptance_rule_at_each_draft() -> None:
    """p/q of the two drafts is 3/7 and 6. If both are accepted, the bonus token follows."""
    p = exact([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.0, 0.0, 1.0]]])
    q = exact([[[0.2, 0.7, 0.1], [0.8, 0.1, 0.1]]])
    drafts = torch.tensor([[1, 1]])
    fresh = exact([[0.7, 0.0, 0.0]])
    for u, kept, next_id in ((0.428, 2, 2), (0.429, 0, 0)):
        accepted, ids = verify(drafts, q, p, exact([[u, 0.999]]), fresh)
        assert (accepted.tolist(), ids.tolist()) == ([kept], [next_id])
    accepted, ids = verify(drafts, None, p, exact([[0.1, 0.7]]), fresh)
    assert (accepted.tolist(), ids.tolist()) == ([1], [0])


def test_a_residual_that_rounds_to_zero_is_the_targets_distribution() -> None:
    """p and q are equal up to rounding, but a draft is rejected. The next token is then sampled
    from the target's own distribution."""
    below_one = math.nextafter(1.0, 0.0)
    p = exact([[[0.0, below_one, 0.0], [1.0, 0.0, 0.0]]])
    q = exact([[[0.0, 1.0, 0.0]]])
    drafts = torch.tensor([[1]])
    u = exact([[below_one]])
    for draft_probs in (q, None):
        accepted, ids = verify(drafts, draft_probs, p, u, torch.zeros(1, 2).double())
        assert (accepted.tolist(), ids.tolist()) == ([0], [1])


def test_a_draft_of_probability_zero_is_never_accepted() -> None:
    p = exact([[[0.0, 1.0], [0.5, 0.5]]])
    drafts = torch.tensor([[0]])
    zeros = torch.zeros(1, 2).double()
    for q in (None, exact([[[1.0, 0.0]]]), exact([[[0.0, 1.0]]])):
        accepted, ids = verify(drafts, q, p, zeros[:, :1], zeros)
        assert (accepted.tolist(), ids.tolist()) == ([0], [1])


def test_greedy_rows_follow_the_greedy_rule_for_any_random_number() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 5, 4, generator=generator)
    drafts = torch.randint(0, 4, (500, 4), generator=generator)
    drafts[::2, :3] = logits[::2, :3].argmax(-1)
    target = probabilities(logits, Filters.of([SamplingParams(9)] * 500, logits.device))
    drafted = torch.rand(500, 4, 4, generator=generator).double().softmax(-1)
    expected = count_accepted(drafts, logits.argmax(-1))
    assert set(expected.tolist()) == {0, 1, 2, 3, 4}
    for u in (0.0, math.nextafter(1.0, 0.0)):
        for q in (None, drafted):
            same = torch.full((500, 5), u, dtype=torch.float64)
            accepted, ids = verify(drafts, q, target, same[:, :4], same)
            assert torch.equal(accepted, expected)
            assert torch.equal(ids, logits.argmax(-1)[torch.arange(500), expected])


def test_without_drafts_the_target_is_sampled() -> None:
    p = exact([[[0.25, 0.75]]])
    none = torch.empty(1, 0)
    accepted, ids = verify(none.long(), None, p, none.double(), exact([[0.3]]))
    assert (accepted.tolist(), ids.tolist()) == ([0], [1])


@pytest.mark.parametrize("is_drawn", [True, False])
def test_rows_with_fewer_drafts_are_judged_as_by_themselves(is_drawn: bool) -> None:
    """The padding after a row's drafts is never accepted, also where the target is sure of it."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(200, 5, 4, generator=generator).double().mul(3).softmax(-1)
    q = torch.randn(200, 4, 4, generator=generator).double().softmax(-1) if is_drawn else None
    drafts = p[:, :4].argmax(-1)
    accept = torch.rand(200, 4, generator=generator).double()
    resample = torch.rand(200, 5, generator=generator).double()
    counts = torch.arange(200) % 5
    accepted, ids = verify(drafts, q, p, accept, resample, counts)
    greedy_counts = count_accepted(drafts, p.argmax(-1), counts)
    assert torch.equal(greedy_counts, counts), "all drafts are the likeliest tokens"
    for row, n in enumerate(counts.tolist()):
        alone = slice(row, row + 1)
        drawn = None if q is None or n == 0 else q[alone, :n]
        own = verify(
            drafts[alone, :n], drawn, p[alone, : n + 1], accept[alone, :n], resample[alone]
        )
        assert (accepted[alone].tolist(), ids[alone].tolist()) == (own[0].tolist(), own[1].tolist())
    assert set((counts - accepted).tolist()) >= {0, 1}


def test_chains_of_several_batches_are_one_proposal() -> None:
    """Those that were not drawn at random are certain beside those that were; a batch may have no
    drafts at all."""
    drawn = torch.rand(1, 1, 3).double().softmax(-1)
    greedy = Proposal(torch.tensor([[1, 2], [2, 0]]))
    sampled = Proposal(torch.tensor([[0]]), drawn)
    joined = join([greedy, None, sampled], [[2, 1], [0], [1]])
    assert joined is not None and joined.counts == [2, 1, 0, 1]
    assert joined.ids.tolist() == [[1, 2], [2, 0], [0, 0], [0, 0]]
    assert joined.probabilities is not None
    assert torch.equal(joined.probabilities[:2], torch.eye(3).double()[greedy.ids])
    assert torch.equal(joined.probabilities[3, :1], drawn[0])
    alone = join([greedy, None], [[2, 1], [0]])
    assert alone is not None and alone.probabilities is None
    assert join([None, None], [[0], [0, 0]]) is None


def test_an_impossible_token_is_never_the_sample_of_uneven_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parallel sums, as on a GPU, round each partial sum on its own. They may rise or fall where
    nothing was added."""
    monkeypatch.setattr(Tensor, "cumsum", lambda x, dim: exact([[0.3, 0.31, 0.30, 0.9, 0.91]]))
    probs = exact([[0.3, 0.0, 0.0, 0.6, 0.0]])
    for u, token in ((0.32, 0), (0.335, 3), (0.34, 3), (0.98, 3), (0.995, 3)):
        assert sample(probs, exact([u])).tolist() == [token], u


@pytest.mark.cuda
def test_a_gpu_accepts_the_same_drafts() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 4, 997, generator=generator) * 4
    drafts = logits[:, :3].argmax(-1)
    seeds = torch.arange(64)
    positions = torch.arange(4).expand(64, -1)
    params = [SamplingParams(9, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)] * 64
    verdicts = []
    for device in ("cpu", "cuda"):
        accept, resample = (
            uniforms(seeds.to(device), positions.to(device), purpose)
            for purpose in (Purpose.ACCEPT, Purpose.RESAMPLE)
        )
        probs = probabilities(logits.to(device), Filters.of(params, torch.device(device)))
        verdicts.append(verify(drafts.to(device), None, probs, accept[:, :3], resample))
    for ours, theirs in zip(*verdicts, strict=True):
        assert torch.equal(ours, theirs.cpu())


BELOW_ONE = 1 - 2.0**-53


SIZE = 3  # of a vocabulary whose chains can all be written down
DEPTH = 3


def trees(seed: int) -> list[dict[tuple[int, ...], list[float]]]:
    """The distributions p and q after each chain of drafts."""
    rng = torch.Generator().manual_seed(seed)
    chains = [chain for k in range(DEPTH + 1) for chain in product(range(SIZE), repeat=k)]
    found = []
    for _ in "pq":
        weights = torch.rand(len(chains), SIZE, generator=rng, dtype=torch.float64)
        weights[weights < 0.2] = 0.0
        weights[:, 0] += 0.05
        rows = (weights / weights.sum(dim=1, keepdim=True)).tolist()
        found.append(dict(zip(chains, rows, strict=True)))
    return found


def along(tree: dict[tuple[int, ...], list[float]], chain: tuple[int, ...]) -> Tensor:
    return exact([[tree[chain[:k]] for k in range(DEPTH + 1)]])


@pytest.mark.parametrize("seed", range(3))
def test_the_probability_of_acceptance_is_unbiased_over_drafts_from_q(seed: int) -> None:
    """Summed over all chains that may be drafted, each as often as it is, it is the probability
    that so many drafts are accepted: of all chains of so many tokens, the sum of the product of
    min(p, q). The first is that for every chain."""
    p, q = trees(seed)
    accepted = [
        sum(
            math.prod(min(p[c[:k]][x], q[c[:k]][x]) for k, x in enumerate(c))
            for c in product(range(SIZE), repeat=depth)
        )
        for depth in range(1, DEPTH + 1)
    ]
    mean = torch.zeros(DEPTH, dtype=torch.float64)
    for chain in product(range(SIZE), repeat=DEPTH):
        weight = math.prod(q[chain[:k]][x] for k, x in enumerate(chain))
        draft_ids = torch.tensor([chain])
        found = acceptance_of(draft_ids, along(q, chain)[:, :DEPTH], along(p, chain))[0]
        assert float(found[0]) == pytest.approx(accepted[0], abs=1e-12)
        mean += weight * found
    assert mean.tolist() == pytest.approx(accepted, abs=1e-12)
    assert 0.05 < accepted[-1] < accepted[0] < 0.95


def test_the_probability_of_acceptance_by_its_definition() -> None:
    """The first row is drawn from q, of the second two drafts are real. Without q they were looked
    up, and are accepted with p."""
    p, q = trees(4)
    chains = [(1, 0, 2), (0, 2, 1)]
    target = torch.cat([along(p, chain) for chain in chains])
    drawn = torch.cat([along(q, chain) for chain in chains])[:, :DEPTH]
    ids = torch.tensor(chains)
    counts = torch.tensor([3, 2])
    expected = []
    looked_up = []
    for chain, count in zip(chains, counts.tolist(), strict=True):
        before = 1.0
        row = list[float]()
        lookups = list[float]()
        for k, x in enumerate(chain):
            p_k = p[chain[:k]]
            q_k = q[chain[:k]]
            overlap = sum(map(min, p_k, q_k))
            row.append(before * overlap if k < count else 0.0)
            before *= min(1.0, p_k[x] / q_k[x]) if q_k[x] else float(p_k[x] > 0)
            lookups.append((lookups or [1.0])[-1] * p_k[x] if k < count else 0.0)
        expected.append(row)
        looked_up.append(lookups)
    torch.testing.assert_close(acceptance_of(ids, drawn, target, counts), exact(expected))
    torch.testing.assert_close(acceptance_of(ids, None, target, counts), exact(looked_up))
    one_hot = torch.nn.functional.one_hot(ids, SIZE).double()
    torch.testing.assert_close(acceptance_of(ids, one_hot, target, counts), exact(looked_up))
    equal = acceptance_of(ids, target[:, :DEPTH], target)
    assert equal.max() <= 1
    torch.testing.assert_close(equal, torch.ones(2, DEPTH).double())


def test_drafts_are_accepted_as_often_as_their_probabilities_say() -> None:
    """By many verifications of drafts from q, within 4 standard errors at each depth."""
    p, q = trees(5)
    rows = 20_000
    seeds = torch.arange(rows)
    places = torch.arange(DEPTH).expand(rows, -1)
    u = uniforms(seeds, places, Purpose.DRAFT)
    chains = torch.zeros(rows, 0, dtype=torch.int64)
    target = []
    drawn = []
    for k in range(DEPTH + 1):
        known = [tuple(chain) for chain in chains.tolist()]
        target.append(exact([p[chain] for chain in known]))
        drawn.append(exact([q[chain] for chain in known]))
        if k < DEPTH:
            chains = torch.cat([chains, sample(drawn[-1], u[:, k]).unsqueeze(1)], dim=1)
    target_probs = torch.stack(target, dim=1)
    draft_probs = torch.stack(drawn, dim=1)[:, :DEPTH]
    accept = uniforms(seeds, places, Purpose.ACCEPT)
    resample = torch.zeros(rows, DEPTH + 1).double()
    accepted, _ = verify(chains, draft_probs, target_probs, accept, resample)
    is_accepted = (accepted.unsqueeze(1) > torch.arange(DEPTH)).double()
    chances = acceptance_of(chains, draft_probs, target_probs)
    off = is_accepted - chances
    assert (off.mean(dim=0).abs() < 4 * off.std(dim=0) / rows**0.5).all(), off.mean(dim=0)
    assert (chances.var(dim=0) < 0.5 * is_accepted.var(dim=0)).all(), "it varies less"
