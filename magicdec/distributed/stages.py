"""StageGrid: which rank is in which stage of a pipeline. Imports no torch.

Owns the order of ranks: the ranks of a stage follow each other and share its layers by tensor
parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageGrid:
    """`num_stages` stages of `tensor_parallel` ranks each. The stages form a ring: the last one
    sends to the first. Rank i of a stage sends to rank i of the next stage, since all ranks of a
    stage have the same hidden states after its last all-reduce."""

    num_stages: int
    tensor_parallel: int = 1

    @property
    def world_size(self) -> int:
        return self.num_stages * self.tensor_parallel

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor_parallel

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        first = stage * self.tensor_parallel
        return tuple(range(first, first + self.tensor_parallel))

    def next(self, rank: int) -> int:
        """The rank that `rank` sends hidden states to."""
        return (rank + self.tensor_parallel) % self.world_size

    def edges(self) -> list[tuple[int, int]]:
        """All pairs (sender, receiver), in the same order on every rank; none for one stage."""
        if self.num_stages == 1:
            return []
        return [(rank, self.next(rank)) for rank in range(self.world_size)]


def make_grid(flag_text: str, num_stages: int, world_size: int) -> StageGrid:
    """The grid of `world_size` ranks. `flag_text` is what the user wrote, such as `--layer_split
    10,12`. Raises ValueError if the ranks cannot be divided among the stages."""
    if num_stages > world_size:
        raise ValueError(
            f"{flag_text} names {num_stages} stages, but {world_size} ranks were started; start "
            f"{num_stages}, or a multiple of that"
        )
    if world_size % num_stages:
        raise ValueError(
            f"{flag_text} names {num_stages} stages, among which {world_size} ranks cannot be "
            f"divided evenly; start a multiple of {num_stages}"
        )
    return StageGrid(num_stages, world_size // num_stages)
