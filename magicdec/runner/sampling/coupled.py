"""Coupled sampling: a target and its drafter choose the token of a position with the same noise.
Therefore they often choose the same token, although neither knows the other's probabilities.

The token is the i with the largest log p(i) + G(i), where the G(i) are independent Gumbel numbers
(Gumbel 1954; Maddison et al. 2014, "A* sampling"). The noise of a position is a function of the
request's seed and the position alone. The drafter adds the same noise to the logarithms of its own
probabilities (Daliri, Musco, Suresh 2024, "Coupling without communication and drafter-invariant
speculative decoding"), and a draft is right if it is the token that the target chooses.

Lossless: E(i) = exp(-G(i)) is exponential of mean 1, so the E(i) / p(i) are exponential with the
rates p(i), and that of token i is the smallest with probability p(i). The noise of a position is
independent of the tokens before it. So the whole output follows from the target and the seed: no
draft, cancellation or division into runs can change it.

Acceptance: a draft is right with probability (1 - d) / (1 + d) or more, where d is the total
variation distance of p and q (Daliri et al.). No method whose two sides do not
communicate has a better bound.

The best k of the drafter's perturbed candidates are a sample of k tokens without replacement.
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
    """`temperature` times the perturbed logarithms of `probs` [B, T, N], float64, of `tokens`
    [B, T, N], by default the whole vocabulary, at `positions` [B, T] of the texts of the requests
    with `seeds` [B]. The largest is the choice. A token of probability 0 has -inf."""
    tokens = torch.arange(probs.shape[-1], device=probs.device) if tokens is None else tokens
    noise = exponentials(seeds, positions, tokens)
    return noise.reciprocal_().mul_(probs).log_().mul_(temperature)


@dataclass(frozen=True)
class CoupledSampling:
    """How tokens are chosen by ranks that know the number of a request, but not the request."""

    section: SamplingSection

    @property
    def has_penalties(self) -> bool:
        return make_params(self.section, 1, (), 0).has_penalties

    def penalised(
        self, logits: Tensor, prompt: Sequence[int], outputs: Sequence[Sequence[int]]
    ) -> Tensor:
        """Logits [N, V] after the penalties, float32, of rows that follow the same prompt. `prompt`
        has each of its tokens once or more, and `outputs` the output tokens before each row."""
        params = [make_params(self.section, 1, (), 0)] * len(outputs)
        penalties = Penalties.of_texts(params, [prompt], outputs, logits.shape[1], logits.device)
        return process(logits.unsqueeze(1), penalties)[:, 0]

    def perturbed(self, logits: Tensor, request: int, positions: Sequence[int]) -> Tensor:
        """Logits [N, V] with noise, for the tokens at `positions` of the text of the request with
        this number. The largest is the choice; filtered tokens have -inf. Each row is shifted by
        some number. At temperature 0 these are the logits themselves."""
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
