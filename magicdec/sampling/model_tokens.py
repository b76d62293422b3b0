"""Turns a model's logits into tokens: the next token of each row, the next draft token, and the
verification of a chain or a tree of draft tokens.

Owns the step from logits that are sharded over ranks to tokens, with the sampling metadata of a
batch. The arithmetic is in `sampling` and `verification`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.config.tree_shape import TreeShape
from magicdec.distributed.groups import Group
from magicdec.runner import ModelRunner
from magicdec.sampling.coupled import perturb
from magicdec.sampling.metadata import SamplingMetadata
from magicdec.sampling.randomness import Purpose
from magicdec.sampling.sampling import probabilities, process, sample
from magicdec.sampling.verification import (
    TreeVerdict,
    ancestor_mask,
    count_accepted,
    longest_path,
    verify,
    verify_tree,
)


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of a batch and the distributions they were drawn from.

    `probabilities` is None if the drafts were not drawn at random: with greedy requests and with
    prompt lookup. With a `tree`, the drafts are its nodes 1 to K, and the probabilities are those
    after each of its E expanded nodes, from which their children were drawn without replacement.
    """

    ids: Tensor  # int64 [B, K]
    probabilities: Tensor | None = None  # float64 [B, K or E, V] over the whole vocabulary
    tree: TreeShape | None = None  # None: the drafts are a chain

    def first(self, count: int) -> Proposal:
        """The first `count` drafts of each row of a chain."""
        assert self.tree is None, "a tree is judged as a whole"
        probs = self.probabilities
        return Proposal(self.ids[:, :count], None if probs is None else probs[:, :count])


@dataclass(frozen=True)
class Judgement:
    """A row that accepts n drafts emits the first n + 1 of its ids. With a tree, these drafts are
    those of the nodes 1 to n of its path, which begins with node 0, the newest token before them;
    the rest of the path repeats its last node."""

    accepted: Tensor  # int64 [B]
    ids: Tensor  # int64 [B, 1 + most drafts that can be accepted]
    path: Tensor | None = None  # int64, of the same shape


def greedy_tokens(
    runner: ModelRunner,
    logits: Tensor,
    sampling: SamplingMetadata,
    drafts: Tensor | None = None,
    is_before: Tensor | None = None,
) -> Tensor:
    """The greedy token ids [B, T] from this rank's logits [B, T, V]. They are the same on every
    rank of the runner's group. `sampling.process` explains the T positions and the other
    arguments."""
    if sampling.penalties is None:
        return greedy(logits, runner.model.head_rows[0], runner.group)
    return whole_logits(runner, logits, sampling, drafts, is_before).argmax(dim=-1)


def whole_logits(
    runner: ModelRunner,
    logits: Tensor,
    sampling: SamplingMetadata,
    drafts: Tensor | None = None,
    is_before: Tensor | None = None,
) -> Tensor:
    """The logits over the whole vocabulary after each request's penalties, float32 [B, T, V]. They
    are the same on every rank."""
    whole = gather_vocab(logits, runner.vocab_places, runner.group)
    return process(whole, sampling.penalties, drafts, is_before)


def next_tokens(runner: ModelRunner, logits: Tensor, sampling: SamplingMetadata) -> Tensor:
    """The next token of each request, int64 [B, 1], from this rank's logits [B, 1, V]."""
    draws = sampling.draws
    if draws is None:
        return greedy_tokens(runner, logits, sampling)
    probs = probabilities(whole_logits(runner, logits, sampling), draws.filters)
    if draws.prompt_lens is not None:
        positions = (draws.prompt_lens + draws.emitted).unsqueeze(1)
        scores = perturb(probs, draws.seeds, positions, draws.filters.temperature)
        return scores.argmax(dim=-1)
    u = draws.ahead(1, Purpose.RESAMPLE)
    return sample(probs[:, 0], u[:, 0]).unsqueeze(1)


def draft_token(
    runner: ModelRunner, logits: Tensor, sampling: SamplingMetadata, drafts: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The next draft token after `drafts` [B, k], from this rank's logits [B, 1, V] of the drafting
    model. Returns its ids [B, 1], and the probabilities [B, 1, V] from which it was drawn; None
    instead of these if all requests are greedy."""
    draws = sampling.draws
    if draws is None:
        return greedy_tokens(runner, logits, sampling, drafts), None
    probs = probabilities(whole_logits(runner, logits, sampling, drafts), draws.filters)
    u = draws.ahead(1, Purpose.DRAFT, skip=drafts.shape[1])
    return sample(probs[:, 0], u[:, 0]).unsqueeze(1), probs


def judge(
    runner: ModelRunner, sampling: SamplingMetadata, proposal: Proposal, logits: Tensor
) -> Judgement:
    """Verify a proposal of K drafts with this rank's logits [B, K+1, V], those of the newest token
    and of the K drafts."""
    if proposal.tree is not None:
        verdict = _judge_tree(runner, sampling, proposal, proposal.tree, logits)
        return Judgement(verdict.accepted, verdict.emitted(proposal.ids), verdict.path)
    draws, drafts = sampling.draws, proposal.ids
    if drafts.shape[1] == 0:
        token = next_tokens(runner, logits, sampling)
        return Judgement(torch.zeros_like(token[:, 0]), token)
    assert draws is None or draws.prompt_lens is None, "only pipelined speculation couples drafts"
    if draws is None:
        target = greedy_tokens(runner, logits, sampling, drafts)
        return Judgement(count_accepted(drafts, target), target)
    probs = probabilities(whole_logits(runner, logits, sampling, drafts), draws.filters)
    count, following = verify(
        drafts,
        proposal.probabilities,
        probs,
        draws.ahead(drafts.shape[1], Purpose.ACCEPT),
        draws.ahead(drafts.shape[1] + 1, Purpose.RESAMPLE),
    )
    tokens = torch.cat([drafts, following.unsqueeze(1)], dim=1)
    return Judgement(count, tokens.scatter(1, count.unsqueeze(1), following.unsqueeze(1)))


def _judge_tree(
    runner: ModelRunner,
    sampling: SamplingMetadata,
    proposal: Proposal,
    tree: TreeShape,
    logits: Tensor,
) -> TreeVerdict:
    draws, drafts = sampling.draws, proposal.ids
    is_before = ancestor_mask(tree, drafts.device)[:, 1:]
    if draws is None:
        target = greedy_tokens(runner, logits, sampling, drafts, is_before)
        return longest_path(tree, drafts, target)
    whole = whole_logits(runner, logits, sampling, drafts, is_before)
    return verify_tree(
        tree,
        drafts,
        proposal.probabilities,
        probabilities(whole, draws.filters),
        draws.branching_ahead(tree.depth, tree.most_children, Purpose.ACCEPT),
        draws.ahead(tree.depth + 1, Purpose.RESAMPLE),
    )


def greedy(logits: Tensor, first_row: int, group: Group) -> Tensor:
    """The ids of the largest logits over a vocabulary that is sharded over ranks: [B, T, V] ->
    int64 [B, T], the same on every rank.

    `first_row` is the vocabulary id of this rank's first row. This takes one collective: values and
    ids are sent as pairs of float64, which hold both exactly. Among equal values the smaller id
    wins, as with argmax on one rank.
    """
    value, index = logits.max(dim=-1)
    if group.size == 1:
        return index
    pair = torch.stack([value.double(), (index + first_row).double()], dim=-1)  # [B, T, 2]
    values, ids = group.all_gather(pair).unbind(-1)  # [ranks, B, T] each
    best = values.max(dim=0, keepdim=True).values
    return torch.where(values == best, ids, float("inf")).min(dim=0).values.long()


def gather_vocab(logits: Tensor, places: Sequence[tuple[int, int]], group: Group) -> Tensor:
    """Gather the logits of a vocabulary that is sharded over ranks: [B, T, columns of this rank] ->
    [B, T, V] on every rank.

    `places` are the half-open ranges of ids of every rank's columns, in the order in which the
    group gathers (`Group.all_gather_range`). This takes one collective; every shard is padded to
    the widest.
    """
    if group.size == 1:
        return logits
    widest = max(last - first for first, last in places)
    padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[-1]))
    shards = zip(places, group.all_gather(padded), strict=True)
    ordered = sorted(shards, key=lambda shard: shard[0])
    return torch.cat([columns[..., : last - first] for (first, last), columns in ordered], dim=-1)
