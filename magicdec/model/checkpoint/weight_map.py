"""The table from decoder parameters to slices of checkpoint tensors, for every layout: q, k and v
apart or packed, stored [out, in] or transposed. Names come from the family. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from magicdec.distributed.tensor_parallel import Shard
from magicdec.model.config import ROUTER, SHARED_GATE, LayerKind, ModelConfig
from magicdec.model.families.family import Names, find_family
from magicdec.model.mixers import LinearAttention
from magicdec.output.files import load_json

NO_MATRIX = re.compile(rf"embedding|\.({ROUTER}|{SHARED_GATE})\.")  # parameters of two dimensions

IndexRange = tuple[int, int]
WeightPart = tuple[str, IndexRange, int]
"""(checkpoint name without ".weight", this rank's rows, number of rows of the whole tensor)."""


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, by a checkpoint's index. Raises ValueError if it is none, or
    names a file outside its directory."""
    try:
        table = load_json(path)["weight_map"]
        files = {str(name): str(file) for name, file in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise ValueError(f"{path}: not an index of weight files ({reason})") from None
    for name, file in files.items():
        if PurePath(file).is_absolute() or ".." in PurePath(file).parts:
            raise ValueError(
                f"{path}: it places tensor {name} in {file}, which is not in its directory"
            )
    return files


@dataclass(frozen=True)
class Piece:
    """A slice of a checkpoint tensor, counted as [out, in]. `columns` is None for a vector and
    for all columns. `full_shape` is as stored, [in, out] if `transposed`. `offset` is added to
    what is stored."""

    name: str
    rows: IndexRange
    columns: IndexRange | None
    full_shape: tuple[int, ...]
    transposed: bool = False
    offset: float = 0.0

    @property
    def width(self) -> int:
        """Columns of the whole tensor; 1 for a vector."""
        return 1 if len(self.full_shape) == 1 else self.full_shape[0 if self.transposed else 1]

    @property
    def inputs(self) -> IndexRange:
        return self.columns or (0, self.width)

    @property
    def stored(self) -> tuple[slice, ...]:
        rows = slice(*self.rows)
        if self.transposed:
            return slice(*self.inputs), rows
        return (rows,) if self.columns is None else (rows, slice(*self.columns))


def weight_map(
    config: ModelConfig,
    shard: Shard,
    layers: range,
    has_ends: bool | None = None,
) -> dict[str, list[Piece]]:
    """For each parameter of `Transformer(config, shard, layers, has_ends)`, the pieces to stack
    by rows."""
    table = _Table(config, shard)
    names = table.names
    if config.is_head:
        table.mtp_head(layers) if config.is_mtp else table.eagle_head(layers)
        return table.pieces
    has_embedding = layers.start == 0 if has_ends is None else has_ends
    has_head = layers.stop == config.num_layers if has_ends is None else has_ends
    if has_embedding or (has_head and config.tie_word_embeddings):
        table.whole("embedding.weight", names.embedding, config.vocab_size)
    if has_embedding and config.positions == "learned":
        table.whole(
            "position_embedding.weight", names.position_embedding, config.max_position_embeddings
        )
    if has_embedding and config.embedding_norm:
        table.norm("embedding_norm", names.embedding_norm)
    kinds = config.kinds
    for index, layer in enumerate(layers):
        table.layer(f"blocks.{index}", names.layer.format(layer), kinds[layer])
    if has_head:
        table.norm("norm", names.norm)
        if not config.tie_word_embeddings:
            table.head()
    return table.pieces


def untie_head(config: ModelConfig) -> ModelConfig:
    """The config with matrices in groups: the head has numbers and the embedding has not, so it is
    untied."""
    if not config.tie_word_embeddings:
        return config
    return replace(config, tie_word_embeddings=False, head_bias=False)


def find_pieces(config: ModelConfig) -> dict[str, Piece]:
    """The unsharded model's pieces by tensor name."""
    table = weight_map(config, Shard(), range(config.num_layers))
    return {piece.name: piece for pieces in table.values() for piece in pieces}


def matrix_pieces(config: ModelConfig) -> list[Piece]:
    """Those of the unsharded model's linear layers that may be quantised, the head included unless
    it is tied."""
    table = weight_map(config, Shard(), range(config.num_layers))
    return [
        piece
        for parameter, pieces in table.items()
        for piece in pieces
        if len(piece.full_shape) == 2 and not NO_MATRIX.search(parameter)
    ]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Full shapes of a checkpoint's tensors by Hugging Face name."""
    return {name: piece.full_shape for name, piece in find_pieces(config).items()}


class _Table:
    """The pieces of one model's shard."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        self.config = config
        self.shard = shard
        names = find_family(config.architecture).names(config)
        self.names: Names = names.mtp_head_names() if config.is_mtp else names
        self.query_heads, self.kv_heads = shard.heads(config.num_heads, config.num_kv_heads)
        self.pieces: dict[str, list[Piece]] = {}

    def mtp_head(self, layers: range) -> None:
        c = self.config
        theirs = self.names.mtp
        self.norm("norm", theirs.norm)
        self.norm("token_norm", theirs.token_norm)
        self.norm("state_norm", theirs.state_norm)
        whole = [(theirs.projection, (0, c.hidden_size), c.hidden_size)]
        self.column_parallel("projection", whole, False, inputs=2 * c.hidden_size)
        for index in layers:
            self.layer(f"blocks.{index}", self.names.layer.format(index), c.kinds[index])

    def eagle_head(self, layers: range) -> None:
        c = self.config
        eagle = c.eagle
        assert eagle is not None, "asked of a head"
        width = eagle.num_states * eagle.state_size
        if eagle.has_embedding:
            self.whole("embedding.weight", self.names.embedding, eagle.target_vocab_size)
        if eagle.norm_before_fc:
            self.vector("input_norm.weight", "input_norm.weight", width)
        for number in range(eagle.num_states if eagle.fc_norm else 0):
            name = f"fc_norm.{number}.weight"
            self.vector(name, name, eagle.state_size)
        whole = (0, c.hidden_size)
        self.column_parallel("fc", [("fc", whole, c.hidden_size)], False, inputs=width)
        for index in layers:
            name = self.names.layer.format(index)
            kind = c.kinds[index]
            self.layer(f"blocks.{index}", name, kind, 2 if index == 0 else 1)
            if index == 0:
                self.norm("blocks.0.hidden_norm", f"{name}hidden_norm")
        self.norm("norm", self.names.norm)
        self.head()

    def head(self) -> None:
        c = self.config
        rows = self.shard.split(c.vocab_size)
        parts = [(self.names.head, rows, c.vocab_size)]
        self.column_parallel("head", parts, c.head_bias, is_head=True)

    def layer(self, ours: str, theirs: str, kind: LayerKind, num_inputs: int = 1) -> None:
        """`num_inputs`: vectors of the hidden size that attention takes, one behind the other."""
        c = self.config
        n = self.names
        self.norm(f"{ours}.attention_norm", theirs + n.attention_norm)
        if isinstance(kind.mixer, LinearAttention):
            self._linear_attention(f"{ours}.attention", theirs + n.linear, kind.mixer)
        else:
            self._attention(ours, theirs, num_inputs * c.hidden_size)
        if c.residual != "parallel_shared_norm":
            self.norm(f"{ours}.mlp_norm", theirs + n.mlp_norm)
        if c.post_norms:
            self.norm(f"{ours}.post_attention_norm", theirs + n.post_attention_norm)
            self.norm(f"{ours}.post_mlp_norm", theirs + n.post_mlp_norm)
        if c.experts is not None and not kind.has_mlp:
            self._experts(f"{ours}.mlp", theirs)
            return
        up = [theirs + name for name in n.gate_up]
        names = f"{ours}.mlp.gate_up", f"{ours}.mlp.down"
        self.mlp(*names, up, theirs + n.down, c.intermediate_size, c.mlp_bias)

    def _attention(self, ours: str, theirs: str, inputs: int) -> None:
        c = self.config
        n = self.names
        self.column_parallel(f"{ours}.attention.qkv", self._qkv(theirs), c.qkv_bias, inputs=inputs)
        if c.qk_norm:
            for name in (n.q_norm, n.k_norm):
                leaf = "q_norm" if name == n.q_norm else "k_norm"
                parameter = f"{ours}.attention.{leaf}.weight"
                self.vector(parameter, f"{theirs}{name}.weight", c.head_dim, n.norm_offset)
        if c.sink_logits:
            sinks = Piece(theirs + n.sinks, self.query_heads, None, (c.num_heads,))
            self.pieces[f"{ours}.attention.sinks"] = [sinks]
        self.row_parallel(
            f"{ours}.attention.output",
            theirs + n.output,
            scale(self.query_heads, c.head_dim),
            c.num_heads * c.head_dim,
            c.output_bias,
        )

    def _linear_attention(self, ours: str, theirs: str, mixer: LinearAttention) -> None:
        """Qwen3.5's tensors: q, k and v in one, the output's gate, and what rates are made of."""
        (first, last), keys = self.shard.heads(mixer.num_value_heads, mixer.num_key_heads)
        values = (first, last)
        key_rows = scale(keys, mixer.key_dim)
        value_rows = scale(values, mixer.value_dim)
        num_keys = mixer.num_key_heads * mixer.key_dim
        num_values = mixer.num_value_heads * mixer.value_dim
        channels = [key_rows, shifted(key_rows, num_keys), shifted(value_rows, 2 * num_keys)]
        num_channels = 2 * num_keys + num_values
        if self.names.linear_by_key_head:
            parts = by_key_head(theirs, mixer, keys, values)
        else:
            parts = [(f"{theirs}in_proj_qkv", rows, num_channels) for rows in channels]
            parts.append((f"{theirs}in_proj_z", value_rows, num_values))
            for name in ("in_proj_b", "in_proj_a"):
                parts.append((f"{theirs}{name}", values, mixer.num_value_heads))
        self.column_parallel(f"{ours}.inputs", parts, False)
        self.pieces[f"{ours}.convolution"] = [
            Piece(f"{theirs}conv1d.weight", rows, None, (num_channels, 1, mixer.kernel))
            for rows in channels
        ]
        for parameter, name in (("step_bias", "dt_bias"), ("log_decay", "A_log")):
            piece = Piece(theirs + name, values, None, (mixer.num_value_heads,))
            self.pieces[f"{ours}.{parameter}"] = [piece]
        self.vector(f"{ours}.norm", f"{theirs}norm.weight", mixer.value_dim)
        self.row_parallel(f"{ours}.output", f"{theirs}out_proj", value_rows, num_values, False)

    def mlp(
        self, gate_up: str, down: str, up_names: list[str], down_name: str, width: int, bias: bool
    ) -> None:
        """The parameters `gate_up` and `down` of an MLP, or of an expert."""
        units = self.shard.mlp_units(width)
        self.column_parallel(gate_up, [(name, units, width) for name in up_names], bias)
        self.row_parallel(down, down_name, units, width, bias)

    def _experts(self, ours: str, theirs: str) -> None:
        n = self.names
        experts = self.config.experts
        assert experts is not None, "asked of a mixture"
        has_bias = experts.has_bias
        self.whole(f"{ours}.{ROUTER}.weight", theirs + n.router, experts.num_experts)
        if has_bias:
            name = f"{theirs}{n.router}.bias"
            self.vector(f"{ours}.{ROUTER}.bias", name, experts.num_experts)
        for number in range(experts.num_experts):
            expert = theirs + n.expert.format(number)
            up = [expert + name for name in n.expert_gate_up]
            names = f"{ours}.gate_up.{number}", f"{ours}.down.{number}"
            self.mlp(*names, up, expert + n.expert_down, experts.width, has_bias)
        if experts.shared_width:
            shared = theirs + n.shared_expert
            up = [shared + name for name in n.expert_gate_up]
            names = f"{ours}.shared_gate_up", f"{ours}.shared_down"
            self.mlp(*names, up, shared + n.expert_down, experts.shared_width, False)
        if experts.has_shared_gate:
            self.whole(f"{ours}.{SHARED_GATE}.weight", theirs + n.shared_gate, 1)

    def column_parallel(
        self,
        parameter: str,
        parts: Iterable[WeightPart],
        bias: bool,
        is_head: bool = False,
        inputs: int | None = None,
    ) -> None:
        """A column-parallel layer: this rank's outputs, all inputs (None: the hidden size)."""
        parts = list(parts)
        hidden = inputs or self.config.hidden_size
        transposed = self.names.transposed and not is_head
        self.pieces[f"{parameter}.weight"] = [
            Piece(
                f"{name}.weight",
                rows,
                None,
                (hidden, full) if transposed else (full, hidden),
                transposed,
            )
            for name, rows, full in parts
        ]
        if bias:
            self.pieces[f"{parameter}.bias"] = [
                Piece(f"{name}.bias", rows, None, (full,)) for name, rows, full in parts
            ]

    def row_parallel(
        self, parameter: str, name: str, columns: IndexRange, full: int, bias: bool
    ) -> None:
        """A row-parallel layer: all outputs, this rank's inputs."""
        hidden = self.config.hidden_size
        transposed = self.names.transposed
        shape = (full, hidden) if transposed else (hidden, full)
        self.pieces[f"{parameter}.weight"] = [
            Piece(f"{name}.weight", (0, hidden), columns, shape, transposed)
        ]
        if bias:
            self.vector(f"{parameter}.bias", f"{name}.bias", hidden)

    def norm(self, parameter: str, name: str) -> None:
        size = self.config.hidden_size
        self.vector(f"{parameter}.weight", f"{name}.weight", size, self.names.norm_offset)
        if self.config.norm == "layer":
            self.vector(f"{parameter}.bias", f"{name}.bias", self.config.hidden_size)

    def vector(self, parameter: str, name: str, size: int, offset: float = 0.0) -> None:
        self.pieces[parameter] = [Piece(name, (0, size), None, (size,), offset=offset)]

    def whole(self, parameter: str, name: str, rows: int) -> None:
        shape = (rows, self.config.hidden_size)
        self.pieces[parameter] = [Piece(f"{name}.weight", (0, rows), None, shape)]

    def _qkv(self, prefix: str) -> list[WeightPart]:
        c = self.config
        n = self.names
        sizes = [c.num_heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2]
        keys = scale(self.kv_heads, c.head_dim)
        spans = [scale(self.query_heads, c.head_dim), keys, keys]
        if c.gated_attention:
            return self._gated_qkv(prefix, keys)
        if n.packing == "separate":
            parts = zip(n.qkv, spans, sizes, strict=True)
            return [(prefix + name, span, size) for name, span, size in parts]
        name = prefix + n.qkv[0]
        full = sum(sizes)
        if n.packing == "stacked":
            starts = (0, sizes[0], sizes[0] + sizes[1])
            return [
                (name, (s[0] + by, s[1] + by), full) for s, by in zip(spans, starts, strict=True)
            ]
        rows = grouped_rows(c, self.query_heads, self.kv_heads)
        return [(name, span, full) for span in rows]

    def _gated_qkv(self, prefix: str, keys: IndexRange) -> list[WeightPart]:
        """The rows of q, k, v and the gates, of which the first tensor has, head by head, a query
        and a gate."""
        c = self.config
        q, k, v = (prefix + name for name in self.names.qkv)
        num_rows = 2 * c.num_heads * c.head_dim
        starts = [2 * head * c.head_dim for head in range(*self.query_heads)]
        queries = [(q, (start, start + c.head_dim), num_rows) for start in starts]
        gates = [(q, shifted(rows, c.head_dim), num_rows) for _, rows, _ in queries]
        num_keys = c.num_kv_heads * c.head_dim
        return [*queries, (k, keys, num_keys), (v, keys, num_keys), *gates]


def by_key_head(
    theirs: str, mixer: LinearAttention, keys: IndexRange, values: IndexRange
) -> list[WeightPart]:
    """The rows of q, k, v, the output's gate and the two rates in Qwen3-Next's tensors, which have,
    key head by key head, those of the head and of the value heads that it serves."""
    group = mixer.num_value_heads // mixer.num_key_heads
    key = mixer.key_dim
    value = mixer.value_dim
    head_rows = 2 * key + 2 * group * value
    num_rows = mixer.num_key_heads * head_rows
    found: dict[str, list[WeightPart]] = {part: [] for part in "qkvzba"}
    for head in range(*keys):
        own = max(values[0] - head * group, 0), min(values[1] - head * group, group)
        start = head * head_rows
        spans = {
            "q": (start, start + key),
            "k": (start + key, start + 2 * key),
            "v": shifted(scale(own, value), start + 2 * key),
            "z": shifted(scale(own, value), start + 2 * key + group * value),
        }
        for part, rows in spans.items():
            found[part].append((f"{theirs}in_proj_qkvz", rows, num_rows))
        for part, at in (("b", 2 * head * group), ("a", (2 * head + 1) * group)):
            rates = shifted(own, at)
            found[part].append((f"{theirs}in_proj_ba", rates, 2 * mixer.num_value_heads))
    return [part for parts in found.values() for part in parts]


def grouped_rows(config: ModelConfig, queries: IndexRange, keys: IndexRange) -> list[IndexRange]:
    """This rank's rows in a tensor that holds, by KV head, query heads, K and V: spans of the
    query heads, then K, then V."""
    size = config.head_dim
    group = config.group_size
    groups = range(*keys)
    starts = {g: g * (group + 2) for g in groups}  # in heads
    q = [
        (starts[g] + max(queries[0] - g * group, 0), starts[g] + min(queries[1] - g * group, group))
        for g in groups
    ]
    k = [(starts[g] + group, starts[g] + group + 1) for g in groups]
    v = [(starts[g] + group + 1, starts[g] + group + 2) for g in groups]
    return [scale(span, size) for span in (*q, *k, *v)]


def scale(span: IndexRange, by: int) -> IndexRange:
    return span[0] * by, span[1] * by


def shifted(span: IndexRange, by: int) -> IndexRange:
    return span[0] + by, span[1] + by
