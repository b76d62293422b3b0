"""The memory plan of a run: what each rank will hold, before any of it is allocated, and whether it
fits. Arithmetic on the resolved config and the models' shapes; allocates nothing.

Weights and KV caches are exact (`tests/unit/test_memory.py` holds them to what is allocated). The
working memory is what the largest moment takes beside them, an estimate from the shapes of the
tensors that are then alive. Not in the plan: the interpreter and its libraries, which a process
that asks for a plan already holds, and the replay in a wider dtype by which a difference of outputs
is settled, which a run seldom needs.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from magicdec.attention.backend import AttentionBackend
from magicdec.bench.costs import kv_bytes_per_token, weight_bytes
from magicdec.bench.timing import BANDWIDTH_BYTES
from magicdec.config import RunConfig
from magicdec.distributed.tensor_parallel import Shard
from magicdec.kv.policy import MASS_BLOCK, make_policy
from magicdec.kv.streaming_llm import StreamingLLM
from magicdec.machine import CUDA_ONLY
from magicdec.model.checkpoint import READ_ELEMENTS
from magicdec.model.config import ModelConfig
from magicdec.names import ATTENTION_BACKENDS, load_named
from magicdec.rolling_runner import BLOCK_SIZE, blocks_held

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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
    return MemoryPlan(
        stored_bytes(models.target, shard, size, is_packed),
        tokens * per_token,
        draft_weights,
        draft_kv + _chosen_bytes(config, models.target, shard),
        working_bytes(config, models.target, shard),
    )


def max_tokens(config: RunConfig) -> int:
    """Cached tokens a row: the newest is never cached, but a verification holds its drafts too."""
    w, d = config.workload, config.decoding
    drafted = 0 if d.strategy == "autoregressive" else d.most_draft_tokens
    return w.prefix_len + w.num_new_tokens + drafted


def stored_bytes(model: ModelConfig, shard: Shard, size: int, is_packed: bool) -> int:
    """All weights of this rank. The embedding is whole on every rank, and a tied head is a part of
    it unless it is packed, which makes a copy in another layout."""
    first, last = shard.split(model.vocab_size)
    shared = (last - first) * model.hidden_size * size
    is_shared = model.tie_word_embeddings and not is_packed
    embedding = model.vocab_size * model.hidden_size * size
    return weight_bytes(model, shard, size) + embedding - (shared if is_shared else 0)


def _rows(config: RunConfig) -> int:
    return config.workload.batch_size


def _rounded(backend: str, tokens: int) -> int:
    """To whole blocks of that backend."""
    chosen: AttentionBackend = load_named(ATTENTION_BACKENDS, backend)()
    block = chosen.block_size(tokens)
    return -(-tokens // block) * block


def _chosen_bytes(config: RunConfig, target: ModelConfig, shard: Shard) -> int:
    """What self-speculation keeps of its own beside the target's cache."""
    if config.decoding.drafter != "self":
        return 0
    size, longest = DTYPE_BYTES[config.model.dtype], max_tokens(config)
    if config.kv.policy == "snapkv":
        tokens = _gathered(config, config.attention.backend, longest)
        return tokens * kv_bytes_per_token(target, shard, size)
    if config.kv.policy == "verified":
        first, last = shard.heads(target.num_heads, target.num_kv_heads)[1]
        blocks = -(-longest // MASS_BLOCK)
        return target.num_layers * _rows(config) * (last - first) * blocks * 4
    return 0


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
    if isinstance(policy, StreamingLLM):
        chunk = min(config.attention.prefill_chunk, config.workload.prefix_len)
        tail = chunk + config.decoding.most_draft_tokens
        tokens = _rows(config) * blocks_held(longest, policy, tail) * BLOCK_SIZE
    else:
        tokens = _rows(config) * _rounded(backend, longest)
        if config.kv.policy == "snapkv":
            tokens += _gathered(config, backend, longest)
    is_packed = config.model.linear == "packed"
    weights = stored_bytes(models.draft, shard, size, is_packed)
    return weights, tokens * kv_bytes_per_token(models.draft, shard, size)


def working_bytes(config: RunConfig, model: ModelConfig, shard: Shard) -> int:
    """The largest of the moments: a chunk of a prompt, a verification, loading a matrix, measuring
    the bandwidth; and the rotary table."""
    size = DTYPE_BYTES[config.model.dtype]
    w, longest = config.workload, max_tokens(config)
    chunk = min(config.attention.prefill_chunk, w.prefix_len)
    is_greedy = config.sampling.temperature == 0
    verified = w.batch_size * (1 + longest - w.prefix_len - w.num_new_tokens)
    first, last = shard.split(model.vocab_size)
    logits = verified * (last - first) * size
    if not is_greedy:  # whole, in float32, and three times in float64 while probabilities are made
        logits += verified * model.vocab_size * (4 + 3 * 8)
    on_cpu = config.parallel.device == "cpu"
    moments = (
        _layer_bytes(model, shard, chunk, size)
        + _attention_bytes(config, model, shard, 1, chunk, longest),
        _layer_bytes(model, shard, verified, size)
        + _attention_bytes(config, model, shard, w.batch_size, verified // w.batch_size, longest)
        + logits,
        _largest_matrix(model, shard) * size + READ_ELEMENTS * 4,
        BANDWIDTH_BYTES // shard.size if on_cpu else BANDWIDTH_BYTES,
    )
    return max(moments) + longest * model.head_dim * 4


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
    """What a backend makes for one layer: B rows, T new tokens, S cached ones."""
    size, backend = DTYPE_BYTES[config.model.dtype], config.attention.backend
    per_layer = kv_bytes_per_token(model, shard, size) // model.num_layers
    first, last = shard.heads(model.num_heads, model.num_kv_heads)[0]
    if backend == "sdpa":  # the keys and values gathered, the mask as it is and as it is added
        return B * S * per_layer + B * T * S * (1 + size)
    if backend == "native" and (T == 1 or size == 2):
        return 0
    if backend == "triton":  # splits are only made until the processors are busy: a few megabytes
        return 0
    if backend in CUDA_ONLY:  # what a view that is not full gathers
        return B * S * per_layer
    if T >= 32:  # grouped, or what native hands to it: torch's fused kernel with a mask
        return B * T * S * (1 + size)
    if backend == "native":
        return 0
    return B * (last - first) * T * S * (2 * size + 4)  # scores, weights, and these once more


def _largest_matrix(model: ModelConfig, shard: Shard) -> int:
    """Elements of the largest matrix that is packed or read at once."""
    vocab, ffn = shard.split(model.vocab_size), shard.split(model.intermediate_size)
    return max(vocab[1] - vocab[0], 2 * (ffn[1] - ffn[0])) * model.hidden_size
