"""Executor: a forward, or a chain of greedy draft forwards, in one native call (`forward.cpp`) on a
CPU. It calls the kernels of `model.transformer` with native attention in the same order, so tokens
have the same bits.

Shapes: B rows, T new tokens, K draft tokens, H query heads, G KV heads, D head size, V vocabulary
rows of this rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from magicdec.attention.native import HEADERS as ATTENTION_HEADERS
from magicdec.attention.native import STORAGE, kernel
from magicdec.distributed.groups import Group
from magicdec.distributed.shared_memory import HEADERS as EXCHANGE_HEADERS
from magicdec.distributed.shared_memory import SLOT_BYTES, WAIT_MS, SharedMemoryExchange
from magicdec.kernels.build import FAST_MATH, PREFILL_FROM, load_library, share_openmp
from magicdec.kv.cache import BatchRows, KVCache
from magicdec.kv.layer_views import LayerViews
from magicdec.kv.view import KVView
from magicdec.model.block import Block
from magicdec.model.config import RopeConfig
from magicdec.model.elementwise.native import HEADERS as ELEMENTWISE_HEADERS
from magicdec.model.linear.packed import LAYER_HEADER
from magicdec.model.transformer import Transformer
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


class Cancellation(Protocol):
    """A cancellation is set once the int64 at `address` is `value`. Native forwards read it."""

    @property
    def address(self) -> int: ...

    @property
    def value(self) -> int: ...

    def is_set(self) -> bool: ...


class Cancelled(Exception):
    """A forward ended after `num_layers` layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.num_layers = num_layers


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
AttentionObserver = Callable[[int, Tensor], None]
"""A function of a layer and its attention weights [B, G, blocks]
(`AttentionBackend.run_with_weights`), or its queries [B, T, H, D] after RoPE, before attention."""


@cache
def library(head_size: int) -> ctypes.CDLL:
    share_openmp()
    flags = (*FAST_MATH, "-fopenmp", f"-DHEAD_SIZE={head_size}")
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


@dataclass(eq=False)
class NativeForward:
    """A forward of `rows` with equal numbers of new tokens, computed alone or with others.

    `x` are token ids [B, T] or hidden states [B, T, hidden]; `out` [B, num_outputs, V or hidden]
    is set once computed, and `states` [N, B, T, hidden] if N are asked for. `watch` and
    `watch_queries`: see `ModelRunner.defer`."""

    x: Tensor
    rows: BatchRows
    views: LayerViews
    num_outputs: int
    watch: AttentionObserver | None = None
    watch_queries: AttentionObserver | None = None
    is_draft: bool = False
    cancellation: Cancellation | None = None
    out: Tensor | None = None
    states: Tensor | None = None

    @property
    def view(self) -> KVView:
        return self.views.widest


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
        attention = blocks[0].attention
        self.num_heads = attention.num_heads
        self.num_kv_heads = attention.num_kv_heads
        self.dtype = blocks[0].attention_norm.weight.dtype
        self.library = library(self.config.head_dim)
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

    def serves(self, forward: NativeForward) -> bool:
        """Whether `forward` can be computed here. Long chunks with watched queries are not: the
        queries of all layers would be kept. Of an EAGLE-3 head, only chains are."""
        if self.config.eagle is not None:
            return False
        return forward.watch_queries is None or forward.view.num_new < PREFILL_FROM

    def forward(
        self,
        forwards: Sequence[NativeForward],
        offsets: Tensor | None,
        state_layers: Sequence[int] = (),
    ) -> tuple[list[int], bool]:
        """Compute `forwards` of distinct rows in one call that reads weights once; tokens have
        the bits of a forward of their own. `state_layers`: see `HiddenStates.layers`.

        Returns by forward the keys that one head saw in all layers, summed over rows, and whether
        all logits of this rank are finite.

        Raises:
            Cancelled: the last forward's cancellation was set before a layer. All forwards end.
        """
        model = self.model
        layers = len(self.model.blocks)
        size = self.config.head_dim
        counts = [len(each.x) * each.num_outputs for each in forwards]
        out = torch.empty(sum(counts), model.width_out, dtype=self.dtype)
        calls = list[CallFields]()
        of_states = (ctypes.c_int64 * len(state_layers))(*state_layers)
        watched = list[tuple[AttentionObserver, Tensor]]()
        for each in forwards:
            call = self._call(each.x, each.views, offsets, 1, each.num_outputs)
            calls.append(call)
            if state_layers:
                each.states = out.new_empty(
                    len(state_layers), *each.x.shape[:2], self.config.hidden_size
                )
                call.states = each.states.data_ptr()
                call.state_layers = ctypes.addressof(of_states)
                call.num_states = len(state_layers)
            if each.watch is not None:
                shape = layers, len(each.x), self.num_kv_heads, each.view.num_weight_blocks
                weights = torch.empty(shape)
                call.mass = weights.data_ptr()
                call.num_blocks = weights.shape[3]
                watched.append((each.watch, weights))
            if each.watch_queries is not None:
                queries = out.new_empty(layers, *each.x.shape[:2], self.num_heads, size)
                call.queries = queries.data_ptr()
                watched.append((each.watch_queries, queries))
        if model.is_last and model.has_head:
            calls[0].logits = out.data_ptr()
        else:
            calls[0].hidden_out = out.data_ptr()
        cancellation = forwards[-1].cancellation
        if cancellation is not None:
            calls[0].cancelled = cancellation.address
            calls[0].cancelled_value = cancellation.value
        fields = self._run(forwards[0].views, calls)
        if cancellation is not None and fields[0].layers_done < layers:
            raise Cancelled(fields[0].layers_done)
        for layer in range(layers):
            for watch, values in watched:
                watch(layer, values[layer])
        for each, own in zip(forwards, out.split(counts), strict=True):
            each.out = own.view(len(each.x), each.num_outputs, model.width_out)
        return list(map(_keys_seen, calls)), not fields[0].not_finite

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
        drafts = torch.empty(len(token_ids), count, dtype=torch.int64)
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
        (num_rows, num_new, num_heads, size), shape = queries.shape, cache.shape
        assert queries.dtype == cache.k.dtype and num_new <= length - first
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
        kernel(size).magicdec_received(
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
        of_views = array_of(ViewFields, len(views.distinct))()
        tensors = [x.contiguous(), view.row_index, view.seq_lens, view.committed]
        if offsets is not None:
            tensors.append(offsets[view.row_index])
        x_pointer, rows, seq_lens, committed, *_ = (tensor.data_ptr() for tensor in tensors)
        for fields, each in zip(of_views, views.distinct, strict=True):
            ranges = each.ranges.contiguous()  # [B, R, 2] or [L, B, G, R, 2]
            tensors.append(ranges)
            fields.ranges = ranges.data_ptr()
            fields.layers = ranges.shape[0] if each.per_head else 1
            fields.heads = ranges.shape[2] if each.per_head else 1
            fields.num_ranges = ranges.shape[-2]
            fields.window = each.window or 0
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
            ctypes.addressof(of_views),
            len(of_views),
            ctypes.addressof(views.windows.in_c),
            view.is_of_prompt,
            num_outputs,
        )
        # The library reads them until it returns, and counts in `of_views`.
        call.kept = [tensors, views, of_views]
        return call

    def _run(self, views: LayerViews, calls: Sequence[CallFields]) -> ctypes.Array[CallFields]:
        """Computes calls over the caches of `views`."""
        peers = self._peers
        exchange = self.exchange
        fields = array_of(CallFields, len(calls))(*calls)
        caches = [each.cache for each in views.distinct]
        described = array_of(CacheFields, len(caches))(*map(describe_cache, caches))
        if exchange is not None:
            peers.turn = exchange.turn
        arguments = (
            STORAGE.index(caches[0].k.dtype),
            self._describe_model(),
            described,
            peers,
            fields,
            len(fields),
        )
        if exchange is None:  # nothing is called back
            failed = self.library.magicdec_forward(*arguments)
        else:
            with self._interrupts.kept():
                failed = self.library.magicdec_forward(*arguments)
        self.keys_read += sum(call.keys_read for call in fields)
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
    _, views, of_views = call.kept[:3]
    pairs = zip(of_views, views.windows.num_layers, strict=True)
    return sum(fields.keys_seen * num_layers for fields, num_layers in pairs)
