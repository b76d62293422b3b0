"""The check itself: what is identical, what is a tie, what is a divergence. And the verdict on
whole runs of the demo model whose bits depend on the shape of a forward: rounding is excused, a
lossy rule is not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import TINY, make_requests, make_runner, random_prompts, tiny_transformer
from lossy import plant, short_run

from magicdec.bench.check.check import check_outputs
from magicdec.bench.check.replays import PrefilledReplays
from magicdec.bench.check.rounding import (
    Gaps,
    WiderView,
    chances_to_differ,
    is_by_chance,
    largest_error,
    measure_gaps,
    most_by_chance,
    view_of,
)
from magicdec.bench.measure import execute
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.distributed.groups import Launch
from magicdec.engine.engine import Engine
from magicdec.model.transformer import Transformer
from magicdec.records.correctness import Correctness
from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import parse_line
from magicdec.runner.request import Request, SamplingParams
from magicdec.setup.prepare import prepare
from magicdec.speculation.steps.speculative import autoregressive
from magicdec.speculation.steps.strategy import Setup

NUM_NEW = 30


def decoded(model: Transformer) -> list[Request]:
    engine = Engine(make_runner(model, 2, 90), 64)
    requests = make_requests(random_prompts([40, 25], TINY.vocab_size), NUM_NEW)
    engine.prefill(requests)
    strategy = autoregressive(Setup(engine.runner, DecodingSection(), KVSection("full")))
    engine.begin(strategy)
    return [r.snapshot() for r in engine.decode(strategy)]


def with_twin(token: int) -> Transformer:
    """A model in which id 96 has the very logits of `token`, and reads like it: always a tie."""
    model = tiny_transformer()
    model.head.weight[96] = model.head.weight[token]
    model.embedding.weight[96] = model.embedding.weight[token]
    return model


def check(
    model: Transformer, expected: list[Request], found: list[Request], gamma: int = 3
) -> Correctness:
    import copy

    def make_wider():  # type: ignore[no-untyped-def]
        return make_runner(copy.deepcopy(model).double(), 1, 90)

    replays = PrefilledReplays(make_runner(model, 2, 90), make_wider, gamma, prefill_chunk=32)
    return check_outputs("autoregressive", expected, found, replays)


def test_equal_outputs_are_identical_and_need_no_replay() -> None:
    expected = decoded(tiny_transformer())
    found = decoded(tiny_transformer())

    def refuse():  # type: ignore[no-untyped-def]
        raise AssertionError("nothing to replay")

    nothing: Any = None
    result = check_outputs(
        "autoregressive", expected, found, PrefilledReplays(nothing, refuse, 3, 32)
    )
    assert result.identical and result.num_tokens == 2 * NUM_NEW and result.num_excused == 0
    assert result.num_diverged == 0


@pytest.mark.parametrize("index", [0, 7, NUM_NEW - 1])
def test_a_wrong_token_is_a_divergence(index: int) -> None:
    model = tiny_transformer()
    expected = decoded(model)
    found = decoded(model)
    found[1].output_ids[index] = (found[1].output_ids[index] + 1) % 90
    result = check(model, expected, found)
    assert not result.identical and result.num_diverged and result.num_excused == 0
    assert result.first_divergence is not None
    assert result.first_divergence.sequence == 1 and result.first_divergence.index == index
    assert result.first_divergence.margin > 1e-2


def test_a_missing_token_is_a_divergence() -> None:
    model = tiny_transformer()
    expected = decoded(model)
    found = decoded(model)
    found[0].output_ids.pop()
    assert check(model, expected, found).num_diverged


def test_a_tie_is_settled_and_counted() -> None:
    plain = decoded(tiny_transformer())
    token = plain[0].output_ids[5]
    model = with_twin(token)
    expected = decoded(model)
    found = decoded(model)
    at = expected[0].output_ids.index(token)
    found[0].output_ids[at] = 96
    result = check(model, expected, found)
    assert not result.identical and result.num_diverged == 0 and result.num_excused == 1
    assert result.first_divergence is not None and result.first_divergence.margin < 1e-9
    # The rest of the row is replayed too: a tie must not wave a wrong token through.
    found[0].output_ids[at + 3] = (found[0].output_ids[at + 3] + 1) % 90
    assert check(model, expected, found).num_diverged


def test_float64_replay_agrees_with_float32_decoding() -> None:
    model = tiny_transformer()
    runner = make_runner(tiny_transformer(dtype=torch.float64), 1, 90)
    for request in decoded(model):
        assert view_of(runner, request, 16).shortfalls.max() < 1e-4


def test_the_replay_by_tokens_is_the_decoding_itself() -> None:
    """Outputs of unequal lengths, in two batches: the best token of each replayed position is the
    one that was emitted."""
    model = tiny_transformer()
    requests = decoded(model)
    requests[1].output_ids = requests[1].output_ids[:8]
    both = measure_gaps(make_runner(model, 2, 90), requests, 3, 64)
    alone = measure_gaps(make_runner(model, 1, 90), requests, 3, 64)
    for request, found in zip(requests * 2, both + alone, strict=True):
        assert found.pairs[:, 0].tolist() == request.output_ids[1:]
        assert (found.decode > 0).all() and len(found.verify) == len(found.decode)
        assert (found.verify - found.decode).abs().max() < 1e-4


def test_equal_shapes_excuse_nothing() -> None:
    """The tie that is settled above diverges if the two shapes compute the same bits."""
    model = with_twin(decoded(tiny_transformer())[0].output_ids[5])
    expected = decoded(model)
    found = decoded(model)
    twin = decoded(tiny_transformer())[0].output_ids[5]
    found[0].output_ids[expected[0].output_ids.index(twin)] = 96
    result = check(model, expected, found, gamma=0)
    assert result.num_diverged and result.most_differing == 0 and result.expected_differing == 0


def test_too_many_shortfalls_are_a_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token is within the bound and as many sequences may differ, but the wider model's choice
    is missed at more tokens than chance allows."""
    model = tiny_transformer()
    expected = decoded(model)
    found = decoded(model)
    for request in found:
        request.output_ids[3:15] = [token + 1 for token in request.output_ids[3:15]]
    monkeypatch.setattr("magicdec.bench.check.check.most_by_chance", lambda chances: 2)
    monkeypatch.setattr("magicdec.bench.check.check.largest_error", lambda gaps, wider: 1e3)
    result = check(model, expected, found)
    assert result.num_short is not None and result.num_short_reference == 0
    assert result.num_short > 9 and result.num_diverged == 2


def test_limits_of_chance() -> None:
    assert most_by_chance([0.0] * 9) == 0 and most_by_chance([1.0, 1.0, 0.0]) == 2
    # Of 10 fair coins, 9 heads or fewer have a probability of 0.99902, 8 or fewer of 0.989.
    assert most_by_chance([0.5] * 10) == 9
    assert most_by_chance([0.001]) == 0 and most_by_chance([0.0011]) == 1
    assert is_by_chance(0, 0) and is_by_chance(0, 9) and not is_by_chance(0, 10)
    assert is_by_chance(16, 15) and not is_by_chance(16, 48) and is_by_chance(48, 16)


def test_the_predicted_number_of_changes_is_that_of_a_simulation() -> None:
    """Gaps and moves as in bfloat16, in steps of 1/16: predicted and simulated numbers agree."""
    generator = torch.Generator().manual_seed(0)
    found = []
    changed = 0
    for _ in range(800):
        true = torch.rand(8, generator=generator, dtype=torch.float64)
        noise = torch.randn(2, 8, generator=generator, dtype=torch.float64) * 0.05
        gaps = ((true + noise) * 16).round() / 16  # in both shapes
        has_smaller_id = torch.rand(8, generator=generator) < 0.5
        chosen = (gaps > 0) | ((gaps == 0) & has_smaller_id)
        changed += bool((chosen[0] != chosen[1]).any())
        decode, verify = gaps * torch.where(chosen[0], 1, -1)
        found.append(Gaps(torch.zeros(8, 2), decode, verify))
    assert sum(chances_to_differ(found)) == pytest.approx(changed, rel=0.15)


def test_a_faulty_shape_does_not_widen_the_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    true = torch.rand(400, generator=generator, dtype=torch.float64)
    noise = torch.randn(400, generator=generator, dtype=torch.float64)
    view = [WiderView(torch.zeros(401), true)]
    good = true + 0.01 * noise
    bad = true + noise
    for shapes in ((good, good), (good, bad), (bad, good)):
        assert 0.03 < largest_error([Gaps(torch.zeros(400, 2), *shapes)], view) < 0.06


# Gaps of eight positions by the wider model. The quarter of them with the smallest ones are two.
TRUE = (0.1, -0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
BOUND = 5 * ((0.03**2 + 0.04**2) / 2) ** 0.5  # of errors of 0.03 and 0.04 there


@dataclass(frozen=True)
class KnownReplays:
    """Gaps and shortfalls by hand: decode steps are wrong by 0.03 and 0.04 at the two smallest
    gaps, verifications by more, and a token of the pass falls short by `margin`."""

    margin: float

    def gaps(self, requests: Sequence[Request]) -> list[Gaps]:
        true = torch.tensor(TRUE, dtype=torch.float64)
        decode = true + torch.tensor([0.03, -0.04, *[0.9] * 6], dtype=torch.float64)
        verify = true + torch.tensor([0.3, -0.4, *[0.0] * 6], dtype=torch.float64)
        return [Gaps(torch.zeros(8, 2), decode, verify) for _ in requests]

    def views(self, requests: Sequence[Request], pairs: Sequence[Any]) -> list[WiderView]:
        shortfalls = torch.zeros(len(requests), 9, dtype=torch.float64)
        shortfalls[-1, 5] = self.margin
        return [
            WiderView(shortfall, torch.tensor(TRUE, dtype=torch.float64))
            for shortfall in shortfalls
        ]


@pytest.mark.parametrize("side", [0.99, 1.01])
def test_the_bound_of_margins_by_hand(side: float) -> None:
    sampling = SamplingParams(9)
    expected, found = (Request(0, (1, 2), sampling, output_ids=[5] * 9) for _ in "ab")
    found.output_ids = [5, 5, 5, 5, 5, 6, 5, 5, 5]
    result = check_outputs("autoregressive", [expected], [found], KnownReplays(side * BOUND))
    assert result.margin_bound == pytest.approx(BOUND)
    assert result.num_diverged == (side > 1)
    assert result.first_divergence is not None and result.first_divergence.index == 5
    assert result.first_divergence.margin == pytest.approx(side * BOUND)


def test_a_logit_that_is_not_a_number_is_no_tie() -> None:
    model = tiny_transformer(dtype=torch.float64)
    (request, _) = decoded(tiny_transformer())
    model.head.weight[3] = float("nan")
    assert view_of(make_runner(model, 1, 90), request, 16).shortfalls.isinf().all()


def run(dtype: str, num_rows: int = 16) -> PassRecord:
    config = short_run(dtype, num_rows=num_rows)
    return execute(prepare(config, Launch(0, 1, 0, 1))).record


@pytest.mark.wide
def test_rounding_in_bfloat16_is_ok_with_ties() -> None:
    record = run("bfloat16")
    found = record.correctness
    assert found is not None and found.identical is False, "on this CPU too, rounding shows"
    assert record.status == "verified_with_ties" and record.passed and record.metrics is not None
    assert found.num_diverged == 0 and found.first_divergence is not None
    assert found.num_excused and found.most_differing and found.expected_differing
    assert found.num_excused <= found.most_differing < 16
    assert 0.5 < found.expected_differing < found.most_differing
    assert found.first_divergence.margin is not None and found.margin_bound is not None
    assert found.first_divergence.margin <= found.margin_bound < 0.25, "less than a fixed bound was"
    assert parse_line(record.to_json(), PassRecord).to_json() == record.to_json()


@pytest.mark.wide
def test_a_lossy_rule_in_bfloat16_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most margins of this rule are less than 0.25, which was once excused without limit."""
    plant(monkeypatch, 0.2)
    record = run("bfloat16")
    found = record.correctness
    assert record.status == "mismatch" and record.metrics is None and found is not None
    assert found.num_excused == 0 and found.num_diverged and found.most_differing
    assert found.num_diverged > found.most_differing


def test_float32_is_identical_and_a_lossy_rule_diverges(monkeypatch: pytest.MonkeyPatch) -> None:
    record = run("float32", 4)
    assert record.status == "verified" and record.correctness is not None
    assert record.correctness.identical and record.correctness.margin_bound is None
    plant(monkeypatch, 0.2)
    record = run("float32", 4)
    assert record.status == "mismatch" and record.correctness is not None
    assert record.correctness.most_differing == 0
    assert record.correctness.margin_bound is not None and record.correctness.margin_bound < 1e-4
