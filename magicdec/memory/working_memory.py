"""The memory that a run needs for a short time, beside weights and caches: an estimate from the
shapes of the tensors of its largest forward. Arithmetic; allocates nothing.
"""

from __future__ import annotations

from magicdec.attention.backend import CallSize, backend_class
from magicdec.config.resolved import ResolvedConfig
from magicdec.cost_model.costs import kv_bytes_per_token
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.observation import heads_at_once
from magicdec.drafting.policies.policy import load_policy, make_policy
from magicdec.hardware.timing import BANDWIDTH_BYTES, GPU_BANDWIDTH_BYTES
from magicdec.model.checkpoint.source import READ_ELEMENTS
from magicdec.model.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def max_tokens(config: ResolvedConfig) -> int:
    """Cached tokens of a row at most. The newest token is never cached, but a verification caches
    its draft tokens too."""
    w, d = config.workload, config.decoding
    drafted = 0 if d.strategy == "autoregressive" else d.most_draft_tokens
    return w.prefix_len + w.num_new_tokens + drafted


def max_following(config: ResolvedConfig, row_tokens: int) -> int:
    """Tokens that follow a prompt at most in a row of `row_tokens`, drafts included. A short prompt
    may be followed by more than the longest is."""
    w = config.workload
    return min(row_tokens, row_tokens - w.prefix_len + w.extra_new_tokens)


def working_bytes(config: ResolvedConfig, model: ModelConfig, shard: Shard) -> int:
    """The largest of these: the forward of a chunk of a prompt, of a verification, or of a policy's
    first choice; reading and converting a matrix; the buffer that measures the bandwidth. The
    rotary table comes on top."""
    w, longest = config.workload, max_tokens(config)
    chunk = min(config.attention.prefill_chunk, w.prefix_len)
    T = 1 + longest - w.prefix_len - w.num_new_tokens
    is_self = config.decoding.drafter == "self"
    observes = is_self and load_policy(config.kv.policy).needs_weights
    buffer = BANDWIDTH_BYTES // shard.size
    needs = (
        forward_bytes(config, model, shard, (1, chunk, longest)),
        forward_bytes(config, model, shard, (w.batch_size, T, longest), observes)
        + _logits_bytes(config, model, shard, w.batch_size * T),
        first_choice_bytes(config, model, shard),
        _loading_bytes(config, model, shard),
        buffer if config.parallel.device == "cpu" else GPU_BANDWIDTH_BYTES,
    )
    return max(needs) + longest * model.head_dim * 4


def first_choice_bytes(config: ResolvedConfig, model: ModelConfig, shard: Shard) -> int:
    """What a policy needs for its choice after prefill: to run the newest prompt tokens a second
    time, or to score the keys of one layer by the queries that prefill kept."""
    policy, w = make_policy(config.kv), config.workload
    if config.decoding.drafter != "self":
        return 0
    B, S, T = w.batch_size, w.prefix_len, policy.rerun_tokens(w.prefix_len)
    per_token = kv_bytes_per_token(model, shard, DTYPE_BYTES[config.model.dtype])
    forward = forward_bytes(config, model, shard, (B, T, S), policy.needs_weights)
    rerun = B * T * per_token + forward if T else 0
    call = _call_size(config, model, shard, (B, min(policy.observed_tokens, S), S))
    if not call.T:
        return rerun
    queries = model.num_layers * B * call.T * call.num_heads * call.head_dim * call.dtype_bytes
    choosing = queries + call.kv_bytes  # K of a layer, twice
    if not policy.is_copied:
        choosing += 4 * B * S * call.num_kv_heads * call.head_dim  # and in float32
    else:
        per_head = call.num_heads // call.num_kv_heads * call.T * S
        num_heads = min(heads_at_once(config.parallel.device, per_head), B * call.num_kv_heads)
        # Scores, their softmax in float32, and its sums before and after pooling.
        choosing += num_heads * per_head * (call.dtype_bytes + 4) + 8 * B * call.num_kv_heads * S
    return max(rerun, choosing)


def forward_bytes(
    config: ResolvedConfig,
    model: ModelConfig,
    shard: Shard,
    shape: tuple[int, int, int],
    observes: bool = False,
) -> int:
    """One layer of a forward of shape (B rows, T new tokens a row, S cached tokens a row): the
    residual stream twice and normed; the larger of attention's and the MLP's tensors; and what the
    backend allocates, also to return its attention weights if the forward `observes` them."""
    call, backend = _call_size(config, model, shard, shape), backend_class(config.attention.backend)
    first, last = shard.split(model.intermediate_size)
    heads = call.num_heads + call.num_kv_heads
    widest = max(3 * heads * model.head_dim, 4 * (last - first))
    layer = call.B * call.T * (3 * model.hidden_size + widest) * call.dtype_bytes
    return layer + backend.working_bytes(call) + observes * backend.weights_bytes(call)


def _call_size(
    config: ResolvedConfig, model: ModelConfig, shard: Shard, shape: tuple[int, int, int]
) -> CallSize:
    queries, keys = shard.heads(model.num_heads, model.num_kv_heads)
    heads = queries[1] - queries[0], keys[1] - keys[0]
    return CallSize(*shape, *heads, model.cached_head_dim, DTYPE_BYTES[config.model.dtype])


def _logits_bytes(config: ResolvedConfig, model: ModelConfig, shard: Shard, num_tokens: int) -> int:
    """This rank's logits; to sample, all logits in float32 and three times in float64."""
    first, last = shard.split(model.vocab_size)
    sampled = 0 if config.sampling.temperature == 0 else model.vocab_size * (4 + 3 * 8)
    return num_tokens * ((last - first) * DTYPE_BYTES[config.model.dtype] + sampled)


def _loading_bytes(config: ResolvedConfig, model: ModelConfig, shard: Shard) -> int:
    """The largest matrix a second time, while it is packed or quantised, and the part that is being
    read in float32; for int8 also divided by its scales and rounded."""
    vocab, ffn = shard.split(model.vocab_size), shard.split(model.intermediate_size)
    largest = max(vocab[1] - vocab[0], 2 * (ffn[1] - ffn[0])) * model.hidden_size
    if config.model.target_dtype == "int8":
        return largest + READ_ELEMENTS * (4 + 4 + 1)
    return largest * DTYPE_BYTES[config.model.dtype] + READ_ELEMENTS * 4
