"""Our decoder against transformers: same checkpoint, same logits, whole, sharded and in stages.

The models are small and random, with non-trivial biases and norms, so that every term matters.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.checkpoint import ModelSource, find_model, load_transformer
from magicdec.model.config import RopeConfig
from magicdec.model.rope import rope_table
from magicdec.model.transformer import Attend, Reduce, Transformer

CPU = torch.device("cpu")
ROWS, LENGTH, VOCAB = 2, 100, 131  # an odd vocabulary cuts into uneven shards
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-2": ("Llama", {"num_key_value_heads": 8}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "qwen2.5": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "tinyllama": ("Llama", {"num_key_value_heads": 1}),
    "linear-rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
}


def make_checkpoint(directory: Path, name: str, max_shard_size: str = "1GB") -> Tensor:
    """Save a random model; returns transformers' logits [ROWS, LENGTH, VOCAB] for `tokens()`."""
    torch.manual_seed(0)
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 1 else 0.15)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    with torch.no_grad():
        logits: Tensor = model(tokens()).logits
    return logits


def tokens() -> Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def make_attend(window: int | None) -> Attend:
    """Causal attention over the tokens at hand, limited to the last `window` ones."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = (distance >= 0) & (distance < (window or LENGTH))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    return attend


def load(source: ModelSource, shard: Shard = Shard(), layers: range | None = None) -> Transformer:
    model = load_transformer(source.config, source.weights, shard, layers, torch.float32, CPU)
    model.set_positions(LENGTH, CPU)
    return model


def run(source: ModelSource, model: Transformer, x: Tensor, reduce: Reduce) -> Tensor:
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return model(x, positions, make_attend(source.config.sliding_window), reduce)


def run_ranks(source: ModelSource, size: int) -> Tensor:
    """All ranks in lockstep threads; logits put together from the vocabulary shards."""
    barrier = threading.Barrier(size, timeout=60)
    partials: list[Tensor] = [torch.empty(0)] * size

    def make_reduce(rank: int) -> Callable[[Tensor], Tensor]:
        def reduce(x: Tensor) -> Tensor:
            partials[rank] = x
            barrier.wait()
            total = torch.stack(partials).sum(0)
            barrier.wait()  # nobody overwrites a partial that another rank has yet to add
            return total

        return reduce

    def run_rank(rank: int) -> Tensor:
        return run(source, load(source, Shard(rank, size)), tokens(), make_reduce(rank))

    with ThreadPoolExecutor(size) as pool:
        return torch.cat(list(pool.map(run_rank, range(size))), dim=-1)


def identity(x: Tensor) -> Tensor:
    return x


@pytest.fixture(params=list(MODELS))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelSource, Tensor]:
    expected = make_checkpoint(tmp_path, request.param)
    return find_model("--model", str(tmp_path)), expected


def test_whole_sharded_and_staged(checkpoint: tuple[ModelSource, Tensor]) -> None:
    source, expected = checkpoint
    assert expected.std() > 0.5, "logits too small for the tolerance to mean anything"
    whole = run(source, load(source), tokens(), identity)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)

    hidden = run(source, load(source, layers=range(0, 2)), tokens(), identity)
    staged = run(source, load(source, layers=range(2, 3)), hidden, identity)
    torch.testing.assert_close(staged, whole, atol=0, rtol=0)

    for size in (2, 3, 5, 8):  # 5 and 8 are more ranks than most of these have KV heads
        torch.testing.assert_close(run_ranks(source, size), expected, atol=1e-4, rtol=0)


def test_last_position_alone(tmp_path: Path) -> None:
    expected = make_checkpoint(tmp_path, "llama-2")
    source = find_model("--model", str(tmp_path))
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    logits = load(source)(tokens(), positions, make_attend(None), identity, last_only=True)
    torch.testing.assert_close(logits, expected[:, -1:], atol=1e-4, rtol=0)


def test_more_ranks_than_heads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama-2")
    source = find_model("--model", str(tmp_path))
    with pytest.raises(ValueError, match="9 ranks cannot share 8 attention heads"):
        load(source, Shard(0, 9))


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2.5"])
def test_checkpoint_of_several_files(tmp_path: Path, name: str) -> None:
    expected = make_checkpoint(tmp_path, name, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    source = find_model("--model", str(tmp_path))
    whole = run(source, load(source), tokens(), identity)
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(run_ranks(source, 2), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(1e4),
        RopeConfig(5e6),
        RopeConfig(1e4, "linear", 8.0),
        RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192),
        RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 32),
    ],
    ids=str,
)
def test_rope_table(rope: RopeConfig) -> None:
    length, head_dim = 20000, 64
    parameters = {
        "rope_type": rope.rope_type,
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    if rope.rope_type != "llama3":
        parameters = dict(list(parameters.items())[:3])
    changes = {"rope_parameters": parameters, "head_dim": head_dim}
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**(SIZES | changes)))
    cos, sin = theirs(torch.empty(1), torch.arange(length)[None])
    ours = rope_table(rope, head_dim, length)
    torch.testing.assert_close(ours[:, 0], cos[0, :, : head_dim // 2], atol=1e-5, rtol=0)
    torch.testing.assert_close(ours[:, 1], sin[0, :, : head_dim // 2], atol=1e-5, rtol=0)
