"""SnapKV's choice against the definition, written out head by head, and what the reader keeps of
it."""

from dataclasses import replace

import pytest
import torch
from attention_cases import OTHER_TILES
from conftest import TINY, make_requests, make_runner, random_prompts, tiny_transformer
from rounded import CODES
from torch import Tensor

from magicdec.attention import native
from magicdec.attention.native import NativeBackend
from magicdec.distributed.groups import Group
from magicdec.engine.engine import Engine
from magicdec.kv.cache import BatchRows
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.prompt_queries import PromptQueries
from magicdec.runner.request import Batch
from magicdec.speculation.observation import newest_queries, received_weights
from magicdec.speculation.policies.snapkv import ChosenCopy, SnapKV


def expected(queries: Tensor, keys: Tensor, policy: SnapKV) -> list[set[int]]:
    """The kept positions of each KV head, by loops over heads, queries and positions."""
    window, num_heads, size = queries.shape
    groups, num_keys, _ = keys.shape
    kept = []
    for g in range(groups):
        votes = torch.zeros(num_keys, dtype=torch.float64)
        for h in range(g * num_heads // groups, (g + 1) * num_heads // groups):
            for w in range(window):
                seen = num_keys - window + w + 1
                scores = keys[g, :seen].double() @ queries[w, h].double() / size**0.5
                votes[:seen] += scores.softmax(0)
        votes = votes[: num_keys - window]
        padded = torch.cat([torch.zeros(2), votes, torch.zeros(2)])
        near = torch.stack([padded[i : i + 5] for i in range(len(votes))])
        pooled = near.mean(1) if policy.pooling == "avg" else near.amax(1)
        best = pooled.topk(policy.budget - window).indices
        kept.append(set(best.tolist()) | set(range(num_keys - window, num_keys)))
    return kept


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
@pytest.mark.parametrize(("window", "pooling"), [(1, "avg"), (13, "max"), (32, "avg")])
def test_the_choice_is_the_definition(group: int, window: int, pooling: str) -> None:
    generator = torch.Generator().manual_seed(group * 100 + window)
    queries = 3 * torch.randn(2, window, 2 * group, 16, generator=generator)
    keys = torch.randn(2, 2, 117, 16, generator=generator)
    policy = SnapKV(window + 21, window, pooling)
    runner = make_runner(tiny_transformer(), 1, 8)
    found = policy.select(received_weights(runner, queries, keys), window)
    assert found.shape == (2, 2, window + 21)
    assert found[0, 0, -window:].tolist() == list(range(117 - window, 117))
    for row in range(2):
        wanted = expected(queries[row], keys[row], policy)
        kept = [set(head_keys.tolist()) for head_keys in found[row]]
        if pooling == "avg":
            assert kept == wanted
        else:  # a maximum is shared by its neighbours: which of equals is kept does not matter
            sizes = [len(ours & want) for ours, want in zip(kept, wanted, strict=True)]
            assert min(sizes) >= window + 21 - 4


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        *((torch.bfloat16, codes) for codes in CODES),
    ],
    ids=str,
)
@pytest.mark.parametrize("flags", [(), *OTHER_TILES], ids=str)
@pytest.mark.parametrize(("heads", "window"), [(2, 32), (6, 5), (10, 33)])  # 165 queries: blocks
def test_scores_in_the_tiles_of_the_cache(
    heads: int,
    window: int,
    flags: tuple[str, ...],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = native.kernel
    monkeypatch.setattr(
        "magicdec.runner.native_steps.executor.kernel",
        lambda size, *more: build(size, *more, *flags),
    )
    model = tiny_transformer(replace(TINY, num_heads=2, num_kv_heads=2, head_dim=64))
    group = Group((0,), 0)
    runner = ModelRunner(model.to(dtype), NativeBackend(), group, 3, 200, kv_dtype=kv_dtype)
    for row in (2, 0, 1):
        runner.allocate(row)
    runner.cache.shape.layout.fill_randomly(runner.cache.k, torch.Generator().manual_seed(0))
    rows = torch.tensor([1, 2])
    queries = torch.randn(2, window, heads, 64).to(dtype)
    for first, length in ((0, 199), (70, 128), (3, 40)):
        keys = runner.cache.first_keys(1, rows, length)[:, :, first:]
        wanted = received_weights(runner, queries.float(), keys.float())
        found = Executor.received(runner.cache, 1, rows, queries, first, length)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_lowest_score_stands_first_and_the_window_last() -> None:
    weights = torch.arange(20.0).view(1, 1, -1)
    # The mean of five neighbours; beyond the 16 tokens before the window there is nothing.
    pooled = {10: 10.0, 11: 11.0, 12: 12.0, 13: 13.0, 14: (12 + 13 + 14 + 15) / 5}
    found = SnapKV(9, 4).select(weights, 4)[0, 0].tolist()
    assert found == [*sorted(pooled, key=lambda p: pooled[p]), 16, 17, 18, 19]


def test_a_budget_that_holds_everything_keeps_everything() -> None:
    found = SnapKV(30, 8).select(torch.rand(2, 3, 30), 8)
    assert found.sort(dim=2).values.tolist() == [[list(range(30))] * 3] * 2


@pytest.mark.parametrize("chunk", [16, 64, 5])
def test_prefill_keeps_the_queries_that_a_rerun_shows(chunk: int) -> None:
    """A window of 12 lies in the last chunk, in the last two or in the last four; a prompt may be
    shorter than it. Another pass, and another prompt in the same row, find their own."""
    runner = make_runner(tiny_transformer(), 3, 100, NativeBackend())
    prefilled = PromptQueries(12)
    runner.set_observer(PromptQueries, prefilled)
    engine = Engine(runner, chunk)
    for seed in (0, 1):
        prompts = random_prompts([66, 9, 66], TINY.vocab_size, seed)
        requests = [r for r in engine.prefill(make_requests(prompts, 9)) if r.row != 1]
        short = [r for r in engine.requests if r.row == 1]
        for some, count in ((requests, 12), (short, 9)):
            forwards = runner.counts.copy().num_forwards
            kept = newest_queries(runner, some, count)
            assert runner.counts.copy().num_forwards == forwards, "no token has run again"
            runner.set_observer(PromptQueries, None)
            again = newest_queries(runner, some, count)
            runner.set_observer(PromptQueries, prefilled)
            assert runner.counts.copy().num_forwards == forwards + 1
            assert len(kept) == len(again) == TINY.num_layers
            for ours, oracle in zip(kept, again, strict=True):
                torch.testing.assert_close(ours, oracle, rtol=1e-4, atol=1e-4)
        engine.scheduler.rewind([])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reader_keeps_the_sources_entries(dtype: torch.dtype) -> None:
    """After the choice and after verifications, the small cache holds exactly what the full one
    holds of the chosen tokens and of all since; and choosing left the full one as it was."""
    model = tiny_transformer(replace(TINY, num_layers=3), dtype=dtype)
    runner = make_runner(model, 3, 100, NativeBackend())
    engine = Engine(runner, 16)
    requests = make_requests(random_prompts([70, 9, 41], TINY.vocab_size), 20)
    engine.prefill(requests)
    batch = Batch(tuple(engine.scheduler.running))
    # What no forward would write: had the choice written anything, it would show.
    runner.cache.k.mul_(1.05)
    runner.cache.v.mul_(1.05)
    full = runner.cache.k.clone()
    values = runner.cache.v.clone()
    reader = ChosenCopy(runner, SnapKV(24, 8))
    reader.admit(batch.requests)
    assert torch.equal(runner.cache.k, full) and torch.equal(runner.cache.v, values)
    assert reader.lengths([0, 1, 2]).bounds == (70, 9, 41)
    assert reader.runner.cache.lengths == [24, 9, 24]
    before = [small_keys(reader, row) for row in range(3)]
    runner.forward(ForwardBatch(torch.tensor([[5, 6, 7], [8, 9, 10]]), [0, 2]))
    runner.truncate([0, 2], [73, 42])  # two drafts accepted and none
    requests[0].output_ids.extend([6, 7, 11])  # the newest is not cached
    requests[2].output_ids.append(9)
    reader.prepare((requests[0], requests[2]), 4)
    reader.follow(BatchRows.of([0, 2], runner.device), 5)
    assert reader.lengths([0, 1, 2]).bounds == (73, 9, 42)
    assert reader.lengths([0, 1, 2]).tensor.tolist() == [73, 9, 42]
    for row, added in ((0, 3), (2, 1)):
        keys = small_keys(reader, row)
        length = reader.lengths([row]).bounds[0]
        positions = torch.arange(length - added, length).unsqueeze(0)
        newest, _ = runner.cache.read(1, runner.cache.slots(torch.tensor([row]), positions))
        assert torch.equal(keys[:, :-added], before[row]) and torch.equal(
            keys[:, -added:], newest[0]
        )


def small_keys(reader: ChosenCopy, row: int) -> Tensor:
    """Layer 1's keys of a row of the small cache, [G, N, D]."""
    cache = reader.runner.cache
    positions = torch.arange(cache.lengths[row]).unsqueeze(0)
    return cache.read(1, cache.slots(torch.tensor([row]), positions))[0][0]


def test_a_draft_attends_to_the_chosen_entries_at_their_own_places() -> None:
    """One draft step against attention written out over the chosen entries of every head."""
    model = tiny_transformer()
    runner = make_runner(model, 1, 100)
    engine = Engine(runner, 64)
    engine.prefill(make_requests(random_prompts([60], TINY.vocab_size), 20))
    batch = Batch(tuple(engine.scheduler.running))
    chosen: list[Tensor] = []

    class Noted(SnapKV):
        def select(self, weights: Tensor, window: int) -> Tensor:
            chosen.append(super().select(weights, window))
            return chosen[-1]

    reader = ChosenCopy(runner, Noted(20, 8))
    reader.admit(batch.requests)
    full = runner.cache

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = full.slots(torch.tensor([0]), torch.arange(60).unsqueeze(0))
        kept_k, kept_v = full.read(layer, slots.gather(2, chosen[layer]))
        keys = torch.cat([kept_k, k.transpose(1, 2)], 2)
        values = torch.cat([kept_v, v.transpose(1, 2)], 2)
        group = TINY.num_heads // TINY.num_kv_heads
        heads = q[0, 0].view(TINY.num_kv_heads, group, TINY.head_dim)
        weights = (heads @ keys[0].mT / TINY.head_dim**0.5).softmax(-1)
        return (weights @ values[0]).view(1, 1, TINY.num_heads, TINY.head_dim)

    token = torch.tensor([[11]])
    found = reader.forward(token, [0], reader.lengths([0]))
    reference = model(token, torch.tensor([[60]]), attend, lambda x: x)
    torch.testing.assert_close(found, reference, rtol=1e-4, atol=1e-4)
    assert len({tuple(row.tolist()) for layer in chosen for row in layer[0]}) > 1, "heads differ"
