"""Low-bit drafts: layers compared with float64 on every kind of CPU, copies of a model that
share what they do not quantise, and self-speculation with them, whose tokens stay the target's."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    Command,
    Drive,
    decode_both,
    make_requests,
    pack,
    random_prompts,
    tiny_transformer,
)
from lossless import RAGGED
from test_grouped import rounded
from test_linear import AVX2, AVX512, BF16, EVERYTHING, F32
from torch import Tensor, nn

from magicdec import LLM
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.bench import roofline
from magicdec.bench.latency.forwards import fill, make_forwards, time_once
from magicdec.bench.latency.record import LatencyGrid
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection, ModelSection, SamplingSection
from magicdec.distributed.groups import Group
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware import costs
from magicdec.model.checkpoint.quantization import low_bit_copy
from magicdec.model.linear import grouped, packed
from magicdec.model.linear.grouped import GroupedLinear, GroupedNumbers
from magicdec.model.linear.packed import PackedLinear, library
from magicdec.model.linear.quantizers import Quantizer
from magicdec.model.presets.presets import PRESETS
from magicdec.model.transformer import Transformer
from magicdec.names import LOW_BIT, QUANTIZERS, load_named
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.setup.memory_plan import Models, plan_rank

SMALL = replace(EVERYTHING, hidden_size=64, intermediate_size=96, num_kv_heads=3)
CPUS = {"any": (), "AVX2": AVX2, "AVX-512": AVX512}


def make_numbers(weights: str, rows: Tensor) -> GroupedNumbers:
    quantizer: Quantizer = load_named(QUANTIZERS, weights)
    return quantizer(rows)


def packed_layer(
    numbers: GroupedNumbers, bias: Tensor | None = None, adds_bias: bool = True
) -> PackedLinear:
    """The layer of a low-bit draft."""
    return PackedLinear(numbers, bias, adds_bias, rounds=True)


@pytest.mark.narrow("pairs")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 13, 17, 32, 33, 70])
@pytest.mark.parametrize("shape", [(64, 32), (1, 64), (97, 96), (130, 352), (256, 704), (65, 256)])
@pytest.mark.parametrize("weights", LOW_BIT)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("cpu", CPUS)
def test_a_packed_layer_multiplies_and_a_row_keeps_its_bits(
    cpu: str,
    dtype: torch.dtype,
    weights: str,
    shape: tuple[int, int],
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sums over a group are exact integers, so that every CPU computes the same bits. Groups of
    int8 have 32, 64 and 128 inputs here."""
    ours = library()
    found = library(*CPUS[cpu])
    monkeypatch.setattr(packed, "library", lambda: found)
    torch.manual_seed(0)
    numbers = make_numbers(weights, torch.randn(shape))
    group = numbers.format.group
    bias = torch.randn(shape[0]).to(dtype)
    x = torch.randn(rows, shape[1]).to(dtype)
    x[0, :group] = 0.0
    for b in (None, bias):
        linear = packed_layer(numbers, b)
        out = linear(x)
        wide_bias = None if b is None else b.double()
        expected = F.linear(rounded(x, group), numbers.dense().double(), wide_bias)
        error = (out.double() - expected).abs()
        bound = expected.abs() * 2**-8 if dtype == BF16 else 0.0
        assert (error <= bound + expected.abs().max() * 1e-5).all()
        assert torch.equal(linear(x[-1:])[0], out[-1])
        assert torch.equal(linear(x[rows // 2 :]), out[rows // 2 :])
    partial = packed_layer(numbers, bias, False)(x)
    assert torch.equal(partial, packed_layer(numbers)(x))
    monkeypatch.setattr(packed, "library", lambda: ours)
    assert torch.equal(packed_layer(numbers, bias)(x), linear(x))


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("cpu", CPUS)
def test_a_row_that_is_not_finite_has_no_number_among_its_outputs(
    cpu: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded activations have no place for infinities. Other rows keep their bits."""
    found = library(*CPUS[cpu])
    monkeypatch.setattr(packed, "library", lambda: found)
    torch.manual_seed(0)
    linear = packed_layer(make_numbers(weights, torch.randn(97, 352)))
    x = torch.randn(12, 352).to(BF16)
    expected = linear(x)
    for row, number in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[3 * row, 100 * row + 51] = number
        expected[3 * row] = float("nan")
    assert torch.equal(linear(x).nan_to_num(9e9), expected.nan_to_num(9e9))


@pytest.mark.parametrize("weights", LOW_BIT)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_plain_layer(dtype: torch.dtype, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "WIDENED", 1 << 13)  # several parts
    torch.manual_seed(0)
    numbers = make_numbers(weights, torch.randn(130, 96))
    bias = torch.randn(130).to(dtype)
    x = torch.randn(2, 3, 96).to(dtype)
    linear = GroupedLinear(numbers, bias)
    expected = F.linear(x.double(), numbers.dense().double(), bias.double())
    assert linear(x).dtype == dtype
    assert linear.weight.nbytes == 130 * 96 * numbers.format.bits // 8
    bound = {F32: 1e-6, BF16: 2**-8}[dtype]
    assert (linear(x).double() - expected).abs().max() <= expected.abs().max() * bound


def test_int4_groups_are_rounded_to_the_nearest_of_sixteen_numbers() -> None:
    torch.manual_seed(0)
    group = 32
    weight = torch.randn(50, 128)
    weight[3] = 0.0
    weight[4, :group] = torch.arange(-8.0, 24.0) / 4
    found = make_numbers("int4", weight)
    numbers = found.numbers
    scales = found.scale
    assert numbers.dtype == torch.int8 and scales.dtype == BF16 and scales.shape == (50, 4)
    assert -8 <= int(numbers.min()) < int(numbers.max()) <= 8 - 1
    step = scales.abs().double().repeat_interleave(group, 1)
    error = (found.dense().double() - weight.double()).abs()
    # What is as large as the largest but of the other sign would need 8. Scales have 8 bits.
    assert (error <= step * torch.where(numbers == 7, 1.02, 0.501)).all()
    assert not found.dense()[3].any()
    used = numbers.unflatten(1, (-1, group))[torch.arange(50) != 3]
    assert (used == -8).any(2).all(), "the largest of each group"


@pytest.mark.parametrize("shape", [(64, 2), (97, 48), (130, 67)])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_packed_weight_is_found_again(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    assert torch.equal(PackedLinear(weight).dense(), weight)


@pytest.mark.narrow("values")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_copy_shares_all_but_its_matrices(weights: str, is_packed: bool, tied: bool) -> None:
    """The same of a packed model and of a plain one. Its bytes are those of the cost model."""
    config = replace(SMALL, vocab_size=128, tie_word_embeddings=tied, head_dim=64)
    config = replace(config, num_heads=4, num_kv_heads=4, hidden_size=64, intermediate_size=128)
    plain = tiny_transformer(config, dtype=BF16)
    copy, again = (low_bit_copy(model, weights, is_packed) for model in (plain, pack_copy(plain)))
    pairs = zip(copy.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(ours, others) for ours, others in pairs)
    shared = {p.data_ptr() for p in plain.parameters()}
    own = [p for p in copy.parameters() if p.data_ptr() not in shared]
    kinds = (PackedLinear, GroupedLinear)
    layers = [m for m in copy.modules() if isinstance(m, kinds)]
    assert len(layers) == 4 * config.num_layers + 1 and copy.config is not plain.config
    assert sum(p.nbytes for p in own) == costs.low_bit_bytes(config, Shard(), weights)
    assert roofline.weight_bytes(copy) == costs.weight_bytes(config, Shard(), 2, weights)
    assert roofline.weight_bytes(copy) < 0.65 * roofline.weight_bytes(plain)


def pack_copy(model: Transformer) -> Transformer:
    return pack(model.with_linears(lambda linear: clone(linear)))


def clone(linear: nn.Module) -> packed.Linear:
    assert isinstance(linear, nn.Linear)
    kind = type(linear)(1, 1, bias=False, device="meta")
    kind.weight = linear.weight
    kind.bias = linear.bias
    return kind


def test_weights_that_are_not_finite_have_no_copy() -> None:
    model = tiny_transformer(SMALL)
    model.blocks[1].mlp.down.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"a matrix of \(64, 96\) is not finite: it has no int4"):
        low_bit_copy(model, "int4", False)


def with_copy(
    model: Transformer, weights: str, is_native: bool, lengths: Sequence[int], most: int
) -> ModelRunner:
    """A runner of the model, whose low-bit copy drafts."""
    group = Group((0,), 0)
    copy = low_bit_copy(model, weights, is_native)
    backend = NativeBackend() if is_native else GroupedBackend()
    executors = [
        Executor(transformer, group) if is_native else None for transformer in (model, copy)
    ]
    runner = ModelRunner(model, backend, group, len(lengths), most, executor=executors[0])
    return runner.with_draft_runner(runner.with_model(copy, executors[1]))


CASES = [
    pytest.param("int8", F32, False, id="int8"),
    pytest.param("int8", F32, True, id="int8, native float32"),
    pytest.param("int4", F32, False, id="int4"),
    pytest.param("int4", F32, True, id="int4, native float32"),
    pytest.param("int8", BF16, True, id="int8, native bfloat16"),
    pytest.param("int4", BF16, True, id="int4, native bfloat16"),
]


@pytest.mark.narrow("values")
@pytest.mark.parametrize(("weights", "dtype", "is_native"), CASES)
@pytest.mark.parametrize(
    "kv",
    [
        KVSection("full"),
        KVSection("streaming_llm", 40, 4),
        KVSection("snapkv", 40, window_size=8, reselect_every=20),
        KVSection("verified", 40, 4),
        KVSection("retrieval", 40, 4),
    ],
    ids=str,
)
def test_tokens_are_the_targets(
    kv: KVSection, weights: str, dtype: torch.dtype, is_native: bool
) -> None:
    """Ragged rows, which end at an end token too. The draft is another model: over the whole cache
    it is right often, but not always."""
    model = tiny_transformer(SMALL, dtype=dtype)
    model = pack(model) if is_native else model
    prompts = random_prompts(RAGGED, SMALL.vocab_size)
    most = max(RAGGED) + 60 + 16
    for eos in ((), (7, 11)):
        runner = with_copy(model, weights, is_native, RAGGED, most)
        requests = make_requests(prompts, 60, eos)
        baseline, tokens, accepted = decode_both(runner, requests, kv, 3)
        assert (tokens == baseline and {len(row) for row in tokens} != {60}) or not eos
        counts = [count for step in accepted for count in step]
        assert runner.draft_runner is not None and runner.draft_runner.counts.num_forwards > 0
        assert 0 < sum(counts) < 3 * len(counts)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_native_chain_has_the_bits_of_its_layers(weights: str) -> None:
    """Drafts by one native call, and by layers over packed matrices."""
    outputs = []
    for is_chain in (True, False):
        model = pack(tiny_transformer(SMALL, dtype=BF16))
        runner = with_copy(model, weights, True, RAGGED, 150)
        if not is_chain:
            runner.draft_runner.executor = None  # type: ignore[union-attr]
        requests = make_requests(random_prompts(RAGGED, SMALL.vocab_size), 60)
        outputs.append(decode_both(runner, requests, KVSection("streaming_llm", 40, 4), 3))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_requests_in_flight_emit_the_tokens_of_their_lone_runs(weights: str) -> None:
    prompts = random_prompts([5, 70, 1, 33], 2000)
    sizes = {"dtype": "float32", "threads": 1, "max_tokens": 200}
    alone = LLM("demo", max_concurrency=1, **sizes)  # type: ignore[arg-type]
    expected = [list(alone.submit(p, 60, ignore_eos=True)) for p in prompts]
    kv = KVSection("streaming_llm", 20, 4)
    llm = LLM("demo", "self", kv=kv, draft_weights=weights, max_concurrency=3, **sizes)  # type: ignore[arg-type]
    streams = [llm.submit(p, 60, ignore_eos=True) for p in prompts]
    assert [list(stream) for stream in reversed(streams)] == expected[::-1]
    draft_runner = llm._engine.runner.draft_runner
    assert draft_runner is not None and draft_runner.counts.num_forwards > 0
    sampled = llm.submit(prompts[0], 9, SamplingSection(temperature=1.0), ignore_eos=True)
    assert len(list(sampled)) == 9


@pytest.mark.narrow(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [
        "--draft_weights int8",
        "--draft_weights int4",
        "--draft_weights int4 --drafter ngram+self --gamma 4",
        "--draft_weights int4_g128",
        "--draft_weights fp8",
    ],
)
def test_the_command_on_ranks(flags: str, num_ranks: int, drive: Drive) -> None:
    sizes = "--B 2 --prefix_len 300 --gen_len 64 --num_batches 1 --warmup_batches 0"
    words = f"{sizes} --kv_policy full --dtype float32 {flags}".split()
    plain, record = drive("selfspec", *words, num_ranks=num_ranks).records
    assert record["status"] == "verified" and record["correctness"]["identical"] is True
    assert record["config"]["decoding"]["draft_weights"] == flags.split()[1]
    assert record["environment"]["world_size"] == num_ranks
    # Drafts by the model itself would read more than decoding without drafts does.
    assert record["metrics"]["bytes_read"] < 0.8 * plain["metrics"]["bytes_read"]


def test_an_int4_standalone_draft(drive: Drive, tmp_path: Path) -> None:
    sizes = "--B 2 --prefix_len 300 --gen_len 64 --num_batches 1 --warmup_batches 0"
    words = f"{sizes} --kv_policy full --target demo --model demo --draft_weights int4".split()
    *_, record = drive("longspec", *words).records
    assert record["status"] in ("verified", "verified_with_ties")
    assert record["config"]["draft"]["draft_dtype"] == "int4"
    assert 0.3 < record["metrics"]["draft_acceptance_rate"] < 1


def test_the_copy_is_in_the_memory_plan() -> None:
    for weights in ("int8", "int4"):
        decoding = DecodingSection("speculative", "self", draft_weights=weights)
        config = resolve(
            RunConfig(ModelSection(dtype="bfloat16"), decoding=decoding), Machine(2, 2, 2)
        )
        plan = plan_rank(config, Models(SMALL), 1)
        assert plan.draft_weights == costs.low_bit_bytes(SMALL, Shard(1, 2), weights)
        plain = plan_rank(config.without_drafts(), Models(SMALL), 1)
        assert plain.draft_weights == 0 and plain.weights == plan.weights


def test_single_forwards_read_the_bytes_of_their_weights() -> None:
    """As `magicdec latency` times them: one cache, and a runner for each kind of weights."""
    model = tiny_transformer(SMALL, dtype=BF16)
    runner = ModelRunner(model, GroupedBackend(), Group((0,), 0), 2, 60)
    drafting: dict[str | None, ModelRunner] = {None: runner}
    for weights in ("int8", "int4"):
        drafting[weights] = runner.with_model(low_bit_copy(model, weights, False), None)
    grid = LatencyGrid((2,), (50,), (1, 2), (KVSection("full", -1),), 1, 0, tuple(drafting))
    forwards = list(make_forwards(runner, fill(runner, 50), grid, 50, drafting=drafting))
    assert [f.cell.draft_weights for f in forwards] == [None, None, None, "int8", "int4"]
    for forward in forwards:
        time_once(forward, forward.runner, runner.group)
    read = [roofline.bytes_read(f.runner.model, f.counts) for f in forwards if f.counts]
    kv = 2 * 51 * roofline.kv_bytes_per_token(model)
    weights_read = [costs.weight_bytes(SMALL, Shard(), 2, w) for w in (None, "int8", "int4")]
    assert read[0] == read[2] and read[2:] == [num_bytes + kv for num_bytes in weights_read]


SELF_SPEC = RunConfig(decoding=DecodingSection("speculative", "self"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--draft ngram --draft_weights int8", "--draft_weights does nothing here: drafts of"),
        ("--draft none --draft_weights int8", "--draft_weights does nothing here: autoregressive"),
        ("--draft_weights int8 --target_dtype int8", "weights are int8 already; leave it out"),
        ("--draft_weights int2", "--draft_weights"),
        (
            "--draft_weights int4 --model random:tiny",
            "--draft_weights int4: groups of 32 inputs do not divide the 80 of a matrix of --model",
        ),
        (
            "--draft model:random:tiny --draft_weights int4 --model random:tiny",
            "do not divide the 80 of a matrix of --draft random:tiny; choose int8, or",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    flags: str, message: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = replace(PRESETS["llama-3.2-1b"].config, intermediate_size=80, num_layers=1)
    monkeypatch.setitem(PRESETS, "tiny", replace(PRESETS["llama-3.2-1b"], config=odd))
    done = command("run", *flags.split(), "--prefix_len", 64, "--device", "cpu")
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1


def test_int4_is_refused_where_nothing_multiplies_it() -> None:
    asked = replace(SELF_SPEC, decoding=replace(SELF_SPEC.decoding, draft_weights="int4"))
    assert resolve(asked, Machine(1, has_cuda=True)).decoding.draft_weights == "int4"
    bare = Machine(1, has_cuda=True, missing_backends={"triton": "triton is not installed"})
    message = "--draft_weights int4 --device cuda: triton is not installed; or choose int8"
    with pytest.raises(ValueError, match=message):
        resolve(asked, bare)
