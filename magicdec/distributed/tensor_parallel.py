"""The heads, MLP units and vocabulary rows of a rank (Megatron-LM, Shoeybi et al. 2019, section 3),
with uneven shards and replicated KV heads."""

from __future__ import annotations

from dataclasses import dataclass

# Inputs: those of int4's groups, and of the smallest groups that layers have.
MLP_GROUPS = (32, 16)


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range of part `index` of `parts`; the first parts are one longer if needed."""
    base, remainder = divmod(total, parts)
    start = index * base + min(index, remainder)
    return start, start + base + (index < remainder)


@dataclass(frozen=True)
class Shard:
    """Rank `rank`'s shard of `size`. `Shard()` is the whole model."""

    rank: int = 0
    size: int = 1

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Half-open ranges (query heads, KV heads). If ranks outnumber KV heads, several split
        one's query heads. Raises ValueError for more ranks than query heads."""
        if self.size > num_heads:
            raise ValueError(
                f"{self.size} ranks cannot share {num_heads} attention heads; "
                f"use at most {num_heads} ranks"
            )
        group = num_heads // num_kv_heads
        if not self.replicates(num_kv_heads):
            first, last = split_evenly(num_kv_heads, self.size, self.rank)
            return (first * group, last * group), (first, last)
        for kv_head in range(num_kv_heads):
            first, last = split_evenly(self.size, num_kv_heads, kv_head)
            if first <= self.rank < last:
                start, stop = split_evenly(group, last - first, self.rank - first)
                return (kv_head * group + start, kv_head * group + stop), (kv_head, kv_head + 1)
        raise AssertionError("every rank belongs to one KV head")

    def replicates(self, num_kv_heads: int) -> bool:
        """Whether some ranks hold the same KV head."""
        return self.size > num_kv_heads

    def mlp_units(self, total: int) -> tuple[int, int]:
        """This rank's half-open range of MLP units, the inputs of the down projection: whole groups
        of its weights where the ranks can share them, so that `total` 8192 on 3 ranks is 2752, 2720
        and 2720. An even split in multiples of 16 is kept."""
        group = 1
        if total % (MLP_GROUPS[-1] * self.size):
            held = (g for g in MLP_GROUPS if total % g == 0 and total >= g * self.size)
            group = next(held, 1)
        first, last = split_evenly(total // group, self.size, self.rank)
        return first * group, last * group

    def split(self, total: int) -> tuple[int, int]:
        """This rank's half-open range of evenly split vocabulary rows."""
        return split_evenly(total, self.size, self.rank)
