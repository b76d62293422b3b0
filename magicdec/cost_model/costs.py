"""The predicted cost of a forward and of a speculative step, from a ModelConfig and the hardware's
ceilings. Pure arithmetic: imports no torch, runs nothing.

The time of a forward is the sum of its linear layers, its attention, its all-reduces and an
overhead per layer. Linear layers and attention each take the longer of their memory time and their
compute time. They run one after the other, so the two times are added. The overhead has a fixed
part and a part per new token (norms, activations, RoPE). Scheduling and all sampling except the
argmax are left out. Source: MagicDec (Chen et al. 2024), section 3; expected tokens: Leviathan et
al. 2023, equation 1.

B rows, T new tokens per row, S visible tokens per row before the forward. Bytes and FLOPs are per
rank; `roofline.py` counts the same bytes from a loaded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.ceiling_file import Hardware
from magicdec.model.config import ModelConfig

Acceptance = float | tuple[float, ...]
"""Either one rate, the probability that a draft token is accepted if all before it were, or the
shares of verifications that accept at least 1, 2, ... draft tokens (a record's
`acceptance_per_position`)."""

SCALE_BYTES = 4  # per output channel of an int8 matrix, or per token and head of an int8 KV cache
ARGMAX_BYTES = 16  # per token and rank: the best logit and its token id


@dataclass(frozen=True)
class ForwardCost:
    """Bytes, FLOPs and all-reduces of one forward on one rank."""

    weight_bytes: int
    kv_bytes: int
    linear_flops: int
    attention_flops: int
    all_reduces: tuple[tuple[int, int], ...]  # (number, bytes of each)


@dataclass(frozen=True)
class Deployment:
    """A model on hardware, with tensor parallelism over `tp` ranks, spread evenly over `nodes`."""

    config: ModelConfig
    hardware: Hardware
    dtype_bytes: int
    tp: int = 1
    nodes: int = 1
    is_int8: bool = False  # int8 weights

    def forward(self, B: int, T: int, S: int) -> ForwardCost:
        """The cost on the rank with the most query heads, for which the other ranks wait."""
        c, shard = self.config, slowest_shard(self.config, self.tp)
        seen = S if c.sliding_window is None else min(S, c.sliding_window - 1)
        hidden_bytes = B * T * c.hidden_size * self.dtype_bytes
        sums = ((c.num_reduces * c.num_layers, hidden_bytes), (1, B * T * ARGMAX_BYTES))
        return ForwardCost(
            weight_bytes(c, shard, self.dtype_bytes, self.is_int8),
            B * (seen + T) * kv_bytes_per_token(c, shard, self.dtype_bytes),
            B * T * linear_flops_per_token(c, shard),
            B * attention_flops(c, shard, T, S),
            sums if self.tp > 1 else (),
        )

    def seconds(self, B: int, T: int, S: int) -> float:
        """Seconds of one forward."""
        cost, h = self.forward(B, T, S), self.hardware
        linear = max(cost.weight_bytes / h.read_bytes_per_s, cost.linear_flops / h.flops_per_s)
        kv_rate = h.kv_bytes_per_s or h.read_bytes_per_s
        attention_rate = h.attention_flops_per_s or h.flops_per_s
        attention = max(cost.kv_bytes / kv_rate, cost.attention_flops / attention_rate)
        overhead = h.layer_overhead_s + (B * T - 1) * h.token_overhead_s
        sums = sum(n * h.all_reduce_s(size, self.tp, self.nodes) for n, size in cost.all_reduces)
        return linear + attention + sums + self.config.num_layers * overhead


def slowest_shard(config: ModelConfig, size: int) -> Shard:
    """The shard with the most query heads. Raises ValueError if there are more ranks than heads."""

    def num_heads(shard: Shard) -> int:
        first, last = shard.heads(config.num_heads, config.num_kv_heads)[0]
        return last - first

    return max((Shard(rank, size) for rank in range(size)), key=num_heads)


def _widths(config: ModelConfig, shard: Shard) -> tuple[int, int, int, int]:
    """This rank's sizes: query heads x head size, KV heads x head size, MLP units, vocabulary."""
    queries, keys = shard.heads(config.num_heads, config.num_kv_heads)
    ffn, head = shard.split(config.intermediate_size), shard.split(config.vocab_size)
    size = config.head_dim
    return (
        (queries[1] - queries[0]) * size,
        (keys[1] - keys[0]) * size,
        ffn[1] - ffn[0],
        head[1] - head[0],
    )


def linear_parameters(config: ModelConfig, shard: Shard) -> int:
    """Number of weights in this rank's linear layers, including the head."""
    q, kv, ffn, head = _widths(config, shard)
    mlp = (3 if config.gated_mlp else 2) * ffn
    layer = config.hidden_size * (q + 2 * kv + q + mlp)
    return config.num_layers * layer + head * config.hidden_size


def weight_bytes(config: ModelConfig, shard: Shard, dtype_bytes: int, is_int8: bool = False) -> int:
    """Bytes of this rank's weights that one forward reads. The few rows read from the embedding are
    counted as 0. `is_int8`: one byte per weight and a float32 scale per output channel."""
    q, kv, ffn, head = _widths(config, shard)
    hidden, up = config.hidden_size, (2 if config.gated_mlp else 1) * ffn
    biases = (q + 2 * kv) * config.qkv_bias + hidden * config.output_bias
    biases += (up + hidden) * config.mlp_bias
    norms = config.norm_parameters + config.embedding_norm_parameters
    vectors = config.num_layers * biases + norms + head * config.head_bias
    matrices = linear_parameters(config, shard)
    if not is_int8:
        return (matrices + vectors) * dtype_bytes
    if config.tie_word_embeddings:  # an int8 model has an untied head, without a bias
        vectors -= head * config.head_bias
    outputs = config.num_layers * (q + 2 * kv + up + 2 * hidden) + head
    return matrices + outputs * SCALE_BYTES + vectors * dtype_bytes


def int8_kv_bytes_per_token(config: ModelConfig, shard: Shard) -> int:
    """`kv_bytes_per_token` for an int8 cache, which has one scale for K and one for V per head."""
    entry = kv_bytes_per_token(config, shard, 1)
    return entry + entry // config.cached_head_dim * SCALE_BYTES


def kv_bytes_per_token(config: ModelConfig, shard: Shard, dtype_bytes: int) -> int:
    """Bytes of K and V of one cached token in all layers."""
    first, last = shard.heads(config.num_heads, config.num_kv_heads)[1]
    return 2 * config.num_layers * (last - first) * config.cached_head_dim * dtype_bytes


def linear_flops_per_token(config: ModelConfig, shard: Shard) -> int:
    return 2 * linear_parameters(config, shard)


def attention_flops(config: ModelConfig, shard: Shard, T: int, S: int) -> int:
    """FLOPs of one row: q k^T and weights x V, over the tokens visible to each of the T queries."""
    window = config.sliding_window or S + T
    seen = sum(min(S + t, window) for t in range(1, T + 1))
    first, last = shard.heads(config.num_heads, config.num_kv_heads)[0]
    return 4 * config.num_layers * (last - first) * config.cached_head_dim * seen


def survival(acceptance: Acceptance, position: int) -> float:
    """Probability that at least `position` (1, 2, ...) draft tokens of a step are accepted."""
    if isinstance(acceptance, tuple):
        assert 1 <= position <= len(acceptance), "gamma is at most the curve's length"
        return acceptance[position - 1]
    return acceptance**position


def expected_tokens(acceptance: Acceptance, gamma: int) -> float:
    """Expected tokens per row and verification, including the bonus token: 1 to gamma + 1."""
    return 1.0 + sum(survival(acceptance, k) for k in range(1, gamma + 1))


@dataclass(frozen=True)
class Prediction:
    """Predicted times of one step in seconds. `draft_s` is the sum of all gamma draft forwards. For
    gamma 0, fields that do not apply are None."""

    gamma: int
    budget: int | None
    decode_s: float
    draft_s: float | None
    verify_s: float | None
    tokens_per_step: float
    speedup: float  # tokens per second relative to autoregressive decoding


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding with one KV budget. The draft (in self-speculation the target itself)
    reads at most `budget` committed tokens per row. The acceptance is the same at every context."""

    target: Deployment
    draft: Deployment
    budget: int
    acceptance: Acceptance

    def predict(self, B: int, S: int, gamma: int) -> Prediction:
        """One step of B rows with S cached tokens each; gamma 0 is autoregressive decoding."""
        decode = self.target.seconds(B, 1, S)
        if gamma == 0:
            return Prediction(0, None, decode, None, None, 1.0, 1.0)
        # The k-th draft forward also sees the k - 1 draft tokens before it.
        draft = sum(self.draft.seconds(B, 1, min(S, self.budget) + k) for k in range(gamma))
        verify = self.target.seconds(B, gamma + 1, S)
        tokens = expected_tokens(self.acceptance, gamma)
        speedup = tokens * decode / (draft + verify)
        return Prediction(gamma, self.budget, decode, draft, verify, tokens, speedup)


def best_gamma(candidates: Sequence[Speculation], B: int, S: int, max_gamma: int) -> Prediction:
    """The fastest prediction over `candidates` (one per KV budget) and gamma 0 to `max_gamma`.
    Gamma is 0 if speculation is not faster than autoregressive decoding."""
    predictions = [candidates[0].predict(B, S, 0)]
    predictions += [
        way.predict(B, S, gamma) for way in candidates for gamma in range(1, max_gamma + 1)
    ]
    return max(predictions, key=lambda p: p.speedup)


def break_even_context(
    candidates: Sequence[Speculation], B: int, max_gamma: int, limit: int = 1 << 20
) -> int | None:
    """The fewest cached tokens per row at which speculation is faster than autoregressive decoding;
    None if there is no such number up to `limit`."""

    def pays(S: int) -> bool:
        return best_gamma(candidates, B, S, max_gamma).gamma > 0

    high = 1
    while not pays(high):
        high *= 2
        if high > limit:
            return None
    low = high // 2  # does not pay, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
