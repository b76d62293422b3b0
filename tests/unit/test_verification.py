"""The verification rule token by token: which drafts are accepted, what is sampled after a
rejection, and the cases in which rounding matters. And trees of drafts: greedy trees against a
search by hand, and sampled trees against the target's distribution, by a sum over everything that
can happen."""

import math
from collections.abc import Callable
from itertools import pairwise, permutations, product

import pytest
import torch
from test_lossless_sampling import chain
from torch import Tensor

from magicdec.config.tree_shape import TreeShape, parse_expansion
from magicdec.runner.request import SamplingParams
from magicdec.runner.sampling import verification as tree_verification
from magicdec.runner.sampling.metadata import Filters
from magicdec.runner.sampling.model_tokens import Proposal, join
from magicdec.runner.sampling.randomness import Purpose, uniforms
from magicdec.runner.sampling.sampling import probabilities, sample
from magicdec.runner.sampling.verification import (
    Judgement,
    child_table,
    count_accepted,
    draw_again,
    longest_path,
    residual,
    verify,
    verify_tree,
)


def exact(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_residual_distribution_after_a_rejection() -> None:
    p = exact([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]])
    q = exact([[[0.2, 0.7, 0.1]]])
    drafts, zero, one = torch.tensor([[1]]), torch.tensor([0]), torch.tensor([1])
    torch.testing.assert_close(residual(drafts, q, p, zero), exact([[0.75, 0.0, 0.25]]))
    torch.testing.assert_close(residual(drafts, None, p, zero), exact([[5 / 7, 0.0, 2 / 7]]))
    assert torch.equal(residual(drafts, q, p, one), p[:, 1]), "the bonus is the target's"


def test_the_acceptance_rule_at_each_draft() -> None:
    """p/q of the two drafts is 3/7 and 6. If both are accepted, the bonus token follows."""
    p = exact([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.0, 0.0, 1.0]]])
    q = exact([[[0.2, 0.7, 0.1], [0.8, 0.1, 0.1]]])
    drafts, fresh = torch.tensor([[1, 1]]), exact([[0.7, 0.0, 0.0]])
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
    drafts, u = torch.tensor([[1]]), exact([[below_one]])
    for draft_probs in (q, None):
        accepted, ids = verify(drafts, draft_probs, p, u, torch.zeros(1, 2).double())
        assert (accepted.tolist(), ids.tolist()) == ([0], [1])


def test_a_draft_of_probability_zero_is_never_accepted() -> None:
    p = exact([[[0.0, 1.0], [0.5, 0.5]]])
    drafts, zeros = torch.tensor([[0]]), torch.zeros(1, 2).double()
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
    of_greedy = count_accepted(drafts, p.argmax(-1), counts)
    assert torch.equal(of_greedy, counts), "all drafts are the likeliest tokens"
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
    greedy, sampled = Proposal(torch.tensor([[1, 2], [2, 0]])), Proposal(torch.tensor([[0]]), drawn)
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
UNEVEN = TreeShape((0, 0, 0, 1, 1, 2, 4))  # nodes 3, 5, 6 and 7 have no children


def test_the_nodes_of_an_expansion_are_numbered_by_level() -> None:
    shape = TreeShape.of((2, 1, 2))
    assert shape.parents == (0, 0, 1, 2, 3, 3, 4, 4)
    assert shape.depths == (0, 1, 1, 2, 2, 3, 3, 3, 3) and shape.depth == 3
    assert list(map(list, shape.levels)) == [[0], [1, 2], [3, 4], [5, 6, 7, 8]]
    assert shape.num_nodes == 8 and shape.num_expanded == 5 and shape.most_children == 2
    assert shape.children[0] == (1, 2) and shape.children[3] == (5, 6)
    assert shape.ranks == (0, 1, 0, 0, 0, 1, 0, 1)
    assert shape.ancestors[6] == {0, 1, 3, 6}
    assert TreeShape.of((3, 2, 1, 1)).num_nodes == 3 + 6 + 6 + 6
    assert UNEVEN.depths == (0, 1, 1, 1, 2, 2, 2, 3) and UNEVEN.num_expanded == 7


def test_an_expansion_is_read_or_refused() -> None:
    assert parse_expansion("3,2,1") == (3, 2, 1)
    for text in ("", "3,", "3,0", "a", "-1"):
        with pytest.raises(ValueError, match=f"--tree {text} is not known; give the children"):
            parse_expansion(text)


def longest_by_hand(shape: TreeShape, drafts: list[int], target: list[int]) -> list[int]:
    """The tokens that a row emits."""
    best: list[int] = []
    for node in range(shape.num_nodes + 1):
        path = sorted(shape.ancestors[node])
        tokens = [drafts[n - 1] for n in path[1:]]
        if tokens == [target[n] for n in path[:-1]] and len(tokens) >= len(best):
            best = [*tokens, target[node]]
    return best


@pytest.mark.parametrize("shape", [TreeShape.of((2, 2)), TreeShape.of((1, 1, 1)), UNEVEN], ids=str)
def test_the_longest_path_of_the_targets_choices_is_accepted(shape: TreeShape) -> None:
    """Of few ids, so that siblings may be equal, as where ids are clamped to a vocabulary."""
    drafts = torch.randint(0, 3, (300, shape.num_nodes))
    target = torch.randint(0, 3, (300, shape.num_nodes + 1))
    verdict = longest_path(shape, drafts, target)
    assert len(set(verdict.accepted.tolist())) == shape.depth + 1
    for row in range(300):
        count = int(verdict.accepted[row])
        expected = longest_by_hand(shape, drafts[row].tolist(), target[row].tolist())
        assert verdict.ids[row, : count + 1].tolist() == expected
        path = verdict.path[row].tolist()
        assert path[0] == 0 and path[count:] == [path[count]] * (shape.depth + 1 - count)
        steps = pairwise(path[: count + 1])
        assert all(shape.parents[child - 1] == parent for parent, child in steps)


def next_of(judgement: Judgement) -> Tensor:
    """The token that follows the accepted drafts of each row."""
    return judgement.ids.gather(1, judgement.accepted.unsqueeze(1)).squeeze(1)


def test_a_tree_without_branches_is_judged_as_a_chain() -> None:
    shape, rows, vocab = TreeShape.of((1, 1, 1)), 200, 5
    drafts = torch.randint(0, vocab, (rows, 3))
    target = torch.randint(0, vocab, (rows, 4))
    greedy = longest_path(shape, drafts, target)
    assert torch.equal(greedy.accepted, count_accepted(drafts, target))
    q, p = (torch.rand(rows, n, vocab).double().softmax(-1) for n in (3, 4))
    seeds, positions = torch.arange(rows), torch.arange(rows).unsqueeze(1) % 7 + torch.arange(4)
    accept = uniforms(seeds, positions[:, :3], Purpose.ACCEPT, branches=1)
    resample = uniforms(seeds, positions, Purpose.RESAMPLE)
    accepted, following = verify(drafts, q, p, accept[:, :, 0], resample)
    verdict = verify_tree(shape, drafts, q, p, accept, resample)
    assert torch.equal(verdict.accepted, accepted) and torch.equal(next_of(verdict), following)
    assert torch.equal(accept[:, :, 0], uniforms(seeds, positions[:, :3], Purpose.ACCEPT))


class Enumeration:
    """Everything that can happen when a tree is drafted and judged once after token 0, as a row for
    each tree that can be drafted. Target and draft choose by the last token alone: p and q [V, V].
    Without q, children are chosen without chance: the smallest ids."""

    def __init__(self, shape: TreeShape, p: Tensor, q: Tensor | None) -> None:
        self.shape, self.p, self.q = shape, p, torch.zeros_like(p) if q is None else q
        trees: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        for node in range(shape.num_nodes + 1):
            trees = [
                ((*drafts, *children), mass * chance)
                for drafts, mass in trees
                for children, chance in self.families((0, *drafts)[node], len(shape.children[node]))
            ]
        self.drafts = torch.tensor([drafts for drafts, _ in trees])
        self.mass = torch.tensor([mass for _, mass in trees], dtype=torch.float64)
        texts = torch.nn.functional.pad(self.drafts, (1, 0))
        self.target_probs = p[texts]
        self.draft_probs = None if q is None else q[texts[:, : shape.num_expanded]]
        self.accept = torch.zeros(len(trees), shape.depth, shape.most_children).double()
        self.resample = torch.zeros(len(trees), shape.depth + 1).double()
        self.found = torch.zeros((len(p),) * (shape.depth + 1)).double()

    def families(self, last: int, count: int) -> list[tuple[tuple[int, ...], float]]:
        """The children that a node with token `last` may have, and how likely each family is: drawn
        one after the other without replacement. If no likely token is left, the smallest one
        follows."""
        q, found = self.q[last].tolist(), []
        for children in permutations(range(len(q)), count):
            chance, left = 1.0, list(range(len(q)))
            for token in children:
                total = sum(q[t] for t in left)
                chance *= q[token] / total if total else float(token == left[0])
                left.remove(token)
            found += [(children, chance)] if chance else []
        return found

    def judged(self) -> Judgement:
        u = self.accept, self.resample
        return verify_tree(self.shape, self.drafts, self.draft_probs, self.target_probs, *u)

    def share(self, numbers: Tensor, place: Tensor, holds: Callable[[Judgement], Tensor]) -> Tensor:
        """How often `holds` is true if the random number at `place` [rows] of `numbers` [rows, N]
        is uniform and all others are what they are; it is true up to a number."""
        low, high = torch.zeros(len(place)).double(), torch.ones(len(place)).double()
        for _ in range(40):
            middle = (low + high) / 2
            numbers.scatter_(1, place.unsqueeze(1), middle.unsqueeze(1))
            is_below = holds(self.judged())
            low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
        return high

    def explore(self, place: int, mass: Tensor) -> None:
        """Add all outcomes to `found`, given the decisions before `place`, which have `mass`."""
        numbers = self.accept.flatten(1)
        if place == numbers.shape[1]:
            self.add(mass)
            return
        numbers[:, place:] = BELOW_ONE
        depth, rank = divmod(place, self.shape.most_children)
        table = child_table(self.shape, torch.device("cpu"))

        def moves(verdict: Judgement) -> Tensor:
            child = table[verdict.path[:, depth], rank]
            return (verdict.accepted > depth) & (verdict.path[:, depth + 1] == child)

        share = self.share(numbers, torch.full((len(mass),), place), moves)
        for value, part in ((0.0, share), (BELOW_ONE, 1 - share)):
            numbers[:, place] = value
            if (mass * part).sum() > 1e-12:
                self.explore(place + 1, mass * part)

    def add(self, mass: Tensor) -> None:
        """Add the texts with the path that the decisions have led to, and any next token. What a
        row does not emit in its step is sampled from the target."""
        verdict, before = self.judged(), torch.zeros_like(mass)
        for token in range(len(self.p)):
            share = self.share(
                self.resample,
                verdict.accepted,
                lambda verdict, token=token: next_of(verdict) <= token,
            )
            for row in (mass * (share - before)).nonzero().flatten().tolist():
                text = (*verdict.ids[row, : verdict.accepted[row]].tolist(), token)
                rest = joint(self.p, token, self.found.ndim - len(text))
                self.found[text] += mass[row] * (share - before)[row] * rest
            before = share


def joint(p: Tensor, last: int, count: int) -> Tensor:
    """The probabilities of the next `count` tokens after `last`: [V, ..., V]."""
    found = torch.ones((), dtype=torch.float64)
    for place in range(count):
        found = found.unsqueeze(-1) * (p if place else p[last])
    return found


def distributions(vocab: int, kind: str) -> tuple[Tensor, Tensor | None]:
    """Target and draft [V, V]."""
    p = chain(0, 1.0, vocab).double().softmax(-1)
    q = chain(1, 1.5, vocab).double().softmax(-1)
    if kind == "few tokens":  # too few for all children of a node
        q = torch.where(q < q.sort(dim=1).values[:, -2:-1], 0.0, q)
        p = torch.where(p == p.amin(1, keepdim=True), 0.0, p)
    if kind == "one token":
        q = (q == q.amax(1, keepdim=True)).double()
    pairs = {"the target itself": p, "without chance": None}
    return p / p.sum(1, keepdim=True), pairs.get(kind, q / q.sum(1, keepdim=True))


KINDS = ["other", "the target itself", "few tokens", "one token", "without chance"]


SHAPES = {TreeShape.of((2, 1)): 3, TreeShape.of((3,)): 4, TreeShape((0, 0, 1, 1, 2)): 3}
CASES = [case for case in product(SHAPES, KINDS) if len(case[0].parents) < 5 or case[1] == "other"]


@pytest.mark.parametrize(("shape", "kind"), CASES, ids=str)
def test_sampled_trees_have_exactly_the_targets_distribution(shape: TreeShape, kind: str) -> None:
    """The sum over all trees, and over all that random numbers can decide."""
    each = Enumeration(shape, *distributions(SHAPES[shape], kind))
    assert float(each.mass.sum()) == pytest.approx(1, abs=1e-12)
    each.explore(0, each.mass)
    error = (each.found - joint(each.p, 0, shape.depth + 1)).abs().max()
    assert error < 1e-9, each.found


def with_replacement(q: Tensor | None, token: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """A wrong rule: the children were drawn without replacement."""
    return draw_again(q, token, like)[0], q


def not_reduced(p: Tensor, drawn_from: Tensor) -> Tensor:
    """A wrong rule: a rejection changes nothing."""
    return p


def not_normalised(p: Tensor, drawn_from: Tensor) -> Tensor:
    """A wrong rule: later children are judged by too small probabilities."""
    return (p - drawn_from).clamp(min=0)


@pytest.mark.parametrize(
    ("name", "rule"),
    [("draw_again", with_replacement), ("remaining", not_reduced), ("remaining", not_normalised)],
)
def test_wrong_rules_change_the_distribution(
    name: str, rule: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_verification, name, rule)
    each = Enumeration(TreeShape.of((3,)), *distributions(4, "other"))
    each.explore(0, each.mass)
    assert (each.found - joint(each.p, 0, 2)).abs().max() > 1e-3
