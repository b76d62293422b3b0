"""The memory plan of a run: what each rank will hold, computed before any of it is allocated.
Arithmetic on the resolved config and the models' shapes; allocates nothing.

Weights and KV caches are exact: `tests/unit/test_memory.py` compares them with what is allocated.
What the largest forward needs beside them is an estimate (`working_memory.py`). Two things are not
in the plan: the interpreter with its libraries, which is in memory already when the plan is made,
and the repetition in a wider dtype that settles a difference of outputs, which few runs need.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from magicdec.attention.backend import backend_class
from magicdec.config.resolved import ResolvedConfig
from magicdec.cost_model.costs import int8_kv_bytes_per_token, kv_bytes_per_token, stored_bytes
from magicdec.distributed.tensor_parallel import Shard
from magicdec.drafting.policies.policy import make_policy
from magicdec.drafting.rolling_runner import BLOCK_SIZE, blocks_held
from magicdec.kv.view import WEIGHTS_BLOCK
from magicdec.memory.working_memory import (
    DTYPE_BYTES,
    max_following,
    max_tokens,
    working_bytes,
)
from magicdec.model.config import ModelConfig


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
        shown = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts if size)
        return f"{self.total / 1e9:.2f} GB" + f" ({shown})" * bool(shown)


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
    kinds = config.model.linear == "packed", config.model.target_dtype == "int8"
    shard = Shard(group.index(rank), len(group))
    ends = stored_bytes(replace(model, num_layers=0), shard, size, *kinds)
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
