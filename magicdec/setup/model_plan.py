"""ModelPlan: a model, or a stage's part of it, that a rank will hold with its KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from magicdec.attention.backend import backend_class
from magicdec.config.resolved import ResolvedConfig, tokens_of_rows
from magicdec.config.weight_formats import WEIGHT_FORMATS, is_native
from magicdec.distributed.tensor_parallel import Shard
from magicdec.hardware.costs import (
    DTYPE_BYTES,
    bytes_as_stored,
    kv_bytes_per_token,
    low_bit_bytes,
    matrices,
    stored_bytes,
)
from magicdec.kv.layer_caches import Forks, Storage, WindowRoom, storages_of
from magicdec.kv.layer_views import LayerWindows
from magicdec.kv.prefix_cache import SnapshotRoom
from magicdec.kv.view import WEIGHTS_BLOCK, SinksAndWindow
from magicdec.model.config import ModelConfig
from magicdec.model.linear.packed import WIDTH
from magicdec.model.mixers import STATE_BYTES
from magicdec.names import KV_DTYPES, NARROW, PACKED, STORED
from magicdec.runner.device_batch import NEWEST
from magicdec.runner.layer_states import StateRoom, StateShape
from magicdec.speculation.policies.policy import make_policy
from magicdec.speculation.rolling_runner import (
    BLOCK_SIZE,
    MOST_REWOUND,
    blocks_held,
    rolling_storage,
)


def max_tokens(config: ResolvedConfig) -> int:
    """The most cached tokens of a row."""
    return tokens_of_rows(config.capacity, config.decoding)


def max_following(config: ResolvedConfig, row_tokens: int) -> int:
    """The most tokens after a prompt in a row of `row_tokens`, drafts included. More may follow a
    short prompt than the longest one."""
    room = config.capacity
    return min(row_tokens, row_tokens - room.max_len + room.new_tokens)


def rewound_by_step(config: ResolvedConfig) -> int:
    """The most tokens by which a step truncates a row: drafts, and what an observing policy runs
    again."""
    policy = make_policy(config.kv)
    rerun = policy.rerun_tokens(config.capacity.prompt_len)
    return config.decoding.max_gamma + NEWEST + max(policy.observed_tokens, rerun)


def state_room(config: ResolvedConfig) -> StateRoom:
    """How far the states of layers with linear attention go back in a step."""
    policy = make_policy(config.kv)
    rerun = policy.rerun_tokens(config.capacity.prompt_len) if policy.chooses_again else 0
    return StateRoom(rewound_by_step(config) + rerun, rerun)


def rewound_by_pass(config: ResolvedConfig, row_tokens: int) -> int:
    """The most tokens by which a run truncates a row of `row_tokens`: each pass goes back to the
    end of the prompt."""
    return max_following(config, row_tokens) + rewound_by_step(config)


@dataclass(frozen=True)
class Kinds:
    """The storage and kernels of a model: activations in `dtype`, matrices in `weights` (`dtype`
    or one of NARROW), and kernels by name."""

    dtype: str
    weights: str
    linear: str = "torch"
    elementwise: str = "torch"
    native_steps: str = "off"

    @classmethod
    def of(cls, config: ResolvedConfig, is_draft: bool = False) -> Kinds:
        section = config.model
        kinds = cls(
            section.dtype,
            section.target_dtype,
            section.linear,
            section.elementwise,
            section.native_steps,
        )
        if not is_draft:
            return kinds
        assert config.draft is not None, "the run has a draft"
        draft = config.draft
        return replace(kinds, native_steps=draft.native_steps).with_weights(draft.draft_dtype)

    def with_weights(self, weights: str) -> Kinds:
        """What is not native is multiplied by torch, layer by layer."""
        if not is_native(weights):
            return replace(self, weights=weights, linear="torch", native_steps="off")
        return replace(self, weights=weights)


@dataclass(frozen=True)
class StagePart:
    """A stage's part of a model: `layers` (None: all), and the embedding, final norm and head if it
    `has_ends` (None: by its layers)."""

    layers: range | None = None
    has_ends: bool | None = None


@dataclass(frozen=True)
class ModelPlan:
    """This rank's shard of a `part` of the target or the standalone draft, whose layers `ranks`
    share.

    A cache row holds `row_tokens` (default: by the config). `block_tokens` and `cache_tokens` are
    the sizes of a block and of the cache, rounded up (default: by the backend, for all rows).
    `rewound`: the most tokens by which a row is truncated, so that layers with a window need to
    hold no more (default: to its begin). `state_room`: how far layers' states go back (default: by
    the config).
    """

    config: ResolvedConfig
    model: ModelConfig
    ranks: tuple[int, ...]
    rank: int
    part: StagePart = StagePart()
    is_draft: bool = False
    row_tokens: int | None = None
    block_tokens: int | None = None
    cache_tokens: int | None = None
    rewound: int | None = None
    state_room: StateRoom | None = None
    shares_prefixes: bool = False  # rows whose texts begin alike share blocks
    offloads: bool = False  # blocks that leave go to host memory
    offload_tokens: int | None = None  # of these; default: as many as the cache has
    forks: Forks | None = None  # rows beside those of the config, which fork their texts
    kept_states: tuple[int, ...] = ()  # `state_layers` of another run, with which it shares prompts

    def __post_init__(self) -> None:
        """Raises ValueError for what states of layers with linear attention do not allow."""
        if self.offloads and self.model.mixers:
            raise ValueError(
                "--kv_offload host: host memory holds no states, which layers of "
                f"{self.model.name} keep (linear attention); leave it out, or choose another model"
            )

    @property
    def shard(self) -> Shard:
        return Shard(self.ranks.index(self.rank), len(self.ranks))

    @property
    def kinds(self) -> Kinds:
        return Kinds.of(self.config, self.is_draft)

    @property
    def copy_kinds(self) -> Kinds | None:
        """The kinds of the low-bit copy that drafts for the target, None without one."""
        weights = self.config.low_bit
        kinds = self.kinds
        if self.is_draft or weights is None:
            return None
        return kinds.with_weights(weights)

    @property
    def copy_bytes(self) -> int:
        kinds = self.copy_kinds
        if kinds is None:
            return 0
        own = low_bit_bytes(self.part_model, self.shard, kinds.weights)
        return own + self.padding_bytes(kinds, True)

    @property
    def layers(self) -> range:
        return range(self.model.num_layers) if self.part.layers is None else self.part.layers

    @property
    def part_model(self) -> ModelConfig:
        return self.model.part(self.layers)

    @property
    def backend(self) -> str:
        draft = self.config.draft if self.is_draft else None
        return self.config.attention.backend if draft is None else draft.backend

    @property
    def num_rows(self) -> int:
        return self.config.capacity.rows + (0 if self.forks is None else self.forks.num_rows)

    @property
    def tokens(self) -> int:
        return self.row_tokens or max_tokens(self.config)

    @property
    def rolling_rule(self) -> SinksAndWindow | None:
        """The rule of a cache that forgets, unless texts share what it has; None of any other."""
        policy = make_policy(self.config.kv)
        if not (self.is_draft and policy.can_roll):
            return None
        assert isinstance(policy, SinksAndWindow), "the rule of a policy that can roll"
        return policy

    @property
    def tail(self) -> int:
        """Tokens after the window of a cache that forgets: a chunk of a prompt, or drafts and, of
        a draft head, slots that are filled again."""
        chunk = min(self.config.attention.prefill_chunk, self.config.capacity.prompt_len)
        return max(chunk, self.most_rewound) + self.config.decoding.max_gamma

    @property
    def most_rewound(self) -> int:
        """Tokens by which a row of such a cache may be rewound before its window."""
        return self.config.decoding.max_gamma + 1 if self.model.is_head else MOST_REWOUND

    @property
    def windows(self) -> LayerWindows:
        kinds = self.part_model.attention_kinds
        return LayerWindows.make([kind.window for kind in kinds], self.tokens)

    @property
    def window_room(self) -> WindowRoom | None:
        """What layers with a window hold beside it; None: every token, which others may share."""
        if self.rewound is None or self.shares_prefixes:
            return None
        chunk = min(self.config.attention.prefill_chunk, self.tokens)
        return WindowRoom(self.rewound, max(chunk, self.config.decoding.max_gamma + NEWEST))

    @property
    def num_blocks(self) -> int | None:
        """Of a cache whose size was asked for."""
        if self.cache_tokens is None:
            return None
        size = BLOCK_SIZE
        if self.rolling_rule is None:
            size = backend_class(self.backend)().block_size(self.block_tokens or self.tokens)
        asked = -(-self.cache_tokens // size)
        if self.is_draft:  # whose blocks no scheduler counts: every row has room to its end
            return max(asked, self.num_rows * -(-self.tokens // size))
        return asked

    def with_forks(self, num_forks: int) -> ModelPlan:
        """This plan with more rows, if `num_forks`, which fork the texts of the others and draft.
        Every token is kept: all forks go back."""
        if not num_forks:
            return self
        # Beside the newest token and its drafts, a copied choice is filled past its end.
        forks = Forks(num_forks, self.config.decoding.max_gamma + 1)
        return replace(self, rewound=None, forks=forks)

    def beside(self, target: ModelPlan) -> ModelPlan:
        """This plan of a draft, which shares prefixes as `target` does, in a cache as large as
        the target's or larger."""
        if not target.shares_prefixes:
            return self
        return replace(
            self,
            block_tokens=target.block_tokens,
            cache_tokens=target.cache_tokens,
            shares_prefixes=True,
            offloads=target.offloads,
            offload_tokens=target.offload_tokens,
        )

    def storages(self) -> list[Storage]:
        """Of the layers with each of the `windows`."""
        rule = self.rolling_rule
        if rule is not None:
            held = None
            if not self.shares_prefixes:
                held = blocks_held(self.tokens, rule, self.tail, most_rewound=self.most_rewound)
            storage = rolling_storage(self.num_rows, self.tokens, rule, held, self.num_blocks)
            return [storage] * len(self.windows.distinct)
        return storages_of(
            self.windows.distinct,
            self.window_room,
            self.num_rows,
            self.tokens,
            backend_class(self.backend)().block_size,
            self.block_tokens,
            self.num_blocks,
            self.forks,
        )

    @property
    def host_tokens(self) -> int:
        """Tokens of blocks in host memory, in whole blocks."""
        if not self.offloads:
            return 0
        storage = self.storages()[0]
        asked = storage.num_tokens if self.offload_tokens is None else self.offload_tokens
        return -(-asked // storage.block_size) * storage.block_size

    @property
    def host_bytes(self) -> int:
        """Bytes of these, with the states of their tokens, where they are in this memory."""
        if self.config.parallel.device != "cpu":
            return 0
        return self.host_tokens * (self.bytes_per_token + self.state_bytes_per_token)

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether the part has the embedding, and whether it has the head."""
        if self.part.has_ends is not None:
            return self.part.has_ends, self.part.has_ends
        return self.layers.start == 0, self.layers.stop == self.model.num_layers

    @property
    def weight_bytes(self) -> int:
        kinds = self.kinds
        own = stored_bytes(
            self.part_model,
            self.shard,
            DTYPE_BYTES[kinds.dtype],
            kinds.linear in PACKED,
            kinds.weights if kinds.weights in NARROW else None,
            *self.ends,
        )
        return own + self.padding_bytes(kinds, self.ends[1]) + self._gate_padding(kinds)

    def padding_bytes(self, kinds: Kinds, has_head: bool) -> int:
        """Bytes that fill up packed matrices: outputs to whole blocks, inputs to pairs in
        bfloat16. Of what is not native, outputs to a multiple."""
        if not is_native(kinds.weights):
            kind = WEIGHT_FORMATS[kinds.weights]
            return sum(
                round(-outputs % kind.output_multiple * inputs * kind.bytes_of(inputs))
                for outputs, inputs in matrices(self.part_model, self.shard)
            )
        if kinds.linear not in PACKED:
            return 0
        low_bit = kinds.weights if kinds.weights in NARROW else None
        size = DTYPE_BYTES[kinds.dtype]
        part = 2 if low_bit is None and size == 2 else 1
        missing = [
            (-(-outputs // WIDTH) * WIDTH * -(-inputs // part) * part - outputs * inputs, inputs)
            for outputs, inputs in matrices(self.part_model, self.shard)
        ]
        if not has_head or self.model.is_mtp:  # whose matrix of logits is the target's
            missing[-1] = 0, 1
        if low_bit == STORED:
            shapes = [(number, 1) for number, _ in missing]
            return bytes_as_stored(self.model, shapes, size, self.shard.size)
        return int(
            sum(
                number * (size if low_bit is None else WEIGHT_FORMATS[low_bit].bytes_of(inputs))
                for number, inputs in missing
            )
        )

    def _gate_padding(self, kinds: Kinds) -> int:
        """Bytes that fill up the routers and gates of mixtures, which are never quantised, and
        which a low-bit copy shares."""
        experts = self.model.experts
        if experts is None or kinds.linear not in PACKED:
            return 0
        outputs = -experts.num_experts % WIDTH + experts.has_shared_gate * (WIDTH - 1)
        numbers = self.part_model.num_mixtures * outputs * self.model.hidden_size
        return numbers * DTYPE_BYTES[kinds.dtype]

    @property
    def kv_bytes(self) -> int:
        pairs = zip(self.storages(), self.windows.num_layers, strict=True)
        tokens_of_layers = sum(storage.num_tokens * count for storage, count in pairs)
        num_layers = max(1, len(self.part_model.attention_kinds))
        return tokens_of_layers * self.bytes_per_token // num_layers + self.linear_bytes

    @property
    def room_of_states(self) -> StateRoom:
        """How far rows go back, where layers have states."""
        return self.state_room or state_room(self.config)

    @property
    def linear_bytes(self) -> int:
        """Bytes of the states of layers with linear attention, and of their snapshots."""
        mixers = self.part_model.mixers
        if not mixers:
            return 0
        numbers = StateShape.of(mixers, self.shard).row_numbers(self.room_of_states.new)
        row_bytes = self.num_rows * len(mixers) * numbers * STATE_BYTES
        return row_bytes + (
            0 if self.snapshots is None else self.snapshots.count * self.snapshot_bytes
        )

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot of these states."""
        mixers = self.part_model.mixers
        return len(mixers) * StateShape.of(mixers, self.shard).snapshot_numbers * STATE_BYTES

    @property
    def snapshots(self) -> SnapshotRoom | None:
        """Those that a prefix cache keeps, if layers have states: half as many bytes as of K and V,
        but at least that of a prompt and that of a text for each row."""
        if not (self.shares_prefixes and self.part_model.mixers):
            return None
        half = self.storages()[0].num_tokens * self.bytes_per_token // 2
        count = max(2 * self.num_rows, half // self.snapshot_bytes)
        policy = make_policy(self.config.kv)
        rerun = policy.rerun_tokens(self.config.capacity.prompt_len)
        return SnapshotRoom(count, max(1, policy.observed_tokens, rerun))

    @property
    def policy_bytes(self) -> int:
        """Bytes that the KV policy keeps beside the cache: a copy of its choice, or the state it
        chooses by."""
        config = self.config
        policy = make_policy(self.config.kv)
        is_self = config.decoding.drafts_itself
        if not (self.is_draft or is_self):
            return 0
        if policy.is_copied:  # with room for the tokens that follow
            chosen = policy.copied_tokens(config.capacity.prompt_len)
            copied = min(chosen + max_following(config, self.tokens), self.tokens)
            block_size = backend_class(self.backend)().block_size
            (copy,) = storages_of([None], None, self.num_rows, copied, block_size, forks=self.forks)
            return copy.num_tokens * self.bytes_of_token(policy.coded_copy or self.coded_kv)
        if not is_self:
            return 0
        queries, (first, last) = self.shard.heads(self.model.num_heads, self.model.num_kv_heads)
        group = (queries[1] - queries[0]) // (last - first)
        blocks = -(-self.tokens // WEIGHTS_BLOCK)
        size = self.model.cached_head_dim
        texts = config.capacity.rows
        numbers = texts * policy.state_numbers(blocks, size, group)
        # Forks have the blocks of their texts.
        numbers += (self.num_rows - texts) * policy.state_numbers(0, size, group)
        return len(self.part_model.attention_kinds) * (last - first) * numbers * 4

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries of each prompt's newest tokens, which prefill keeps for the KV
        policy."""
        if not (self.is_draft or self.config.decoding.drafts_itself):
            return 0
        room = self.config.capacity
        first, last = self.shard.heads(self.model.num_heads, self.model.num_kv_heads)[0]
        tokens = room.rows * min(make_policy(self.config.kv).observed_tokens, room.prompt_len)
        num_layers = len(self.part_model.attention_kinds)
        numbers = num_layers * (last - first) * self.model.cached_head_dim
        return tokens * numbers * DTYPE_BYTES[self.config.model.dtype]

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states this rank keeps for a draft head."""
        draft = self.config.draft
        if self.is_draft:
            return ()
        if draft is None or not draft.state_layers or self.rank not in draft.rank_group:
            return self.kept_states
        return draft.state_layers

    @property
    def state_bytes_per_token(self) -> int:
        """Bytes of the hidden states of a token, and of its id."""
        numbers = len(self.state_layers) * self.model.hidden_size
        return numbers * DTYPE_BYTES[self.config.model.dtype] + 8 * (numbers > 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of what it keeps of the hidden states of all tokens."""
        bytes_per_token = self.state_bytes_per_token
        if self.shares_prefixes:
            return self.storages()[0].num_tokens * bytes_per_token
        num_rows = self.config.capacity.rows + (self.forks is not None)
        return num_rows * self.tokens * bytes_per_token

    @property
    def coded_kv(self) -> str | None:
        """The dtype of a cache of codes, that of the target and of what its drafts copy; None of
        numbers."""
        kv_dtype = self.config.attention.kv_dtype
        return kv_dtype if kv_dtype in KV_DTYPES and not self.is_draft else None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of a token in the cache."""
        return self.bytes_of_token(self.coded_kv)

    def bytes_of_token(self, coded_kv: str | None) -> int:
        """Bytes of K and V of a token in a cache of codes, or of numbers (None)."""
        size = DTYPE_BYTES[self.config.model.dtype]
        return kv_bytes_per_token(self.part_model, self.shard, size, coded_kv)
