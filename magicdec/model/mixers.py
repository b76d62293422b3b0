"""Token mixers beside attention as `attention/` computes it: what they weigh, keep and read, from
published shapes. `gated_delta.py` computes linear attention, and `magicdec plan` alone counts the
others. Imports no torch.

Counts are of one layer and of one rank, which has the heads that `Shard` gives it. An entry is what
a cached token has in the layer; a state is what the layer keeps of a sequence whatever its length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from magicdec.distributed.tensor_parallel import Shard

Matrices = list[tuple[int, int]]
STATE_BYTES = 4  # of a number of a linear layer's state, which is kept in float32


@dataclass(frozen=True)
class Mixer:
    """What a layer has in place of attention as it is computed here. The matrices and vectors of a
    mixer are its own, so that the model's `qk_norm` and biases do not count in its layer."""

    is_computed: ClassVar[bool] = False

    def matrices(self, hidden: int, shard: Shard) -> Matrices:
        """(outputs, inputs) of the linear layers."""
        raise NotImplementedError

    def vectors(self, hidden: int, shard: Shard) -> int:
        """Parameters that are in no matrix: norms, convolutions, decay rates."""
        raise NotImplementedError

    def entry_bytes(self, shard: Shard, dtype_bytes: int) -> float:
        """Bytes that the cache grows by for a token."""
        raise NotImplementedError

    def read_bytes(self, shard: Shard, dtype_bytes: int, T: int, S: int) -> int:
        """Bytes of the cache that T new tokens of a row read together, after S cached ones."""
        return round((T + S) * self.entry_bytes(shard, dtype_bytes))

    def state_bytes(self, shard: Shard, dtype_bytes: int) -> int:
        """Bytes of a sequence's state."""
        return 0

    def written_bytes(self, shard: Shard) -> int:
        """Bytes of what a token writes to the state, by which this goes back to any token."""
        return 0

    def flops(self, shard: Shard, T: int, S: int) -> int:
        """FLOPs beside the linear layers of T new tokens of a row after S cached ones."""
        raise NotImplementedError

    def describe(self) -> str:
        """Heads and sizes, as the table of presets shows them."""
        raise NotImplementedError


def visible(T: int, S: int) -> int:
    """Pairs of a query and a key that it sees: T new tokens of a row after S cached ones."""
    return T * S + T * (T + 1) // 2


@dataclass(frozen=True)
class OtherAttention(Mixer):
    """Attention over all tokens with heads of its own (Gemma 4). Queries and keys have norms.
    `projects_values` is off where values are the unnormed keys; both are cached."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    projects_values: bool = True

    def _heads(self, shard: Shard) -> tuple[int, int]:
        queries, keys = shard.heads(self.num_heads, self.num_kv_heads)
        return queries[1] - queries[0], keys[1] - keys[0]

    def matrices(self, hidden: int, shard: Shard) -> Matrices:
        num_queries, num_keys = self._heads(shard)
        q = num_queries * self.head_dim
        kv = num_keys * self.head_dim
        outputs = q + kv * (2 if self.projects_values else 1)
        return [(outputs, hidden), (hidden, q)]

    def vectors(self, hidden: int, shard: Shard) -> int:
        return 2 * self.head_dim

    def entry_bytes(self, shard: Shard, dtype_bytes: int) -> float:
        return 2 * self._heads(shard)[1] * self.head_dim * dtype_bytes

    def flops(self, shard: Shard, T: int, S: int) -> int:
        return 4 * self._heads(shard)[0] * self.head_dim * visible(T, S)

    def describe(self) -> str:
        return f"{self.num_heads}: {self.num_kv_heads} x {self.head_dim}"


@dataclass(frozen=True)
class LinearAttention(Mixer):
    """Gated DeltaNet (Yang et al., arXiv 2412.06464). Each value head has a state of `key_dim` x
    `value_dim` numbers; each key head serves as many value heads. A causal convolution over the
    last `kernel` tokens of q, k and v, whose inputs are kept, comes before."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_computed: ClassVar[bool] = True

    def _heads(self, shard: Shard) -> tuple[int, int]:
        values, keys = shard.heads(self.num_value_heads, self.num_key_heads)
        return values[1] - values[0], keys[1] - keys[0]

    def _channels(self, shard: Shard) -> int:
        """Those of q, k and v, which the convolution has."""
        num_values, num_keys = self._heads(shard)
        return 2 * num_keys * self.key_dim + num_values * self.value_dim

    def matrices(self, hidden: int, shard: Shard) -> Matrices:
        num_values = self._heads(shard)[0]
        v = num_values * self.value_dim
        # q, k and v; the gate of the output; the rates of decay and of writing of each value head.
        return [(self._channels(shard) + v + 2 * num_values, hidden), (hidden, v)]

    def vectors(self, hidden: int, shard: Shard) -> int:
        convolution = self._channels(shard) * self.kernel
        return convolution + 2 * self._heads(shard)[0] + self.value_dim

    def entry_bytes(self, shard: Shard, dtype_bytes: int) -> float:
        return 0

    def state_bytes(self, shard: Shard, dtype_bytes: int) -> int:
        inputs = self._channels(shard) * (self.kernel - 1) * dtype_bytes
        state = self._heads(shard)[0] * self.key_dim * self.value_dim * STATE_BYTES
        return state + inputs

    def written_bytes(self, shard: Shard) -> int:
        """A key for each key head, and a correction and a decay for each value head."""
        num_values, num_keys = self._heads(shard)
        numbers = num_keys * self.key_dim + num_values * (self.value_dim + 1)
        return numbers * STATE_BYTES

    def flops(self, shard: Shard, T: int, S: int) -> int:
        """A state decays, and is multiplied by k, by the outer product of k and the correction, and
        by q."""
        return 7 * T * self._heads(shard)[0] * self.key_dim * self.value_dim

    def describe(self) -> str:
        keys = f"{self.num_key_heads} x {self.key_dim}"
        return f"{keys} and {self.num_value_heads} x {self.value_dim} linear"


@dataclass(frozen=True)
class KimiDeltaAttention(Mixer):
    """Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): a gated delta rule whose state decays
    apart in each dimension of a key. Decays and the gate of the output are made by matrices of rank
    `head_dim`, whose first halves every rank has whole; q, k and v are as wide as each other."""

    num_heads: int
    head_dim: int
    kernel: int

    def _num_heads(self, shard: Shard) -> int:
        first, last = shard.split(self.num_heads)
        return last - first

    def matrices(self, hidden: int, shard: Shard) -> Matrices:
        heads = self._num_heads(shard)
        width = heads * self.head_dim
        low_rank = [(self.head_dim, hidden), (width, self.head_dim)]  # of decays, and of the gate
        return [(3 * width + heads, hidden), *low_rank, *low_rank, (hidden, width)]

    def vectors(self, hidden: int, shard: Shard) -> int:
        heads = self._num_heads(shard)
        width = heads * self.head_dim
        return 3 * width * self.kernel + width + heads + self.head_dim

    def entry_bytes(self, shard: Shard, dtype_bytes: int) -> float:
        return 0

    def state_bytes(self, shard: Shard, dtype_bytes: int) -> int:
        width = self._num_heads(shard) * self.head_dim
        return 3 * width * (self.kernel - 1) * dtype_bytes + width * self.head_dim * STATE_BYTES

    def written_bytes(self, shard: Shard) -> int:
        """A key, a correction and a decay of each of its dimensions."""
        return 3 * self._num_heads(shard) * self.head_dim * STATE_BYTES

    def flops(self, shard: Shard, T: int, S: int) -> int:
        """As those of a gated delta net."""
        return 7 * T * self._num_heads(shard) * self.head_dim**2

    def describe(self) -> str:
        return f"{self.num_heads} x {self.head_dim} linear (KDA)"


@dataclass(frozen=True)
class Mamba2(Mixer):
    """A selective state space (Mamba 2, arXiv 2405.21060). Each head has a state of `head_dim` x
    `state_dim` numbers, which decays as a whole; the heads of a group share what writes to them (B)
    and what reads them (C). A causal convolution over the last `kernel` tokens of x, B and C, whose
    inputs are kept, comes before, and a gated norm after."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    kernel: int
    has_convolution_bias: bool = True

    def _heads(self, shard: Shard) -> tuple[int, int]:
        heads, groups = shard.heads(self.num_heads, self.num_groups)
        return heads[1] - heads[0], groups[1] - groups[0]

    def _channels(self, shard: Shard) -> int:
        """Those of x, B and C, which the convolution has."""
        num_heads, num_groups = self._heads(shard)
        return num_heads * self.head_dim + 2 * num_groups * self.state_dim

    def matrices(self, hidden: int, shard: Shard) -> Matrices:
        num_heads = self._heads(shard)[0]
        width = num_heads * self.head_dim
        # The gate of the output; x, B and C; the step of each head.
        return [(width + self._channels(shard) + num_heads, hidden), (hidden, width)]

    def vectors(self, hidden: int, shard: Shard) -> int:
        num_heads = self._heads(shard)[0]
        convolution = self._channels(shard) * (self.kernel + self.has_convolution_bias)
        return convolution + 3 * num_heads + num_heads * self.head_dim

    def entry_bytes(self, shard: Shard, dtype_bytes: int) -> float:
        return 0

    def state_bytes(self, shard: Shard, dtype_bytes: int) -> int:
        inputs = self._channels(shard) * (self.kernel - 1) * dtype_bytes
        state = self._heads(shard)[0] * self.head_dim * self.state_dim * STATE_BYTES
        return state + inputs

    def written_bytes(self, shard: Shard) -> int:
        """B for each group, and for each head x times its step, and a decay."""
        num_heads, num_groups = self._heads(shard)
        numbers = num_groups * self.state_dim + num_heads * (self.head_dim + 1)
        return numbers * STATE_BYTES

    def flops(self, shard: Shard, T: int, S: int) -> int:
        """A state decays, has the outer product of x and B added, and is multiplied by C."""
        return 5 * T * self._heads(shard)[0] * self.head_dim * self.state_dim

    def describe(self) -> str:
        return f"{self.num_heads} x {self.head_dim} states of {self.state_dim} (Mamba 2)"


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). A token's entry is one latent
    of `kv_rank` numbers and one rotated key of `rope_dim`, for all heads: every rank has them
    whole. Decoding multiplies queries into the latents' space, and the weighted latents out of it,
    by the two halves of one matrix. `q_rank`: queries have a latent of their own; None: none."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int

    def _num_heads(self, shard: Shard) -> int:
        first, last = shard.split(self.num_heads)
        return last - first

    def matrices(self, hidden: int, shard: Shard) -> Matrices:
        heads = self._num_heads(shard)
        q = heads * (self.plain_dim + self.rope_dim)
        queries = [(q, hidden)]
        if self.q_rank is not None:
            queries = [(self.q_rank, hidden), (q, self.q_rank)]
        latents = [
            (self.kv_rank + self.rope_dim, hidden),
            (heads * (self.plain_dim + self.value_dim), self.kv_rank),
        ]
        return [*queries, *latents, (hidden, heads * self.value_dim)]

    def vectors(self, hidden: int, shard: Shard) -> int:
        return (self.q_rank or 0) + self.kv_rank

    def entry_bytes(self, shard: Shard, dtype_bytes: int) -> float:
        return (self.kv_rank + self.rope_dim) * dtype_bytes

    def flops(self, shard: Shard, T: int, S: int) -> int:
        per_key = 2 * (self.kv_rank + self.rope_dim) + 2 * self.kv_rank
        return self._num_heads(shard) * per_key * visible(T, S)

    def describe(self) -> str:
        return f"{self.num_heads}: latents of {self.kv_rank} + {self.rope_dim}"


@dataclass(frozen=True)
class CompressedAttention(Mixer):
    """Attention over the last `window` tokens and over older ones compressed, `rate` tokens into an
    entry that is key and value of all heads (DeepSeek-V4). Every rank has the entries whole; 0: a
    window alone. `num_chosen`: a query reads so many entries, those with the best scores by the
    keys of an index, of which it reads all; 0: it reads all entries, and there is no index.

    The residual has `streams` streams, mixed before and after attention and MLP. `joins_streams`:
    the layer is the last one, after which they become one."""

    num_heads: int
    head_dim: int
    q_rank: int
    num_groups: int
    group_rank: int
    window: int
    rate: int
    num_chosen: int
    index_heads: int
    index_dim: int
    streams: int
    joins_streams: bool = False

    def _num_heads(self, shard: Shard) -> int:
        first, last = shard.split(self.num_heads)
        return last - first

    def _num_compressed(self) -> int:
        """Numbers that a token adds to what is compressed: with an index, two entries overlap."""
        return self.head_dim * (2 if self.num_chosen else 1) * (self.rate > 0)

    def matrices(self, hidden: int, shard: Shard) -> Matrices:
        heads = self._num_heads(shard)
        first, last = shard.split(self.num_groups)
        group_outputs = (last - first) * self.group_rank
        found = [
            (self.q_rank, hidden),
            (heads * self.head_dim, self.q_rank),
            (self.head_dim, hidden),
            (group_outputs, self.num_heads * self.head_dim // self.num_groups),
            (hidden, group_outputs),
        ]
        if self.rate:
            found.append((2 * self._num_compressed(), hidden))
        if self.num_chosen:
            found.append((4 * self.index_dim + self.index_heads, hidden))
            found.append((self.index_heads * self.index_dim, self.q_rank))
        return found

    def vectors(self, hidden: int, shard: Shard) -> int:
        found = self.q_rank + self.head_dim + self._num_heads(shard)
        if self.rate:
            found += self.rate * self._num_compressed() + self.head_dim
        if self.num_chosen:
            found += self.rate * 2 * self.index_dim + self.index_dim
        num_mixed = self.streams * (self.streams + 2)
        found += 2 * (num_mixed * (self.streams * hidden + 1) + 3)
        if self.joins_streams:
            found += self.streams * (self.streams * hidden + 1) + 1
        return found

    def entry_bytes(self, shard: Shard, dtype_bytes: int) -> float:
        if not self.rate:
            return 0
        numbers = self.head_dim + (self.index_dim if self.num_chosen else 0)
        return numbers * dtype_bytes / self.rate

    def _entries(self, T: int, S: int) -> tuple[int, int]:
        """Compressed entries that T tokens see, and those of them that they read: at most, where
        no two tokens choose the same."""
        seen = (T + S) // self.rate if self.rate else 0
        return seen, min(seen, T * self.num_chosen) if self.num_chosen else seen

    def read_bytes(self, shard: Shard, dtype_bytes: int, T: int, S: int) -> int:
        seen, read = self._entries(T, S)
        numbers = (T + min(S, self.window - 1) + read) * self.head_dim
        numbers += seen * self.index_dim * (self.num_chosen > 0)
        return numbers * dtype_bytes

    def flops(self, shard: Shard, T: int, S: int) -> int:
        seen = self._entries(T, S)[0]
        read = min(seen, self.num_chosen) if self.num_chosen else seen
        keys = min(S + T, self.window) + read
        index_flops = 2 * self.index_heads * self.index_dim * seen * (self.num_chosen > 0)
        return T * (4 * self._num_heads(shard) * self.head_dim * keys + index_flops)

    def describe(self) -> str:
        kept = f"of {self.head_dim} for {self.rate} tokens" if self.rate else ""
        return f"{self.num_heads}: window {self.window}" + f" and entries {kept}" * bool(kept)
