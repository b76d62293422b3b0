"""Tensor parallelism as arithmetic: which heads, hidden units and vocabulary rows one rank of a
group holds.

Owns the split rule. Communication lives in `groups.py`; the model asks this file what to load and
what to compute. Source: Megatron-LM (Shoeybi et al. 2019), section 3, with uneven shards and
replicated KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range of part `index` when `total` is cut into `parts`, the first ones longer by
    the remainder."""
    base, remainder = divmod(total, parts)
    start = index * base + min(index, remainder)
    return start, start + base + (index < remainder)


@dataclass(frozen=True)
class Shard:
    """One rank's place in a tensor-parallel group: `rank` of `size`. `Shard()` is the whole
    model."""

    rank: int = 0
    size: int = 1

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Half-open ranges (query heads, KV heads). With more ranks than KV heads each KV head is
        held by several ranks.

        Raises ValueError when there are more ranks than query heads.
        """
        if self.size > num_heads:
            raise ValueError(
                f"{self.size} ranks cannot share {num_heads} attention heads; "
                f"use at most {num_heads} ranks"
            )
        group = num_heads // num_kv_heads
        if self.size <= num_kv_heads:
            first, last = split_evenly(num_kv_heads, self.size, self.rank)
            return (first * group, last * group), (first, last)
        for kv_head in range(num_kv_heads):
            first, last = split_evenly(self.size, num_kv_heads, kv_head)
            if first <= self.rank < last:
                start, stop = split_evenly(group, last - first, self.rank - first)
                return (kv_head * group + start, kv_head * group + stop), (kv_head, kv_head + 1)
        raise AssertionError("every rank falls in one KV head's share")

    def split(self, total: int) -> tuple[int, int]:
        """Half-open range of an evenly cut dimension (FFN units, vocabulary rows)."""
        return split_evenly(total, self.size, self.rank)
