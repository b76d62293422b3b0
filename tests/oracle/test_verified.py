"""Verification-guided KV: the arithmetic of the choice, the reader that keeps it fresh, and the
native choice of blocks, which is that of torch's operators."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from conftest import TINY, make_requests, make_runner, pack, random_prompts, tiny_transformer
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded import CODES
from torch import Tensor

from magicdec.attention.native import NativeBackend
from magicdec.distributed.groups import Group
from magicdec.engine.engine import Engine
from magicdec.kv.view import WEIGHTS_BLOCK
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Batch
from magicdec.speculation.block_choice import add_mean_keys, score_blocks, top_blocks
from magicdec.speculation.draft_length import FixedLength
from magicdec.speculation.model_drafter import SelfDrafter
from magicdec.speculation.policies.verified import VerifiedKV, WeighedBlocks
from magicdec.speculation.steps.speculative import Speculative
from magicdec.speculation.steps.steps import DecodeSteps


def speculative(runner: ModelRunner, reader: WeighedBlocks, gamma: int) -> Speculative:
    drafter = SelfDrafter(reader)
    steps = DecodeSteps(runner, drafter, nullcontext)
    return Speculative(runner, drafter, FixedLength(gamma), steps)


def heaviest(policy: VerifiedKV, committed: list[int], mass: Tensor) -> Tensor:
    """The policy's choice for lengths that the host knows."""
    most = max(policy.split(length)[1] for length in committed)
    return policy.top_blocks(torch.tensor(committed), mass, most)


@settings(max_examples=300, deadline=None)
@given(
    committed=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    sinks=st.integers(0, 40),
    window=st.integers(1, 60),
    more=st.integers(0, 150),
    seed=st.integers(0, 50),
)
def test_the_choice_is_sinks_window_and_the_heaviest_blocks(
    committed: list[int], sinks: int, window: int, more: int, seed: int
) -> None:
    policy = VerifiedKV(sinks, window, sinks + window + more)
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-max(committed) // WEIGHTS_BLOCK)
    mass = torch.rand(2, len(committed), 3, blocks, generator=generator)
    mass = mass * (torch.rand(mass.shape, generator=generator) < 0.7)  # some have none at all
    ranges = heaviest(policy, committed, mass)
    assert ranges.shape[:3] == mass.shape[:3]
    for row, length in enumerate(committed):
        start, count = policy.split(length)
        assert policy.num_visible(length) <= min(length, policy.budget)
        assert length - start >= min(length, window)
        for layer in range(2):
            for head in range(3):
                flat = ranges[layer, row, head].flatten().tolist()
                assert flat == sorted(flat), "ascending and disjoint"
                seen = {p for a, b in ranges[layer, row, head].tolist() for p in range(a, b)}
                assert len(seen) == policy.num_visible(length)
                assert {*range(min(sinks, length)), *range(start, length)} <= seen
                between = list(range(-(-sinks // WEIGHTS_BLOCK), start // WEIGHTS_BLOCK))
                taken = [b for b in between if b * WEIGHTS_BLOCK in seen]
                assert len(taken) == count
                weights = mass[layer, row, head]
                left = [float(weights[b]) for b in between if b not in taken]
                assert all(float(weights[b]) >= max(left, default=0.0) for b in taken)


def test_a_row_within_the_budget_is_read_whole() -> None:
    policy = VerifiedKV(16, 60, 257)
    for committed in (0, 1, 16, 256, 257):
        assert policy.num_visible(committed) == committed
    assert all(257 - WEIGHTS_BLOCK < policy.num_visible(c) <= 257 for c in range(258, 600))


def test_what_is_not_known_yet_goes_to_the_newest() -> None:
    ranges = VerifiedKV(4, 20, 70).ranges(torch.tensor([200, 30]))
    kept = [(a, b) for a, b in ranges[0].tolist() if a < b]
    assert kept == [(0, 4), (144, 160), (160, 176), (176, 200)]
    assert [(a, b) for a, b in ranges[1].tolist() if a < b] == [(0, 30)]


@pytest.mark.parametrize(
    ("sinks", "window", "budget"), [(16, 1, 16), (0, 0, 5), (-1, 2, 5), (4, 9, 12)]
)
def test_a_budget_without_room_is_refused(sinks: int, window: int, budget: int) -> None:
    with pytest.raises(ValueError, match=f"KV budget {budget} has no room"):
        VerifiedKV(sinks, window, budget)


def started(
    dtype: torch.dtype, lengths: list[int], policy: VerifiedKV
) -> tuple[ModelRunner, WeighedBlocks, Batch, Engine]:
    """A prefilled batch and a reader that has not begun."""
    model = tiny_transformer(replace(TINY, num_kv_heads=3), dtype=dtype)
    if dtype == torch.bfloat16:
        pack(model)
    runner = make_runner(model, len(lengths), 160, NativeBackend())
    engine = Engine(runner, 64)
    engine.prefill(make_requests(random_prompts(lengths, TINY.vocab_size), 20))
    batch = Batch(tuple(engine.scheduler.running))
    return runner, WeighedBlocks(runner, policy), batch, engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_beginning_leaves_the_cache_as_it_was(dtype: torch.dtype) -> None:
    """The newest prompt tokens are run a second time in another company; not a bit of it stays."""
    runner, reader, batch, _ = started(dtype, [120, 7, 90], VerifiedKV(4, 16, 64))
    before = [runner.cache.k.clone(), runner.cache.v.clone()]
    lens = runner.cache.seq_lens.clone()
    reader.admit(batch.requests)
    assert torch.equal(runner.cache.k, before[0]) and torch.equal(runner.cache.v, before[1])
    assert runner.cache.lengths == [120, 7, 90] and torch.equal(runner.cache.seq_lens, lens)
    # Both long rows know where 16 queries of two heads looked; the short one needs no choice.
    assert (reader._weights.sum(3)[:, [0, 2]] - 32).abs().max() < 0.5
    assert not reader._weights[:, 1].any()


def test_drafts_read_the_blocks_that_the_verification_before_looked_at() -> None:
    """Every step: the choice is that of the masses which the verification's backend gave, and no
    draft reads more than the budget."""
    policy = VerifiedKV(4, 16, 64)
    runner, reader, batch, engine = started(torch.float32, [120, 100], policy)
    strategy = speculative(runner, reader, 3)
    strategy.admit(batch)
    told: list[tuple[int, Tensor]] = []
    views = []
    run = runner.backend.run
    run_with_weights = runner.backend.run_with_weights

    def spy(layer, q, k, v, view):  # type: ignore[no-untyped-def]
        views.append((layer, view))
        return run(layer, q, k, v, view)

    def spy_weights(layer, q, k, v, view):  # type: ignore[no-untyped-def]
        out, mass = run_with_weights(layer, q, k, v, view)
        told.append((layer, mass.clone()))
        return out, mass

    # type: ignore[method-assign]
    runner.backend.run = spy
    runner.backend.run_with_weights = spy_weights
    chosen = []
    for _ in range(4):
        settled = list(runner.cache.lengths)
        masses = dict(told)
        views[:] = []
        told[:] = []
        engine.scheduler.commit(batch, strategy.step(batch), 0.0)
        assert len(views) == 3 * 2 and len(told) == 2, "3 drafts and a verification of 2 layers"
        for layer, view in views:
            assert all(
                n - (length - c) <= policy.budget
                for n, length, c in zip(view.num_visible, view.lengths, settled, strict=True)
            )
            assert view.ranges is views[0][1].ranges, "chosen once a step"
            if masses:
                mass = torch.stack([masses[0], masses[1]])
                expected = heaviest(policy, settled, mass)[layer]
                assert torch.equal(view.layer_ranges(layer)[:, :, :-1], expected)
        chosen.append(views[0][1].ranges)
    assert len({str(c.tolist()) for c in chosen}) > 1, "the choice follows the text"
    assert any(not torch.equal(c[:, :, 0], c[:, :, 1]) for c in chosen), "heads differ"


def test_a_choice_is_for_its_own_rows() -> None:
    """Also where no verification came in between."""
    policy = VerifiedKV(4, 16, 64)
    _, reader, batch, _ = started(torch.float32, [120, 100], policy)
    reader.admit(batch.requests)
    for rows in ([0], [1], [1, 0]):
        settled = reader.lengths(rows)
        reader.forward(torch.ones(len(rows), 1, dtype=torch.int64), rows, settled)
        reader.rewind(rows, settled)
        assert reader._choice is not None
        expected = heaviest(policy, list(settled.bounds), reader._weights[:, rows])
        assert torch.equal(reader._choice[1].key_ranges, expected)


def test_a_step_without_drafts_watches_nothing() -> None:
    """It is a step of the baseline and costs as much; what was known before stays known."""
    runner, reader, batch, engine = started(torch.float32, [120, 100], VerifiedKV(4, 16, 64))
    strategy = speculative(runner, reader, 0)
    strategy.admit(batch)
    before = reader._weights.clone()
    output = strategy.step(batch)
    engine.scheduler.commit(batch, output, 0.0)
    assert [len(t) for t in output.token_ids] == [1, 1]
    assert output.num_accepted is None and torch.equal(before, reader._weights)


@pytest.mark.parametrize("window", [None, 30, 48, 64, 300])
@pytest.mark.parametrize("sinks", [0, 4, 20, 40])
def test_verified_blocks_lie_in_the_window(sinks: int, window: int | None) -> None:
    """Ranges are disjoint, ascending, as many as said, and of the window before the next token."""
    for budget in (sinks + 20, sinks + 41):
        policy = VerifiedKV(sinks, 9, budget, window)
        for committed in range(1, 200, 7):
            mass = torch.rand(2, 1, 3, -(-committed // 16))
            ranges = heaviest(policy, [committed], mass)[:, 0]
            kept = [{p for a, b in r for p in range(a, b)} for r in ranges.flatten(0, 1).tolist()]
            first = 0 if window is None else max(0, committed + 1 - window)
            for positions, r in zip(kept, ranges.flatten(0, 1), strict=True):
                assert len(positions) == policy.num_visible(committed) <= budget
                assert len(positions) == int((r[:, 1] - r[:, 0]).sum()), "disjoint"
                assert (r.flatten().diff() >= 0).all() and r[-1, 1] == committed
                assert min(positions) >= first
                assert len(positions) == committed - first or len(positions) > budget - 16 - 15


DTYPES = [torch.float32, torch.bfloat16]


@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=4),
    budget=st.integers(20, 300),
    sinks=st.integers(0, 9),
    window=st.integers(1, 11),
    sliding_window=st.none() | st.integers(30, 400),
)
def test_the_best_blocks(
    lengths: list[int], budget: int, sinks: int, window: int, sliding_window: int | None
) -> None:
    policy = VerifiedKV(sinks, window, budget, sliding_window)
    num_blocks = -(-max(lengths) // WEIGHTS_BLOCK)
    most = min(num_blocks, max(policy.split(length)[1] for length in lengths))
    kept = torch.rand(2, 6, 3, num_blocks + 3)  # of more rows and blocks than take part
    rows = torch.tensor([5, 0, 3, 2][: len(lengths)])
    scores = kept[:, rows, :, :num_blocks]
    expected = policy.top_blocks(torch.tensor(lengths), scores, most)
    pairs = [(policy.sinks(length), policy.split(length)) for length in lengths]
    split = [[sink[0] for sink, _ in pairs], [sink[1] for sink, _ in pairs]]
    split += [[middle[0] for _, middle in pairs], [middle[1] for _, middle in pairs], lengths]
    assert torch.equal(top_blocks(kept, rows, split, most), expected)


@given(
    blocks=st.lists(st.tuples(*[st.integers(0, 40)] * 2), min_size=1, max_size=3),
    rep=st.integers(1, 3),
)
def test_scores_are_a_softmax_over_the_blocks_that_may_be_chosen(
    blocks: list[tuple[int, int]], rep: int
) -> None:
    torch.manual_seed(0)
    blocks = [(min(pair), max(pair)) for pair in blocks]
    queries = torch.randn(2, 4, 3, rep, 16)
    means = torch.randn(2, 2, 3, 50, 16)  # two texts, each of which several rows may fork
    rows = torch.tensor([2, 0, 3][: len(blocks)])
    texts = torch.tensor([1, 0, 1][: len(blocks)])
    found = score_blocks(queries, means, rows, texts, blocks, 45)
    logits = queries[:, rows] @ means[:, texts, :, :45].mT * 16**-0.5
    for b, (first, stop) in enumerate(blocks):
        expected = logits[:, b, ..., first:stop].double().softmax(dim=-1).sum(dim=2)
        own = found[:, b, :, first:stop].double()
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
        assert not found[:, b, :, :first].any() and not found[:, b, :, stop:].any()


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [*zip(DTYPES, DTYPES, strict=True), *((torch.bfloat16, codes) for codes in CODES)],
    ids=str,
)
def test_mean_keys(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    model = pack(tiny_transformer(dtype=dtype))
    runner = ModelRunner(model, NativeBackend(), Group((0,), 0), 3, 300, kv_dtype=kv_dtype)
    for row in (2, 0, 1):
        runner.allocate(row)  # blocks of zeros
    runner.cache.shape.layout.fill_randomly(runner.cache.k, torch.Generator().manual_seed(0))
    rows = [1, 2]
    first = [3, 0]
    last = [17, 9]
    means = torch.zeros(TINY.num_layers, 3, TINY.num_kv_heads, 20, TINY.head_dim)
    add_mean_keys(runner.cache, rows, first, last, means)
    for layer in range(TINY.num_layers):
        keys = runner.cache.first_keys(layer, torch.tensor(rows), 17 * WEIGHTS_BLOCK).double()
        expected = keys.unflatten(2, (-1, WEIGHTS_BLOCK)).mean(dim=3)
        assert expected.std() > 0.1, "there is something to be wrong about"
        for b, (row, begin, end) in enumerate(zip(rows, first, last, strict=True)):
            found = means[layer, row, :, begin:end].double()
            torch.testing.assert_close(found, expected[b, :, begin:end], rtol=1e-5, atol=1e-6)
            assert not means[layer, row, :, :begin].any() and not means[layer, row, :, end:].any()
    assert not means[:, 0].any()
