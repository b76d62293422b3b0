"""The memory plan of a run: what each rank will hold, computed before any of it is allocated.
Arithmetic on the resolved config and the models' shapes; allocates nothing.

Weights and KV caches are exact: `tests/unit/test_memory.py` compares them with what is allocated.
What is needed for a short time beside them (`working_bytes`) is an estimate from the shapes of the
tensors of the largest forward. Two things are not in the plan: the interpreter with its libraries,
which is in memory already when the plan is made, and the repetition in a wider dtype that settles a
difference of outputs, which few runs need.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from magicdec.attention.backend import CallSize, backend_class
from magicdec.config.resolved import ResolvedConfig
from magicdec.cost_model.costs import int8_kv_bytes_per_token, kv_bytes_per_token, stored_bytes
from magicdec.cost_model.plan import DTYPE_BYTES
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.observation import heads_at_once
from magicdec.drafting.policies.policy import load_policy, make_policy
from magicdec.drafting.rolling_runner import BLOCK_SIZE, blocks_held
from magicdec.hardware.timing import BANDWIDTH_BYTES, GPU_BANDWIDTH_BYTES
from magicdec.kv.view import WEIGHTS_BLOCK
from magicdec.model.checkpoint.source import READ_ELEMENTS
from magicdec.model.config import ModelConfig


def max_tokens(config: ResolvedConfig) -> int:
    """Cached tokens of a row at most. The newest token is never cached, but a verification caches
    its draft tokens too."""
    w, d = config.workload, config.decoding
    num_drafts = 0 if d.strategy == "autoregressive" else d.most_draft_tokens
    return w.prefix_len + w.num_new_tokens + num_drafts


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
    num_heads, num_kv_heads = queries[1] - queries[0], keys[1] - keys[0]
    dtype_bytes = DTYPE_BYTES[config.model.dtype]
    return CallSize(*shape, num_heads, num_kv_heads, model.cached_head_dim, dtype_bytes)


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


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, or of several together. `working` is needed for a short time, the rest is
    held for the whole run."""

    weights: int
    kv: int
    draft_weights: int = 0
    draft_kv: int = 0  # a standalone draft's cache, or what self-speculation keeps of its own
    working: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def describe(self) -> str:
        names = ("weights", "KV", "draft weights", "draft KV", "working")
        parts = zip(names, astuple(self), strict=True)
        listing = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts if size)
        return f"{self.total / 1e9:.2f} GB" + f" ({listing})" * bool(listing)


@dataclass(frozen=True)
class Models:
    """Shapes of the target and of the standalone draft, if the run has one."""

    target: ModelConfig
    draft: ModelConfig | None = None


def plan_rank(
    config: ResolvedConfig, models: Models, rank: int, keeps_queries: bool = True
) -> MemoryPlan:
    """The plan of one rank. `config` is resolved. `keeps_queries`: prompts are prefilled, and the
    queries that the KV policy asks for are kept."""
    group, size = config.parallel.rank_group, DTYPE_BYTES[config.model.dtype]
    shard, is_packed = Shard(group.index(rank), len(group)), config.model.linear == "packed"
    is_int8 = config.model.target_dtype == "int8"
    weights = stored_bytes(models.target, shard, size, is_packed, is_int8)
    tokens = _stored_tokens(config, config.attention.backend, max_tokens(config))
    kv = tokens * kv_bytes_per_token(models.target, shard, size)
    working = working_bytes(config, models.target, shard)
    draft = config.draft
    if draft is None or models.draft is None:
        draft_kv = _draft_kv_bytes(config, models.target, shard, config.attention.backend)
        if config.decoding.drafter == "self" and keeps_queries:
            draft_kv += _query_bytes(config, models.target, shard)
        return MemoryPlan(weights, kv, 0, draft_kv, working)
    if rank not in draft.rank_group:
        return MemoryPlan(weights, kv, working=working)
    shard = Shard(draft.rank_group.index(rank), len(draft.rank_group))
    is_int8 = draft.draft_dtype == "int8"
    draft_weights = stored_bytes(models.draft, shard, size, is_packed, is_int8)
    draft_kv = _draft_kv_bytes(config, models.draft, shard, draft.backend)
    if keeps_queries:
        draft_kv += _query_bytes(config, models.draft, shard)
    return MemoryPlan(weights, kv, draft_weights, draft_kv, working)


def plan_stage(
    config: ResolvedConfig, model: ModelConfig, num_layers: int, has_ends: bool, rank: int
) -> MemoryPlan:
    """The plan of one rank of a pipeline's stage, which shares `num_layers` of the layers with the
    ranks of the config's group. Only with `has_ends` does it hold the embedding and the head."""
    plan = plan_rank(config, Models(replace(model, num_layers=num_layers)), rank)
    if has_ends:
        return plan
    group, size = config.parallel.rank_group, DTYPE_BYTES[config.model.dtype]
    is_packed, is_int8 = config.model.linear == "packed", config.model.target_dtype == "int8"
    shard = Shard(group.index(rank), len(group))
    ends = stored_bytes(replace(model, num_layers=0), shard, size, is_packed, is_int8)
    return replace(plan, weights=plan.weights - ends)


def _stored_tokens(config: ResolvedConfig, backend: str, tokens: int) -> int:
    """Tokens that a cache of all rows has room for, `tokens` of them in each row: the backend's
    blocks are whole."""
    block = backend_class(backend)().block_size(tokens)
    return config.workload.batch_size * -(-tokens // block) * block


def _query_bytes(config: ResolvedConfig, model: ModelConfig, shard: Shard) -> int:
    """The queries of each prompt's newest tokens, which prefill keeps for the KV policy."""
    w, (first, last) = config.workload, shard.heads(model.num_heads, model.num_kv_heads)[0]
    tokens = w.batch_size * min(make_policy(config.kv).observed_tokens, w.prefix_len)
    numbers = model.num_layers * (last - first) * model.cached_head_dim
    return tokens * numbers * DTYPE_BYTES[config.model.dtype]


def _draft_kv_bytes(config: ResolvedConfig, model: ModelConfig, shard: Shard, backend: str) -> int:
    """What the KV policy makes a draft hold beside the newest queries of the prompts: the whole
    cache of a standalone draft, or, in self-speculation, what is kept beside the target's cache."""
    is_self, w, longest = config.decoding.drafter == "self", config.workload, max_tokens(config)
    if not is_self and config.draft is None:
        return 0
    in_run_dtype = kv_bytes_per_token(model, shard, DTYPE_BYTES[config.model.dtype])
    is_int8 = config.kv.draft_kv_dtype == "int8"
    per_token = int8_kv_bytes_per_token(model, shard) if is_int8 else in_run_dtype
    whole, policy = _stored_tokens(config, backend, longest), make_policy(config.kv)
    if policy.is_copied:  # with room for the tokens that follow
        following = max_following(config, longest)
        copied = min(policy.copied_tokens(w.prefix_len) + following, longest)
        context = 0 if is_self else whole * in_run_dtype
        return context + _stored_tokens(config, backend, copied) * per_token
    if is_self:
        queries, (first, last) = shard.heads(model.num_heads, model.num_kv_heads)
        blocks, group = -(-longest // WEIGHTS_BLOCK), (queries[1] - queries[0]) // (last - first)
        numbers = policy.state_numbers(blocks, model.cached_head_dim, group)
        return model.num_layers * w.batch_size * (last - first) * numbers * 4
    if policy.can_roll:
        tail = min(config.attention.prefill_chunk, w.prefix_len) + config.decoding.most_draft_tokens
        return (
            w.batch_size
            * blocks_held(longest, policy.rolling_rule(), tail)
            * BLOCK_SIZE
            * per_token
        )
    return whole * per_token
