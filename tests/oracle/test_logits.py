"""Our decoder has the same logits as transformers: whole, sharded and in pipeline stages.

A new family is one row in MODELS (`tiny_families.py`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import HANG, load
from tiny_families import LENGTH, MODELS, ROWS, SIZES, make_checkpoint, stored, tokens
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.block import Attend
from magicdec.model.config import RopeConfig
from magicdec.model.elementwise.operators import apply_rope
from magicdec.model.families.hf_config import ROPE_FIELDS
from magicdec.model.linear.packed import Reduce
from magicdec.model.positions import rope_table, rotate
from magicdec.model.transformer import Transformer


def make_attend(window: int | None) -> Attend:
    """Causal attention over the tokens at hand, limited to the last `window` ones."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = (distance >= 0) & (distance < (window or LENGTH))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)

    return attend


def run(model: Transformer, x: Tensor, reduce: Reduce = lambda x: x, **options: bool) -> Tensor:
    model.set_positions(LENGTH, torch.device("cpu"))
    positions = torch.arange(LENGTH).expand(ROWS, LENGTH)
    return model(x, positions, make_attend(model.config.sliding_window), reduce, **options)


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
def test_whole_sharded_and_staged(name: str) -> None:
    path, expected = stored(name).directory, stored(name).reference.logits(tokens())
    assert expected.std() > 0.5, "logits too small for the tolerance to mean anything"
    whole = run(load(path), tokens())
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    last = run(load(path), tokens(), last_only=True)
    torch.testing.assert_close(last, expected[:, -1:], atol=1e-4, rtol=0)
    hidden = run(load(path, layers=range(0, 2)), tokens())
    staged = run(load(path, layers=range(2, 3)), hidden)
    torch.testing.assert_close(staged, whole, atol=0, rtol=0)
    # 5 and 8 are more ranks than most of these have KV heads.
    num_heads = stored(name).source.config.num_heads
    for size in (n for n in (2, 3, 5, 8) if n <= num_heads):
        torch.testing.assert_close(run_ranks(path, size), expected, atol=1e-4, rtol=0)


def test_more_ranks_than_heads() -> None:
    with pytest.raises(ValueError, match="9 ranks cannot share 8 attention heads"):
        stored("llama-2").load(Shard(0, 9))


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2.5", "gpt2", "falcon-40b"])
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
    length, head_dim = 20000, 64
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
    heads, rows = torch.randn(1, 50, 5, 32), rope_table(rope, 32, 50)[None]
    q, k, _ = rotate(rows, rope)(heads.clone(), 3, 1)
    scaled = apply_rope(heads[..., : rotary_dim or 32], rows * rope.attention_factor, interleaved)
    theirs = torch.cat([scaled, heads[..., rotary_dim or 32 :]], dim=-1)
    expected = torch.einsum("bthd,bsd->bhts", theirs[:, :, :3], theirs[:, :, 3])
    found = torch.einsum("bthd,bsd->bhts", q, k[:, :, 0])
    assert rope.attention_factor > 1.2
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
