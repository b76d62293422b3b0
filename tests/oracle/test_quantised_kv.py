"""`--kv_policy quantised`: logits of drafts are those of attention in float64 over the target's K
and V, rounded by the definition of the format, after any steps; and what they read is counted."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch
from conftest import (
    TINY,
    Command,
    make_requests,
    make_runner,
    pack,
    random_prompts,
    tiny_transformer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded import as_stored
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.native import NativeBackend, flags_of, kernel
from magicdec.attention.sdpa import SDPABackend
from magicdec.attention.triton import TritonBackend, missing_parts
from magicdec.config.sections import KVSection
from magicdec.engine.engine import Engine
from magicdec.kv.cache import BatchRows
from magicdec.kv.layout import POOL_DTYPES
from magicdec.model.config import LayerKind, ModelConfig
from magicdec.names import KV_DTYPES
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.native_steps.executor import Executor
from magicdec.runner.request import Request
from magicdec.speculation import copied_kv
from magicdec.speculation.policies.policy import make_draft_kv

MODELS = {
    "half a group": TINY,  # heads of 16 dimensions
    "two groups": replace(TINY, num_heads=2, num_kv_heads=1, head_dim=64),
    "windows": replace(TINY, num_layers=3, layer_kinds=(LayerKind(30), LayerKind(), LayerKind(30))),
}
SEED = 1
MOST_NEW = 60
# A few codes differ by rounding in float32: FP8's by up to an eighth of a number.
TOLERANCE = {"fp8": 2e-2, "int8": 2e-3, "int4": 2e-3}


@dataclass
class RoundedText:
    """A text's tokens as the target's cache has them, rounded, with the draft tokens since."""

    model: "ExactModel"
    keys: list[Tensor]  # of each layer, float64 [G, T, D]
    values: list[Tensor]

    def logits(self, token: int) -> Tensor:
        """Of the next token; its K and V are rounded, too, and kept."""
        return self.model.append(self, token)


class ExactModel:
    """The model in float64 over rounded K and V."""

    def __init__(self, config: ModelConfig, codes: torch.dtype) -> None:
        self.config = config
        self.codes = codes
        self.model = tiny_transformer(config, SEED, torch.float64)
        self.model.set_positions(400, torch.device("cpu"))

    def text(self, runner: ModelRunner, row: int, length: int) -> RoundedText:
        places = torch.arange(length)[None]
        pairs = [
            runner.caches.read(layer, torch.tensor([row]), places)
            for layer in range(self.config.num_layers)
        ]
        rounded = [
            [as_stored(x[0], self.codes, are_keys).double() for x in part]
            for part, are_keys in zip(zip(*pairs, strict=True), (True, False), strict=True)
        ]
        return RoundedText(self, *rounded)

    def append(self, text: RoundedText, token: int) -> Tensor:
        position = text.keys[0].shape[1]
        windows = [kind.window for kind in self.config.kinds]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for numbers, new, are_keys in ((text.keys, k, True), (text.values, v, False)):
                rounded = as_stored(new[0].transpose(0, 1), self.codes, are_keys).double()
                numbers[layer] = torch.cat([numbers[layer], rounded], 1)
            first = max(0, position + 1 - (windows[layer] or position + 1))
            keys, values = (x[layer][:, first:] for x in (text.keys, text.values))
            queries = q[0, 0].unflatten(0, (len(keys), -1))  # [G, H/G, D]
            weights = (queries @ keys.mT * q.shape[-1] ** -0.5).softmax(-1)
            return (weights @ values).view_as(q)

        with torch.inference_mode():
            return self.model(
                torch.tensor([[token]]), torch.tensor([[position]]), attend, lambda x: x
            )[0, 0]


def check_drafts(
    config: ModelConfig,
    kv_dtype: str,
    backend: AttentionBackend,
    lengths: Sequence[int],
    seed: int,
    is_native: bool = False,
) -> int:
    """Drafts after prompts of such `lengths`, and after steps that accept any number of them. Some
    steps draft nothing. Returns how many logits were compared."""
    random = Random(seed)
    model = tiny_transformer(config, SEED)
    runner = make_runner(
        pack(model) if is_native else model, len(lengths), max(lengths) + MOST_NEW, backend
    )
    if is_native:
        runner.executor = Executor(model, runner.group)
    exact = ExactModel(config, POOL_DTYPES[kv_dtype])
    engine = Engine(runner, 16)
    engine.prefill(make_requests(random_prompts(lengths, config.vocab_size, seed), MOST_NEW))
    requests = engine.scheduler.running
    kv = make_draft_kv(runner, KVSection("quantised", draft_kv_dtype=kv_dtype))
    kv.admit(requests)
    num_compared = 0
    for gamma in (2, 0, 0, 3, 1, 4):
        batch = random.sample(requests, random.randint(1, len(requests)))
        rows = BatchRows.of(rows_of(batch), runner.device)
        chains = [[r.last_token, *random.choices(range(3, 97), k=gamma)] for r in batch]
        if gamma:
            kv.prepare(batch, gamma)
            kv.follow(rows, gamma + 1)
            given = kv.forward, exact, runner, batch, chains, kv.lengths(rows), rows
            num_compared += compare(*given, TOLERANCE[kv_dtype])
            kv.rewind(rows, runner.cache.lengths_of(rows))
        verify(runner, batch, chains, random)
    return num_compared


def compare(
    forward: Callable[..., Tensor],
    exact: ExactModel,
    runner: ModelRunner,
    batch: Sequence[Request],
    chains: Sequence[Sequence[int]],
    committed: object,
    rows: BatchRows,
    tolerance: float,
) -> int:
    texts = [
        exact.text(runner, row, request.num_cached)
        for row, request in zip(rows_of(batch), batch, strict=True)
    ]
    for step in range(len(chains[0]) - 1):
        found = forward(torch.tensor([[chain[step]] for chain in chains]), rows, committed)
        for place, (text, chain) in enumerate(zip(texts, chains, strict=True)):
            wanted = text.logits(chain[step])
            assert (found[place, 0].double() - wanted).abs().max() < tolerance, (step, place)
    return len(chains) * (len(chains[0]) - 1)


def verify(
    runner: ModelRunner, batch: Sequence[Request], chains: Sequence[Sequence[int]], random: Random
) -> None:
    """Verify the chains, and accept any number of their drafts."""
    rows = rows_of(batch)
    accepted = [random.randint(0, len(chain) - 1) for chain in chains]
    before = [request.num_cached for request in batch]
    runner.forward(ForwardBatch(torch.tensor(chains), rows))
    runner.truncate(rows, [n + 1 + count for n, count in zip(before, accepted, strict=True)])
    for request, chain, count in zip(batch, chains, accepted, strict=True):
        request.output_ids.extend([*chain[1 : 1 + count], random.randrange(3, 97)])


def rows_of(batch: Sequence[Request]) -> list[int]:
    return [request.row for request in batch if request.row is not None]


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "sdpa": SDPABackend,
    "native": NativeBackend,
    "triton": TritonBackend,
}
INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or missing_parts() is not None, reason="nothing to interpret"
)
WAYS = ["sdpa", "native", "native steps", pytest.param("triton", marks=INTERPRETED)]


@pytest.mark.narrow("values")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_of_drafts_are_those_over_rounded_numbers(
    kv_dtype: str, name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are copied in several parts."""
    monkeypatch.setattr(copied_kv, "NUMBERS_AT_ONCE", 3000)
    backend = BACKENDS[way.removesuffix(" steps")]()
    is_native = way == "native steps"
    seen = check_drafts(MODELS[name], kv_dtype, backend, [70, 1, 9, 70], 3, is_native)
    assert seen > 10


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=4),
    kv_dtype=st.sampled_from(tuple(KV_DTYPES)),
    seed=st.integers(0, 10**6),
)
def test_texts_of_any_length(lengths: list[int], kv_dtype: str, seed: int) -> None:
    check_drafts(TINY, kv_dtype, NativeBackend(), lengths, seed)


def test_fewer_bits_draft_otherwise() -> None:
    """The tolerance above tells the formats apart."""
    config = MODELS["two groups"]
    runner = make_runner(tiny_transformer(config, SEED), 1, 80)
    engine = Engine(runner, 16)
    engine.prefill(make_requests(random_prompts([70], config.vocab_size), 8))
    exact = ExactModel(config, torch.float32).text(runner, 0, 70).logits(5)
    found = {
        name: float((ExactModel(config, codes).text(runner, 0, 70).logits(5) - exact).abs().max())
        for name, codes in POOL_DTYPES.items()
    }
    assert found["int8"] < found["fp8"] < found["int4"], found
    assert all(TOLERANCE[name] < distance for name, distance in found.items()), found
    assert found["int8"] < found["int4"] / 4, found


@pytest.mark.narrow("values")
@pytest.mark.parametrize("is_native", [False, True], ids=["layers", "native steps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_reads_of_drafts_are_counted_in_the_bytes_of_the_copy(
    kv_dtype: str, dtype: torch.dtype, is_native: bool
) -> None:
    """Keys as the kernels count them, each with its value."""
    config = MODELS["two groups"]
    model = tiny_transformer(config, dtype=dtype)
    runner = make_runner(model, 2, 90, NativeBackend())
    if is_native:
        runner.executor = Executor(pack(model), runner.group)
    engine = Engine(runner, 16)
    engine.prefill(make_requests(random_prompts([70, 9], 97), 20))
    kv = make_draft_kv(runner, KVSection("quantised", draft_kv_dtype=kv_dtype))
    kv.admit(engine.scheduler.running)
    rows = BatchRows.of([0, 1], runner.device)
    library = kernel(64, *flags_of(POOL_DTYPES[kv_dtype], dtype))
    before = runner.counts.copy()
    keys = library.magicdec_keys_read() + (runner.executor.keys_read if runner.executor else 0)
    kv.forward(torch.tensor([[5], [6]]), rows, kv.lengths(rows))
    keys = (
        library.magicdec_keys_read() + (runner.executor.keys_read if runner.executor else 0) - keys
    )
    used = runner.counts.minus(before)
    assert used.draft_kv_tokens_read == used.kv_tokens_read == 71 + 10
    assert keys == (71 + 10) * config.num_layers
    head_bytes = {"fp8": 64, "int8": 64 + 4, "int4": 2 * (16 + 2)}[kv_dtype]
    assert used.kv_bytes_read == keys * 2 * head_bytes
    before = runner.counts.copy()
    runner.forward(ForwardBatch(torch.tensor([[5], [6]]), [0, 1]))
    used = runner.counts.minus(before)
    assert used.kv_bytes_read == keys * 2 * 64 * dtype.itemsize


@pytest.mark.narrow(2)
@pytest.mark.parametrize(
    "words",
    [
        "--modes static static+draft --nproc 2 --dtype float32",
        "--modes inflight inflight+draft --prefix_cache --block_tokens 64 --dtype float32",
        "--modes inflight inflight+draft --draft_kv_dtype int8 --draft_weights int4 "
        "--dtype bfloat16",
    ],
)
def test_modes_are_lossless(words: str, command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    load = "--num_requests 5 --arrival burst --prefix_len uniform:5:150 --gen_len uniform:3:40"
    flags = f"--draft self --kv_policy quantised --threads 1 --out {out}"
    ended = command("serve", *words.split(), *load.split(), *flags.split())
    assert ended.code == 0, ended.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["status"] for record in records] == ["verified"] * 2
    assert records[1]["metrics"]["draft_acceptance_rate"] > 0.5
