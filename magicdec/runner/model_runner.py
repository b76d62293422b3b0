"""ModelRunner: one model with its KV cache and attention backend on one rank group. Drafting,
verification and decoding make the same call, with another KV policy or another T.

Shapes: B rows, T new tokens, V vocabulary rows on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from magicdec.attention.backend import AttentionBackend
from magicdec.distributed.groups import Group
from magicdec.kv.cache import BatchRows, KVCache, Lengths, Rows, upload
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.kv.kernel_view import make_kernel_view
from magicdec.kv.layer_caches import Forks, LayerCaches, Storage, WindowRoom, storages_of
from magicdec.kv.layer_views import LayerViews, LayerWindows
from magicdec.kv.pool import CacheShape
from magicdec.kv.prefix_cache import Beginning, CachedText, SnapshotRoom
from magicdec.kv.view import FULL, KVView, Visible, make_view
from magicdec.model.gated_delta import Remember
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import (
    Cancelled,
    EnqueuedForward,
    ForwardBatch,
    ForwardObserver,
)
from magicdec.runner.layer_states import LayerStates, StateRoom, StateShape
from magicdec.runner.native_steps.executor import Executor

OneObserver = TypeVar("OneObserver", bound=ForwardObserver)


@dataclass
class ModelRunner:
    """A model with a cache of `num_rows` sequences of at most `max_tokens` tokens,
    `max_following` of them after the prompt.

    `offsets` [num_rows]: position of a row's next token minus its cached tokens, for caches of
    selected tokens. `windows`: the sliding windows of the layers; one that no sequence gets past
    is none. `caches` has one for each of them, and `cache` is that of the widest. With
    `window_room`, layers with a window hold no token that no forward can see any more.

    `draft_runner`: that of a low-bit copy of the model, over these caches, which drafts in its
    place. `observers` see forwards of this runner and of those that are made from it."""

    model: Transformer
    backend: AttentionBackend
    group: Group
    num_rows: int
    max_tokens: int
    policy: Visible = FULL  # which tokens a forward sees by default
    kv_dtype: torch.dtype | None = None  # in which the cache is stored; default: as the weights
    executor: Executor | None = None  # computes a forward in one native call, if the model has one
    block_tokens: int | None = None  # about the tokens of a block; default: the backend's choice
    num_blocks: int | None = None  # of the pool; default: as many as all rows can need
    max_following: int | None = None  # drafts included; default: as many as a row holds
    window_room: WindowRoom | None = None  # default: layers with a window keep every token
    shares_prefixes: bool = False  # rows whose texts begin alike share blocks
    host_tokens: int = 0  # of blocks that have left for host memory, and may come back
    forks: Forks | None = None  # the last rows, which fork the texts of the others
    borrows_states: bool = False  # of layers with states: rows begin anew in another runner
    state_room: StateRoom = StateRoom(32)  # how far rows go back, where layers have states
    snapshots: SnapshotRoom | None = None  # of such states, where texts share prefixes
    offsets: Tensor | None = None
    draft_runner: ModelRunner | None = None
    observers: list[ForwardObserver] = field(default_factory=list)
    shared_caches: InitVar[LayerCaches | None] = None  # default: caches of its own
    shared_counts: InitVar[ForwardCounts | None] = None  # default: counts of its own
    shared_states: InitVar[LayerStates | None] = None  # default: states of its own

    def __post_init__(
        self,
        shared_caches: LayerCaches | None,
        shared_counts: ForwardCounts | None,
        shared_states: LayerStates | None,
    ) -> None:
        self.device = next(self.model.parameters()).device
        self.windows = self.layer_windows()
        self.caches = self._make_caches() if shared_caches is None else shared_caches
        # A backend plans for one view, and knows the layers of one cache: each window has its own.
        others = (copy(self.backend) for _ in self.windows.distinct[1:])
        self.backends = (self.backend, *others)
        self.sink_logits = self.model.sinks()  # float32 [L, H]
        for own, layers in zip(self.backends, self.windows.layers, strict=True):
            own.sinks = None if self.sink_logits is None else self.sink_logits[list(layers)]
        self.model.set_positions(self.max_tokens, self.device)
        self.counts = self._make_counts() if shared_counts is None else shared_counts
        self.states = self._make_states() if shared_states is None else shared_states
        self.enqueued: list[EnqueuedForward] = []
        self.has_flaws = False  # native calls computed NaN or infinity

    def layer_windows(self) -> LayerWindows:
        kinds = self.model.part_config.attention_kinds
        return LayerWindows.make([kind.window for kind in kinds], self.max_tokens)

    def _shape_of(self, num_layers: int, storage: Storage) -> CacheShape:
        config = self.model.config
        _, (first, last) = self.model.shard.heads(config.num_heads, config.num_kv_heads)
        return CacheShape(
            num_layers=num_layers,
            num_kv_heads=last - first,
            head_dim=config.cached_head_dim,
            block_size=storage.block_size,
            num_blocks=storage.num_blocks,
            layout=self.backend.layout(self._stored_dtype),
        )

    @property
    def _stored_dtype(self) -> torch.dtype:
        return self.kv_dtype or next(self.model.parameters()).dtype

    def _make_caches(self) -> LayerCaches:
        storages = self.storages()
        return LayerCaches.of(
            self.windows,
            storages,
            self._shape_of,
            num_rows=self.num_rows,
            dtype=self._stored_dtype,
            device=self.device,
            rewound=0 if self.window_room is None else self.window_room.rewound,
            shares_prefixes=self.shares_prefixes,
            num_places=-(-self.host_tokens // storages[0].block_size),
            snapshots=self.snapshots,
        )

    def _make_states(self) -> LayerStates | None:
        """Those of layers with linear attention, None without such layers."""
        mixers = self.model.part_config.mixers
        if not mixers:
            return None
        shape = StateShape.of(mixers, self.model.shard)
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return LayerStates(
            shape,
            len(mixers),
            self.num_rows,
            self.state_room,
            dtype,
            self.device,
            0 if self.snapshots is None else self.snapshots.count,
        )

    @cached_property
    def layer_numbers(self) -> list[int]:
        """The number of each layer among those of its kind: with attention, or with a state."""
        counts = [0, 0]
        numbers = []
        for kind in self.model.part_config.kinds:
            is_linear = kind.mixer is not None
            numbers.append(counts[is_linear])
            counts[is_linear] += 1
        return numbers

    @property
    def cache(self) -> KVCache:
        """The cache of the layers with the widest window. Its lengths are those of all."""
        return self.caches.distinct[0]

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of a token's K and V in the caches, which may differ from those of runners with
        the same counts."""
        return self.caches.bytes_per_token

    @property
    def window(self) -> int | None:
        """The widest window of the layers."""
        return self.windows.widest

    def _make_counts(self) -> ForwardCounts:
        with torch.inference_mode(False):  # counts change outside inference mode
            on_device = torch.zeros(3, self.num_rows, 2, dtype=torch.int64, device=self.device)
        num_layers = max(1, len(self.windows.window_indices))  # none where all have states
        return ForwardCounts(
            bytes_per_token=self.bytes_per_token,
            num_layers=num_layers,
            keys_on_device=num_layers if len(self.windows.distinct) == 1 else 1,
            on_device=on_device,
        )

    @cached_property
    def vocab_places(self) -> list[tuple[int, int]]:
        """The vocabulary ranges of the ranks' logits, in gathering order. Shards may be uneven.
        First use is a collective."""
        return self.group.all_gather_range(self.model.head_rows, self.device)

    def with_cache(self, max_tokens: int, kv_dtype: torch.dtype | None = None) -> ModelRunner:
        """A runner of the same model, with shared counts and its own cache of `max_tokens`
        tokens a row, in `kv_dtype` (None: as this one's)."""
        copied = replace(
            self,
            backend=copy(self.backend),
            max_tokens=max_tokens,
            kv_dtype=kv_dtype or self.kv_dtype,
            block_tokens=None,
            num_blocks=None,
            window_room=None,
            shares_prefixes=False,
            host_tokens=0,
            snapshots=None,
            offsets=torch.zeros(self.num_rows, dtype=torch.int64, device=self.device),
            borrows_states=True,
            draft_runner=None,
            shared_counts=self.counts,
            shared_states=self.states,
        )
        if copied.bytes_per_token != self.counts.bytes_per_token:
            self.counts.copied_bytes_per_token = copied.bytes_per_token
        return copied

    def with_model(self, model: Transformer, executor: Executor | None) -> ModelRunner:
        """A runner of a low-bit copy of the model that drafts over this cache, with its own
        counts."""
        return replace(
            self,
            model=model,
            executor=executor,
            backend=copy(self.backend),
            draft_runner=None,
            shared_caches=self.caches,
            shared_states=self.states,
        )

    def with_draft_runner(self, draft_runner: ModelRunner) -> ModelRunner:
        """This runner, with its caches and counts, for which another one (`with_model`) drafts."""
        return replace(
            self,
            draft_runner=draft_runner,
            shared_caches=self.caches,
            shared_counts=self.counts,
            shared_states=self.states,
        )

    def with_rows(self, num_rows: int, max_following: int) -> ModelRunner:
        """This runner, with its caches and counts, for its first rows alone."""
        draft = self.draft_runner
        return replace(
            self,
            num_rows=num_rows,
            max_following=max_following,
            forks=None,
            draft_runner=None if draft is None else draft.with_rows(num_rows, max_following),
            shared_caches=self.caches,
            shared_counts=self.counts,
            shared_states=self.states,
        )

    @property
    def drafting_runner(self) -> ModelRunner:
        """The one that drafts in self-speculation."""
        return self if self.draft_runner is None else self.draft_runner

    def observer(self, kind: type[OneObserver]) -> OneObserver | None:
        """The observer of this kind, if there is one."""
        for observer in self.observers:
            if isinstance(observer, kind):
                return observer
        return None

    def set_observer(self, kind: type[OneObserver], observer: OneObserver | None) -> None:
        """Let `observer`, or none, take the place of that of its kind."""
        others = [other for other in self.observers if not isinstance(other, kind)]
        self.observers[:] = others if observer is None else [*others, observer]

    def storages(self) -> list[Storage]:
        """The storage of the layers with each of the windows."""
        return storages_of(
            self.windows.distinct,
            self.window_room,
            self.num_rows,
            self.max_tokens,
            self.backend.block_size,
            self.block_tokens,
            self.num_blocks,
            self.forks,
        )

    @property
    def num_texts(self) -> int:
        """The rows that fork no other."""
        return self.num_rows - (0 if self.forks is None else self.forks.num_rows)

    def allocate(self, row: int) -> None:
        self.caches.allocate(row, self.max_tokens)

    def begin(self, row: int, text: CachedText, num_tokens: int) -> int:
        """Give an empty row room for `num_tokens` of a text, or for the longest, and what others
        have left of it. Returns how many tokens these are, fewer than the text's."""
        if self.shares_prefixes:
            beginning = self.caches.begin(row, text, min(num_tokens, self.max_tokens))
            self._load_state(row, beginning)
            return beginning.num_tokens
        self.allocate(row)
        return 0

    def copy_beginning(self, row: int, beginning: Beginning) -> None:
        """Give a row that has adopted a beginning what of it is copied."""
        self.caches.copy_beginning(row, beginning)
        self._load_state(row, beginning)

    def _load_state(self, row: int, beginning: Beginning) -> None:
        if beginning.snapshot is not None:
            assert self.states is not None, "it is one of them"
            self.states.load(row, beginning.snapshot, beginning.num_tokens)

    def keep(self, row: int, text: CachedText) -> None:
        """Let other rows begin with the blocks of `row`, which holds the tokens of `text`."""
        self.caches.keep(row, text)

    def keep_state(self, row: int, text: CachedText) -> None:
        """Let texts that begin with `text`, whose tokens `row` holds, begin with the states after
        them, if the caches have them."""
        prefixes = self.caches.prefixes
        if prefixes is None or self.states is None:
            return
        number = prefixes.take_snapshot(text)
        if number is not None:
            self.states.save(row, number, len(text))

    def fork(self, row: int, source: int, length: int) -> None:
        """Let an empty row of `forks` begin with the first `length` tokens of `source`."""
        assert self.forks is not None and row >= self.num_texts > source, "forks are the last rows"
        self.caches.fork(row, source, length, length + self.forks.num_tokens)

    def release(self, row: int, text: CachedText = ()) -> None:
        """Empty a row. What it has computed of `text` stays for others, if they share prefixes."""
        num_tokens = min(len(text), self.cache.lengths[row])
        self.caches.release(row, text)
        if self.states is None or self.borrows_states:
            return
        if self.shares_prefixes:
            for length in self.states.ends(row, num_tokens):
                self.keep_state(row, text[:length])
        self.states.forget([row])

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Append the tokens of a batch to its rows. Returns this rank's logits [B, T, V], or [B,
        num_outputs, V] of the last tokens, or hidden states of a model's part.

        Raises:
            Cancelled: the batch's cancellation was set before a layer. Nothing is appended.
        """
        forward = self.enqueue(batch)
        if forward.out is None:
            self.execute()
        assert forward.out is not None, "it has just been computed"
        return forward.out

    def enqueue(self, batch: ForwardBatch) -> EnqueuedForward:
        """As `forward`, but a native forward may wait for the next, of other rows, so that both
        read the weights once, at latest until `execute`. Until then it has no output, and its rows
        must not change. Whoever calls it is in inference mode, which takes time to enter."""
        tokens = batch.tokens
        x = tokens if isinstance(tokens, Tensor) else upload(tokens, self.device)
        num_new = x.shape[1]
        rows = BatchRows.of(batch.rows, self.device)
        policy = batch.policy or self.policy
        committed = self.make_room(rows, num_new, policy, batch.committed)
        views = self.make_views(policy, rows, num_new, committed, batch.is_of_prompt)
        num_outputs = batch.num_outputs
        if num_outputs is None or not self.model.is_last:
            num_outputs = num_new
        forward = EnqueuedForward(
            x, rows, views, num_outputs, is_draft=batch.is_draft, cancellation=batch.cancellation
        )
        if self.observers or batch.observers:
            self._ask_observers(forward, [*self.observers, *batch.observers])
        if self.executor is not None and self.executor.serves(forward):
            self.enqueued.append(forward)
        else:
            self._run_layers(forward)
        return forward

    def _ask_observers(
        self, forward: EnqueuedForward, observers: Sequence[ForwardObserver]
    ) -> None:
        if forward.is_draft:
            self._show_draft(forward.rows, forward.views, 1)
        forward.observers = [observer for observer in observers if observer.wants(forward)]

    def _show_draft(self, rows: BatchRows, views: LayerViews, num_forwards: int) -> None:
        for observer in self.observers:
            observer.on_draft(rows, views, self.offsets, num_forwards)

    def make_views(
        self,
        policy: Visible,
        rows: BatchRows,
        num_new: int,
        committed: Lengths | Sequence[int] | None,
        is_of_prompt: bool = False,
    ) -> LayerViews:
        make = make_kernel_view if self.model.elementwise.has_views else make_view

        def view(rule: Visible, place: int) -> KVView:
            cache = self.caches.distinct[place]
            window = self.windows.distinct[place]
            made = make(cache, rows, rule, num_new, committed, window, self.offsets)
            return replace(made, is_of_prompt=True) if is_of_prompt else made

        return self.windows.views(policy, view)

    def execute(self) -> None:
        """Compute the forwards that are enqueued, in one native call. In inference mode, as
        `enqueue`.

        Raises:
            Cancelled: the last one's cancellation was set before a layer. None is appended.
        """
        if not self.enqueued:
            return
        assert self.executor is not None, "only its forwards are enqueued"
        forwards = self.enqueued
        self.enqueued = []
        keys, is_finite = self.executor.forward(forwards, self.offsets)
        self.has_flaws |= not is_finite
        self.counts.num_forwards += 1
        self.counts.experts_read += self.executor.take_experts_read()
        for forward, num_keys in zip(forwards, keys, strict=True):
            num_new = forward.view.num_new
            num_rows = len(forward.rows)
            self.cache.advance(forward.rows, num_new)
            self._count(0, num_new * num_rows, num_keys, num_rows * forward.is_draft)

    def make_room(
        self,
        rows: BatchRows,
        num_new: int,
        policy: Visible,
        committed: Lengths | Sequence[int] | None,
    ) -> Lengths | Sequence[int] | None:
        """Prepare rows for a forward, and return its `committed`. Only the host can do it, so for
        captured rows it has been done before (`CapturedSteps`)."""
        if not rows.is_captured:
            self.caches.make_room(rows.numbers, num_new)
        return committed

    def _run_layers(self, forward: EnqueuedForward) -> None:
        view = forward.view
        rows = forward.rows
        first = self.model.layers.start
        views = forward.views.distinct
        backends = self.backends
        for backend, planned in zip(backends, views, strict=True):
            backend.plan(planned)
        window_indices = self.windows.window_indices
        numbers = self.windows.numbers
        see_queries = [observer for observer in forward.observers if observer.needs_queries]
        see_weights = [observer for observer in forward.observers if observer.needs_weights]
        layer_numbers = self.layer_numbers

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            index = layer_numbers[layer - first]
            backend = backends[window_indices[index]]
            view = views[window_indices[index]]
            for observer in see_queries:
                observer.on_queries(forward, index, q)
            if not see_weights:
                return backend.run(numbers[index], q, k, v, view)
            out, weights = backend.run_with_weights(numbers[index], q, k, v, view)
            for observer in see_weights:
                observer.on_weights(forward, index, weights)
            return out

        def before_layer(layer: int) -> None:
            if forward.cancellation is not None and forward.cancellation.is_set():
                raise Cancelled(layer - first)

        state_layers = forward.state_layers
        states = dict[int, Tensor]()

        def keep(layer: int, state: Tensor) -> None:
            if layer in state_layers:
                states[layer] = state

        forward.out = self.model(
            forward.x,
            forward.positions,
            attend,
            self.group.all_reduce,
            forward.num_outputs,
            before_layer,
            keep if state_layers else None,
            None if self.states is None else self._remember_in(forward, self.states),
        )
        if state_layers:
            forward.show_states(torch.stack([states[layer] for layer in state_layers]))
        self.cache.advance(rows, view.num_new)
        counts = self.counts
        num_tokens = view.num_new * len(rows)
        counts.num_forwards += 1
        counts.num_tokens += num_tokens
        counts.experts_read += self.model.take_experts_read()
        if self.states is not None:
            counts.state_bytes += len(rows) * self.states.row_bytes
        if rows.is_captured:
            assert counts.on_device is not None
            reads = forward.views.reads(rows)
            reads_codes = self.bytes_per_token != counts.bytes_per_token
            counts.on_device[forward.is_draft + reads_codes].index_add_(0, rows.index, reads)
            return
        self._count(0, 0, forward.views.num_keys, len(rows) * forward.is_draft)

    def _count(self, num_forwards: int, num_tokens: int, keys: int, draft_rows: int) -> None:
        self.counts.count(num_forwards, num_tokens, keys, draft_rows, self.bytes_per_token)

    def _remember_in(self, forward: EnqueuedForward, states: LayerStates) -> Remember:
        """What keeps the states of layers with linear attention in a forward."""
        view = forward.view
        begins = forward.positions[:, 0]  # a copied cache has fewer entries
        committed = begins - view.seq_lens + view.committed
        run = states.forward(
            forward.rows.index,
            begins,
            committed,
            view.num_new,
            view.is_of_prompt,
            self.model.elementwise,
        ).run
        first = self.model.layers.start
        return lambda layer, tokens: run(self.layer_numbers[layer - first], tokens)

    @property
    def finds_flaws(self) -> bool:
        """Whether `has_flaws` covers all logits from which tokens are chosen, also on other
        ranks."""
        return self.executor is not None and self.group.size == 1

    @property
    def can_chain(self) -> bool:
        return self.executor is not None

    def draft(
        self, batch: ForwardBatch, count: int, pa: float = 0.0, states: Tensor | None = None
    ) -> Tensor:
        """At most `count` greedy draft ids [B, K] of each row after a batch's token ids [B, T]. All
        tokens but the last draft are appended. Chains stop at `pa` as in `draft_chain`. `states`
        [B, T, hidden]: of an EAGLE-3 head, beside the tokens. In inference mode, as `enqueue`."""
        assert self.executor is not None, "asked of a runner that can chain"
        tokens = batch.tokens
        token_ids = tokens if isinstance(tokens, Tensor) else upload(tokens, self.device)
        num_new = token_ids.shape[1]
        rows = BatchRows.of(batch.rows, self.device)
        policy = batch.policy or self.policy
        committed = self.make_room(rows, num_new + count - 1, policy, batch.committed)
        views = self.make_views(policy, rows, num_new, committed)
        drafts, keys, is_finite = self.executor.draft(
            token_ids, views, self.offsets, count, pa, states
        )
        self.has_flaws |= not is_finite
        self.counts.experts_read += self.executor.take_experts_read()
        count = drafts.shape[1]
        self._show_draft(rows, views, count)
        self.cache.advance(rows, num_new + count - 1)
        self._count(count, (num_new + count - 1) * len(rows), keys, count * len(rows))
        return drafts

    def truncate(self, rows: Rows, lengths: Lengths | Sequence[int]) -> None:
        self.cache.truncate(rows, lengths)


def greedy(
    logits: Tensor, first_row: int, group: Group, flaws: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Ids int64 [B, T] of the largest logits [B, T, V] over all ranks, smallest id first, and
    with `flaws` (`SamplingMetadata`) numbers [B, T] that are finite if all logits are.

    `first_row` is the vocabulary id of this rank's first row. One collective sends values and
    ids as pairs of float64, which hold both exactly; NaN stands for logits or `flaws` that are
    not finite."""
    value, index = logits.max(dim=-1)
    sums = None if flaws is None else sums_of(logits)
    if group.size == 1:
        return index, sums
    value = value.double()
    if sums is not None and flaws is not None:
        value = value + (sums - sums) + flaws.sum()  # plus 0 or NaN
    pair = torch.stack([value, (index + first_row).double()], dim=-1)  # [B, T, 2]
    values, ids = group.all_gather(pair).unbind(-1)  # [ranks, B, T] each
    best = values.max(dim=0).values
    # No value is below NaN, so that the ids are those of tokens even then.
    chosen = torch.where(values < best, float("inf"), ids).min(dim=0).values.long()
    return chosen, None if flaws is None else best


def sums_of(logits: Tensor) -> Tensor:
    """Sums float32 [B, T] of logits [B, T, V], finite if they all are (below 1e33)."""
    return logits.sum(dim=-1, dtype=torch.float32)


def gather_vocab(logits: Tensor, places: Sequence[tuple[int, int]], group: Group) -> Tensor:
    """Gather sharded logits: [B, T, columns of this rank] -> [B, T, V] on every rank, in one
    collective padded to the widest shard.

    `places` are the half-open id ranges of the ranks' columns, in gathering order."""
    if group.size == 1:
        return logits
    widest = max(last - first for first, last in places)
    padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[-1]))
    shards = zip(places, group.all_gather(padded), strict=True)
    ordered = sorted(shards, key=lambda shard: shard[0])
    return torch.cat([columns[..., : last - first] for (first, last), columns in ordered], dim=-1)
