"""Sampled speculation keeps the target's distribution: chi-squared tests of first tokens and of
pairs, on toy vocabularies with known probabilities. Wrong rules fail these tests. Seeds are
fixed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from chi_squared import ACCEPTED, REFUSED, p_value
from torch import Tensor

from magicdec.config.sections import SamplingSection
from magicdec.request import Request
from magicdec.sampling.metadata import Draws, Filters, Penalties, SamplingMetadata
from magicdec.sampling.randomness import Purpose
from magicdec.sampling.sampling import make_params, probabilities, process, sample
from magicdec.sampling.verification import verify

CPU = torch.device("cpu")
VOCAB, FIRST = 6, 2  # FIRST: the prompt's only token
NUM_REQUESTS = 8_000
Rule = Callable[[Tensor, "Tensor | None", Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def chain(seed: int, spread: float, vocab_size: int = VOCAB) -> Tensor:
    """Logits [V, V] of the next token given the last one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, vocab_size, generator=generator) * spread


def make_requests(count: int, section: SamplingSection) -> list[Request]:
    return [Request(i, (FIRST,), make_params(section, 99, (), i)) for i in range(count)]


def draws_of(choosing: SamplingMetadata) -> Draws:
    assert choosing.draws is not None, "all sections sample"
    return choosing.draws


class Toy:
    """A target and a draft whose logits depend only on the last token. Everything else is as in
    decoding: penalties with history, filters, random numbers by output position."""

    def __init__(self, target: Tensor, draft: Tensor | None, section: SamplingSection) -> None:
        self.target, self.draft, self.section = target, draft, section

    def propose(self, requests: list[Request], count: int) -> tuple[Tensor, Tensor | None]:
        last = torch.tensor([(*r.prompt_ids, *r.output_ids)[-1] for r in requests])
        choosing = SamplingMetadata.of(requests, len(self.target), CPU)
        draws = draws_of(choosing)
        ids, probs = torch.empty(len(requests), 0, dtype=torch.long), []
        for place in range(count):
            if self.draft is None:  # deterministic drafts: a function of the last token
                last = (last * 2 + 1) % len(self.target)
            else:
                before = ids if place else None
                logits = process(self.draft[last].unsqueeze(1), choosing.penalties, before)
                probs.append(probabilities(logits, draws.filters))
                u = draws.ahead(1, Purpose.DRAFT, skip=place)
                last = sample(probs[-1][:, 0], u[:, 0])
            ids = torch.cat([ids, last.unsqueeze(1)], dim=1)
        return ids, torch.cat(probs, dim=1) if probs else None

    def step(self, requests: list[Request], count: int, rule: Rule) -> None:
        drafts, draft_probs = self.propose(requests, count)
        last = torch.tensor([[(*r.prompt_ids, *r.output_ids)[-1]] for r in requests])
        choosing = SamplingMetadata.of(requests, len(self.target), CPU)
        draws = draws_of(choosing)
        logits = process(self.target[torch.cat([last, drafts], dim=1)], choosing.penalties, drafts)
        accepted, next_ids = rule(
            drafts,
            draft_probs,
            probabilities(logits, draws.filters),
            draws.ahead(count, Purpose.ACCEPT),
            draws.ahead(count + 1, Purpose.RESAMPLE),
        )
        for row, r in enumerate(requests):
            r.output_ids += [*drafts[row, : accepted[row]].tolist(), int(next_ids[row])]

    def emitted(self, num_drafts: int, rule: Rule = verify) -> Tensor:
        """The first two tokens of every request: [N, 2]."""
        requests = make_requests(NUM_REQUESTS, self.section)
        while waiting := [r for r in requests if len(r.output_ids) < 2]:
            self.step(waiting, num_drafts, rule)
        return torch.tensor([r.output_ids[:2] for r in requests])

    def expected(self) -> Tensor:
        """The probabilities of the first two tokens, by enumeration: [V, V]."""
        vocab = range(len(self.target))
        params = make_params(self.section, 99, (), 0)

        def next_probs(output: list[int]) -> Tensor:
            logits = self.target[[FIRST, *output][-1]].view(1, 1, -1)
            request = Request(0, (FIRST,), params, output)
            penalties = Penalties.of([request], len(self.target), CPU)
            return probabilities(process(logits, penalties), Filters.of([params], CPU))[0, 0]

        return next_probs([]).unsqueeze(1) * torch.stack([next_probs([t]) for t in vocab])


def p_values(tokens: Tensor, pairs: Tensor) -> list[float]:
    """The p-values of the first tokens and of the pairs [N, 2], given the probabilities of the
    pairs [V, V]."""
    counts = (tokens[:, 0] * len(pairs) + tokens[:, 1]).bincount(minlength=pairs.numel())
    counts = counts.view_as(pairs)
    return [p_value(counts.sum(1), pairs.sum(1)), p_value(counts.flatten(), pairs.flatten())]


TARGET = chain(0, 1.0)
DRAFTERS = {
    "the target itself": TARGET,
    "good": TARGET + chain(1, 0.3),
    "bad": chain(2, 2.0),
    "never the likeliest": torch.where(TARGET.amax(1, keepdim=True) == TARGET, -torch.inf, TARGET),
    "without chance": None,
}
SECTIONS = {
    "plain": SamplingSection(temperature=1.0),
    "filters": SamplingSection(temperature=0.8, top_k=4, top_p=0.95, min_p=0.02),
    "penalties": SamplingSection(
        temperature=1.2, repetition_penalty=1.8, presence_penalty=0.7, seed=1
    ),
}


@pytest.mark.narrow("values")
@pytest.mark.parametrize(
    ("drafter", "num_drafts"),
    # Two tokens are counted, on which the third draft and later ones have no influence.
    [*product(DRAFTERS, [1, 2, 3]), ("good", 4), ("bad", 5)],
)
def test_tokens_and_pairs_have_the_targets_distribution(drafter: str, num_drafts: int) -> None:
    toy = Toy(TARGET, DRAFTERS[drafter], SECTIONS["plain"])
    for p in p_values(toy.emitted(num_drafts), toy.expected()):
        assert p > ACCEPTED


@pytest.mark.narrow("values")
@pytest.mark.parametrize("drafter", ["good", "bad", "without chance"])
@pytest.mark.parametrize("section", ["filters", "penalties"])
def test_filters_and_penalties_keep_the_targets_distribution(section: str, drafter: str) -> None:
    toy = Toy(TARGET, DRAFTERS[drafter], SECTIONS[section])
    for p in p_values(toy.emitted(3), toy.expected()):
        assert p > ACCEPTED


def accept_always(
    d: Tensor, q: Tensor | None, p: Tensor, a: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    return verify(d, q, p, torch.zeros_like(a), r)


def resample_from_the_target(
    d: Tensor, q: Tensor | None, p: Tensor, a: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    accepted, _ = verify(d, q, p, a, r)
    rows = torch.arange(len(d))
    return accepted, sample(p[rows, accepted], r[rows, accepted])


def reuse_one_number(
    d: Tensor, q: Tensor | None, p: Tensor, a: Tensor, r: Tensor
) -> tuple[Tensor, Tensor]:
    """A wrong rule: the correction depends on the random number that rejected the draft."""
    return verify(d, q, p, a, torch.cat([a, r[:, -1:]], dim=1))


@pytest.mark.narrow("values")
@pytest.mark.parametrize("drafter", ["bad", "good"])
@pytest.mark.parametrize("rule", [accept_always, resample_from_the_target, reuse_one_number])
def test_wrong_acceptance_rules_change_the_distribution(rule: Rule, drafter: str) -> None:
    toy = Toy(TARGET, DRAFTERS[drafter], SECTIONS["plain"])
    for p in p_values(toy.emitted(3, rule), toy.expected()):
        assert p < REFUSED
