"""From logits sharded over ranks to tokens: next tokens, draft tokens and verification. The
arithmetic is in `sampling` and `verification`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from magicdec.kv.cache import upload
from magicdec.runner.model_runner import ModelRunner, gather_vocab, greedy
from magicdec.runner.sampling.coupled import perturb
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.randomness import Purpose, uniforms
from magicdec.runner.sampling.sampling import probabilities, process, sample
from magicdec.runner.sampling.verification import (
    Judgement,
    acceptance_of,
    count_accepted,
    leading,
    verify,
)


@dataclass(frozen=True)
class Proposal:
    """Draft tokens of a batch and the distributions that they were drawn from.

    `probabilities` is None for drafts that were not drawn at random. With `counts`, rows have
    that many drafts, then padding."""

    ids: Tensor  # int64 [B, K]
    probabilities: Tensor | None = None  # float64 [B, K, V] over the whole vocabulary
    counts: Sequence[int] | None = None  # None: K for each row

    @property
    def counts_on_device(self) -> Tensor | None:
        return None if self.counts is None else upload(self.counts, self.ids.device)

    def first(self, count: int) -> Proposal:
        probs = self.probabilities
        return Proposal(self.ids[:, :count], None if probs is None else probs[:, :count])


def join(proposals: Sequence[Proposal | None], counts: Sequence[Sequence[int]]) -> Proposal | None:
    """The proposals of several batches as one. `counts` are the numbers of drafts by batch and
    row; a batch may have no proposal."""
    chains = [proposal for proposal in proposals if proposal is not None]
    if not chains:
        return None
    width = max(drawn.ids.shape[1] for drawn in chains)
    all_ids = []
    all_probs = list[Tensor]()
    sizes = {drawn.probabilities.shape[2] for drawn in chains if drawn.probabilities is not None}
    for proposal, row_counts in zip(proposals, counts, strict=True):
        chain = proposal or Proposal(chains[0].ids.new_zeros(len(row_counts), 0))
        room = width - chain.ids.shape[1]
        all_ids.append(F.pad(chain.ids, (0, room)))
        for size in sizes:
            if chain.probabilities is None:  # not drawn at random
                all_probs.append(F.one_hot(all_ids[-1], size).double())
            else:
                all_probs.append(F.pad(chain.probabilities, (0, 0, 0, room)))
    probs = torch.cat(all_probs) if all_probs else None
    return Proposal(torch.cat(all_ids), probs, counts=[n for count in counts for n in count])


def greedy_tokens(
    runner: ModelRunner,
    logits: Tensor,
    sampling: SamplingMetadata,
    drafts: Tensor | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Greedy ids [B, T] from this rank's logits [B, T, V], which are noted; equal on every rank.
    `drafts`: see `sampling.process`; `places`: see `judge`, without penalties only."""
    if sampling.penalties is None:
        first_row = runner.model.head_rows[0]
        flaws = sampling.flaws
        ids, sums = greedy(logits, first_row, runner.group, flaws)
        if sums is not None:
            sampling.note_sums(sums, places)
        return ids if places is None else ids[0, places]
    return whole_logits(runner, logits, sampling, drafts).argmax(dim=-1)


def whole_logits(
    runner: ModelRunner,
    logits: Tensor,
    sampling: SamplingMetadata,
    drafts: Tensor | None = None,
) -> Tensor:
    """Logits over the whole vocabulary after penalties, float32 [B, T, V], noted; equal on every
    rank."""
    whole = gather_vocab(logits, runner.vocab_places, runner.group)
    sampling.note(whole)
    return process(whole, sampling.penalties, drafts)


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
    """The next draft token [B, 1] after `drafts` [B, k] from this rank's logits [B, 1, V], and
    the probabilities [B, 1, V] that it was drawn from; None for greedy batches."""
    if sampling.draws is None:
        return greedy_tokens(runner, logits, sampling, drafts), None
    return drawn_draft(whole_logits(runner, logits, sampling, drafts), sampling, drafts)


def drawn_draft(
    logits: Tensor, sampling: SamplingMetadata, drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """As `draft_token`, of a sampled batch, from whole logits [B, 1, V] after penalties."""
    draws = sampling.draws
    assert draws is not None, "the batch is sampled"
    probs = probabilities(logits, draws.filters)
    place = drafts.shape[1]
    if sampling.given is not None:  # maybe ids that the vocabulary of a draft lacks
        return sampling.given[:, place : place + 1].clamp(max=probs.shape[2] - 1), probs
    u = draws.ahead(1, Purpose.DRAFT, skip=place)
    return sample(probs[:, 0], u[:, 0]).unsqueeze(1), probs


def confidence(runner: ModelRunner, logits: Tensor) -> Tensor:
    """The probability of each row's likeliest token, float64 [B], from this rank's raw logits
    [B, 1, V]; equal on every rank."""
    most = logits.amax(dim=-1).double()
    total = logits.double().logsumexp(dim=-1)
    most, total = runner.group.all_gather(torch.stack([most, total], dim=-1)).unbind(-1)
    return (most.amax(dim=0) - total.logsumexp(dim=0)).exp()[:, 0]


PRIME = 1_000_003  # above any vocabulary: other tokens make another seed


class AcceptanceRule(Protocol):
    """What becomes of the drafts that the target has judged."""

    keeps_drafts: bool
    """Whether accepted drafts stay in the text."""

    def judge(
        self,
        proposal: Proposal,
        target: Judgement,
        sampling: SamplingMetadata,
        newest: Tensor,
        starts: Tensor,
    ) -> Judgement:
        """The verdict in place of the target's. `newest` tokens [B, any] and lengths `starts` [B]
        are those of the rows before it."""


@dataclass(frozen=True)
class CountedAcceptance:
    """The target's verdict, of which no draft is kept: every step emits the target's next token
    alone, so that drafts are judged at every position of its own text.

    A sampled text is that of decoding without drafts, whose random numbers are the same. It does
    not depend on the drafts, so that these are drawn from q at each position, as in a run."""

    keeps_drafts = False

    def judge(
        self,
        proposal: Proposal,
        target: Judgement,
        sampling: SamplingMetadata,
        newest: Tensor,
        starts: Tensor,
    ) -> Judgement:
        draws = sampling.draws
        probs = target.target_probs
        if draws is None or probs is None:
            return target
        token = sample(probs[:, 0], draws.ahead(1, Purpose.RESAMPLE)[:, 0])
        acceptance = acceptance_of(
            proposal.ids, proposal.probabilities, probs, proposal.counts_on_device
        )
        ids = torch.cat([token.unsqueeze(1), target.ids[:, 1:]], dim=1)
        return Judgement(target.accepted, ids, acceptance=acceptance)


@dataclass(frozen=True)
class EmulatedAcceptance:
    """Acceptance by chance. `rates` float64 [most drafts]: how often a draft is accepted, given
    that all before it are."""

    rates: Tensor
    keeps_drafts = True

    def judge(
        self,
        proposal: Proposal,
        target: Judgement,
        sampling: SamplingMetadata,
        newest: Tensor,
        starts: Tensor,
    ) -> Judgement:
        """Accept drafts [B, K] themselves; after them comes a token of the `target`. The random
        numbers follow from each row's place, its `newest` tokens [B, any] and its length `starts`
        [B], so that prompts of equal lengths have others."""
        drafts = proposal.ids
        steps = torch.arange(drafts.shape[1], device=drafts.device)
        seeds = torch.arange(len(drafts), device=drafts.device)
        for tokens in newest.unbind(1):
            seeds = seeds * PRIME + tokens
        u = uniforms(seeds, starts.unsqueeze(1) + steps, Purpose.ACCEPT)
        accepted = leading(u < self.rates[: drafts.shape[1]], proposal.counts_on_device)
        place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
        is_draft = place < accepted.unsqueeze(1)
        return Judgement(accepted, torch.where(is_draft, F.pad(drafts, (0, 1)), target.ids))


def judge(
    runner: ModelRunner,
    sampling: SamplingMetadata,
    proposal: Proposal,
    logits: Tensor,
    places: Tensor | None = None,
) -> Judgement:
    """Verify K drafts with this rank's logits [B, K+1, V] after the newest token and each draft.
    If rows have different numbers of drafts, logits are [1, N, V], and `places` [B, K+1] are a
    row's among the N."""
    draws = sampling.draws
    drafts = proposal.ids
    counts = proposal.counts_on_device
    # Where only the likeliest tokens are needed, no logits are copied.
    is_copied = draws is not None or sampling.penalties is not None
    if places is not None and is_copied:
        logits = logits[0, places]
    if drafts.shape[1] == 0:
        token = next_tokens(runner, logits, sampling)
        return Judgement(torch.zeros_like(token[:, 0]), token)
    assert draws is None or draws.prompt_lens is None, "only pipelined speculation couples drafts"
    if draws is None:
        target = greedy_tokens(runner, logits, sampling, drafts, None if is_copied else places)
        return Judgement(count_accepted(drafts, target, counts), target)
    probs = probabilities(whole_logits(runner, logits, sampling, drafts), draws.filters)
    accept = draws.ahead(drafts.shape[1], Purpose.ACCEPT)
    resample = draws.ahead(drafts.shape[1] + 1, Purpose.RESAMPLE)
    verdict = verify(drafts, proposal.probabilities, probs, accept, resample, counts)
    return Judgement.of(drafts, *verdict, probs)
