"""Sampled speculation keeps the target's distribution: chi-squared tests of first tokens and of
pairs, on toy vocabularies with known probabilities. Wrong rules fail these tests. And coupled
sampling: its noise, the same distribution whatever is drafted, and how often drafts are right.
Seeds are fixed."""

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from chi_squared import ACCEPTED, REFUSED, p_value
from torch import Tensor

from magicdec.config.sections import SamplingSection
from magicdec.runner.request import Request
from magicdec.runner.sampling.coupled import FEW, CoupledSampling, perturb
from magicdec.runner.sampling.metadata import Draws, Filters, Penalties, SamplingMetadata
from magicdec.runner.sampling.randomness import Purpose, derive_seed, exponentials
from magicdec.runner.sampling.sampling import make_params, probabilities, process, sample
from magicdec.runner.sampling.verification import verify

CPU = torch.device("cpu")
# FIRST: the prompt's only token.
VOCAB = 6
FIRST = 2
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
        self.target = target
        self.draft = draft
        self.section = section

    def propose(self, requests: list[Request], count: int) -> tuple[Tensor, Tensor | None]:
        last = torch.tensor([(*r.prompt_ids, *r.output_ids)[-1] for r in requests])
        choosing = SamplingMetadata.of(requests, len(self.target), CPU)
        draws = draws_of(choosing)
        ids = torch.empty(len(requests), 0, dtype=torch.long)
        probs = []
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

    def emitted(self, gamma: int, rule: Rule = verify) -> Tensor:
        """The first two tokens of every request: [N, 2]."""
        requests = make_requests(NUM_REQUESTS, self.section)
        while waiting := [r for r in requests if len(r.output_ids) < 2]:
            self.step(waiting, gamma, rule)
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


@pytest.mark.narrow(3)
@pytest.mark.parametrize(
    ("drafter", "gamma"),
    # Two tokens are counted, on which the third draft and later ones have no influence.
    [*product(DRAFTERS, [1, 2]), ("without chance", 3), ("good", 4), ("bad", 5)],
)
def test_tokens_and_pairs_have_the_targets_distribution(drafter: str, gamma: int) -> None:
    toy = Toy(TARGET, DRAFTERS[drafter], SECTIONS["plain"])
    for p in p_values(toy.emitted(gamma), toy.expected()):
        assert p > ACCEPTED


@pytest.mark.narrow(2)
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


@pytest.mark.narrow(2)
@pytest.mark.parametrize("drafter", ["bad", "good"])
@pytest.mark.parametrize("rule", [accept_always, resample_from_the_target, reuse_one_number])
def test_wrong_acceptance_rules_change_the_distribution(rule: Rule, drafter: str) -> None:
    toy = Toy(TARGET, DRAFTERS[drafter], SECTIONS["plain"])
    for p in p_values(toy.emitted(3, rule), toy.expected()):
        assert p < REFUSED


Key = Callable[[Tensor, int], Tensor]
NUM_DRAFTS = 2
PROMPT_LEN = 1


def seeds_of(count: int) -> Tensor:
    return torch.randint(1 << 62, (count,), generator=torch.Generator().manual_seed(3))


def test_the_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds = seeds_of(3)
    positions = torch.tensor([[0, 1, 70_000], [5, 4, 4], [1, 2, 0]])
    noise = exponentials(seeds, positions, torch.arange(50))
    assert noise.shape == (3, 3, 50) and noise.dtype == torch.float64
    for row in range(3):
        for column in range(3):
            alone = exponentials(
                seeds[row : row + 1], positions[row : row + 1, column, None], torch.arange(20)
            )
            assert torch.equal(alone[0, 0], noise[row, column, :20])
    assert torch.equal(noise[1, 1], noise[1, 2])
    different = noise.flatten(0, 1)[[0, 1, 2, 3, 4, 6, 7, 8]]
    assert different.unique().numel() == different.numel()


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {}], ids=str)
def test_noise_for_kept_tokens_alone_has_the_same_bits(filters: dict[str, float]) -> None:
    logits = torch.randn(6, 2003) * 3
    positions = [7, 8, 8, 70_000, 3, 0]
    section = SamplingSection(temperature=0.7, seed=5, **filters)
    params = make_params(section, 1, (), 4)
    probs = probabilities(logits.unsqueeze(0), Filters.of([params], CPU))
    assert bool(filters) == ((probs > 0).sum(dim=-1).max() < 2003 / FEW)
    seeds = torch.tensor([params.seed])
    places = torch.tensor([positions])
    expected = perturb(probs, seeds, places, params.temperature)[0]
    coupled = CoupledSampling(section)
    assert torch.equal(coupled.perturbed(logits, 4, positions), expected)
    assert torch.equal(expected.isinf(), probs[0] == 0), "filtered tokens are never chosen"
    assert coupled.perturbed(logits[:0], 4, []).shape == (0, 2003)
    assert CoupledSampling(SamplingSection()).perturbed(logits, 4, positions) is logits


def test_the_noise_is_exponential_and_independent_of_its_neighbours() -> None:
    """The tolerance is five standard errors of 400,000 draws."""
    noise = exponentials(seeds_of(20), torch.arange(100).expand(20, -1), torch.arange(200))
    assert noise.min() > 0 and noise.max() < 37
    assert abs(noise.mean() - 1) < 5 / math.sqrt(noise.numel())
    unit = (-noise).exp()
    counts = torch.histc(unit, 50, 0, 1)
    assert p_value(counts.long(), torch.full((50,), 1 / 50).double()) > ACCEPTED
    for a, b in (
        (unit[1:], unit[:-1]),
        (unit[:, 1:], unit[:, :-1]),
        (unit[..., 1:], unit[..., :-1]),
        (unit[:, 1:, :-1], unit[:, :-1, 1:]),
    ):
        found = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(found) < 5 / math.sqrt(a.numel())


class CoupledToy(Toy):
    """As in pipelined speculation: every row predicts the target's token at its position, and a
    draft is right if it is this token. `position_of` says whose noise a row has."""

    def __init__(
        self, target: Tensor, draft: Tensor | None, section: SamplingSection, position_of: Key
    ) -> None:
        super().__init__(target, draft, section)
        self.position_of = position_of

    def choose(self, model: Tensor, last: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """The token after each of `last` [B], which is at `positions` [B]."""
        params = make_params(self.section, 99, (), 0)
        probs = probabilities(model[last].unsqueeze(1), Filters.of([params], CPU))
        scores = perturb(probs, seeds, positions.unsqueeze(1), params.temperature)
        return scores.argmax(dim=-1)[:, 0]

    def step_together(self, outputs: list[list[int]], seeds: Tensor) -> None:
        lengths = torch.tensor([len(output) for output in outputs]) + PROMPT_LEN
        last = torch.tensor([(FIRST, *output)[-1] for output in outputs])
        rows = last
        drafts = []
        predicted = []
        for place in range(NUM_DRAFTS):
            if self.draft is None:
                rows = (rows * 2 + 1) % VOCAB
            else:
                rows = self.choose(self.draft, rows, seeds, self.position_of(lengths, place))
            drafts.append(rows)
        for place, token in enumerate([last, *drafts]):
            predicted.append(
                self.choose(self.target, token, seeds, self.position_of(lengths, place))
            )
        right = torch.stack(drafts, 1) == torch.stack(predicted[:-1], 1)
        accepted = right.long().cumprod(dim=1).sum(dim=1)
        emitted = torch.stack(predicted, 1).tolist()
        for output, tokens, count in zip(outputs, emitted, accepted.tolist(), strict=True):
            output += tokens[: count + 1]

    def first_two(self) -> Tensor:
        """The first two tokens of every request: [N, 2]."""
        seeds = seeds_of(NUM_REQUESTS)
        outputs = [list[int]() for _ in range(NUM_REQUESTS)]
        while waiting := [i for i, output in enumerate(outputs) if len(output) < 2]:
            self.step_together([outputs[i] for i in waiting], seeds[waiting])
        return torch.tensor([output[:2] for output in outputs])


def own_position(lengths: Tensor, place: int) -> Tensor:
    return lengths + place


def place_in_the_run(lengths: Tensor, place: int) -> Tensor:
    """A wrong key: a token after a refused draft has the noise that refused it."""
    return torch.full_like(lengths, place)


@pytest.mark.parametrize("section", ["plain", "filters"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_coupled_tokens_have_the_targets_distribution(drafter: str, section: str) -> None:
    toy = CoupledToy(TARGET, DRAFTERS[drafter], SECTIONS[section], own_position)
    tokens = toy.first_two()
    for p in p_values(tokens, toy.expected()):
        assert p > ACCEPTED
    undrafted = CoupledToy(TARGET, None, SECTIONS[section], own_position)
    assert torch.equal(tokens, undrafted.first_two()), "the drafter changes no token"


def test_noise_by_the_place_in_a_run_changes_the_distribution() -> None:
    toy = CoupledToy(TARGET, DRAFTERS["bad"], SECTIONS["plain"], place_in_the_run)
    assert p_values(toy.first_two(), toy.expected())[1] < REFUSED


@pytest.mark.parametrize("drafter", ["the target itself", "good", "bad"])
def test_drafts_are_right_as_often_as_computed(drafter: str) -> None:
    """At least (1 - d) / (1 + d) and at most 1 - d, where d is the total variation distance. The
    exact probability is in the module's docstring."""
    draft = DRAFTERS[drafter]
    assert draft is not None
    p, q = (x[FIRST].double().softmax(dim=-1) for x in (TARGET, draft))
    seeds = seeds_of(40_000)
    positions = torch.zeros(40_000, 1, dtype=torch.int64)
    both = [
        perturb(x.expand(40_000, 1, -1), seeds, positions, 1.0).argmax(-1).flatten() for x in (p, q)
    ]
    found = (both[0] == both[1]).double().mean()
    ratios = torch.maximum(p / p.unsqueeze(1), q / q.unsqueeze(1))  # [i, j]
    expected = (1 / ratios.sum(dim=1)).sum()
    distance = (p - q).abs().sum() / 2
    assert abs(found - expected) < 5 * math.sqrt(0.25 / 40_000) + 1e-12
    assert (1 - distance) / (1 + distance) <= expected + 1e-12 <= 1 - distance + 2e-12


def test_the_best_candidates_are_drawn_without_replacement() -> None:
    p = TARGET[FIRST].double().softmax(dim=-1)
    seeds = seeds_of(20_000)
    positions = torch.zeros(20_000, 1, dtype=torch.int64)
    tokens = perturb(p.expand(20_000, 1, -1), seeds, positions, 0.7).topk(2).indices[:, 0]
    pairs = p.unsqueeze(1) * p / (1 - p.unsqueeze(1))
    for value in p_values(tokens, pairs.fill_diagonal_(0)):
        assert value > ACCEPTED


@pytest.mark.parametrize("temperature", [0.05, 0.5, 2.0])
def test_perturbed_logits_are_logits_with_noise_of_the_temperatures_size(
    temperature: float,
) -> None:
    section = SamplingSection(temperature=temperature)
    logits = TARGET[:2].double()
    rows = CoupledSampling(section).perturbed(logits, 0, [3, 8])
    seed = torch.tensor([derive_seed(0, 0)])
    gumbel = -exponentials(seed, torch.tensor([[3, 8]]), torch.arange(VOCAB))[0].log()
    shifts = rows - logits.float().double() - temperature * gumbel
    assert torch.allclose(shifts, shifts[:, :1].expand_as(shifts), atol=1e-9)
