"""What one forward and one step of speculation cost, from a ModelConfig and the hardware's ceilings
alone. Pure arithmetic: imports no torch, runs nothing.

The time of a forward is what its linear layers take, plus what its attention takes, each the slower
of reading and computing (they run one after the other, so one cannot hide the other), plus the
all-reduces, plus an overhead a layer: fixed, and for each new token (norms, activations, rotation).
Sampling beyond the choice of the likeliest token and the scheduler are left out.
Source: MagicDec (Chen et al. 2024), section 3; expected tokens: Leviathan et al. 2023, equation 1.

B rows, T new tokens a row, S visible tokens a row before the forward. Bytes and FLOPs are one
rank's; `roofline.py` counts the same bytes from a loaded model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.ceiling_file import Hardware
from magicdec.model.config import ModelConfig

Acceptance = float | tuple[float, ...]
"""Either one rate, the same for every draft token whose predecessors were accepted, or the share of
verifications that accept at least 1, 2, ... draft tokens (a record's `acceptance_per_position`)."""

SCALE_BYTES = 4  # of an output of an int8 matrix, of a token of one head in an int8 cache
ARGMAX_BYTES = 16  # a token's best logit and its id, from each rank


@dataclass(frozen=True)
class ForwardCost:
    """Of one forward on one rank."""

    weight_bytes: int
    kv_bytes: int
    linear_flops: int
    attention_flops: int
    all_reduces: tuple[tuple[int, int], ...]  # (how many, bytes of each)


@dataclass(frozen=True)
class Deployment:
    """A model on hardware: `tp` ranks hold a share each, spread evenly over `nodes`."""

    config: ModelConfig
    hardware: Hardware
    dtype_bytes: int
    tp: int = 1
    nodes: int = 1
    is_int8: bool = False  # the matrices

    def forward(self, B: int, T: int, S: int) -> ForwardCost:
        """Of the rank with most heads, which the others wait for."""
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
        """Time of one forward."""
        cost, h = self.forward(B, T, S), self.hardware
        linear = max(cost.weight_bytes / h.read_bytes_per_s, cost.linear_flops / h.flops_per_s)
        kv_rate = h.kv_bytes_per_s or h.read_bytes_per_s
        attention_rate = h.attention_flops_per_s or h.flops_per_s
        attention = max(cost.kv_bytes / kv_rate, cost.attention_flops / attention_rate)
        overhead = h.layer_overhead_s + (B * T - 1) * h.token_overhead_s
        sums = sum(n * h.all_reduce_s(size, self.tp, self.nodes) for n, size in cost.all_reduces)
        return linear + attention + sums + self.config.num_layers * overhead


def slowest_shard(config: ModelConfig, size: int) -> Shard:
    """The rank with most query heads. Raises ValueError when there are more ranks than heads."""

    def num_heads(shard: Shard) -> int:
        first, last = shard.heads(config.num_heads, config.num_kv_heads)[0]
        return last - first

    return max((Shard(rank, size) for rank in range(size)), key=num_heads)


def _widths(config: ModelConfig, shard: Shard) -> tuple[int, int, int, int]:
    """This rank's columns: of all query heads, of all KV heads, FFN units, vocabulary rows."""
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
    """Entries of all matrices that a forward multiplies with: of every layer, and the head."""
    q, kv, ffn, head = _widths(config, shard)
    mlp = (3 if config.gated_mlp else 2) * ffn
    layer = config.hidden_size * (q + 2 * kv + q + mlp)
    return config.num_layers * layer + head * config.hidden_size


def weight_bytes(config: ModelConfig, shard: Shard, dtype_bytes: int, is_int8: bool = False) -> int:
    """Of this rank's weights that one forward reads; of the embedding a few rows (0). `is_int8`:
    the matrices have a byte an entry and a float32 scale an output."""
    q, kv, ffn, head = _widths(config, shard)
    hidden, up = config.hidden_size, (2 if config.gated_mlp else 1) * ffn
    biases = (q + 2 * kv) * config.qkv_bias + hidden * config.output_bias
    biases += (up + hidden) * config.mlp_bias
    norms = config.norm_parameters + config.embedding_norm_parameters
    vectors = config.num_layers * biases + norms + head * config.head_bias
    matrices = linear_parameters(config, shard)
    if not is_int8:
        return (matrices + vectors) * dtype_bytes
    if config.tie_word_embeddings:  # then it has a head of its own, without a bias
        vectors -= head * config.head_bias
    outputs = config.num_layers * (q + 2 * kv + up + 2 * hidden) + head
    return matrices + outputs * SCALE_BYTES + vectors * dtype_bytes


def int8_kv_bytes_per_token(config: ModelConfig, shard: Shard) -> int:
    """As `kv_bytes_per_token`, of a cache in int8: a scale for K and one for V of each head."""
    entry = kv_bytes_per_token(config, shard, 1)
    return entry + entry // config.cached_head_dim * SCALE_BYTES


def kv_bytes_per_token(config: ModelConfig, shard: Shard, dtype_bytes: int) -> int:
    """K and V of one cached token in all layers."""
    first, last = shard.heads(config.num_heads, config.num_kv_heads)[1]
    return 2 * config.num_layers * (last - first) * config.cached_head_dim * dtype_bytes


def linear_flops_per_token(config: ModelConfig, shard: Shard) -> int:
    return 2 * linear_parameters(config, shard)


def attention_flops(config: ModelConfig, shard: Shard, T: int, S: int) -> int:
    """Of one row: both products, over what each of the T causal queries sees."""
    window = config.sliding_window or S + T
    seen = sum(min(S + t, window) for t in range(1, T + 1))
    first, last = shard.heads(config.num_heads, config.num_kv_heads)[0]
    return 4 * config.num_layers * (last - first) * config.cached_head_dim * seen


def survival(acceptance: Acceptance, position: int) -> float:
    """Probability that at least `position` (1, 2, ...) draft tokens of a step are accepted."""
    if isinstance(acceptance, tuple):
        assert 1 <= position <= len(acceptance), "the plan keeps gamma within the curve"
        return acceptance[position - 1]
    return acceptance**position


def expected_tokens(acceptance: Acceptance, gamma: int) -> float:
    """Tokens a verification yields a row, bonus included: between 1 and gamma + 1."""
    return 1.0 + sum(survival(acceptance, k) for k in range(1, gamma + 1))


@dataclass(frozen=True)
class Prediction:
    """Of one step, in seconds; what does not apply to gamma 0 is None. `draft_s` is of all gamma
    forwards together."""

    gamma: int
    budget: int | None
    decode_s: float
    draft_s: float | None
    verify_s: float | None
    tokens_per_step: float
    speedup: float  # tokens a second against autoregressive decoding


@dataclass(frozen=True)
class Speculation:
    """`draft` (the target itself in self-speculation) reads at most `budget` committed tokens a row
    and is accepted as `acceptance` says, at whatever context."""

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


def best_gamma(ways: Sequence[Speculation], B: int, S: int, max_gamma: int) -> Prediction:
    """The fastest of `ways` (several budgets) and of gamma 0 to `max_gamma`; gamma 0 where
    speculation does not pay."""
    predictions = [ways[0].predict(B, S, 0)]
    predictions += [way.predict(B, S, gamma) for way in ways for gamma in range(1, max_gamma + 1)]
    return max(predictions, key=lambda p: p.speedup)


def break_even_context(
    ways: Sequence[Speculation], B: int, max_gamma: int, limit: int = 1 << 20
) -> int | None:
    """Fewest cached tokens a row at which speculation pays; None if it does not up to `limit`."""

    def pays(S: int) -> bool:
        return best_gamma(ways, B, S, max_gamma).gamma > 0

    high = 1
    while not pays(high):
        high *= 2
        if high > limit:
            return None
    low = high // 2  # does not pay, or is nothing
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
