"""Retrieval: blocks whose mean key has the largest attention from the newest query.

Source: TriForce, arXiv 2404.11912, section 4. Here a chunk is a block of WEIGHTS_BLOCK tokens,
every KV head chooses for itself, and sinks and a window are always read. Any attention backend
serves.

Shapes: L layers, B rows, T new tokens, H query heads, G KV heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.attention import AttentionQueries
from magicdec.runner.request import Request
from magicdec.speculation.block_choice import add_mean_keys, score_blocks
from magicdec.speculation.block_kv import BLOCK, BlockKV, BlockSelection, Number
from magicdec.speculation.draft_kv import DraftKV
from magicdec.speculation.observation import newest_queries

HIDDEN = -1e30  # score of a block that may not be chosen


@dataclass(frozen=True)
class Retrieval(BlockSelection):
    """A policy that scores blocks by a softmax of the newest query over mean keys, summed over
    the query heads of a KV head."""

    @property
    def observed_tokens(self) -> int:
        return 1

    def state_numbers(self, num_blocks: int, head_dim: int, queries_per_head: int) -> int:
        return (num_blocks + queries_per_head) * head_dim

    def draft_kv(self, runner: ModelRunner) -> DraftKV:
        return RetrievedBlocks(runner, self)


class RetrievedBlocks(BlockKV):
    """A draft KV with mean keys of complete blocks, and each row's newest cached query. Forks have
    the mean keys of their texts."""

    def __init__(self, runner: ModelRunner, policy: BlockSelection) -> None:
        super().__init__(runner, policy)
        shape = runner.cache.shape
        model = runner.model.config
        rows = runner.num_rows
        first, last = runner.model.shard.heads(model.num_heads, model.num_kv_heads)[0]
        self._query = torch.zeros(
            shape.num_layers,
            rows,
            shape.num_kv_heads,
            (last - first) // shape.num_kv_heads,
            shape.head_dim,
            device=runner.device,
        )
        self._mean_keys = torch.zeros(
            shape.num_layers,
            runner.num_texts,
            shape.num_kv_heads,
            self.num_blocks,
            shape.head_dim,
            device=runner.device,
        )
        self._texts = torch.arange(rows, device=runner.device)  # whose mean keys each row has
        self._committed = torch.zeros(rows, dtype=torch.int64, device=runner.device)
        self._complete = [0] * rows  # blocks of each row whose mean key is known, on the host
        self._seen = AttentionQueries()  # of the last verification
        self.observers = (self._seen,)

    @property
    def state(self) -> list[Tensor]:
        return [self._query, self._committed]

    def admit(self, requests: Sequence[Request]) -> None:
        rows = [r.row for r in requests if r.row is not None]
        index = upload(rows, self.runner.device)
        for request, row in zip(requests, rows, strict=True):
            self._complete[row] = 0
            self._committed[row] = request.num_cached
        layer_queries = newest_queries(self.runner, requests, 1)
        for number, layer in enumerate(self.runner.windows.layers[0]):
            self._query[number, index] = self._by_kv_head(layer_queries[layer][:, 0])
        self._add_means(requests)
        self._choice = None

    def fork(self, forks: Sequence[Request], texts: Sequence[Request]) -> None:
        rows, text_rows = ([r.row for r in some if r.row is not None] for some in (forks, texts))
        self._texts[rows] = self._texts[text_rows]
        for request, row in zip(forks, rows, strict=True):
            self._complete[row] = request.num_cached // BLOCK
            self._committed[row] = request.num_cached - 1  # before its last verification
        self._choice = None

    def prepare(self, requests: Sequence[Request], gamma: int) -> None:
        self._add_means(requests)

    def scores(self, rows: BatchRows, committed: Lengths, num_blocks: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(len(rows), device=self.runner.device)
        if self.runner.executor is not None:
            blocks = [(self._first_block(n), n // BLOCK) for n in committed.bounds]
            texts = self._texts[rows.index]
            scores = score_blocks(
                self._query, self._mean_keys, rows.index, texts, blocks, num_blocks
            )
            return scores, index
        # As many rows at a time as there are texts, of whose mean keys each has a copy.
        parts = zip(
            rows.index.split(self.runner.num_texts),
            committed.tensor.split(self.runner.num_texts),
            strict=True,
        )
        return torch.cat([self._score(*part, num_blocks) for part in parts], dim=1), index

    def _score(self, index: Tensor, committed: Tensor, num_blocks: int) -> Tensor:
        keys = self._mean_keys[:, self._texts[index], :, :num_blocks]  # [L, B, G, blocks, D]
        query = self._query[:, index] * keys.shape[-1] ** -0.5  # [L, B, G, H/G, D]
        block = torch.arange(num_blocks, device=keys.device)
        is_partial = block >= (committed // BLOCK).view(-1, 1, 1, 1)  # [B, 1, 1, blocks]
        is_gone = block < self._first_block(committed).view(-1, 1, 1, 1)
        weights = (query @ keys.mT).masked_fill(is_partial | is_gone, HIDDEN).softmax(dim=-1)
        return weights.sum(dim=3)

    def _first_block(self, committed: Number) -> Number:
        """The first block that lies in the model's window."""
        first, _ = self.policy.sinks(committed)
        return -(-first // BLOCK)

    def commit(self, rows: BatchRows, lengths: Lengths) -> None:
        before = self._committed[rows.index]
        for number, queries in self.in_widest(self._seen.layers):
            place = (lengths.tensor - before - 1).clamp(0, queries.shape[1] - 1)
            query = queries.gather(1, place.view(-1, 1, 1, 1).expand(-1, 1, *queries.shape[2:]))
            self._query[number].index_copy_(0, rows.index, self._by_kv_head(query[:, 0]))
        self._seen.layers.clear()
        self._committed.index_copy_(0, rows.index, lengths.tensor)
        super().commit(rows, lengths)

    def _by_kv_head(self, queries: Tensor) -> Tensor:
        return queries.unflatten(1, self._query.shape[2:4]).float()

    def _add_means(self, requests: Sequence[Request]) -> None:
        rows = [r.row for r in requests if r.row is not None]
        # A model whose layers all have a window may have lost the first blocks.
        num_lost = [-(-self.runner.cache.first_held[row] // BLOCK) for row in rows]
        num_known = [max(self._complete[row], n) for row, n in zip(rows, num_lost, strict=True)]
        complete = [r.num_cached // BLOCK for r in requests]
        count = max(new - old for new, old in zip(complete, num_known, strict=True))
        if count <= 0:
            return
        if self.runner.executor is not None:
            add_mean_keys(self.runner.cache, rows, num_known, complete, self._mean_keys)
        else:
            self._read_means(rows, num_known, count)
        for row, number in zip(rows, complete, strict=True):
            self._complete[row] = number

    def _read_means(self, rows: Sequence[int], num_known: Sequence[int], count: int) -> None:
        cache = self.runner.cache
        device = self.runner.device
        index = upload(rows, device)
        first = upload(num_known, device).unsqueeze(1)
        # Rows with fewer new blocks add some that are not complete; these are added again later.
        blocks = (first + torch.arange(count, device=device)).clamp(max=self.num_blocks - 1)
        tokens = (blocks.unsqueeze(2) * BLOCK + torch.arange(BLOCK, device=device)).flatten(1)
        tokens = tokens.clamp(max=cache.tokens_per_row - 1)
        for layer in range(cache.shape.num_layers):  # keys [B, G, count * BLOCK, D]
            if any(num_known):
                keys, _ = cache.read(layer, cache.slots(index, tokens))
            else:
                keys = cache.first_keys(layer, index, count * BLOCK)
            means = keys.unflatten(2, (-1, BLOCK)).mean(dim=3, dtype=torch.float32)
            self._mean_keys[layer, index.unsqueeze(1), :, blocks] = means.transpose(1, 2)
