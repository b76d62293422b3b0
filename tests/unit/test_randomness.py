"""Random numbers from a hash: equal to the published generator, uniform, independent, and the same
in any batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from magicdec.request import Request, SamplingParams
from magicdec.sampling.randomness import Purpose, derive_seed, splitmix64, uniforms, uniforms_ahead


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
    seeds = torch.tensor([r.sampling.seed for r in requests])
    emitted = torch.tensor([len(r.output_ids) for r in requests])
    return uniforms_ahead(seeds, emitted, count, purpose, skip)


def test_a_request_draws_the_same_in_any_batch() -> None:
    requests = [
        Request(i, (1,), SamplingParams(9, seed=derive_seed(0, i)), [5] * i) for i in (4, 2)
    ]
    both = ahead(requests, 3, Purpose.ACCEPT)
    assert both.shape == (2, 3) and both.unique().numel() == 6
    for i, r in enumerate(requests):
        assert torch.equal(ahead([r], 3, Purpose.ACCEPT)[0], both[i])
        later = ahead([r], 1, Purpose.ACCEPT, skip=2)
        assert torch.equal(later[0], both[i, 2:])
        expected = uniforms(
            torch.tensor([r.sampling.seed]), torch.tensor([len(r.output_ids)]), Purpose.ACCEPT
        )
        assert torch.equal(expected, both[i, :1])
        assert not torch.equal(ahead([r], 3, Purpose.DRAFT)[0], both[i])
    requests[0].output_ids.append(7)
    assert torch.equal(ahead(requests, 2, Purpose.ACCEPT)[0], both[0, 1:])


def test_seeds_of_requests_differ_and_fit_int64() -> None:
    seeds = [derive_seed(s, i) for s in (0, 1, (1 << 63) - 1) for i in range(500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert all(SamplingParams(1, seed=seed).seed == seed for seed in seeds)
