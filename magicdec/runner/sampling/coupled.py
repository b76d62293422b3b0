"""Coupled sampling: target and drafter choose the token of a position with the same noise.

The token is the i with the largest log p(i) + G(i), with independent Gumbel numbers G(i) from the
request's seed and the position (Gumbel 1954; Maddison et al. 2014, "A* sampling"). The drafter adds
them to its own log probabilities (Daliri, Musco, Suresh 2024, "Coupling without communication and
drafter-invariant speculative decoding"); a draft is right if it is the target's token.

Lossless: E(i) = exp(-G(i)) is exponential of mean 1, so E(i) / p(i) has rate p(i), and is the
smallest with probability p(i). Noise is independent of earlier tokens, and so of drafts.

Acceptance: at least (1 - d) / (1 + d), for a total variation distance d of p and q, the best bound
without communication (Daliri et al.). The drafter's best k candidates are a sample without
replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.config.sections import SamplingSection
from magicdec.kv.cache import upload
from magicdec.runner.sampling.metadata import Filters, Penalties
from magicdec.runner.sampling.randomness import exponentials
from magicdec.runner.sampling.sampling import make_params, probabilities, process

FEW = 8  # a share of the vocabulary below which the tokens that filters keep are looked at alone


def perturb(
    probs: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | float,
    tokens: Tensor | None = None,
) -> Tensor:
    """`temperature` times the perturbed logarithms of `probs` [B, T, N] of `tokens` [B, T, N]
    (default: the vocabulary), float64, at text `positions` [B, T] of requests with `seeds` [B].
    The largest is the choice; probability 0 gives -inf."""
    tokens = torch.arange(probs.shape[-1], device=probs.device) if tokens is None else tokens
    noise = exponentials(seeds, positions, tokens)
    return noise.reciprocal_().mul_(probs).log_().mul_(temperature)


@dataclass(frozen=True)
class CoupledSampling:
    """The choice of tokens on ranks that know only a request's number."""

    section: SamplingSection

    @property
    def has_penalties(self) -> bool:
        return make_params(self.section, 1, (), 0).has_penalties

    def penalised(
        self, logits: Tensor, prompt: Sequence[int], outputs: Sequence[Sequence[int]]
    ) -> Tensor:
        """Logits [N, V] after penalties, float32, of rows that follow `prompt` (each token once
        or more) and `outputs`."""
        params = [make_params(self.section, 1, (), 0)] * len(outputs)
        penalties = Penalties.from_texts(params, [prompt], outputs, logits.shape[1], logits.device)
        return process(logits.unsqueeze(1), penalties)[:, 0]

    def perturbed(self, logits: Tensor, request: int, positions: Sequence[int]) -> Tensor:
        """Logits [N, V] with noise at text `positions` of a request, shifted by row; the largest
        is the choice, filtered tokens have -inf. Unchanged at temperature 0."""
        if self.section.temperature == 0 or not positions:
            return logits
        params = make_params(self.section, 1, (), request)
        device = logits.device
        filters = Filters.of([params], device)
        probs = probabilities(logits.float().unsqueeze(0), filters)
        seeds = upload([params.seed], device)
        places = upload([positions], device)
        most = int((probs > 0).sum(dim=-1).max())
        if most * FEW > probs.shape[-1]:
            return perturb(probs, seeds, places, params.temperature)[0]
        # Noise for the tokens that were filtered out would take longer than all else.
        best = probs.topk(most)
        scores = perturb(best.values, seeds, places, params.temperature, best.indices)
        return torch.full_like(probs, -torch.inf).scatter_(-1, best.indices, scores)[0]
