"""Judges drafts, chains and trees of them: pure functions of ids and probabilities.

Greedy (Leviathan et al. 2023, section 2.3): draft tokens are accepted up to the first that is not
the target's own choice. The target's next choice, a correction or a bonus, follows them. Of a tree
(Miao et al. 2024, SpecInfer, section 4.3), the longest path from the newest token is accepted of
which every draft is the target's own choice after the one before it.

Sampled (Leviathan et al. 2023, algorithm 1 and appendix A.1; Chen et al. 2023, "Accelerating large
language model decoding with speculative sampling", algorithm 2 and theorem 1): the output has
exactly the target's distribution. A draft token x is accepted with probability min(1, p(x)/q(x)).
At the first rejection, the token is sampled from norm(max(0, p - q)) instead. If all K drafts are
accepted, one more token is sampled from p. Greedy rows in the same batch need no special case:
their p is one-hot, so p(x) is 1 or 0.

Sampled trees (SpecInfer, section 4.3, multi-step speculative sampling): the children of the last
accepted node are judged one after the other by rejection sampling. After each rejection the
target's distribution p becomes norm(max(0, p - q)); if all children are rejected, the next token is
sampled from what p has become. The output has exactly the target's distribution. SpecInfer draws
the children with replacement. Here they are drawn without replacement, so that no two children of a
node are equal: child i is drawn from q without the children before it, normalised, and judged by
that distribution (Yang et al. 2024, "Multi-candidate speculative decoding"; Jeon et al. 2024,
"Recursive speculative decoding"). If q has no other tokens, a child is chosen without chance, and
judged by a one-hot q. This is so for all but the first child in greedy rows.

Shapes: B rows, K drafts, V vocabulary; of trees U = K + 1 nodes (`config.tree_shape` numbers them),
E nodes that the draft computed, D levels of drafts, C children of a node at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from magicdec.config.tree_shape import TreeShape
from magicdec.kv.cache import upload
from magicdec.runner.sampling.sampling import sample


def count_accepted(draft_ids: Tensor, target_ids: Tensor, counts: Tensor | None = None) -> Tensor:
    """How many leading draft ids [B, K], of which the first `counts` [B] are drafts, equal the
    target's choices [B, K+1] at the same positions: int64 [B]."""
    return _leading(draft_ids == target_ids[:, :-1], counts)


def _leading(is_kept: Tensor, counts: Tensor | None) -> Tensor:
    """How many drafts of each row [B, K] stand before the first that is not kept. With `counts`, a
    row has so many drafts, and padding behind them."""
    leading = is_kept.long().cumprod(dim=1).sum(dim=1)
    return leading if counts is None else leading.minimum(counts)


def verify(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    u_accept: Tensor,
    u_resample: Tensor,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (accepted [B], next_ids [B]), both int64: how many leading drafts are accepted, and
    the token after them.

    draft_ids [B, K] are the drafts; with `counts` [B], only so many first ones of each row are.
    draft_probs, float64 [B, K, V], are the probabilities q from which they were sampled; None if
    they were not sampled (then q is one-hot). target_probs, float64 [B, K+1, V], are the target's
    probabilities p at each position, given the drafts before it. u_accept [B, K] and u_resample
    [B, K+1] are independent uniform random numbers.
    """
    num_drafts = draft_ids.shape[1]
    p = target_probs[:, :num_drafts].gather(2, draft_ids.unsqueeze(2)).squeeze(2)  # [B, K]
    if draft_probs is None:
        is_kept = u_accept < p
    else:
        # This is u < p / q without the division. A token with p = 0 is never accepted.
        is_kept = u_accept * draft_probs.gather(2, draft_ids.unsqueeze(2)).squeeze(2) < p
    accepted = _leading(is_kept, counts)
    following = residual(draft_ids, draft_probs, target_probs, accepted, counts)
    u = u_resample.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return accepted, sample(following, u)


def residual(
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    accepted: Tensor,
    counts: Tensor | None = None,
) -> Tensor:
    """The distribution from which the token after `accepted` [B] drafts is sampled, [B, V]: what
    remains of p at the rejected position, and p itself if every draft was accepted."""
    num_rows, num_drafts = draft_ids.shape
    rows = torch.arange(num_rows, device=draft_ids.device)
    p = target_probs[rows, accepted]  # [B, V]
    if num_drafts == 0:
        return p
    place = accepted.clamp(max=num_drafts - 1)
    if draft_probs is None:
        q = torch.zeros_like(p).scatter_(1, draft_ids[rows, place].unsqueeze(1), 1.0)
    else:
        q = draft_probs[rows, place]
    is_rejection = accepted < (num_drafts if counts is None else counts)
    return torch.where(is_rejection.unsqueeze(1), remaining(p, q), p)


@dataclass(frozen=True)
class Judgement:
    """A row that accepts n drafts emits the first n + 1 of its ids. With a tree, these drafts are
    those of the nodes 1 to n of its path, which begins with node 0, the newest token before them;
    the rest of the path repeats its last node."""

    accepted: Tensor  # int64 [B]
    ids: Tensor  # int64 [B, 1 + most drafts that can be accepted]
    path: Tensor | None = None  # int64, of the same shape

    @classmethod
    def of(
        cls, draft_ids: Tensor, accepted: Tensor, following: Tensor, path: Tensor | None = None
    ) -> Judgement:
        """Of rows that accept the first `accepted` [B] of their drafts [B, K], or of those on their
        `path`, which the token `following` [B] follows."""
        if path is not None:
            draft_ids = draft_ids.gather(1, (path[:, 1:] - 1).clamp(min=0))
        following = following.unsqueeze(1)
        ids = torch.cat([draft_ids, following], dim=1)
        return cls(accepted, ids.scatter(1, accepted.unsqueeze(1), following), path)


@cache
def ancestor_mask(shape: TreeShape, device: torch.device) -> Tensor:
    """Which nodes are ancestors of a node, or the node itself: bool [U, U]."""
    nodes = range(shape.num_nodes + 1)
    mask = [[ancestor in shape.ancestors[node] for ancestor in nodes] for node in nodes]
    return upload(mask, device, torch.bool)


@cache
def child_table(shape: TreeShape, device: torch.device) -> Tensor:
    """The children of each node in the order of their ranks: int64 [U, C]. Where a node has fewer,
    0 stands for none."""
    most = shape.most_children
    table = [[*nodes, *[0] * (most - len(nodes))] for nodes in shape.children]
    return upload(table, device)


def longest_path(shape: TreeShape, draft_ids: Tensor, target_ids: Tensor) -> Judgement:
    """Judge greedy drafts [B, K] by the target's choices [B, U] after each node."""
    device = draft_ids.device
    ancestors, depths = ancestor_mask(shape, device), upload(shape.depths, device)
    parents = upload(shape.parents, device)
    differs = draft_ids != target_ids[:, parents]  # [B, K]
    is_cut = (differs.unsqueeze(1) & ancestors[:, 1:]).any(dim=2)  # [B, U]
    accepted, last = torch.where(is_cut, -1, depths).max(dim=1)
    nodes = torch.arange(shape.num_nodes + 1, device=device)
    # The numbers of nodes rise along a path.
    ordered = torch.where(ancestors[last], nodes, shape.num_nodes + 1).sort(dim=1).values
    path = torch.minimum(ordered[:, : shape.depth + 1], last.unsqueeze(1))
    following = target_ids.gather(1, last.unsqueeze(1)).squeeze(1)
    return Judgement.of(draft_ids, accepted, following, path)


def verify_tree(
    shape: TreeShape,
    draft_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    u_accept: Tensor,
    u_resample: Tensor,
) -> Judgement:
    """Judge sampled drafts [B, K].

    draft_probs, float64 [B, E, V], are the probabilities q after each node from which its children
    were drawn without replacement; None if they were not sampled. target_probs, float64 [B, U, V],
    are the target's probabilities p after each node. u_accept [B, D, C] and u_resample [B, D + 1]
    are independent uniform random numbers.
    """
    device, table = draft_ids.device, child_table(shape, draft_ids.device)
    row = torch.arange(len(draft_ids), device=device)
    node = torch.zeros_like(row)
    accepted, is_going_on = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)
    p, path = target_probs[:, 0], [node]
    for depth in range(shape.depth):
        parent, has_moved = node, torch.zeros_like(is_going_on)
        # A node without children may be one that the draft did not compute; its q is not used.
        q = (
            None
            if draft_probs is None
            else draft_probs[row, parent.clamp(max=draft_probs.shape[1] - 1)]
        )
        for rank in range(max(len(shape.children[n]) for n in shape.levels[depth])):
            child = table[parent, rank]
            is_judged = is_going_on & ~has_moved & (child > 0)
            token = draft_ids[row, (child - 1).clamp(min=0)].unsqueeze(1)  # [B, 1]
            drawn_from, q = draw_again(q, token, p)
            is_kept = u_accept[:, depth, rank] * drawn_from.gather(1, token)[:, 0] < p.gather(
                1, token
            ).squeeze(1)
            has_moved = has_moved | (is_judged & is_kept)
            node = torch.where(is_judged & is_kept, child, node)
            is_rejected = (is_judged & ~is_kept).unsqueeze(1)
            p = torch.where(is_rejected, remaining(p, drawn_from), p)
        p = torch.where(has_moved.unsqueeze(1), target_probs[row, node], p)
        is_going_on = is_going_on & has_moved
        accepted = accepted + is_going_on
        path.append(node)
    u = u_resample.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return Judgement.of(draft_ids, accepted, sample(p, u), torch.stack(path, dim=1))


def draw_again(q: Tensor | None, token: Tensor, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """The distribution [B, V] from which a child `token` [B, 1] was drawn, and the q [B, V], not
    normalised, from which the next one is drawn. None: children are chosen without chance. `like`
    [B, V] has the shape of the result."""
    certain = torch.zeros_like(like).scatter_(1, token, 1.0)
    if q is None:
        return certain, None
    total = q.sum(dim=1, keepdim=True)
    return torch.where(total > 0, q / total, certain), q.scatter(1, token, 0.0)


def remaining(p: Tensor, drawn_from: Tensor) -> Tensor:
    """What the target's distribution p [B, V] becomes when a token that was drawn from another
    distribution is rejected: norm(max(0, p - q)). If no entry of p - q is positive, then both are
    equal up to rounding, and p is kept."""
    rest = (p - drawn_from).clamp(min=0)
    total = rest.sum(dim=1, keepdim=True)
    return torch.where(total > 0, rest / total, p)
