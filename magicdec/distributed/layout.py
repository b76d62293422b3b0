"""The roles of ranks in a ring of stages and in pipelined speculation, by `--layer_split`. Imports
no torch.

    0.1,0.4,0.5/1.0    three stages, and the draft on a rank of its own, which is the last
    0.5,0.5/0.5,0.5    two stages, and the draft on the last two ranks, which share its layers
    0,1.0/head         the head has no layers: it schedules and drafts; one stage
    auto/1.0           all ranks but the last are stages, whose layers follow from times

Rank 0 is the head and, unless its share is 0, in the first stage. With more ranks than the split
names, each stage has several consecutive ranks, which share its layers by tensor parallelism. A
ring has no head without layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicdec.distributed.layer_split import (
    FLAG,
    StageTimes,
    count_stages,
    split_layers,
)

ON_HEAD = "head"
APART = ("1.0", "1")  # behind the slash: the draft has a rank of its own, the last


@dataclass(frozen=True)
class StageGrid:
    """`num_stages` stages of `tensor_parallel` ranks each, from `first_rank` on."""

    num_stages: int
    tensor_parallel: int = 1
    first_rank: int = 0

    @property
    def world_size(self) -> int:
        return self.first_rank + self.num_stages * self.tensor_parallel

    @property
    def leaders(self) -> list[int]:
        return [*range(self.first_rank, self.world_size, self.tensor_parallel)]

    def stage_of(self, rank: int) -> int:
        return (rank - self.first_rank) // self.tensor_parallel

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        first = self.first_rank + stage * self.tensor_parallel
        return tuple(range(first, first + self.tensor_parallel))

    def edges(self) -> list[tuple[int, int]]:
        """The pairs (sender, receiver) of a ring, in the same order on every rank. Rank i of a
        stage sends to rank i of the next, since all ranks of a stage have the same hidden states.
        """
        if self.num_stages == 1:
            return []
        size = self.world_size
        return [(rank, (rank + self.tensor_parallel) % size) for rank in range(size)]


@dataclass(frozen=True)
class PipelineLayout:
    """The roles of ranks in pipelined speculation. A rank without layers only schedules or
    drafts."""

    layers: tuple[range, ...]
    draft_rank: int
    tensor_parallel: int = 1

    @property
    def world_size(self) -> int:
        return len(self.layers)

    @property
    def grid(self) -> StageGrid:
        ranks = [rank for rank, layers in enumerate(self.layers) if len(layers)]
        return StageGrid(len(ranks) // self.tensor_parallel, self.tensor_parallel, ranks[0])

    @property
    def stages(self) -> list[int]:
        """The first rank of each stage, to which messages go."""
        return self.grid.leaders

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that share this rank's layers; a rank without layers is alone."""
        grid = self.grid
        return grid.ranks_of(grid.stage_of(rank)) if len(self.layers[rank]) else (rank,)

    def with_layers(self, layers: Sequence[range]) -> PipelineLayout:
        stage_layers = dict(zip(self.stages, layers, strict=True))
        firsts = (self.group_of(rank)[0] for rank in range(self.world_size))
        return replace(self, layers=tuple(stage_layers.get(first, range(0)) for first in firsts))

    def describe(self, rank: int) -> str:
        parts = ["head"] if rank == 0 else []
        group = self.group_of(rank)
        if len(self.layers[rank]):
            shard = "" if len(group) == 1 else f" shard {group.index(rank)}"
            parts.append(f"stage {self.grid.stage_of(rank)}{shard}")
        if rank == self.draft_rank:
            parts.append("draft")
        return ", ".join(parts)


@dataclass(frozen=True)
class SplitText:
    """The parts of `--layer_split`: a head without layers (`0,`, or empty), the text for
    `split_layers`, and the draft's place behind the slash (None without)."""

    head: str
    stages: str | None
    draft: str | None

    def __str__(self) -> str:
        return f"{self.head}{self.stages}{'' if self.draft is None else f'/{self.draft}'}"

    @property
    def is_apart(self) -> bool:
        """Whether the draft has a rank of its own. Raises ValueError, naming the flag."""
        if self.draft not in (None, ON_HEAD, *APART):
            raise ValueError(
                f"{FLAG} {self}: behind the slash is {ON_HEAD}, or {APART[0]} for a rank of the "
                "draft's own"
            )
        return self.draft in APART

    def num_stages(self, world_size: int) -> int:
        """The number of stages on `world_size` ranks. Raises ValueError as `is_apart`."""
        return count_stages(self.stages, world_size - self.is_apart - bool(self.head))


def read_split(text: str | None) -> SplitText:
    if text is None:
        return SplitText("", None, None)
    target, slash, draft = text.partition("/")
    first, comma, rest = target.partition(",")
    has_head_layers = not comma or first.strip("0.") != ""
    head, stages = ("", target) if has_head_layers else (f"{first},", rest)
    return SplitText(head, stages, draft if slash else None)


def make_grid(flag_text: str, num_stages: int, num_ranks: int, num_others: int = 0) -> StageGrid:
    """The stages of `num_ranks` ranks, beside `num_others` without one. Raises ValueError, which
    begins with `flag_text`, if they cannot be divided."""
    if num_ranks < num_stages or num_ranks % num_stages:
        raise ValueError(
            f"{flag_text} names {num_stages + num_others} ranks, but {num_ranks + num_others} were "
            f"started; start {num_stages + num_others}, or equally many ranks for each stage"
        )
    return StageGrid(num_stages, num_ranks // num_stages)


def make_stage_grid(text: str | None, world_size: int) -> StageGrid:
    """The stages of pipelined speculation, from rank 1 on after a head without layers. Raises
    ValueError, naming the flag."""
    split = read_split(text)
    num_headless = int(split.head != "")
    num_others = int(split.is_apart) + num_headless
    num_stages = max(1, split.num_stages(world_size))
    grid = make_grid(f"{FLAG} {text}", num_stages, world_size - num_others, num_others)
    return replace(grid, first_rank=num_headless)


def make_layout(text: str | None, world_size: int, num_layers: int) -> PipelineLayout:
    """The layout by the flag's `text`; None: equal shares, the draft on the head. `auto` gives
    equal shares until `with_layers`. Raises ValueError, naming the flag."""
    split = read_split(text)
    grid = make_stage_grid(text, world_size)
    num_headless = grid.first_rank
    num_apart = int(split.is_apart)
    any_times = [StageTimes(0.0, 1.0)] * grid.num_stages
    layers = split_layers(split.stages, grid.num_stages, num_layers, any_times)
    computing = (layers_of_stage for layers_of_stage in layers for _ in range(grid.tensor_parallel))
    empty = (range(0),)
    draft_rank = world_size - 1 if num_apart else 0
    return PipelineLayout(
        (*empty * num_headless, *computing, *empty * num_apart), draft_rank, grid.tensor_parallel
    )
