"""Queries of the newest tokens, kept by prefill or run once more, and the attention weights that
cached keys receive from them.

Shapes: B rows, W newest tokens, H query heads and G KV heads of this rank, D head size, S keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

import torch
from torch import Tensor

from magicdec.attention.sinks import softmax_with_sinks
from magicdec.kv.cache import BatchRows, Rows, upload
from magicdec.runner.forward_batch import ForwardBatch, ForwardObserver
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.attention import AttentionQueries
from magicdec.runner.observers.prompt_queries import PromptQueries
from magicdec.runner.request import Request

# Scores that are computed at a time, unless one KV head of a row has more: on a CPU as many as its
# cache holds, else enough to keep the device busy.
CPU_SCORES = 1 << 19
DEVICE_SCORES = 1 << 26


def newest_queries(runner: ModelRunner, requests: Sequence[Request], count: int) -> list[Tensor]:
    """Queries [B, count, H, D] after RoPE, by layer, of the newest `count` cached tokens.
    Prefill's serve until a text grows."""
    rows = [r.row for r in requests if r.row is not None]
    lengths = [r.num_cached for r in requests]
    prompt_queries = runner.observer(PromptQueries)
    queries = [] if prompt_queries is None else prompt_queries.newest(rows, lengths, count)
    if queries:
        return queries
    observer = AttentionQueries()
    rerun_tail(runner, rows, newest_cached(requests, count, runner.device), observer)
    return list(observer.layers.values())


@torch.inference_mode()
def rerun_tail(
    runner: ModelRunner, rows: Rows, token_ids: Tensor, observer: ForwardObserver
) -> None:
    """Run the newest tokens of `rows`, token_ids [B, T], once more for an observer.

    Another T may round K and V differently, so the old ones are written back: the cache stays
    bitwise equal."""
    cache = runner.cache
    rows = BatchRows.of(rows, runner.device)
    before = cache.lengths_of(rows).plus(-token_ids.shape[1])
    steps = torch.arange(token_ids.shape[1], device=runner.device)
    places = before.tensor.unsqueeze(1) + steps
    with runner.caches.unchanged(rows.index, places):
        cache.truncate(rows, before)
        runner.forward(ForwardBatch(token_ids, rows, num_outputs=0, observers=[observer]))


def newest_cached(requests: Sequence[Request], count: int, device: torch.device) -> Tensor:
    """The last `count` cached tokens of each request: int64 [B, count]."""
    tokens = [(*r.prompt_ids, *r.output_ids)[r.num_cached - count : r.num_cached] for r in requests]
    return upload(tokens, device)


def weights_in_cache(
    runner: ModelRunner, layer: int, rows: Tensor, queries: Tensor, first: int, length: int
) -> Tensor:
    """`received_weights` of the keys at positions `first` to `length` - 1 of rows [B]."""
    cache, number = runner.caches.cache_of(layer)
    sinks = None if runner.sink_logits is None else runner.sink_logits[layer]
    if runner.executor is not None:
        weights = runner.executor.received(cache, number, rows, queries, first, length, sinks)
        return sum_over_replicas(runner, weights)
    keys = cache.first_keys(number, rows, length)[:, :, first:]
    return received_weights(runner, queries, keys, sinks)


def received_weights(
    runner: ModelRunner, queries: Tensor, keys: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Attention weights float32 [B, G, S] that keys received, summed over queries and over all
    query heads of a KV head on all ranks.

    queries [B, W, H, D] belong to the last W of keys [B, G, S, D]. `sinks`, float32 [H]: logits
    that take part in the softmax."""
    # Of ALiBi the products hold a bias too, which needs more digits than bfloat16 has.
    dtype = torch.float32 if runner.model.config.positions == "alibi" else keys.dtype
    rows, window, num_heads, size = queries.shape
    _, groups, num_keys, _ = keys.shape
    packed = queries.view(rows, window, groups, num_heads // groups, size)
    packed = packed.permute(0, 2, 3, 1, 4).flatten(2, 3)
    # [B * G, H/G * W, D], [B * G, S, D]
    packed = packed.flatten(0, 1)
    flat = keys.flatten(0, 1)
    count = heads_at_once(runner.device.type, packed.shape[1] * num_keys)
    logits: Iterable[Tensor | None] = repeat(None)
    if sinks is not None:
        logits = sinks.repeat_interleave(window).view(groups, -1).repeat(rows, 1).split(count)
    parts = zip(packed.split(count), flat.split(count), logits, strict=False)
    weights = torch.cat([_received(q.to(dtype), k.to(dtype), window, own) for q, k, own in parts])
    return sum_over_replicas(runner, weights.view(rows, groups, num_keys))


def heads_at_once(device: str, scores_per_head: int) -> int:
    most = CPU_SCORES if device == "cpu" else DEVICE_SCORES
    return max(1, most // scores_per_head)


def _received(queries: Tensor, keys: Tensor, window: int, sinks: Tensor | None) -> Tensor:
    """`sinks` [heads, H/G * W] of queries [heads, H/G * W, D]."""
    num_keys, size = keys.shape[1:]
    scores = (queries * size**-0.5) @ keys.mT
    later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    newest = scores.unflatten(1, (-1, window))[..., num_keys - window :]
    newest.masked_fill_(later, float("-inf"))
    return softmax_with_sinks(scores, sinks).sum(dim=1)


def sum_over_replicas(runner: ModelRunner, x: Tensor) -> Tensor:
    """Sum x [..., G, N] over the ranks that hold the same KV heads: a collective if KV heads are
    replicated."""
    config = runner.model.config
    shard = runner.model.shard
    if not shard.replicates(config.num_kv_heads):
        return x
    first, last = shard.heads(config.num_heads, config.num_kv_heads)[1]
    all_heads = x.new_zeros(*x.shape[:-2], config.num_kv_heads, x.shape[-1])
    all_heads[..., first:last, :] = x
    return runner.group.all_reduce(all_heads)[..., first:last, :]
