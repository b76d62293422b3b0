"""The predicted cost of a forward, from a ModelConfig and the hardware's ceilings (MagicDec, arXiv
2408.11049, section 3). Pure arithmetic; imports no torch.

Time is the sum of linear layers, attention (each the longer of memory and compute time),
all-reduces and an overhead per layer (fixed, and per new token); of sampling the argmax alone.

B rows, T new tokens per row, S visible tokens per row before the forward. Bytes and FLOPs are per
rank; `roofline.py` counts the same bytes from a loaded model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from magicdec.config.weight_formats import WEIGHT_FORMATS
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.ceiling_file import Hardware
from magicdec.model.config import ModelConfig
from magicdec.model.mixers import Mixer
from magicdec.names import STORED

# Of an int8 KV cache the bytes of a scale for each token, head, and K or V; of an int4 one the
# dimensions of a group, and the bytes of its codes with their scale.
SCALE_BYTES = 4
CODED_GROUP = 32
GROUP_BYTES = 16 + 2
ARGMAX_BYTES = 16  # per token and rank: the best logit and its token id
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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
    """A model with tensor parallelism over `tp` ranks, spread evenly over `nodes`."""

    config: ModelConfig
    hardware: Hardware
    dtype_bytes: int
    tp: int = 1
    nodes: int = 1
    low_bit: str | None = None  # one of NARROW
    kv_dtype: str | None = None  # of K and V, if not that of weights: one of `KV_DTYPES`

    def forward(self, B: int, T: int, S: int, num_logits: int | None = None) -> ForwardCost:
        """The cost on the rank with the most query heads, for which the others wait. `num_logits`
        of a row's new tokens get logits; None: all, any of which may be the last to be kept, so
        that linear layers keep what each writes to the state, which the next forward reads."""
        c = self.config
        shard = slowest_shard(self.config, self.tp)
        entry = attention_entry_bytes(c, shard, self.dtype_bytes, self.kv_dtype)
        layers = attention_layers(c).items()
        entries = sum(n * (T + min(S, (window or S + 1) - 1)) for window, n in layers)
        num_open = T if num_logits is None else 0  # tokens that may be forgotten
        mixer_bytes = 0
        for mixer, n in mixers_of(c).items():
            kept = mixer.state_bytes(shard, self.dtype_bytes)
            kept += num_open * mixer.written_bytes(shard)
            mixer_bytes += n * mixer.read_bytes(shard, self.dtype_bytes, T, S)
            mixer_bytes += n * 2 * kept  # read, and written
        without = 0 if num_logits is None else T - num_logits
        head = _widths(c, shard)[3] * c.hidden_size
        hidden_bytes = B * T * c.hidden_size * self.dtype_bytes
        sums = ((c.num_reduces, hidden_bytes), (1, B * T * ARGMAX_BYTES))
        multiplied = linear_parameters(c, shard)  # by each new token
        untouched = 0  # bytes of experts that no token goes to
        if c.experts is not None:
            expert_total = expert_bytes(c, shard, self.dtype_bytes, self.low_bit)
            untouched = round(expert_total * (1 - c.experts.touched(B * T) / c.experts.num_experts))
            unused = c.experts.num_experts - c.experts.num_used
            multiplied -= expert_parameters(c, shard) * unused // c.experts.num_experts
        return ForwardCost(
            weight_bytes(c, shard, self.dtype_bytes, self.low_bit) - untouched,
            B * (entries * entry + mixer_bytes),
            2 * B * (T * multiplied - without * head),
            B * attention_flops(c, shard, T, S),
            sums if self.tp > 1 else (),
        )

    def seconds(self, B: int, T: int, S: int, num_logits: int | None = None) -> float:
        cost = self.forward(B, T, S, num_logits)
        h = self.hardware
        linear = max(cost.weight_bytes / h.read_bytes_per_s, cost.linear_flops / h.flops_per_s)
        kv_rate = h.kv_bytes_per_s or h.read_bytes_per_s
        attention_rate = h.attention_flops_per_s or h.flops_per_s
        attention = max(cost.kv_bytes / kv_rate, cost.attention_flops / attention_rate)
        overhead = h.layer_overhead_s + (B * T - 1) * h.token_overhead_s
        sums = sum(n * h.all_reduce_s(size, self.tp, self.nodes) for n, size in cost.all_reduces)
        return linear + attention + sums + self.config.num_layers * overhead


def slowest_shard(config: ModelConfig, size: int) -> Shard:
    """The shard with the most query heads. Raises ValueError for more ranks than heads."""

    def num_heads(shard: Shard) -> int:
        first, last = shard.heads(config.num_heads, config.num_kv_heads)[0]
        return last - first

    return max((Shard(rank, size) for rank in range(size)), key=num_heads)


def _widths(config: ModelConfig, shard: Shard) -> tuple[int, int, int, int]:
    """This rank's sizes: query heads x head size, KV heads x head size, MLP units, vocabulary."""
    queries, keys = shard.heads(config.num_heads, config.num_kv_heads)
    units = shard.mlp_units(config.intermediate_size)
    parts = queries, keys, units, shard.split(config.vocab_size)
    num_queries, num_keys, ffn, head = (last - first for first, last in parts)
    return num_queries * config.head_dim, num_keys * config.head_dim, ffn, head


def matrices(config: ModelConfig, shard: Shard) -> list[tuple[int, int]]:
    """(outputs, inputs) of this rank's linear layers, the head last."""
    q, kv, ffn, head = _widths(config, shard)
    hidden = config.hidden_size
    up = config.mlp_inputs * ffn
    gates = q * config.gated_attention
    attention = [(q + 2 * kv + gates, hidden), (hidden, q)]
    mlp = [(up, hidden), (hidden, ffn)]
    shapes = []
    for kind in config.kinds:
        has_experts = config.experts is not None and not kind.has_mlp
        shapes += attention if kind.mixer is None else kind.mixer.matrices(hidden, shard)
        if kind.is_mixer_alone:
            continue
        shapes += experts_of_layer(config, shard) if has_experts else mlp
        shapes += shared_expert(config, shard) if has_experts else []
    shapes.append((head, hidden))
    if config.is_mtp:
        return [(hidden, 2 * hidden), *shapes]
    if config.eagle is None:
        return shapes
    states = config.eagle.num_states * config.eagle.state_size
    first = [(q + 2 * kv, 2 * hidden)] if config.num_layers else []
    return [(hidden, states), *first, *shapes[len(first) :]]


def experts_of_layer(config: ModelConfig, shard: Shard) -> list[tuple[int, int]]:
    """(outputs, inputs) of this rank's share of all experts of a layer, without the router."""
    experts = config.experts
    assert experts is not None, "asked of a mixture"
    first, last = shard.mlp_units(experts.width)
    width = last - first
    pair = [(config.mlp_inputs * width, config.hidden_size), (config.hidden_size, width)]
    return pair * experts.num_experts


def shared_expert(config: ModelConfig, shard: Shard) -> list[tuple[int, int]]:
    """(outputs, inputs) of this rank's share of the MLP that every token goes to beside its
    experts; empty without one."""
    assert config.experts is not None, "asked of a mixture"
    first, last = shard.mlp_units(config.experts.shared_width)
    width = last - first
    if not width:
        return []
    return [(config.mlp_inputs * width, config.hidden_size), (config.hidden_size, width)]


def mixers_of(config: ModelConfig) -> dict[Mixer, int]:
    """The number of layers of each mixer beside attention."""
    counts = Counter[Mixer]()
    for kind, number in config.kind_counts.items():
        if kind.mixer is not None:
            counts[kind.mixer] += number
    return counts


def attention_layers(config: ModelConfig) -> dict[int | None, int]:
    """The number of layers with attention that is computed here, by window."""
    counts = Counter[int | None]()
    for kind, number in config.kind_counts.items():
        if kind.mixer is None:
            counts[kind.window] += number
    return counts


def expert_parameters(config: ModelConfig, shard: Shard) -> int:
    """The number of weights in this rank's experts of all layers."""
    shapes = experts_of_layer(config, shard)
    return config.num_mixtures * sum(outputs * inputs for outputs, inputs in shapes)


@cache
def expert_bytes(
    config: ModelConfig, shard: Shard, dtype_bytes: int, low_bit: str | None = None
) -> int:
    """Bytes of this rank's experts of all layers, as `weight_bytes` counts them."""
    number = expert_parameters(config, shard)
    biases = expert_biases(config, shard) * dtype_bytes
    if low_bit is None:
        return number * dtype_bytes + biases
    if low_bit == STORED:
        assert config.experts is not None, "asked of a mixture"
        own = config.experts.stored_bytes
        average = config.average_bytes(dtype_bytes, shard.size)
        return round(number * (average if own is None else own)) + biases
    shapes = experts_of_layer(config, shard)
    layer_bytes = sum(
        outputs * inputs * WEIGHT_FORMATS[low_bit].bytes_of(inputs) for outputs, inputs in shapes
    )
    return round(config.num_mixtures * layer_bytes) + biases


def expert_biases(config: ModelConfig, shard: Shard) -> int:
    """The number of biases in this rank's experts of all layers."""
    experts = config.experts
    assert experts is not None, "asked of a mixture"
    if not experts.has_bias:
        return 0
    first, last = shard.mlp_units(experts.width)
    expert_numbers = config.mlp_inputs * (last - first) + config.hidden_size
    return config.num_mixtures * experts.num_experts * expert_numbers


@cache
def linear_parameters(config: ModelConfig, shard: Shard) -> int:
    """The number of weights in this rank's linear layers, head included."""
    return sum(outputs * inputs for outputs, inputs in matrices(config, shard))


def low_bit_bytes(config: ModelConfig, shard: Shard, low_bit: str) -> int:
    """Bytes of this rank's matrices, head included. `low_bit`: one of DRAFT_WEIGHTS."""
    shapes = matrices(config, shard)
    return round(sum(n * inputs * WEIGHT_FORMATS[low_bit].bytes_of(inputs) for n, inputs in shapes))


def bytes_as_stored(
    config: ModelConfig, shapes: list[tuple[int, int]], dtype_bytes: int, num_ranks: int
) -> int:
    """Bytes of matrices as a checkpoint stores them in groups, those of layers and then the head,
    on one of `num_ranks` that share them; plain ones have `dtype_bytes`."""
    *layers, head = [outputs * inputs for outputs, inputs in shapes]
    head_bytes = dtype_bytes if config.head_bytes is None else config.head_bytes
    return round(sum(layers) * config.average_bytes(dtype_bytes, num_ranks) + head * head_bytes)


@cache
def weight_bytes(
    config: ModelConfig, shard: Shard, dtype_bytes: int, low_bit: str | None = None
) -> int:
    """Bytes of this rank's weights that one forward reads, with matrices in `low_bit`, one of
    `NARROW`. Embedding rows count as 0."""
    q, kv, ffn, head = _widths(config, shard)
    hidden = config.hidden_size
    up = config.mlp_inputs * ffn
    biases = (q + 2 * kv) * config.qkv_bias + hidden * config.output_bias
    biases += (up + hidden) * config.mlp_bias
    norms = config.norm_parameters + config.embedding_norm_parameters
    vectors = config.num_layers * biases + norms + head * config.head_bias
    vectors += config.num_layers * (q // config.head_dim) * config.sink_logits
    vectors += sum(n * mixer.vectors(hidden, shard) for mixer, n in mixers_of(config).items())
    if config.experts is not None:
        router_weights = config.experts.num_experts * (hidden + config.experts.has_bias)
        router_weights += config.experts.has_shared_gate * hidden
        vectors += config.num_mixtures * router_weights + expert_biases(config, shard)
    if low_bit is None:
        return (linear_parameters(config, shard) + vectors) * dtype_bytes
    if config.tie_word_embeddings:  # a low-bit model has an untied head, without a bias
        vectors -= head * config.head_bias
    if low_bit == STORED:
        shapes = matrices(config, shard)
        matrix_bytes = bytes_as_stored(config, shapes, dtype_bytes, shard.size)
        if config.experts is not None and config.experts.stored_bytes is not None:
            more = config.experts.stored_bytes - config.average_bytes(dtype_bytes, shard.size)
            matrix_bytes += round(expert_parameters(config, shard) * more)
    else:
        matrix_bytes = low_bit_bytes(config, shard, low_bit)
    return matrix_bytes + vectors * dtype_bytes


def stored_bytes(
    model: ModelConfig,
    shard: Shard,
    size: int,
    is_packed: bool,
    low_bit: str | None = None,
    has_embedding: bool = True,
    has_head: bool = True,
) -> int:
    """Bytes of one rank's weights, possibly without the embedding, or without last norm and head.
    The embedding is whole on every rank; a tied head is part of it, unless packing or low-bit
    weights copy it. A head for multi-token prediction has no matrix of logits of its own."""
    c = model
    is_tied = model.tie_word_embeddings
    first, last = shard.split(c.vocab_size)
    embedding_norm = c.embedding_norm_parameters * size
    ends = weight_bytes(c.part(range(0)), shard, size, low_bit)
    stored = weight_bytes(c, shard, size, low_bit) - ends
    if has_head:
        stored += ends - embedding_norm
        if c.is_mtp or (is_tied and not (is_packed or low_bit)):
            stored -= (last - first) * c.hidden_size * size
    if has_embedding or (has_head and is_tied and not low_bit):
        stored += c.embedding_rows * c.hidden_size * size
    if has_embedding:
        positions = c.max_position_embeddings * c.hidden_size * (c.positions == "learned")
        stored += embedding_norm + positions * size
    return stored


def kv_bytes_per_token(
    config: ModelConfig, shard: Shard, dtype_bytes: int, kv_dtype: str | None = None
) -> int:
    """Bytes of K and V of one cached token in all layers, with the scales of codes."""
    mixer_bytes = sum(n * m.entry_bytes(shard, dtype_bytes) for m, n in mixers_of(config).items())
    num_layers = sum(attention_layers(config).values())
    entry_bytes = attention_entry_bytes(config, shard, dtype_bytes, kv_dtype)
    return num_layers * entry_bytes + round(mixer_bytes)


def attention_entry_bytes(
    config: ModelConfig, shard: Shard, dtype_bytes: int, kv_dtype: str | None = None
) -> int:
    """Bytes of K and V of one cached token in a layer with attention that is computed here."""
    first, last = shard.heads(config.num_heads, config.num_kv_heads)[1]
    size = config.cached_head_dim
    head_bytes = {
        None: size * dtype_bytes,
        "fp8": size,
        "int8": size + SCALE_BYTES,
        "int4": -(-size // CODED_GROUP) * GROUP_BYTES,
    }
    return 2 * (last - first) * head_bytes[kv_dtype]


def state_bytes(config: ModelConfig, shard: Shard, dtype_bytes: int) -> int:
    """Bytes that linear layers keep of a sequence, whatever its length, in all layers."""
    counts = mixers_of(config).items()
    return sum(n * mixer.state_bytes(shard, dtype_bytes) for mixer, n in counts)


def attention_flops(config: ModelConfig, shard: Shard, T: int, S: int) -> int:
    """FLOPs of one row: q k^T and weights x V, over the tokens visible to each of the T queries; of
    another mixer, what it says."""
    num_keys = sum(
        num_layers * min(S + t, window or S + t)
        for window, num_layers in attention_layers(config).items()
        for t in range(1, T + 1)
    )
    mixer_flops = sum(n * mixer.flops(shard, T, S) for mixer, n in mixers_of(config).items())
    first, last = shard.heads(config.num_heads, config.num_kv_heads)[0]
    return 4 * (last - first) * config.cached_head_dim * num_keys + mixer_flops
