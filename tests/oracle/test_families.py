"""Every family has the logits of transformers, whole, sharded and in pipeline stages, and in the
engine its greedy tokens, also with speculation; and the parameters and all-reduces that its config
predicts. The error of ALiBi in bfloat16 is that of its extra dimensions of q and k.
A new family is one row in MODELS (`tiny_families.py`)."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from attention_cases import ON_CPUS
from conftest import (
    HANG,
    decode_both,
    load,
    make_requests,
    make_runner,
    num_parameters,
    random_prompts,
)
from lossless import speculate
from safetensors.torch import load_file, save_file
from tiny_families import LENGTH, MODELS, ROWS, SIZE, SIZES, VOCAB, make_checkpoint, stored, tokens
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from magicdec.attention.backend import AttentionBackend
from magicdec.attention.grouped import GroupedBackend
from magicdec.attention.native import NativeBackend
from magicdec.attention.sdpa import SDPABackend
from magicdec.bench import roofline
from magicdec.config.capabilities import policy_called
from magicdec.config.sections import KVSection
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware import costs
from magicdec.kv.view import make_view
from magicdec.model.block import Attend
from magicdec.model.checkpoint.random_weights import RandomWeights
from magicdec.model.checkpoint.source import expected_shapes, find_model, load_transformer
from magicdec.model.config import ModelConfig, RopeConfig
from magicdec.model.elementwise.operators import apply_rope
from magicdec.model.families.hf_config import ROPE_FIELDS
from magicdec.model.linear.packed import Reduce
from magicdec.model.positions import alibi, alibi_slopes, rope_table, rotate
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.speculation.policies.policy import FullKV

NAMES = list(MODELS)
# A family of every kind of positions, windows, experts, blocks and heads. What is the same code for
# all families is tested with these; `make test-wide` has the others.
KINDS = {
    "llama-3.1",
    "qwen2.5",
    "ministral",
    "gemma3",
    "qwen3-moe",
    "gpt-oss",
    "yarn-rope",
    "gpt2",
    "gptj",
    "starcoder",
    "falcon-11b",
    "bloom",
}
ONE_OF_EVERY_KIND = [
    name if name in KINDS else pytest.param(name, marks=pytest.mark.wide) for name in NAMES
]
LENGTHS = [40, 7, 61]
KV_SECTIONS = [
    KVSection("full"),
    KVSection("streaming_llm", 17, 16),
    KVSection("snapkv", 20, window_size=8, reselect_every=7),
    KVSection("verified", 33, 4),
    KVSection("retrieval", 33, 4),
    KVSection("quantised"),
]


@pytest.mark.narrow(9)
@pytest.mark.parametrize("name", ONE_OF_EVERY_KIND)
def test_greedy_tokens_are_the_references(name: str) -> None:
    """Prompts in chunks of 16, then one token at a time, with rows of unequal length."""
    model = stored(name)
    prompts = random_prompts(LENGTHS, VOCAB)
    runner = make_runner(model.load(), len(LENGTHS), max(LENGTHS) + 24 + 4)
    kv = KVSection("streaming_llm", 24, 4)
    baseline, ours, _ = decode_both(runner, make_requests(prompts, 24), kv, 4, chunk=16)
    expected = [model.reference.greedy(prompt, 24) for prompt in prompts]
    assert baseline == expected and ours == expected
    assert max(len(set(text)) for text in expected) > 8, "they say something"


@pytest.mark.parametrize("name", ONE_OF_EVERY_KIND)
def test_stages_compute_the_bits_of_the_whole_model(name: str) -> None:
    """Two layers and the ends, then one layer: a chunk of a prompt, the rest, and one token."""
    whole, first, last = (
        make_runner(model, 1, 40)
        for model in (
            stored(name).load(),
            stored(name).load(layers=range(2), has_ends=True),
            stored(name).load(layers=range(2, 3), has_ends=False),
        )
    )
    for runner in (whole, first, last):
        runner.allocate(0)
    text = torch.tensor(random_prompts([28], VOCAB))
    for ids, num_outputs in ((text[:, :16], 1), (text[:, 16:27], 1), (text[:, 27:], None)):
        expected = whole.forward(ForwardBatch(ids, [0], num_outputs=num_outputs))
        hidden = last.forward(
            ForwardBatch(first.forward(ForwardBatch(ids, [0])), [0], num_outputs=num_outputs)
        )
        assert hidden.shape[1] == 1 and torch.equal(first.model.logits(hidden), expected)
    assert all(n.startswith("blocks.") for n, _ in last.model.named_parameters())
    sizes = [sum(p.numel() for p in runner.model.parameters()) for runner in (whole, first, last)]
    assert sizes[0] == sizes[1] + sizes[2], "every layer is owned once, and the ends too"


@pytest.mark.parametrize("backend", ON_CPUS)
@pytest.mark.parametrize("name", ["mistral", "bloom", "bloom-6-heads", "baichuan-13b"])
def test_logits_in_chunks_equal_transformers(name: str, backend: str) -> None:
    """Of a family with a sliding window, and with ALiBi, whose heads of size 8 are cached with size
    16. Chunks end before the end of the window, contain it, and lie after it; then there is one
    token at a time."""
    text = torch.tensor(random_prompts([200], VOCAB))
    runner = make_runner(stored(name).load(), 1, 200, ON_CPUS[backend]())
    runner.allocate(0)
    chunks = text.split([48, 16, 40, 33, 16, 30, 5, 1, 1, 10], dim=1)
    logits = torch.cat([runner.forward(ForwardBatch(part, [0])) for part in chunks], 1)
    assert runner.cache.shape.head_dim == 16
    torch.testing.assert_close(logits, stored(name).reference.logits(text), atol=1e-4, rtol=0)


def backends_of(name: str, kv: KVSection) -> list[type[AttentionBackend]]:
    """Those for a CPU that serve the family's heads, and read what drafts do."""
    takes_16 = MODELS[name][1].get("head_dim", SIZE) % 16 == 0
    reads_numbers = not policy_called(kv.policy).reads_codes
    return [
        *([GroupedBackend] if reads_numbers else []),
        SDPABackend,
        *([NativeBackend] if takes_16 else []),
    ]


@pytest.mark.narrow(12)
@pytest.mark.parametrize(
    ("name", "kv", "backend"),
    [
        pytest.param(name, kv, backend, id=f"{name}-{kv.policy}-{backend.__name__}")
        for (i, name), (j, kv) in product(enumerate(NAMES), enumerate(KV_SECTIONS))
        for served in [backends_of(name, kv)]
        for backend in [served[(i + j) % len(served)]]
    ],
)
def test_self_speculation_changes_nothing(
    name: str, kv: KVSection, backend: type[AttentionBackend]
) -> None:
    """Every family under every policy, over the backends that serve it in turn."""
    sizes = {"lengths": LENGTHS, "num_new": 16, "seed": 1, "backend": backend}
    assert speculate(stored(name).load(), kv, **sizes).accepts_all == (kv.policy == "full")


@pytest.mark.narrow(6)
@pytest.mark.parametrize(
    ("name", "kv"),
    [
        *product(["gpt2", "bloom", "gemma3"], [KVSection("full")]),
        *product(["gptj", "mistral", "gemma3"], [KVSection("snapkv", 20, window_size=8)]),
        # A rolling draft turns its sinks as the family rotates, unless it holds the whole text.
        *product(["gptj", "gemma3"], [KVSection("streaming_llm", 200, 4)]),
        *product(["yarn-rope", "ministral", "gemma3"], [KVSection("streaming_llm", 24, 4)]),
    ],
    ids=str,
)
def test_a_standalone_draft_changes_nothing(name: str, kv: KVSection) -> None:
    """The draft has the target's weights: what reads the whole text is accepted."""
    target = stored(name).load()
    draft = stored(name).load()
    found = speculate(target, kv, 3, draft=draft, lengths=LENGTHS, num_new=40, seed=2)
    assert found.accepts_all == (kv.policy == "full" or kv.budget == 200)


def test_learned_positions_to_the_last() -> None:
    """Draft tokens lie beyond the last position when the text ends at it."""
    model = stored("gpt2")
    (prompt,) = random_prompts([256 - 9], VOCAB)
    runner = make_runner(model.load(), 1, 256 + 4)
    kv = KVSection("streaming_llm", 24, 4)
    baseline, ours, _ = decode_both(runner, make_requests([prompt], 9), kv, 4)
    assert [model.reference.greedy(prompt, 9)] == baseline == ours


@pytest.mark.parametrize("name", NAMES)
def test_the_config_counts_what_the_model_holds(name: str) -> None:
    config = stored(name).source.config
    whole = Transformer(config)
    assert num_parameters(config) == sum(p.numel() for p in whole.parameters())
    for size in (1, 2, 3, 5):
        for shard in (Shard(rank, size) for rank in range(size)):
            model = Transformer(config, shard)
            assert costs.weight_bytes(config, shard, 4) == roofline.weight_bytes(model)
            kv = costs.kv_bytes_per_token(config, shard, 4)
            assert kv == roofline.kv_bytes_per_token(model)
            heads = shard.heads(config.num_heads, config.num_kv_heads)[1]
            assert kv == 2 * 4 * config.cached_head_dim * config.num_layers * (heads[1] - heads[0])


@pytest.mark.parametrize("name", NAMES)
def test_sums_over_ranks_in_a_layer(name: str) -> None:
    model = stored(name).load()
    calls = []

    def reduce(x: Tensor) -> Tensor:
        calls.append(x.shape)
        return x

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == model.config.cached_head_dim
        return q

    model.set_positions(5, torch.device("cpu"))
    model(torch.ones(1, 5, dtype=torch.int64), torch.arange(5)[None], attend, reduce)
    assert len(calls) == model.config.num_reduces
    parallel = name in ("gptj", "falcon-7b", "falcon-40b", "falcon-11b")
    assert model.config.num_reduces == model.config.num_layers * (1 if parallel else 2)


@pytest.mark.narrow(5)
@pytest.mark.parametrize("name", ONE_OF_EVERY_KIND)
def test_random_weights_of_every_layout(name: str) -> None:
    """Ranks have shards of one model; norm weights are 1 under all names."""
    config = stored(name).source.config
    source = RandomWeights(expected_shapes(config))

    def load_random(shard: Shard) -> Transformer:
        return load_transformer(config, source, shard, None, torch.float32, torch.device("cpu"))

    parts = [load_random(Shard(rank, 2)) for rank in range(2)]
    whole = load_random(Shard())
    for key, tensor in whole.state_dict().items():
        if "norm" in key and key.endswith("weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), key
        elif key.endswith("output.weight") or key.endswith("down.weight"):
            shards = [part.state_dict()[key] for part in parts]
            assert torch.equal(torch.cat(shards, dim=1), tensor), key


def test_a_checkpoint_of_the_bare_body(tmp_path: Path) -> None:
    """As in the published GPT-2: names without "transformer.", and stored causal masks."""
    model = stored("gpt2")
    directory = model.directory
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256) for i in range(3)}
    save_file(tensors | masks, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    bare = load(tmp_path).state_dict()
    whole = model.load().state_dict()
    torch.testing.assert_close(bare, whole, atol=0, rtol=0)
    del tensors["h.1.ln_1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"transformer\.h\.1\.ln_1\.weight is missing"):
        find_model("--model", str(tmp_path))


def make_attend(model: Transformer) -> Attend:
    """Causal attention over the tokens at hand, limited to the last ones of a layer's window, with
    the sink logits of the model's layers."""
    kinds = model.config.kinds
    first = model.layers.start
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = (distance >= 0) & (distance < (kinds[layer].window or LENGTH))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        sinks = model.blocks[layer - first].attention.sinks
        if sinks is None:
            return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
        return (weights @ v).transpose(1, 2)

    return attend


def run(model: Transformer, x: Tensor, reduce: Reduce = lambda x: x, **options: bool) -> Tensor:
    model.set_positions(LENGTH, torch.device("cpu"))
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return model(x, positions, make_attend(model), reduce, **options)


def run_ranks(path: Path, size: int) -> Tensor:
    """All ranks in synchronised threads; logits are concatenated from the vocabulary shards."""
    barrier = threading.Barrier(size, timeout=HANG)
    partials: list[Tensor] = [torch.empty(0)] * size

    def make_reduce(rank: int) -> Callable[[Tensor], Tensor]:
        def reduce(x: Tensor) -> Tensor:
            partials[rank] = x
            barrier.wait()
            total = torch.stack(partials).sum(0)
            barrier.wait()  # no rank overwrites a partial result that another has not read
            return total

        return reduce

    def run_rank(rank: int) -> Tensor:
        return run(load(path, Shard(rank, size)), tokens(), make_reduce(rank))

    with ThreadPoolExecutor(size) as pool:
        return torch.cat(list(pool.map(run_rank, range(size))), dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_whole_and_staged(name: str) -> None:
    path = stored(name).directory
    expected = stored(name).reference.logits(tokens())
    assert expected.std() > 0.5, "logits too small for the tolerance to mean anything"
    whole = run(load(path), tokens())
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    last = run(load(path), tokens(), num_outputs=1)
    torch.testing.assert_close(last, expected[:, -1:], atol=1e-4, rtol=0)
    hidden = run(load(path, layers=range(0, 2)), tokens())
    staged = run(load(path, layers=range(2, 3)), hidden)
    torch.testing.assert_close(staged, whole, atol=0, rtol=0)


@pytest.mark.narrow(6)
@pytest.mark.parametrize("name", ONE_OF_EVERY_KIND)
def test_sharded(name: str) -> None:
    """3 ranks have unequal shares, and as many ranks as heads are more than KV heads."""
    path = stored(name).directory
    expected = stored(name).reference.logits(tokens())
    for size in (3, stored(name).source.config.num_heads):
        torch.testing.assert_close(run_ranks(path, size), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama-3.1", "gpt2"])
def test_checkpoint_of_several_files(tmp_path: Path, name: str) -> None:
    expected = make_checkpoint(tmp_path, name, max_shard_size="100KB").logits(tokens())
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    torch.testing.assert_close(run(load(tmp_path), tokens()), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(run_ranks(tmp_path, 2), expected, atol=1e-4, rtol=0)


def yarn(theta: float, factor: float, trained: int, **others: Any) -> RopeConfig:
    scale = others.pop("attention_factor", 0.1 * math.log(factor) + 1)
    scaling = {"original_max_position_embeddings": trained, "attention_factor": scale}
    return RopeConfig(theta, "yarn", factor, **scaling, **others)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e4),
        RopeConfig(5e6),
        RopeConfig(1e4, "linear", 8.0),
        RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32),
        yarn(1e4, 8.0, 32),
        yarn(1e6, 4.0, 32768),
        yarn(1e4, 40.0, 4096, attention_factor=1.3, beta_fast=20.0, beta_slow=2.0, truncate=False),
    ],
    ids=str,
)
def test_rope_table(rope: RopeConfig) -> None:
    length = 20000
    head_dim = 64
    fields = {"rope_type", "factor", *ROPE_FIELDS.get(rope.rope_type, ())}
    parameters = {"rope_theta": rope.theta} | {name: getattr(rope, name) for name in fields}
    changes = {"rope_parameters": parameters, "head_dim": head_dim}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**(SIZES | changes)))
    cos, sin = theirs(torch.empty(1), torch.arange(length)[None])
    ours = rope_table(rope, head_dim, length) * rope.attention_factor
    torch.testing.assert_close(ours[:, 0], cos[0, :, : head_dim // 2], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[:, 1], sin[0, :, : head_dim // 2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 16, 24])
def test_yarn_warms_what_it_rotates(rotary_dim: int | None, interleaved: bool) -> None:
    """Heads of 32 dimensions, of which all or only the first are rotated. The scores are those of
    transformers, which multiplies the tables for q and for k by the attention factor."""
    torch.manual_seed(0)
    rope = yarn(1e4, 8.0, 32, rotary_dim=rotary_dim, interleaved=interleaved)
    heads = torch.randn(1, 50, 5, 32)
    rows = rope_table(rope, 32, 50)[None]
    q, k, _ = rotate(rows, rope)(heads.clone(), 3, 1)
    scaled = apply_rope(heads[..., : rotary_dim or 32], rows * rope.attention_factor, interleaved)
    theirs = torch.cat([scaled, heads[..., rotary_dim or 32 :]], dim=-1)
    expected = torch.einsum("bthd,bsd->bhts", theirs[:, :, :3], theirs[:, :, 3])
    found = torch.einsum("bthd,bsd->bhts", q, k[:, :, 0])
    assert rope.attention_factor > 1.2
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


ALIBI = ModelConfig("alibi", 64, 1, 256, 64, 4, 4, 64, 4096, positions="alibi")


def bfloat16_error(backend: AttentionBackend) -> float:
    """The error of attention with ALiBi at the end of a long text, relative to float64 on equal
    inputs."""
    torch.manual_seed(0)
    length = 3000
    heads = ALIBI.num_heads
    size = ALIBI.head_dim
    drawn = torch.randn(1, length + 1, 3 * heads, size).bfloat16()
    slopes = alibi_slopes(ALIBI)
    place = alibi(torch.arange(length + 1)[None], slopes, ALIBI.cached_head_dim)
    q, k, v = place(drawn, heads, heads)
    model = Transformer(ALIBI).bfloat16()
    runner = make_runner(model, 1, length + 1, backend)
    runner.allocate(0)
    slots = runner.cache.slots(torch.tensor([0]), torch.arange(length)[None])
    runner.cache.write(0, slots, k[:, :length], v[:, :length])
    runner.cache.advance([0], length)
    view = make_view(runner.cache, [0], FullKV(), 1)
    backend.plan(view)
    out = backend.run(0, q[:, length:], k[:, length:], v[:, length:], view)[0, 0, :, :size]
    queries, keys, values = (t.double() for t in drawn[0].split(heads, dim=1))
    scores = torch.einsum("hd,shd->hs", queries[-1], keys) / size**0.5
    scores = scores + slopes.double()[:, None] * torch.arange(length + 1)
    expected = torch.einsum("hs,shd->hd", scores.softmax(-1), values)
    return float((out.double() - expected).abs().max())


def test_the_error_of_alibi_in_bfloat16() -> None:
    """Positions are exact, and slopes, powers of two here, nearly exact. The grouped backend rounds
    the scores, so that neighbouring keys get equal scores; such a run is refused."""
    assert bfloat16_error(NativeBackend()) < 0.05
    assert bfloat16_error(NativeBackend(is_widened=True)) < 0.05
    assert bfloat16_error(SDPABackend()) < 0.05
    assert bfloat16_error(GroupedBackend()) > 0.3
