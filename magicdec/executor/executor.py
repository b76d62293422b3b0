"""Executor: a forward of a model or of some of its layers on a CPU, or a chain of greedy draft
forwards, in one native call (`forward.cpp`), with no Python and no torch operator between its
parts.

Owns the calls, and how one learns between its layers that nobody needs it any more. The library
calls the same kernels in the same order as `model.transformer` with native attention, so every
token has the same bits either way.

Shapes: B rows, T new tokens, K draft tokens, H query heads, G KV heads, D head size, V vocabulary
rows of this rank.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from magicdec.attention.native import HEADERS as ATTENTION_HEADERS
from magicdec.attention.native import STORAGE, kernel
from magicdec.distributed.groups import Group
from magicdec.distributed.shared_memory import HEADERS as EXCHANGE_HEADERS
from magicdec.distributed.shared_memory import SLOT_BYTES, WAIT_MS, SharedMemoryExchange
from magicdec.executor.descriptions import (
    CacheFields,
    CallFields,
    ExchangeFields,
    KeepWaiting,
    LayerFields,
    ModelFields,
    describe_cache,
    describe_layer,
    describe_model,
    pointer,
)
from magicdec.kernels.build import FAST_MATH, PREFILL_FROM, load_library, share_openmp
from magicdec.kv.cache import KVCache
from magicdec.kv.view import KVView
from magicdec.model.block import Block
from magicdec.model.elementwise.native import HEADERS as ELEMENTWISE_HEADERS
from magicdec.model.linear.packed import HEADERS as LINEAR_HEADERS
from magicdec.model.transformer import Transformer


class Cancellation(Protocol):
    """Set once the int64 at `address` is `value` and the monotonic clock has reached the int64
    behind it, in ns. A native forward reads these two itself."""

    @property
    def address(self) -> int: ...

    @property
    def value(self) -> int: ...

    def is_set(self) -> bool: ...


class Cancelled(Exception):
    """A forward has ended after `num_layers` of its layers."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.num_layers = num_layers


def check(cancellation: Cancellation, num_layers: int) -> None:
    """Raises Cancelled if it is set, after so many layers."""
    if cancellation.is_set():
        raise Cancelled(num_layers)


SOURCE = Path(__file__).with_name("forward.cpp")
HEADERS = (
    SOURCE.with_suffix(".h"),
    *dict.fromkeys((*ATTENTION_HEADERS, *EXCHANGE_HEADERS, *ELEMENTWISE_HEADERS, *LINEAR_HEADERS)),
)
INTERRUPTED, UNKNOWN_TOKEN = 1, 2  # what the library returns; 0: done

Observe = Callable[[int, Tensor], None]


@cache
def library(head_size: int) -> ctypes.CDLL:
    """The compiled library for one head size."""
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
    )
    return native


class Executor:
    """Runs `model`, whose weights are packed, with native attention over any cache of its shape.
    `keys_read` is the number of keys that the kernels have read so far, counted by the kernels:
    summed over forwards, layers, rows and KV heads of this rank."""

    def __init__(self, model: Transformer, group: Group) -> None:
        self.model, self.config = model, model.config
        self.keys_read = 0
        blocks = [block for block in model.blocks if isinstance(block, Block)]
        attention = blocks[0].attention
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.dtype = blocks[0].attention_norm.weight.dtype
        self.library = library(self.config.head_dim)
        self.exchange: SharedMemoryExchange | None = None
        if group.size > 1:
            assert isinstance(group.exchange, SharedMemoryExchange), "checked before the run"
            self.exchange = group.exchange
        self._layers = (LayerFields * len(blocks))(*map(describe_layer, blocks))
        self._model: ModelFields | None = None
        self._rope: Tensor | None = None
        self._error: BaseException | None = None
        self._keep_waiting = KeepWaiting(self._may_wait)
        segment = None if self.exchange is None else self.exchange.segment
        self._peers = ExchangeFields(
            segment, group.index, group.size, SLOT_BYTES, WAIT_MS, self._keep_waiting, 0
        )

    @staticmethod
    def serves(view: KVView, are_queries_watched: bool) -> bool:
        """Whether `forward` computes the new tokens of the view. A chunk of a prompt whose queries
        are watched is computed layer by layer, because here they would be kept of all layers."""
        return not are_queries_watched or view.num_new < PREFILL_FROM

    def forward(
        self,
        x: Tensor,
        view: KVView,
        offsets: Tensor | None,
        last_only: bool,
        watch: Observe | None,
        watch_queries: Observe | None,
        cancellation: Cancellation | None = None,
    ) -> tuple[Tensor, int]:
        """What `Transformer.forward` returns for x, token ids [B, T] or hidden states [B, T,
        hidden], which are appended to the cache; and the number of keys that one head saw, summed
        over rows. `watch` is called with each layer's attention weights [B, G, blocks],
        `watch_queries` with its queries [B, T, H, D]. Raises Cancelled if the cancellation is set
        before a layer."""
        (rows, count), model = x.shape[:2], self.model
        last_only = last_only and model.is_last
        out = torch.empty(rows, 1 if last_only else count, model.width_out, dtype=self.dtype)
        layers, size = len(model.blocks), self.config.head_dim
        weights = queries = None
        if watch is not None:
            weights = torch.empty(layers, rows, self.num_kv_heads, view.num_weight_blocks)
        if watch_queries is not None:
            queries = out.new_empty(layers, rows, count, self.num_heads, size)
        call = self._call(x, view, offsets, 1, last_only)
        if model.is_last and model.has_head:
            call.logits = out.data_ptr()
        else:
            call.hidden_out = out.data_ptr()
        if weights is not None:
            call.mass, call.num_blocks = weights.data_ptr(), weights.shape[3]
        if queries is not None:
            call.queries = queries.data_ptr()
        if cancellation is not None:
            call.cancelled, call.cancelled_value = cancellation.address, cancellation.value
        self._run(view, call)
        if cancellation is not None and call.layers_done < layers:
            raise Cancelled(call.layers_done)
        for layer in range(layers):
            if watch_queries is not None and queries is not None:
                watch_queries(layer, queries[layer])
            if watch is not None and weights is not None:
                watch(layer, weights[layer])
        return out, call.keys_seen

    def draft(
        self, token_ids: Tensor, view: KVView, offsets: Tensor | None, count: int, pa: float = 0.0
    ) -> tuple[Tensor, int]:
        """At most `count` draft tokens of each row, int64 [B, K], chosen greedily one after the
        other after token_ids [B, T]. All of these but the last are appended to the cache. A row
        stops after a draft less probable than `pa`, the call when all rows have stopped. Also the
        number of keys that one head saw, summed over rows and forwards."""
        drafts = torch.empty(len(token_ids), count, dtype=torch.int64)
        call = self._call(token_ids, view, offsets, count, True)
        call.drafts, call.pa = drafts.data_ptr(), pa
        self._run(view, call)
        return drafts[:, : call.num_drafted], call.keys_seen

    @staticmethod
    def received(
        cache: KVCache, layer: int, rows: Tensor, queries: Tensor, first: int, length: int
    ) -> Tensor:
        """The attention weights that the keys of rows [B] at positions `first` to `length` - 1
        received from the newest tokens, whose queries are [B, T, H, D], summed over these and over
        the query heads of a KV head: float32 [B, G, length - first]. The cache has the layout of
        native attention."""
        (num_rows, num_new, num_heads, size), shape = queries.shape, cache.shape
        assert queries.dtype == cache.k.dtype and num_new <= length - first
        queries, table = queries.contiguous(), cache.block_table
        out = torch.empty(num_rows, shape.num_kv_heads, length - first)
        numbers = (ctypes.c_int64 * 8)(
            num_rows, num_new, num_heads, shape.num_kv_heads, shape.block_size, table.shape[1],
            first, length,
        )  # fmt: skip
        kernel(size).magicdec_received(
            STORAGE.index(cache.k.dtype), numbers, queries.data_ptr(),
            cache.k[layer].data_ptr(), table.data_ptr(), rows.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def _call(
        self, x: Tensor, view: KVView, offsets: Tensor | None, steps: int, last_only: bool
    ) -> CallFields:
        ranges = view.ranges.contiguous()  # [B, R, 2] or [L, B, G, R, 2]
        tensors = [x.contiguous(), view.row_index, view.seq_lens, view.committed, ranges]
        if offsets is not None:
            tensors.append(offsets[view.row_index])
        x_pointer, rows, seq_lens, committed, *_ = (tensor.data_ptr() for tensor in tensors)
        tokens, hidden = (x_pointer, None) if self.model.has_embedding else (None, x_pointer)
        call = CallFields(
            *x.shape[:2], steps, tokens, rows, seq_lens, committed,
            None if offsets is None else tensors[-1].data_ptr(), hidden, ranges.data_ptr(),
            ranges.shape[0] if view.per_head else 1, ranges.shape[2] if view.per_head else 1,
            ranges.shape[-2], view.window or 0, *map(pointer, view.nodes), view.num_nodes,
            last_only,
        )  # fmt: skip
        call.kept = [tensors, view]  # the library reads them until it returns
        return call

    def _run(self, view: KVView, call: CallFields) -> None:
        peers, exchange, cache = self._peers, self.exchange, view.cache
        if exchange is not None:
            peers.turn = exchange.turn
        failed = self.library.magicdec_forward(
            STORAGE.index(cache.k.dtype), self._describe_model(), describe_cache(view), peers, call
        )
        self.keys_read += call.keys_read
        if exchange is not None:
            exchange.turn = peers.turn
        if failed == INTERRUPTED:
            error, self._error = self._error, None
            raise error or KeyboardInterrupt
        if failed == UNKNOWN_TOKEN:
            raise IndexError(f"a token id is not below {self.config.vocab_size}, the vocabulary")

    def _may_wait(self, rank: int) -> int:
        """Called when another rank is late. An exception cannot pass through the library, so it is
        kept until the library has returned."""
        try:
            assert self.exchange is not None
            self.exchange.check_alive(rank)
        except BaseException as error:
            self._error = error
            return 0
        return 1

    def _describe_model(self) -> ModelFields:
        """Made again if a longer table of rotations has replaced the one before."""
        if self._model is None or self._rope is not self.model.rope:
            self._rope = self.model.rope
            self._model = describe_model(
                self.model, self.num_heads, self.num_kv_heads, self._layers
            )
        return self._model
