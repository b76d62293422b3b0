"""From logits to tokens: penalties and filters against transformers, ties, rows with one token
left, the inverse CDF, and refused values; and the random numbers of requests."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from magicdec.cli.drivers import RUN
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import SamplingSection
from magicdec.runner.request import Request, SamplingParams
from magicdec.runner.sampling.metadata import NO_TOP_K, Draws, Filters, Penalties
from magicdec.runner.sampling.randomness import Purpose, derive_seed, splitmix64, uniforms
from magicdec.runner.sampling.sampling import by_selection, by_sorting, make_params, process, sample
from magicdec.runner.sampling.sampling import probabilities as filtered

VOCAB = 50
BELOW_ONE = math.nextafter(1.0, 0.0)


def random_logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def params(**values: float) -> SamplingParams:
    return SamplingParams(9, **values)  # type: ignore[arg-type]


def probabilities(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    return filtered(logits, Filters.of(params, logits.device))


def request(prompt: list[int], output: list[int], **values: float) -> Request:
    return Request(0, tuple(prompt), params(**values), output)


def penalised(logits: Tensor, request: Request, drafted: list[int]) -> Tensor:
    """The logits [V] of one position after the penalties, computed token by token."""
    p = request.sampling
    out = logits.clone().unsqueeze(0)
    output = [*request.output_ids, *drafted]
    history = torch.tensor([[*request.prompt_ids, *output]])
    out = RepetitionPenaltyLogitsProcessor(p.repetition_penalty)(history, out)[0]
    for token in set(output):
        out[token] -= p.presence_penalty
    return out


REQUESTS = (
    request([3, 3, 7, 9], [7, 11], repetition_penalty=1.7),
    request([4], [], temperature=0.8, top_k=3),
    request([5, 6], [6, 6, 1], presence_penalty=1.25, temperature=1.0),
    request([8] * 20, [0], presence_penalty=-0.5, repetition_penalty=0.6),
    request([2, 1], [], repetition_penalty=1.3, presence_penalty=2.0),
)
PENALTIES = Penalties.of(REQUESTS, VOCAB, torch.device("cpu"))
DRAFTS = torch.tensor([[9, 11, 20], [0, 1, 2], [30, 30, 5], [8, 0, 8], [49, 2, 49]])


def test_penalties_apply_to_the_history_of_each_position() -> None:
    logits = random_logits(len(REQUESTS), 4, VOCAB)
    before = logits.clone()
    result = process(logits, PENALTIES, DRAFTS)
    assert result.dtype == torch.float32 and torch.equal(logits, before), "a pure function"
    for row, r in enumerate(REQUESTS):
        for place in range(4):
            expected = penalised(logits[row, place], r, DRAFTS[row, :place].tolist())
            torch.testing.assert_close(result[row, place], expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(result[1], logits[1]), "no penalties"
    assert not torch.equal(result[0, 0], result[0, 3])


def test_penalties_while_drafting_equal_those_of_verification() -> None:
    logits = random_logits(len(REQUESTS), 4, VOCAB)
    chain = process(logits, PENALTIES, DRAFTS)
    for place in range(4):
        drafts = DRAFTS[:, :place] if place else None
        assert torch.equal(
            process(logits[:, place : place + 1], PENALTIES, drafts)[:, 0], chain[:, place]
        )


def test_without_penalties_logits_do_not_change() -> None:
    logits = random_logits(1, 4, VOCAB)
    assert Penalties.of(REQUESTS[1:2], VOCAB, logits.device) is None
    assert process(logits, None, DRAFTS[1:2]) is logits
    assert process(logits.bfloat16(), None, DRAFTS[1:2]).dtype == torch.float32


def warped(logits: Tensor, p: SamplingParams) -> Tensor:
    """The probabilities [N, V] by transformers, in the order of its `generate`."""
    warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(p.temperature)]
    if p.top_k:
        warpers.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        warpers.append(TopPLogitsWarper(p.top_p))
    if p.min_p:
        warpers.append(MinPLogitsWarper(p.min_p))
    scores = LogitsProcessorList(warpers)(torch.zeros(len(logits), 1).long(), logits.double())
    return scores.softmax(dim=-1)


FILTERS = [
    params(temperature=1.0),
    params(temperature=0.3),
    params(temperature=2.5),
    params(temperature=1.0, top_k=1),
    params(temperature=0.7, top_k=7),
    params(temperature=1.0, top_k=10_000),
    params(temperature=1.3, top_p=0.9),
    params(temperature=1.0, top_p=1e-9),
    params(temperature=1.0, min_p=0.05),
    params(temperature=1.0, min_p=1.0),
    params(temperature=1.5, top_k=20, top_p=0.8, min_p=0.1),
    params(temperature=0.9, top_k=5, top_p=0.5),
    params(temperature=3.0, top_p=0.95, min_p=0.02),
]


@pytest.mark.parametrize("vocab_size", [1, 2, VOCAB, 1009])
def test_filters_equal_transformers(vocab_size: int) -> None:
    logits = random_logits(len(FILTERS), 5, vocab_size, seed=vocab_size)
    result = probabilities(logits, FILTERS)
    assert result.dtype == torch.float64
    for row, p in enumerate(FILTERS):
        expected = warped(logits[row], p)
        assert torch.equal(result[row] > 0, expected > 0), p
        torch.testing.assert_close(result[row], expected, rtol=1e-12, atol=1e-15)
        alone = probabilities(logits[row : row + 1], [p])
        torch.testing.assert_close(result[row : row + 1], alone, rtol=1e-12, atol=1e-15)


@pytest.mark.narrow("values")
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("vocab_size", [1, 255, 257, 4097, 20_000])
def test_looking_at_the_likeliest_tokens_keeps_what_sorting_keeps(
    vocab_size: int, scale: float
) -> None:
    """Rows of a batch have filters of their own. Some scores are equal."""
    logits = random_logits(2, 3, vocab_size, seed=vocab_size).mul(scale / 5).double()
    logits[0, 0] = logits[0, 0].round(decimals=1)
    scores = logits - logits.amax(dim=-1, keepdim=True)
    for top_k in (1, 7, 300, 5000, NO_TOP_K):
        for top_p in (1e-9, 0.5, 0.95, 0.999999, 1.0):
            ks = torch.tensor([top_k, NO_TOP_K]).view(2, 1, 1)
            ps = torch.tensor([top_p, 0.3], dtype=torch.float64).view(2, 1, 1)
            assert torch.equal(by_selection(scores, ks, ps), by_sorting(scores, ks, ps))


def test_filters_keep_or_drop_equal_tokens_together() -> None:
    logits = torch.tensor([[[1.0, 2.0, 2.0, 0.0, 2.0, 0.0]]])
    for values in ({"top_k": 1}, {"top_k": 2}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 1.0}):
        probs = probabilities(logits, [params(temperature=1.0, **values)])
        expected = torch.tensor([0, 1, 1, 0, 1, 0]).double() / 3
        torch.testing.assert_close(probs[0, 0], expected)
    greedy = probabilities(logits, [params()])
    assert greedy.tolist() == [[[0, 1, 0, 0, 0, 0]]], "the smallest id among equals"
    flat = probabilities(torch.zeros(1, 1, 8), [params(temperature=2.0, top_k=2, top_p=0.5)])
    torch.testing.assert_close(flat[0, 0], torch.full((8,), 1 / 8).double())


def test_filters_that_leave_one_token_and_extreme_temperatures() -> None:
    only = torch.full((1, 1, 5), -math.inf)
    only[..., 3] = -7.0
    logits = torch.tensor([[[100.0, -100.0, 99.0, 0.0, 1.0]]])
    for p in FILTERS:
        assert probabilities(only, [p]).tolist() == [[[0, 0, 0, 1, 0]]]
        assert probabilities(logits, [p]).sum() == pytest.approx(1.0)
    for temperature in (1e-9, 5e-324):
        cold = probabilities(logits, [params(temperature=temperature)])
        assert cold.tolist() == [[[1, 0, 0, 0, 0]]]
    hot = probabilities(logits, [params(temperature=1e300)])
    torch.testing.assert_close(hot[0, 0], torch.full((5,), 0.2).double())


def test_greedy_rows_in_a_batch_with_sampled_rows() -> None:
    logits = random_logits(3, 2, VOCAB)
    mixed = probabilities(logits, [params(), params(temperature=1.0), params(top_k=5)])
    for row in (0, 2):
        assert torch.equal(mixed[row].argmax(-1), logits[row].argmax(-1))
        assert mixed[row].max(-1).values.tolist() == [1, 1] and mixed[row].sum() == 2
    assert (mixed[1] > 0).all()


def test_samples_follow_the_inverse_cdf() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]).double()
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, BELOW_ONE], dtype=torch.float64)
    for scale in (1.0, 1e-300, 7.0):  # probabilities need not sum to 1
        assert sample(probs.expand(6, 6) * scale, u).tolist() == [1, 1, 3, 3, 4, 4]
    u = (torch.arange(1000).double() + 0.5) / 1000
    counts = sample(probs.expand(1000, 6), u).bincount(minlength=6)
    assert counts.tolist() == [0, 250, 0, 500, 250, 0]


def test_an_impossible_token_is_never_sampled() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(4000, 97, generator=generator, dtype=torch.float64)
    probs[torch.rand(4000, 97, generator=generator) < 0.9] = 0
    probs[:, 5] += 1e-300
    probs[2000:, 60:] = 0
    probs /= probs.sum(-1, keepdim=True)
    rows = torch.arange(4000)
    for u in (0.0, 5e-324, 0.5, 1 - 2**-24, BELOW_ONE):
        ids = sample(probs, torch.full((4000,), u, dtype=torch.float64))
        assert (probs[rows, ids] > 0).all()
    # If rounding keeps every sum below u, the last possible token is chosen.
    assert sample(torch.tensor([[0.5, 0.5, 0.0]]).double(), torch.tensor([1.0])).tolist() == [1]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "--temperature -0.1 is too small; it must be at least 0"),
        ("temperature", math.nan, "--temperature nan is not a finite number"),
        ("top_k", -1, "--top_k -1 is too small"),
        ("top_p", 0.0, "--top_p 0.0 is too small; it must be more than 0"),
        ("top_p", 1.1, "--top_p 1.1 is too large; it must be at most 1"),
        ("min_p", 1.5, "--min_p 1.5 is too large"),
        ("repetition_penalty", 0.0, "--repetition_penalty 0.0 is too small"),
        ("repetition_penalty", math.inf, "--repetition_penalty inf is not a finite number"),
        ("presence_penalty", 2.1, "--presence_penalty 2.1 is too large; it must be at most 2"),
        ("seed", -1, "--sampling_seed -1 is too small"),
        ("seed", 1 << 63, "is too large; it must be less than"),
    ],
)
def test_a_program_is_refused_what_a_user_is(name: str, value: Any, message: str) -> None:
    for make in (
        lambda: RunConfig(sampling=SamplingSection(**{name: value})).check(1),
        lambda: params(**{name: value}),
    ):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            make()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", ["--top_k 5", "--top_p 0.9", "--min_p 0.1"])
def test_filters_are_refused_with_greedy_decoding(flag: str) -> None:
    message = re.escape("does nothing at --temperature 0 (greedy); give a --temperature larger")
    with pytest.raises(ValueError, match=message):
        RUN.read(flag.split()).check(1)
    RUN.read([*flag.split(), "--temperature", "0.1"]).check(1)


def test_a_request_gets_the_parameters_of_the_section_and_its_own_seed() -> None:
    section = SamplingSection(0.7, 5, 0.9, 0.1, 1.2, -1.0, seed=3)
    made = [make_params(section, 9, (2,), request_id) for request_id in (0, 1, 0)]
    assert made[0] == made[2] and made[0].seed != made[1].seed
    assert made[0] == SamplingParams(9, (2,), 0.7, 5, 0.9, 0.1, 1.2, -1.0, made[0].seed)
    assert params().is_greedy and params().is_plain and not params(temperature=0.1).is_greedy
    assert params(repetition_penalty=1.1).is_greedy
    for values in ({"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"temperature": 1.0}):
        assert not params(**values).is_plain


def test_the_generator_is_splitmix64() -> None:
    """The first outputs for the seed 1234567, as the reference implementation prints them."""
    bits = splitmix64(torch.tensor(1234567), torch.arange(5))
    assert [b % (1 << 64) for b in bits.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def seeds_of(count: int) -> Tensor:
    return torch.tensor([derive_seed(7, i) for i in range(count)])


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@pytest.mark.parametrize("purpose", Purpose)
def test_numbers_are_uniform_over_requests_and_positions(purpose: Purpose) -> None:
    """The tolerance is five standard errors of 200,000 draws."""
    positions = torch.arange(1000).expand(200, -1)
    u = uniforms(seeds_of(200), positions, purpose)
    assert u.dtype == torch.float64 and u.shape == (200, 1000)
    assert u.min() >= 0 and u.max() < 1
    assert u.unique().numel() == u.numel()
    error = 5 / math.sqrt(u.numel())
    assert abs(u.mean() - 1 / 2) < error * math.sqrt(1 / 12)
    assert abs(u.square().mean() - 1 / 3) < error * math.sqrt(4 / 45)
    counts = torch.histc(u, 50, 0, 1)
    chi_squared = float(((counts - 4000).square() / 4000).sum())
    assert chi_squared < 49 + 5 * math.sqrt(2 * 49)


def test_numbers_are_independent_across_purposes_positions_and_requests() -> None:
    positions = torch.arange(1001).expand(200, -1)
    draws = {p: uniforms(seeds_of(200), positions, p) for p in Purpose}
    bound = 5 / math.sqrt(200_000)
    for a in Purpose:
        for b in Purpose:
            assert a == b or abs(correlation(draws[a], draws[b])) < bound
            assert abs(correlation(draws[a][:, 1:], draws[b][:, :-1])) < bound
            assert abs(correlation(draws[a][1:], draws[b][:-1])) < bound


def ahead(requests: list[Request], count: int, purpose: Purpose, skip: int = 0) -> Tensor:
    draws = Draws.of(requests, torch.device("cpu"))
    assert draws is not None
    return draws.ahead(count, purpose, skip)


def test_a_request_draws_the_same_in_any_batch() -> None:
    requests = [
        Request(i, (1,), SamplingParams(9, temperature=1.0, seed=derive_seed(0, i)), [5] * i)
        for i in (4, 2)
    ]
    both = ahead(requests, 3, Purpose.ACCEPT)
    assert both.shape == (2, 3) and both.unique().numel() == 6
    for i, r in enumerate(requests):
        assert torch.equal(ahead([r], 3, Purpose.ACCEPT)[0], both[i])
        later = ahead([r], 1, Purpose.ACCEPT, skip=2)
        assert torch.equal(later[0], both[i, 2:])
        expected = uniforms(
            torch.tensor([r.sampling.seed]), torch.tensor([[len(r.output_ids)]]), Purpose.ACCEPT
        )
        assert torch.equal(expected[0], both[i, :1])
        assert not torch.equal(ahead([r], 3, Purpose.DRAFT)[0], both[i])
    requests[0].output_ids.append(7)
    assert torch.equal(ahead(requests, 2, Purpose.ACCEPT)[0], both[0, 1:])


def test_seeds_of_requests_differ_and_fit_int64() -> None:
    seeds = [derive_seed(s, i) for s in (0, 1, (1 << 63) - 1) for i in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert all(SamplingParams(1, seed=seed).seed == seed for seed in seeds)
