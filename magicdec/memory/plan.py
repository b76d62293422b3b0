"""The memory plan of a run: what each rank will hold, before any of it is allocated, and whether it
fits. Arithmetic on the resolved config and the models' shapes; allocates nothing.

Weights and KV caches are exact (`tests/unit/test_memory.py` holds them to what is allocated); what
the largest moment takes beside them is an estimate (`working_memory.py`). Not in the plan: the
interpreter and its libraries, which a process that asks for a plan already holds, and the replay in
a wider dtype by which a difference of outputs is settled, which a run seldom needs.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from magicdec.attention.backend import backend_class
from magicdec.config.run_config import RunConfig
from magicdec.cost_model.costs import int8_kv_bytes_per_token, kv_bytes_per_token, weight_bytes
from magicdec.distributed.tensor_parallel import Shard
from magicdec.kv.policy import MASS_BLOCK, make_policy
from magicdec.kv.streaming_llm import StreamingLLM
from magicdec.memory.working_memory import DTYPE_BYTES, max_tokens, working_bytes
from magicdec.model.config import ModelConfig
from magicdec.rolling_runner import BLOCK_SIZE, blocks_held


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, of one rank or of several together. `working` is held for moments, the rest for the
    whole run."""

    weights: int
    kv: int
    draft_weights: int = 0
    draft_kv: int = 0  # of a standalone draft, or what SnapKV gathers
    working: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def describe(self) -> str:
        names = ("weights", "KV", "draft weights", "draft KV", "working")
        parts = zip(names, astuple(self), strict=True)
        shown = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts if size)
        return f"{self.total / 1e9:.2f} GB ({shown})"


@dataclass(frozen=True)
class Models:
    """Shapes of the target and of the standalone draft, if the run has one."""

    target: ModelConfig
    draft: ModelConfig | None = None


def plan_rank(config: RunConfig, models: Models, rank: int) -> MemoryPlan:
    """Of one rank. `config` is resolved."""
    group, size = config.parallel.rank_group, DTYPE_BYTES[config.model.dtype]
    assert group is not None, "resolved"
    shard, is_packed = Shard(group.index(rank), len(group)), config.model.linear == "packed"
    tokens = _rows(config) * _rounded(config.attention.backend, max_tokens(config))
    per_token = kv_bytes_per_token(models.target, shard, size)
    draft_weights, draft_kv = _draft_bytes(config, models, rank)
    is_int8 = config.model.target_dtype == "int8"
    return MemoryPlan(
        stored_bytes(models.target, shard, size, is_packed, is_int8),
        tokens * per_token,
        draft_weights,
        draft_kv + _chosen_bytes(config, models.target, shard),
        working_bytes(config, models.target, shard),
    )


def stored_bytes(
    model: ModelConfig, shard: Shard, size: int, is_packed: bool, is_int8: bool = False
) -> int:
    """All weights of this rank. The embedding is whole on every rank, and a tied head is a part of
    it unless it is packed or in int8, which makes a copy."""
    first, last = shard.split(model.vocab_size)
    shared = (last - first) * model.hidden_size * size
    is_shared = model.tie_word_embeddings and not (is_packed or is_int8)
    embedding = model.vocab_size * model.hidden_size * size
    return weight_bytes(model, shard, size, is_int8) + embedding - (shared if is_shared else 0)


def _rows(config: RunConfig) -> int:
    return config.workload.batch_size


def _rounded(backend: str, tokens: int) -> int:
    """To whole blocks of that backend."""
    block = backend_class(backend)().block_size(tokens)
    return -(-tokens // block) * block


def _chosen_bytes(config: RunConfig, target: ModelConfig, shard: Shard) -> int:
    """What self-speculation keeps of its own beside the target's cache."""
    if config.decoding.drafter != "self":
        return 0
    longest = max_tokens(config)
    if config.kv.policy == "snapkv":
        tokens = _gathered(config, config.attention.backend, longest)
        return tokens * _own_bytes_per_token(config, target, shard)
    if config.kv.policy == "verified":
        first, last = shard.heads(target.num_heads, target.num_kv_heads)[1]
        blocks = -(-longest // MASS_BLOCK)
        return target.num_layers * _rows(config) * (last - first) * blocks * 4
    return 0


def _own_bytes_per_token(config: RunConfig, model: ModelConfig, shard: Shard) -> int:
    """Of K and V of a token in a draft's own cache."""
    if config.kv.draft_kv_dtype == "int8":
        return int8_kv_bytes_per_token(model, shard)
    return kv_bytes_per_token(model, shard, DTYPE_BYTES[config.model.dtype])


def _gathered(config: RunConfig, backend: str, longest: int) -> int:
    """Tokens of all rows that SnapKV copies, and room for what follows them."""
    prefix = config.workload.prefix_len
    held = min(min(config.kv.budget, prefix) + longest - prefix, longest)
    return _rows(config) * _rounded(backend, held)


def _draft_bytes(config: RunConfig, models: Models, rank: int) -> tuple[int, int]:
    """(weights, KV) of a standalone draft on this rank."""
    if config.draft is None or models.draft is None:
        return 0, 0
    ranks, backend = config.draft.rank_group, config.draft.backend
    assert ranks is not None and backend is not None, "resolved"
    if rank not in ranks:
        return 0, 0
    shard, size = Shard(ranks.index(rank), len(ranks)), DTYPE_BYTES[config.model.dtype]
    policy, longest = make_policy(config.kv), max_tokens(config)
    per_token = _own_bytes_per_token(config, models.draft, shard)
    if isinstance(policy, StreamingLLM):
        chunk = min(config.attention.prefill_chunk, config.workload.prefix_len)
        tail = chunk + config.decoding.most_draft_tokens
        kv = _rows(config) * blocks_held(longest, policy, tail) * BLOCK_SIZE * per_token
    elif config.kv.policy == "snapkv":  # beside the whole context in the run's dtype
        kv = _gathered(config, backend, longest) * per_token + _rows(config) * _rounded(
            backend, longest
        ) * kv_bytes_per_token(models.draft, shard, size)
    else:
        kv = _rows(config) * _rounded(backend, longest) * per_token
    is_packed = config.model.linear == "packed"
    is_int8 = config.draft.draft_dtype == "int8"
    weights = stored_bytes(models.draft, shard, size, is_packed, is_int8)
    return weights, kv
