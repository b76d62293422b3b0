"""Layout: what each rank does in pipelined speculation, as `--layer_split` says it. Imports no
torch.

    0.1,0.4,0.5/1.0    three stages, and the draft on a rank of its own, which is the last
    0.5,0.5/head       two stages, and the draft on the head
    0,1.0/head         the head has no layers: it schedules and drafts; one stage

Rank 0 is the head and, unless its share is 0, the first stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from magicdec.distributed.layer_split import FLAG, is_auto, split_layers

ON_HEAD, ON_ITS_OWN = "head", ("1", "1.0")


@dataclass(frozen=True)
class Layout:
    """`layers` are those of each rank; a rank without layers is a head that only schedules, or the
    draft's. `draft_rank` is where drafts are made, if any are."""

    layers: tuple[range, ...]
    draft_rank: int

    @property
    def world_size(self) -> int:
        return len(self.layers)

    @property
    def stages(self) -> list[int]:
        """The ranks of the stages in order."""
        return [rank for rank, layers in enumerate(self.layers) if len(layers)]

    @property
    def hops(self) -> list[tuple[int, int]]:
        """The pairs (sender, receiver) of different ranks that a run passes from the head through
        all stages and home."""
        way = [0, *self.stages, 0]
        return [(a, b) for a, b in pairwise(way) if a != b]

    def describe(self, rank: int) -> str:
        parts = ["head"] if rank == 0 else []
        if rank in self.stages:
            parts.append(f"stage {self.stages.index(rank)}")
        return ", ".join([*parts, *["draft"] * (rank == self.draft_rank)])


def make_layout(text: str | None, world_size: int, num_layers: int) -> Layout:
    """`text` as the user wrote it; None stands for equal shares of all ranks, with the draft on the
    head. Raises ValueError, naming the flag."""
    if text is None:
        return Layout(split_layers(None, world_size, num_layers), 0)
    target, slash, draft = text.partition("/")
    if is_auto(target):
        raise ValueError(
            f"{FLAG} {text}: no times are measured for a pipeline whose head also schedules and "
            "may draft; give counts or shares"
        )
    if slash and draft not in (ON_HEAD, *ON_ITS_OWN):
        raise ValueError(
            f"{FLAG} {text}: behind the slash is 1.0, for a draft on a rank of its own, or "
            f"{ON_HEAD}; the draft is on one rank"
        )
    words = target.split(",")
    is_apart = draft in ON_ITS_OWN
    count = len(words) + is_apart
    if count != world_size:
        raise ValueError(
            f"{FLAG} {text} names {count} ranks, but {world_size} were started; start {count}"
        )
    has_head_layers = len(words) == 1 or words[0].strip("0.") != ""
    given = words if has_head_layers else words[1:]
    layers = split_layers(",".join(given), len(given), num_layers)
    empty = (range(0),)
    layers = (*(() if has_head_layers else empty), *layers, *(empty if is_apart else ()))
    return Layout(layers, world_size - 1 if is_apart else 0)
