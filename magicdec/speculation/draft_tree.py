"""Drafts a tree of tokens with a model, one level in each forward.

Owns this loop, and how the children of a node are chosen: for greedy requests the likeliest tokens,
for others draws without replacement. Must not know how a tree is verified, except that
`sampling.verification` judges by the distributions that the draws here are made from.

Shapes: B rows, T newest tokens, N nodes of a level, C children of a node at most, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from magicdec.config.tree_shape import TreeShape
from magicdec.distributed.groups import Group
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import Proposal, whole_logits
from magicdec.runner.sampling.randomness import Purpose
from magicdec.runner.sampling.sampling import probabilities, sample
from magicdec.runner.sampling.verification import ancestor_mask
from magicdec.speculation.draft_kv import DraftKV


def draft_tree(
    kv: DraftKV,
    rows: BatchRows,
    committed: Lengths,
    newest: Tensor,
    sampling: SamplingMetadata,
    tree: TreeShape,
    vocab_size: int,
) -> Proposal:
    """Draft a tree of each row after its newest tokens [B, T], with ids below `vocab_size`. Before
    the call the cache holds the `committed` tokens. The call appends `newest` and all levels of the
    tree but the last, uncommitted."""
    before = list(range(-1, newest.shape[1] - 1))  # the newest tokens follow each other
    parents = [*before, *(newest.shape[1] - 1 + parent for parent in tree.parents)]
    of_nodes = upload(parents, newest.device).expand(len(rows), -1)
    most_ids = kv.runner.model.config.vocab_size
    drafts, all_probs = newest[:, :0], []
    logits = kv.forward(newest, rows, committed, num_outputs=1)
    for depth in range(tree.depth):
        if depth:
            num_nodes = newest.shape[1] + drafts.shape[1]
            level = drafts[:, -len(tree.levels[depth]) :].clamp(max=most_ids - 1)
            logits = kv.forward(level, rows, committed, of_nodes[:, :num_nodes])
        ids, probs = _children(kv, logits, sampling, drafts, tree, depth, vocab_size)
        drafts = torch.cat([drafts, ids], dim=1)
        all_probs += [] if probs is None else [probs]
    return Proposal(drafts, torch.cat(all_probs, dim=1) if all_probs else None, tree)


def _children(
    kv: DraftKV,
    logits: Tensor,
    sampling: SamplingMetadata,
    drafts: Tensor,
    tree: TreeShape,
    depth: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor | None]:
    """The next level of a tree whose levels before it are `drafts`, from this rank's logits
    [B, N, V] of the nodes at `depth`: its ids, and the probabilities [B, N, V] from which they were
    drawn; None if all requests are greedy."""
    level, runner = tree.levels[depth], kv.runner
    most = max(len(tree.children[node]) for node in level)
    places = [
        (tree.parents[c - 1] - level.start, tree.ranks[c - 1]) for c in tree.levels[depth + 1]
    ]
    flat = upload([node * most + rank for node, rank in places], logits.device)
    if sampling.is_greedy:
        sampling.note(logits)
        ids = likeliest(logits, most, runner.model.head_rows[0], runner.group)
        return ids.clamp(max=vocab_size - 1).flatten(1)[:, flat], None
    mask = ancestor_mask(tree, logits.device)
    is_before = mask[level.start : level.stop, 1 : 1 + drafts.shape[1]]
    whole = whole_logits(runner, logits, sampling, drafts, is_before)
    scores = _resized(whole, vocab_size, -torch.inf)
    if sampling.draws is None:
        return scores.topk(most, dim=2).indices.flatten(1)[:, flat], None
    probs = fold(probabilities(whole, sampling.draws.filters), vocab_size)
    numbers = torch.zeros(len(level) * most, dtype=torch.int64, device=logits.device)
    numbers[flat] = torch.arange(len(places), device=logits.device)
    u = sampling.draws.ahead(1, Purpose.DRAFT, depth, branches=len(places))[:, 0, numbers]
    ids = draw_children(probs, scores, u.unflatten(1, (len(level), most)))
    return ids.flatten(1)[:, flat], probs


def draw_children(probs: Tensor, scores: Tensor, u: Tensor) -> Tensor:
    """Draw C tokens for each node without replacement from its probabilities, float64 [B, N, V],
    with random numbers u [B, N, C]: ids [B, N, C]. Where no token of positive probability is left,
    the token with the largest of the scores [B, N, V] that was not drawn follows."""
    tokens = []
    for rank in range(u.shape[2]):
        draws = sample(probs.flatten(0, 1), u[:, :, rank].flatten()).view(probs.shape[:2])
        is_left = probs.sum(dim=2) > 0
        token = torch.where(is_left, draws, scores.argmax(dim=2)).unsqueeze(2)
        probs, scores = probs.scatter(2, token, 0.0), scores.scatter(2, token, -torch.inf)
        tokens.append(token)
    return torch.cat(tokens, dim=2)


def likeliest(logits: Tensor, count: int, first_row: int, group: Group) -> Tensor:
    """The `count` ids with the largest logits over a vocabulary that is sharded over ranks, the
    largest first: [B, N, V] -> int64 [B, N, count], the same on every rank.

    `first_row` is the vocabulary id of this rank's first row. One collective, as in `greedy`."""
    values, index = logits.topk(min(count, logits.shape[2]), dim=2)
    if group.size == 1:
        return index
    missing = count - index.shape[2]  # of a shard with few rows
    pair = torch.stack([values.double(), (index + first_row).double()], dim=-1)
    pair = torch.nn.functional.pad(pair, (0, 0, 0, missing), value=-torch.inf)
    pairs = torch.cat(list(group.all_gather(pair)), dim=2)  # [B, N, ranks * count, 2]
    best = pairs[..., 0].topk(count, dim=2).indices
    return pairs[..., 1].gather(2, best).long()


def fold(probs: Tensor, vocab_size: int) -> Tensor:
    """The probabilities of ids that are clamped to `vocab_size`: probs [B, K, any] to [B, K,
    vocab_size]."""
    if probs.shape[2] <= vocab_size:
        return _resized(probs, vocab_size, 0.0)
    last = probs[:, :, vocab_size - 1 :].sum(dim=2, keepdim=True)
    return torch.cat([probs[:, :, : vocab_size - 1], last], dim=2)


def _resized(x: Tensor, vocab_size: int, value: float) -> Tensor:
    """x [B, N, any] with `vocab_size` columns; those that it lacks have that value."""
    missing = vocab_size - x.shape[2]
    return (
        x[:, :, :vocab_size]
        if missing <= 0
        else torch.nn.functional.pad(x, (0, missing), value=value)
    )
