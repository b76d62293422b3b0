"""Native steps: a forward in one native call returns the bits that the layers return one by one,
and a chain of drafts is the chain of forwards."""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import TINY, make_requests, pack, tiny_transformer
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rounded import CODES
from torch import Tensor, nn

from magicdec.attention.native import NativeBackend
from magicdec.distributed.groups import Group
from magicdec.engine.engine import Engine
from magicdec.kernels.build import load_library
from magicdec.kv.cache import BatchRows
from magicdec.kv.view import FULL, SinksAndWindow, Visible
from magicdec.model.config import ClampedGate, ExpertsConfig, LayerKind, ModelConfig, RopeConfig
from magicdec.model.elementwise.native import NativeElementwise
from magicdec.model.linear.grouped import GroupedLinear, GroupedNumbers, NumberFormat
from magicdec.model.linear.packed import Linear, exchange
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import Cancelled, ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps import executor
from magicdec.runner.native_steps.descriptions import layer_obstacle
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.observers.attention import AttentionQueries, AttentionWeights
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import confidence
from magicdec.runner.step_plan import BatchLimits
from magicdec.speculation import draft_kv
from magicdec.speculation.draft_kv import DraftKV, draft_chain
from magicdec.systems.pipeinfer.run_stage import CancelBoard, RunCancellation

pytestmark = pytest.mark.two_threads

MOST = 600  # tokens of a row
YARN = RopeConfig(
    rope_type="yarn", factor=8.0, original_max_position_embeddings=32, attention_factor=1.2
)
MODELS = {
    "grouped heads": TINY,
    "biases": replace(TINY, qkv_bias=True, output_bias=True, mlp_bias=True, head_bias=True),
    "head norms": replace(TINY, qk_norm=True, head_dim=64),
    "tied head": replace(TINY, tie_word_embeddings=True, num_kv_heads=6),
    "odd MLP": replace(TINY, intermediate_size=81),
    "window": replace(TINY, layer_kinds=(LayerKind(40),)),
    "a window over wide heads": replace(
        TINY, head_dim=32, layer_kinds=(LayerKind(150),), sink_logits=True
    ),
    "windows and ropes of layers": replace(
        TINY, num_layers=3, layer_kinds=(LayerKind(40), LayerKind(None, YARN), LayerKind(40))
    ),
    "norms of what is added": replace(
        TINY, post_norms=True, embedding_scale=7.3, query_scale=0.8, activation="gelu_tanh"
    ),
    "experts": replace(TINY, experts=ExpertsConfig(8, 3, 40, renormalises=False)),
    "a shared expert": replace(
        TINY, experts=ExpertsConfig(8, 3, 40, shared_width=51, has_shared_gate=True)
    ),
    "experts with biases, sink logits": replace(
        TINY,
        num_layers=3,
        layer_kinds=(LayerKind(40), LayerKind(), LayerKind(has_mlp=True)),
        sink_logits=True,
        experts=ExpertsConfig(5, 2, 37, has_bias=True, gate=ClampedGate(limit=0.4)),
    ),
    "yarn": replace(TINY, rope=YARN),
    "partial rotation": replace(TINY, rope=RopeConfig(rotary_dim=8, interleaved=True)),
}
DTYPES = [torch.float32, torch.bfloat16]


def make_pair(
    config: ModelConfig,
    dtype: torch.dtype,
    lengths: Sequence[int],
    model: Transformer | None = None,
    kv_dtype: torch.dtype | None = None,
) -> tuple[ModelRunner, ModelRunner]:
    """Two runners with the same weights and cached tokens: layer by layer, and native."""
    model = model or pack(tiny_transformer(config, dtype=dtype))
    group = Group((0,), 0)
    place = (len(lengths), MOST)
    first = ModelRunner(model, NativeBackend(), group, *place, kv_dtype=kv_dtype)
    second = replace(first, backend=NativeBackend(), executor=Executor(model, group))
    for runner in (first, second):
        for row in range(len(lengths)):
            runner.allocate(row)
        generator = torch.Generator().manual_seed(1)
        for row, length in enumerate(lengths):  # written by the layers in both
            ids = torch.randint(config.vocab_size, (1, length), generator=generator)
            native = runner.executor
            runner.executor = None
            runner.forward(ForwardBatch(ids, [row], num_outputs=1))
            runner.executor = native
    return first, second


def ids_for(num_rows: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(TINY.vocab_size, (num_rows, count), generator=generator)


def chain(
    runner: ModelRunner, ids: Tensor, visible: Visible, count: int, pa: float = 0.0
) -> Tensor:
    kv = DraftKV(runner, visible)
    rows = BatchRows.of(range(len(ids)), runner.device)
    committed = runner.cache.lengths_of(rows)
    drafts = draft_chain(kv, rows, committed, ids, SamplingMetadata(), count, pa).ids
    kv.rewind(rows, committed)
    return drafts


def check_same(
    pair: tuple[ModelRunner, ModelRunner], work: Callable[..., Tensor], *args: Any, **options: bool
) -> Tensor:
    """Both runners compute the same bits, which are returned, and leave the same cache."""
    first, second = (work(runner, *args, **options) for runner in pair)
    assert first.shape == second.shape and torch.equal(first, second)
    check_equal(*pair)
    return first


def check_equal(first: ModelRunner, second: ModelRunner) -> None:
    assert torch.equal(first.cache.k, second.cache.k)
    assert torch.equal(first.cache.v, second.cache.v)
    assert first.cache.lengths == second.cache.lengths
    assert torch.equal(first.cache.seq_lens, second.cache.seq_lens)
    assert first.counts.copy() == second.counts.copy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_native_forward_has_the_bits_of_its_layers(name: str, dtype: torch.dtype) -> None:
    pair = make_pair(MODELS[name], dtype, [70, 3, 131])
    for count, num_outputs in itertools.product((1, 5, 31), (None, 1, 0)):
        ids = ids_for(3, count)
        batch = ForwardBatch(ids, [0, 1, 2], num_outputs=num_outputs)
        check_same(pair, ModelRunner.forward, batch)
    for visible in (FULL, SinksAndWindow(4, 20)):
        assert len(check_same(pair, chain, ids_for(3, 2), visible, 4).unique()) > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", ["grouped heads", "window", "head norms", "a window over wide heads"]
)
def test_a_prompt_has_the_same_bits_in_any_chunks(name: str, dtype: torch.dtype) -> None:
    """As after a part of it that a prefix cache had: by layers and native, in short and long
    chunks, also where a row would be divided (from 512 tokens on)."""
    model = pack(tiny_transformer(MODELS[name], dtype=dtype))
    group = Group((0,), 0)
    ids = ids_for(1, 590)
    found = []
    for sizes in ([590], [512, 78], [31] * 19 + [1], [77, 500, 13], [1, 33, 520, 4, 32]):
        for by in (None, Executor(model, group)):
            runner = ModelRunner(model, NativeBackend(), group, 1, MOST, executor=by)
            runner.allocate(0)
            for chunk in ids.split(sizes, dim=1):
                logits = runner.forward(ForwardBatch(chunk, [0], num_outputs=1, is_of_prompt=True))
            found.append((logits, *(layer_cache.k for layer_cache in runner.caches.distinct)))
    for tensors in found[1:]:
        assert all(map(torch.equal, found[0], tensors))


def in_groups(linear: Linear) -> GroupedLinear:
    """The layer in 8 bits and groups of 16, whose columns have an order as GPTQ's act-order makes
    them."""
    weight = cast(Tensor, linear.weight).float()
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3)).int()
    groups = weight[:, order].unflatten(1, (-1, 16))
    scale = (groups.abs().amax(2) / 127).bfloat16()
    numbers = (groups / scale.unsqueeze(2).float()).round().clamp(-128, 127).to(torch.int8)
    kind = NumberFormat(8, 16, "bfloat16", False, -128)
    held = GroupedNumbers(kind, numbers.flatten(1), scale, None, order)
    return GroupedLinear(held, linear.bias)


def widened(linear: Linear) -> Linear:
    plain = nn.Linear(linear.in_features, linear.out_features, device="meta")
    plain.weight = nn.Parameter(in_groups(linear).dense(), requires_grad=False)
    plain.bias = linear.bias
    return plain


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_in_an_order_have_the_bits_of_the_layers(dtype: torch.dtype, rounds: bool) -> None:
    """And, in exact arithmetic and float32, the logits of the plain weights."""
    config = replace(TINY, qkv_bias=True)
    model = tiny_transformer(config, dtype=dtype)
    exchange(model, in_groups)
    model.pack(rounds)
    model.use(NativeElementwise())
    pair = make_pair(config, dtype, [70, 3, 131], model)
    for count in (1, 5, 31):
        logits = check_same(pair, ModelRunner.forward, ForwardBatch(ids_for(3, count), [0, 1, 2]))
    if dtype == torch.float32 and not rounds:
        plain = tiny_transformer(config)
        exchange(plain, widened)
        other = make_pair(config, dtype, [70, 3, 131], pack(plain))[0]
        for count in (1, 5, 31):
            expected = other.forward(ForwardBatch(ids_for(3, count), [0, 1, 2]))
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert len(check_same(pair, chain, ids_for(3, 2), FULL, 4).unique()) > 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rows_with_different_numbers_of_new_tokens_share_a_forward(
    name: str, dtype: torch.dtype
) -> None:
    """A chunk of a prompt, a verification whose attention weights are watched, and a decode: the
    bits, caches and weights of forwards of their own, with one forward's reading of weights."""
    layered, native = make_pair(MODELS[name], dtype, [70, 3, 131, 64])
    results = []
    for runner in (layered, native):
        seen = AttentionWeights()
        before = runner.counts.copy()
        chunk = runner.enqueue(ForwardBatch(ids_for(1, 41), [1], num_outputs=0))
        verified = runner.enqueue(ForwardBatch(ids_for(2, 4), [0, 3], observers=[seen]))
        assert (chunk.out is None) == (verified.out is None) == (runner.executor is not None)
        logits = runner.forward(ForwardBatch(ids_for(1, 1), [2]))
        assert chunk.out is not None and chunk.out.shape[1] == 0 and verified.out is not None
        results.append([verified.out, logits, *seen.layers.values()])
        assert len(seen.layers) == len(runner.model.blocks)
        counts = runner.counts.minus(before)
        assert counts.num_forwards == (1 if runner.executor else 3) and counts.num_tokens == 50
        alone = runner.enqueue(ForwardBatch(ids_for(1, 7), [1], num_outputs=2))
        runner.execute()
        assert alone.out is not None
        results[-1].append(alone.out)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert native.counts.copy().kv_tokens_read == layered.counts.copy().kv_tokens_read
    assert torch.equal(native.cache.k, layered.cache.k)
    assert torch.equal(native.cache.v, layered.cache.v)
    assert native.cache.lengths == layered.cache.lengths


def test_a_step_that_fails_leaves_nothing_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a later step would compute its part of a prompt."""

    def fail(*args: object) -> None:
        assert len(runner.enqueued) == 1
        raise ValueError("planted")

    _, runner = make_pair(TINY, torch.float32, [5])
    runner.cache.release(0)
    engine = Engine(runner, 8, BatchLimits(prefill_tokens=8))
    engine.scheduler.add(make_requests([(1,) * 20], 4), 0.0)
    plan = engine.scheduler.schedule()
    assert plan is not None
    monkeypatch.setattr(engine.scheduler, "commit", fail)
    with pytest.raises(ValueError, match="planted"):
        engine.execute(plan, cast("Any", None))
    assert not runner.enqueued


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_native_chain_stops_where_the_forwards_do(dtype: torch.dtype) -> None:
    """Where every row has had an unlikely token: `pa` just above and below the confidences of a
    chain that goes on."""
    lengths = [70, 3, 131]
    count = 5
    pair = make_pair(TINY, dtype, lengths)
    ids = ids_for(len(lengths), 2)
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            draft_kv, "confidence", lambda *args: seen.append(confidence(*args)) or seen[-1]
        )
        check_same(pair, chain, ids, FULL, count, 1e-9)
    values = torch.stack(seen, dim=1)  # [B, K]
    assert values.shape == (3, count) and 0 < values.min() < values.max() < 1
    drafted = set()
    for pa in [*values.unique().tolist(), 1.0]:
        for near in (pa * (1 - 1e-5), pa * (1 + 1e-5)):
            stops = [(row < near).tolist() for row in values]
            expected = max(row.index(True) + 1 if any(row) else count for row in stops)
            assert check_same(pair, chain, ids, FULL, count, near).shape == (3, expected)
            drafted.add(expected)
    assert {1, count} < drafted


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ends", ["ring", "chain"])
def test_native_stages_have_the_bits_of_their_layers(ends: str, dtype: torch.dtype) -> None:
    """In a ring the first stage has the head, in a chain the last one."""
    config = replace(TINY, num_layers=4)
    group = Group((0,), 0)
    lengths = [70, 3]
    native = []
    layered = []
    for layers in (range(0, 1), range(1, 3), range(3, 4)):
        has_ends = None if ends == "chain" else layers.start == 0
        model = pack(tiny_transformer(config, dtype=dtype, layers=layers, has_ends=has_ends))
        for runners, native_or_none in ((native, Executor(model, group)), (layered, None)):
            runners.append(
                ModelRunner(model, NativeBackend(), group, 2, MOST, executor=native_or_none)
            )
            for row in range(len(lengths)):
                runners[-1].allocate(row)
    for count, num_outputs in ((20, 1), (1, 1), (5, None), (5, 1), (1, None), (6, 0)):
        shown = []
        for stages in (native, layered):
            x = ids_for(2, count)
            passed = []
            for runner in stages:
                x = runner.forward(ForwardBatch(x, [0, 1], num_outputs=num_outputs))
                passed.append(x)
            assert passed[0].shape[1] == count and passed[-1].shape[1] == (
                count if num_outputs is None else num_outputs
            )
            shown.append(passed)
        for ours, theirs in zip(*shown, strict=True):
            assert torch.equal(ours, theirs)
    for ours, theirs in zip(native, layered, strict=True):
        assert ours.executor is not None and theirs.executor is None
        check_equal(ours, theirs)


@hypothesis_settings(max_examples=20)
@given(
    lengths=st.lists(st.integers(1, 560), min_size=1, max_size=5),
    count=st.integers(1, 9),
    budget=st.integers(6, 300),
    dtype=st.sampled_from(DTYPES),
    drafts=st.integers(1, 6),
)
def test_ragged_rows(
    lengths: list[int], count: int, budget: int, dtype: torch.dtype, drafts: int
) -> None:
    pair = make_pair(TINY, dtype, lengths)
    rows = list(range(len(lengths)))
    ids = ids_for(len(lengths), count)
    visible = SinksAndWindow(4, budget)
    check_same(pair, chain, ids, visible, drafts)
    check_same(pair, ModelRunner.forward, ForwardBatch(ids, rows, visible))
    check_same(pair, ModelRunner.forward, ForwardBatch(ids[-1:], rows[-1:]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_weights_and_queries_are_shown(dtype: torch.dtype) -> None:
    first, second = make_pair(TINY, dtype, [200, 17])
    seen = list[tuple[AttentionWeights, AttentionQueries]]()
    for runner in (first, second):
        observers = AttentionWeights(), AttentionQueries()
        runner.forward(ForwardBatch(ids_for(2, 5), [0, 1], observers=observers))
        assert runner.observers == []
        seen.append(observers)
    for ours, theirs in zip(*seen, strict=True):
        assert ours.layers.keys() == theirs.layers.keys() == set(range(TINY.num_layers))
        for layer, values in ours.layers.items():
            assert torch.equal(values, theirs.layers[layer])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", CODES, ids=str)
def test_a_cache_of_codes_is_read(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    pair = make_pair(TINY, dtype, [130, 3], kv_dtype=kv_dtype)
    assert pair[0].cache.k.dtype == kv_dtype
    check_same(pair, chain, ids_for(2, 1), SinksAndWindow(4, 50), 5)


def test_ranges_of_single_heads_are_read() -> None:
    class OfHeads:
        """Other tokens in every layer and head, as a policy may choose."""

        def ranges(self, committed: Tensor) -> Tensor:
            shape = (TINY.num_layers, len(committed), TINY.num_kv_heads)
            begin = torch.arange(shape[0] * shape[1] * shape[2]).view(*shape, 1)
            parts = [(begin * 0, begin * 0 + 3), (begin + 5, begin + 9), (begin * 0 + 90,) * 2]
            return torch.cat([torch.stack(part, dim=4) for part in parts], dim=3)

        def num_visible(self, committed: int) -> int:
            return 7

        def most_visible(self, committed: int) -> int:
            return 7

    pair = make_pair(TINY, torch.float32, [100, 120])
    ids = ids_for(2, 1)
    drafts = check_same(pair, chain, ids, OfHeads(), 5)
    assert not torch.equal(drafts, chain(pair[0], ids, FULL, 5))


def test_an_unknown_token_is_refused() -> None:
    _, second = make_pair(TINY, torch.float32, [9])
    with pytest.raises(IndexError, match="a token id is not below 97"):
        second.forward(ForwardBatch(torch.tensor([[97]]), [0]))


def test_what_the_library_does_not_compute_is_named() -> None:
    assert layer_obstacle(TINY) is None
    for changed, name in (
        ({"norm": "layer"}, "layer norms"),
        ({"positions": "alibi"}, "alibi positions"),
        ({"residual": "parallel"}, "parallel residuals"),
        ({"gated_mlp": False}, "an MLP without a gate"),
        ({"activation": "gelu"}, "gelu activations"),
        ({"embedding_norm": True}, "a norm after the embedding"),
        ({"hidden_size": 49}, "hidden size 49, which is odd"),
    ):
        assert layer_obstacle(replace(TINY, **changed)) == name


@pytest.mark.parametrize("dtype", DTYPES[-1:])
def test_a_cancelled_forward_appends_nothing(dtype: torch.dtype) -> None:
    """Both ways look at the same board; one that is not cancelled changes no bit."""
    board = CancelBoard()
    board.cancel(3)
    token_ids = torch.tensor([[7]])
    for runner in make_pair(TINY, dtype, [5]):
        for run in (3, 4):
            cancellation = RunCancellation(board, run)
            if run == 3:
                with pytest.raises(Cancelled) as error:
                    runner.forward(ForwardBatch(token_ids, [0], cancellation=cancellation))
                assert error.value.num_layers == 0 and runner.cache.lengths[0] == 5
                expected = runner.forward(ForwardBatch(token_ids, [0]))
            else:
                logits = runner.forward(ForwardBatch(token_ids, [0], cancellation=cancellation))
                assert torch.equal(logits, expected)
            runner.truncate([0], [5])


usual_library = executor.library


@cache
def library_on_trial(head_size: int) -> ctypes.CDLL:
    source = Path(__file__).with_name("forward_on_trial.cpp")
    flags = ("-fopenmp", f"-DHEAD_SIZE={head_size}")
    native = load_library(source, flags, (executor.SOURCE, *executor.HEADERS))
    native.magicdec_forward.restype = ctypes.c_int64
    native.magicdec_forward.argtypes = usual_library(head_size).magicdec_forward.argtypes
    return native


@pytest.mark.timeout(120, method="thread")  # a thread that waits for ever is in native code
def test_threads_may_be_late_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it ends early: threads that are late take the loops that the others took."""
    monkeypatch.setattr(executor, "library", library_on_trial)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        test_a_native_chain_stops_where_the_forwards_do(torch.float32)
        test_ranges_of_single_heads_are_read()
        test_attention_weights_and_queries_are_shown(torch.float32)
        for _ in range(20):
            test_a_cancelled_forward_appends_nothing(torch.float32)
    finally:
        torch.set_num_threads(num_threads)
