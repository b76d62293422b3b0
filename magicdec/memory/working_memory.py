"""The memory that a run takes for moments, beside weights and caches: an estimate from the shapes
of the tensors that are then alive. Arithmetic; allocates nothing.
"""

from __future__ import annotations

from magicdec.attention.backend import CallSize, backend_class
from magicdec.config.run_config import RunConfig
from magicdec.cost_model.costs import kv_bytes_per_token
from magicdec.decoding.heaviest_reader import REPLAYED
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.timing import BANDWIDTH_BYTES, GPU_BANDWIDTH_BYTES
from magicdec.model.checkpoint.source import READ_ELEMENTS
from magicdec.model.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def max_tokens(config: RunConfig) -> int:
    """Cached tokens a row: the newest is never cached, but a verification holds its drafts too."""
    w, d = config.workload, config.decoding
    drafted = 0 if d.strategy == "autoregressive" else d.most_draft_tokens
    return w.prefix_len + w.num_new_tokens + drafted


def working_bytes(config: RunConfig, model: ModelConfig, shard: Shard) -> int:
    """The largest of the moments: a chunk of a prompt, a verification, the prompts' ends a second
    time (`replay_bytes`), loading a matrix, measuring the bandwidth; and the rotary table."""
    size = DTYPE_BYTES[config.model.dtype]
    w, longest = config.workload, max_tokens(config)
    chunk = min(config.attention.prefill_chunk, w.prefix_len)
    is_greedy = config.sampling.temperature == 0
    verified = w.batch_size * (1 + longest - w.prefix_len - w.num_new_tokens)
    verification = w.batch_size, verified // w.batch_size, longest
    is_watching = config.decoding.drafter == "self" and config.kv.policy == "verified"
    first, last = shard.split(model.vocab_size)
    logits = verified * (last - first) * size
    if not is_greedy:  # whole, in float32, and three times in float64 while probabilities are made
        logits += verified * model.vocab_size * (4 + 3 * 8)
    on_cpu = config.parallel.device == "cpu"
    moments = (
        _layer_bytes(model, shard, chunk, size)
        + _attention_bytes(config, model, shard, 1, chunk, longest),
        _layer_bytes(model, shard, verified, size)
        + _attention_bytes(config, model, shard, *verification)
        + is_watching * _watching_bytes(config, model, shard, *verification)
        + logits,
        replay_bytes(config, model, shard),
        _loading_bytes(config, model, shard),
        BANDWIDTH_BYTES // shard.size if on_cpu else GPU_BANDWIDTH_BYTES,
    )
    return max(moments) + longest * model.head_dim * 4


def replay_bytes(config: RunConfig, model: ModelConfig, shard: Shard) -> int:
    """What it takes to see, after prefill, where the newest prompt tokens look: of SnapKV for one
    row after the other, of `verified` for all together. Their K and V are kept meanwhile."""
    drafts, kv, w = config.decoding.drafter, config.kv, config.workload
    if drafts != "self" or kv.policy not in ("snapkv", "verified"):
        return 0
    size, S = DTYPE_BYTES[config.model.dtype], w.prefix_len
    B, T = (1, kv.window_size) if kv.policy == "snapkv" else (w.batch_size, REPLAYED)
    T = min(T, S)
    kept = B * T * kv_bytes_per_token(model, shard, size)
    forward = _layer_bytes(model, shard, B * T, size)
    forward += _attention_bytes(config, model, shard, B, T, S)
    if kv.policy == "snapkv":
        queries, keys = shard.heads(model.num_heads, model.num_kv_heads)
        H, G, D = queries[1] - queries[0], keys[1] - keys[0], model.cached_head_dim
        # The row's K and V, K once more in float32, and scores and probabilities in float32.
        chosen = 2 * S * G * D * size + S * G * D * 4 + 2 * H * T * S * 4 + T * S
        positions = (model.num_layers + 2) * G * S * 8  # at most, with the slots of all tokens
        return kept + _layer_bytes(model, shard, T, size) + max(forward, chosen) + positions
    return kept + forward + _watching_bytes(config, model, shard, B, T, S)


def _layer_bytes(model: ModelConfig, shard: Shard, num_tokens: int, size: int) -> int:
    """Of a layer over so many tokens: the residual stream twice and normed, and the wider of q, k,
    v, rotated copies and output, and of gate, up, activated gate and product."""
    queries, keys = shard.heads(model.num_heads, model.num_kv_heads)
    q, kv = ((last - first) * model.head_dim for first, last in (queries, keys))
    first, last = shard.split(model.intermediate_size)
    widest = max(3 * q + 3 * kv, 4 * (last - first))
    return num_tokens * (3 * model.hidden_size + widest) * size


def _attention_bytes(
    config: RunConfig, model: ModelConfig, shard: Shard, B: int, T: int, S: int
) -> int:
    """What the backend allocates for one layer: B rows, T new tokens, S cached ones."""
    size = _call_size(config, model, shard, B, T, S)
    return backend_class(config.attention.backend).working_bytes(size)


def _watching_bytes(
    config: RunConfig, model: ModelConfig, shard: Shard, B: int, T: int, S: int
) -> int:
    """What the backend allocates on top of that to return its attention weights."""
    size = _call_size(config, model, shard, B, T, S)
    return backend_class(config.attention.backend).weights_bytes(size)


def _call_size(
    config: RunConfig, model: ModelConfig, shard: Shard, B: int, T: int, S: int
) -> CallSize:
    queries, keys = shard.heads(model.num_heads, model.num_kv_heads)
    heads = queries[1] - queries[0], keys[1] - keys[0]
    return CallSize(B, T, S, *heads, model.cached_head_dim, DTYPE_BYTES[config.model.dtype])


def _loading_bytes(config: RunConfig, model: ModelConfig, shard: Shard) -> int:
    """A matrix while it is packed, and what is read at once; while it is quantised, in float32,
    divided by its scales and rounded."""
    matrix = _largest_matrix(model, shard)
    if config.model.target_dtype == "int8":
        return matrix + READ_ELEMENTS * (4 + 4 + 1)
    return matrix * DTYPE_BYTES[config.model.dtype] + READ_ELEMENTS * 4


def _largest_matrix(model: ModelConfig, shard: Shard) -> int:
    """Elements of the largest matrix that is packed or read at once."""
    vocab, ffn = shard.split(model.vocab_size), shard.split(model.intermediate_size)
    return max(vocab[1] - vocab[0], 2 * (ffn[1] - ffn[0])) * model.hidden_size
