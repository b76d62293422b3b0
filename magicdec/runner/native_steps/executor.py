"""Executor: a forward, or a chain of greedy draft forwards, in one native call (`forward.cpp`) on a
CPU. It calls the kernels of `model.transformer` with native attention in the same order, so tokens
have the same bits.

Shapes: B rows, T new tokens, K draft tokens, H query heads, G KV heads, D head size, V vocabulary
rows of this rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from magicdec.attention.native import HEADERS as ATTENTION_HEADERS
from magicdec.attention.native import STORAGE, flags_of, kernel
from magicdec.distributed.groups import Group
from magicdec.distributed.shared_memory import HEADERS as EXCHANGE_HEADERS
from magicdec.distributed.shared_memory import SLOT_BYTES, WAIT_MS, SharedMemoryExchange
from magicdec.kernels.build import PREFILL_FROM, load_library, share_openmp
from magicdec.kv.cache import KVCache
from magicdec.kv.layer_views import LayerViews
from magicdec.model.block import Block
from magicdec.model.config import RopeConfig
from magicdec.model.elementwise.native import HEADERS as ELEMENTWISE_HEADERS
from magicdec.model.linear.packed import LAYER_HEADER
from magicdec.model.transformer import Transformer
from magicdec.runner.forward_batch import Cancelled, EnqueuedForward
from magicdec.runner.native_steps.descriptions import (
    CacheFields,
    CallFields,
    ExchangeFields,
    KeepWaiting,
    LayerFields,
    ModelFields,
    ViewFields,
    describe_cache,
    describe_layer,
    describe_model,
)
from magicdec.runner.native_steps.interrupts import Interrupts

SOURCE = Path(__file__).with_name("forward.cpp")
HEADERS = (
    SOURCE.with_suffix(".h"),
    SOURCE.with_name("forward_part.h"),
    LAYER_HEADER,
    *dict.fromkeys((*ATTENTION_HEADERS, *EXCHANGE_HEADERS, *ELEMENTWISE_HEADERS)),
)
# what the library returns; 0: done
INTERRUPTED = 1
UNKNOWN_TOKEN = 2

Fields = TypeVar("Fields", bound=ctypes.Structure)


@cache
def library(head_size: int, *more_flags: str) -> ctypes.CDLL:
    share_openmp()
    flags = ("-fopenmp", f"-DHEAD_SIZE={head_size}", *more_flags)
    native = load_library(SOURCE, flags, HEADERS)
    native.magicdec_forward.restype = ctypes.c_int64
    native.magicdec_forward.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(ModelFields),
        ctypes.POINTER(CacheFields),
        ctypes.POINTER(ExchangeFields),
        ctypes.POINTER(CallFields),
        ctypes.c_int64,
    )
    return native


@cache
def array_of(fields: type[Fields], size: int) -> type[ctypes.Array[Fields]]:
    """The type of an array, kept: making one anew takes longer than a small layer."""
    return fields * size


@dataclass
class SeenForward:
    """What observers of a forward see of all layers, once it is computed: attention weights [L, B,
    G, blocks], queries [L, B, T, H, D], and hidden states [N, B, T, hidden]."""

    forward: EnqueuedForward
    weights: Tensor | None = None
    queries: Tensor | None = None
    states: Tensor | None = None

    def show(self) -> None:
        for observer in self.forward.observers:
            if self.weights is not None and observer.needs_weights:
                for layer, weights in enumerate(self.weights):
                    observer.on_weights(self.forward, layer, weights)
            if self.queries is not None and observer.needs_queries:
                for layer, queries in enumerate(self.queries):
                    observer.on_queries(self.forward, layer, queries)
        if self.states is not None:
            self.forward.show_states(self.states)


class Executor:
    """The native forward of a model with packed weights, over any cache of its shape.

    `keys_read` counts keys read by the kernels, summed over forwards, layers, rows and KV heads
    of this rank; `experts_read` experts, summed over forwards and layers."""

    def __init__(self, model: Transformer, group: Group) -> None:
        self.model = model
        self.config = model.config
        self.keys_read = 0
        self.experts_read = 0
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        attention = blocks[0].self_attention
        self.num_heads = attention.num_heads
        self.num_kv_heads = attention.num_kv_heads
        self.dtype = blocks[0].attention_norm.weight.dtype
        library(self.config.head_dim)  # compiled before the first step
        self.exchange: SharedMemoryExchange | None = None
        if group.size > 1:
            assert isinstance(group.exchange, SharedMemoryExchange), "checked before the run"
            self.exchange = group.exchange
        ropes = [self.config.rope_of(self.config.kinds[layer]) for layer in model.layers]
        scales = [rope.attention_factor**2 * self.config.query_scale for rope in ropes]
        self._sinks = model.sinks()
        sinks = [None] * len(blocks) if self._sinks is None else list(self._sinks)
        described = list(map(describe_layer, blocks, scales, sinks))
        self._layers = (LayerFields * len(blocks))(*described)
        self._kept = described  # what the copies in the array point to
        self._model: ModelFields | None = None
        self._ropes: dict[RopeConfig, Tensor] = {}
        self._error: BaseException | None = None
        self._interrupts = Interrupts()
        self._keep_waiting = KeepWaiting(self._may_wait)
        segment = None if self.exchange is None else self.exchange.segment
        self._peers = ExchangeFields(
            segment, group.index, group.size, SLOT_BYTES, WAIT_MS, self._keep_waiting, 0
        )

    def take_experts_read(self) -> int:
        """`experts_read` since this was asked last."""
        count = self.experts_read
        self.experts_read = 0
        return count

    def serves(self, forward: EnqueuedForward) -> bool:
        """Whether `forward` can be computed here. Long chunks whose queries are seen are not: the
        queries of all layers would be kept. Of an EAGLE-3 head, only chains are."""
        if self.config.eagle is not None:
            return False
        if not forward.observers or forward.view.num_new < PREFILL_FROM:
            return True
        return not any(observer.needs_queries for observer in forward.observers)

    def forward(
        self,
        forwards: Sequence[EnqueuedForward],
        offsets: Tensor | None,
    ) -> tuple[list[int], bool]:
        """Compute `forwards` of distinct rows in one call that reads weights once; tokens have
        the bits of a forward of their own.

        Returns by forward the keys that one head saw in all layers, summed over rows, and whether
        all logits of this rank are finite.

        Raises:
            Cancelled: the last forward's cancellation was set before a layer. All forwards end.
        """
        model = self.model
        width = model.width_out
        counts = [forward.x.shape[0] * forward.num_outputs for forward in forwards]
        out = torch.empty(sum(counts), width, dtype=self.dtype)
        calls = list[CallFields]()
        seen = list[SeenForward]()
        for forward in forwards:
            call = self._call(forward.x, forward.views, offsets, 1, forward.num_outputs)
            calls.append(call)
            if forward.observers:
                seen.append(self._let_see(forward, call))
        if model.is_last and model.has_head:
            calls[0].logits = out.data_ptr()
        else:
            calls[0].hidden_out = out.data_ptr()
        cancellation = forwards[-1].cancellation
        if cancellation is not None:
            calls[0].cancelled = cancellation.address
            calls[0].cancelled_value = cancellation.value
        fields = self._run(forwards[0].views, calls)
        if cancellation is not None and fields[0].layers_done < len(self._layers):
            raise Cancelled(fields[0].layers_done)
        for shown in seen:
            shown.show()
        for enqueued, own in zip(forwards, out.split_with_sizes(counts), strict=True):
            enqueued.out = own.view(enqueued.x.shape[0], enqueued.num_outputs, width)
        return list(map(_keys_seen, calls)), not fields[0].not_finite

    def _let_see(self, forward: EnqueuedForward, call: CallFields) -> SeenForward:
        """Let `call` write what the observers of `forward` need."""
        num_rows, num_new = forward.x.shape[:2]
        layers = len(self.model.blocks)
        seen = SeenForward(forward)
        observers = forward.observers
        if any(observer.needs_weights for observer in observers):
            num_blocks = forward.view.num_weight_blocks
            seen.weights = torch.empty(layers, num_rows, self.num_kv_heads, num_blocks)
            call.mass = seen.weights.data_ptr()
            call.num_blocks = num_blocks
        if any(observer.needs_queries for observer in observers):
            seen.queries = torch.empty(
                layers, num_rows, num_new, self.num_heads, self.config.head_dim, dtype=self.dtype
            )
            call.queries = seen.queries.data_ptr()
        state_layers = forward.state_layers
        if state_layers:
            first = self.model.layers.start
            numbers = (ctypes.c_int64 * len(state_layers))(*(n - first for n in state_layers))
            hidden = self.config.hidden_size
            seen.states = torch.empty(
                len(state_layers), num_rows, num_new, hidden, dtype=self.dtype
            )
            call.states = seen.states.data_ptr()
            call.state_layers = ctypes.addressof(numbers)
            call.num_states = len(state_layers)
            call.kept.append(numbers)
        return seen

    def draft(
        self,
        token_ids: Tensor,
        views: LayerViews,
        offsets: Tensor | None,
        count: int,
        pa: float = 0.0,
        states: Tensor | None = None,
    ) -> tuple[Tensor, int, bool]:
        """At most `count` greedy drafts of each row, int64 [B, K], after token_ids [B, T]; the
        keys that one head saw in all layers, summed over rows and forwards; and whether all
        ranks' logits are finite. All tokens but the last draft are appended. Chains stop at `pa`
        as in `draft_chain`. `states` [B, T, hidden]: of an EAGLE-3 head, beside the tokens."""
        drafts = torch.empty(token_ids.shape[0], count, dtype=torch.int64)
        call = self._call(token_ids, views, offsets, count, 1)
        call.drafts = drafts.data_ptr()
        if states is not None:
            states = states.contiguous()
            call.tokens = call.hidden_in
            call.hidden_in = states.data_ptr()
            call.kept.append(states)
        call.pa = pa
        done = self._run(views, [call])[0]
        return drafts[:, : done.num_drafted], _keys_seen(call), not done.not_finite

    @staticmethod
    def received(
        cache: KVCache,
        layer: int,
        rows: Tensor,
        queries: Tensor,
        first: int,
        length: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention weights float32 [B, G, length - first] that keys at positions `first` to
        `length` - 1 of rows [B] received from the newest queries [B, T, H, D], summed over these
        and a KV head's query heads. `layer` is the number of one in the cache, which has native
        layout. `sinks`, float32 [H]: logits that take part in the softmax."""
        (num_rows, num_new, num_heads, size) = queries.shape
        shape = cache.shape
        assert num_new <= length - first
        queries = queries.contiguous()
        table = cache.block_table
        out = torch.empty(num_rows, shape.num_kv_heads, length - first)
        numbers = (ctypes.c_int64 * 8)(
            num_rows,
            num_new,
            num_heads,
            shape.num_kv_heads,
            shape.block_size,
            table.shape[1],
            first,
            length,
        )
        kernel(size, *flags_of(cache.k.dtype, queries.dtype)).magicdec_received(
            STORAGE.index(cache.k.dtype),
            numbers,
            queries.data_ptr(),
            cache.k[layer].data_ptr(),
            table.data_ptr(),
            rows.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        return out

    def _call(
        self, x: Tensor, views: LayerViews, offsets: Tensor | None, steps: int, num_outputs: int
    ) -> CallFields:
        view = views.widest
        view_fields = array_of(ViewFields, len(views.distinct))()
        tensors = [x.contiguous(), view.row_index, view.seq_lens, view.committed]
        if offsets is not None:
            tensors.append(offsets[view.row_index])
        x_pointer, rows, seq_lens, committed, *_ = [tensor.data_ptr() for tensor in tensors]
        for fields, kv_view in zip(view_fields, views.distinct, strict=True):
            ranges = kv_view.ranges.contiguous()  # [B, R, 2] or [L, B, G, R, 2]
            tensors.append(ranges)
            fields.ranges = ranges.data_ptr()
            fields.layers = ranges.shape[0] if kv_view.per_head else 1
            fields.heads = ranges.shape[2] if kv_view.per_head else 1
            fields.num_ranges = ranges.shape[-2]
            fields.window = kv_view.window or 0
        tokens, hidden = (x_pointer, None) if self.model.has_embedding else (None, x_pointer)
        call = CallFields(
            *x.shape[:2],
            steps,
            tokens,
            rows,
            seq_lens,
            committed,
            None if offsets is None else tensors[4].data_ptr(),
            hidden,
            ctypes.addressof(view_fields),
            len(view_fields),
            ctypes.addressof(views.windows.in_c),
            view.is_of_prompt,
            num_outputs,
        )
        # The library reads them until it returns, and counts in `view_fields`.
        call.kept = [tensors, views, view_fields]
        return call

    def _run(self, views: LayerViews, calls: Sequence[CallFields]) -> ctypes.Array[CallFields]:
        """Computes calls over the caches of `views`."""
        peers = self._peers
        exchange = self.exchange
        fields = array_of(CallFields, len(calls))(*calls)
        caches = [view.cache for view in views.distinct]
        described = array_of(CacheFields, len(caches))(*map(describe_cache, caches))
        if exchange is not None:
            peers.turn = exchange.turn
        stored = caches[0].k.dtype
        native = library(self.config.head_dim, *flags_of(stored, self.dtype))
        arguments = (
            STORAGE.index(stored),
            self._describe_model(),
            described,
            peers,
            fields,
            len(fields),
        )
        if exchange is None:  # nothing is called back
            failed = native.magicdec_forward(*arguments)
        else:
            with self._interrupts.kept():
                failed = native.magicdec_forward(*arguments)
        self.keys_read += sum([call.keys_read for call in fields])
        self.experts_read += fields[0].experts_read
        if exchange is not None:
            exchange.turn = peers.turn
        if failed == INTERRUPTED:
            error = self._error
            self._error = None
            raise error or KeyboardInterrupt
        if failed == UNKNOWN_TOKEN:
            raise IndexError(f"a token id is not below {self.config.vocab_size}, the vocabulary")
        return fields

    def _may_wait(self, rank: int) -> int:
        """Called when a rank is late. Exceptions are kept until the library returns."""
        try:
            assert self.exchange is not None
            self.exchange.check_alive(rank)
        except BaseException as error:
            self._error = error
            return 0
        return int(not self._interrupts.is_kept)

    def _describe_model(self) -> ModelFields:
        if self._model is None or self._ropes is not self.model.ropes:
            self._ropes = self.model.ropes
            self._model = describe_model(
                self.model, self.num_heads, self.num_kv_heads, self._layers, self.dtype
            )
        return self._model


def _keys_seen(call: CallFields) -> int:
    """Keys that one head saw in all layers, summed over rows and forwards."""
    _, views, view_fields = call.kept[:3]
    pairs = zip(view_fields, views.windows.num_layers, strict=True)
    return sum([fields.keys_seen * num_layers for fields, num_layers in pairs])
