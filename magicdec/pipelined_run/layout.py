"""Layout: what each rank does in pipelined speculation, as `--layer_split` says it. Imports no
torch.

    0.1,0.4,0.5/1.0    three stages, and the draft on a rank of its own, which is the last
    0.5,0.5/0.5,0.5    two stages, and the draft on the last two ranks, which share its layers
    0.5,0.5/head       two stages, and the draft on the head
    0,1.0/head         the head has no layers: it schedules and drafts; one stage

Rank 0 is the head and, unless its share is 0, the first stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from magicdec.distributed.layer_split import FLAG, SHARE, is_auto, split_layers

ON_HEAD = "head"


@dataclass(frozen=True)
class Layout:
    """`layers` are those of each rank; a rank without layers is a head that only schedules, or the
    draft's. `draft_ranks` is where drafts are made, if any are: several ranks share every layer of
    the draft."""

    layers: tuple[range, ...]
    draft_ranks: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.layers)

    @property
    def draft_rank(self) -> int:
        """The first of the draft's ranks, which answers the head."""
        return self.draft_ranks[0]

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
        if rank in self.draft_ranks:
            place = self.draft_ranks.index(rank)
            parts.append("draft" if len(self.draft_ranks) == 1 else f"draft shard {place}")
        return ", ".join(parts)


def make_layout(text: str | None, world_size: int, num_layers: int) -> Layout:
    """`text` as the user wrote it; None stands for equal shares of all ranks, with the draft on the
    head. Raises ValueError, naming the flag."""
    if text is None:
        return Layout(split_layers(None, world_size, num_layers), (0,))
    target, slash, draft = text.partition("/")
    if is_auto(target):
        raise ValueError(
            f"{FLAG} {text}: no times are measured for a pipeline whose head also schedules and "
            "may draft; give counts or shares"
        )
    num_apart = count_shares(text, draft) if slash and draft != ON_HEAD else 0
    words = target.split(",")
    count = len(words) + num_apart
    if count != world_size:
        raise ValueError(
            f"{FLAG} {text} names {count} ranks, but {world_size} were started; start {count}"
        )
    has_head_layers = len(words) == 1 or words[0].strip("0.") != ""
    given = words if has_head_layers else words[1:]
    layers = split_layers(",".join(given), len(given), num_layers)
    empty = (range(0),)
    layers = (*(() if has_head_layers else empty), *layers, *(empty * num_apart))
    return Layout(layers, tuple(range(world_size - num_apart, world_size)) or (0,))


def count_shares(text: str, draft: str) -> int:
    """The number of ranks that share the draft, by the equal shares of it in `draft`. Raises
    ValueError, naming the flag, for anything else."""
    words = draft.split(",")
    if not all(is_equal_share(word, len(words)) for word in words):
        equal = ",".join([f"{1 / len(words):.3g}" if len(words) > 1 else "1.0"] * len(words))
        raise ValueError(
            f"{FLAG} {text}: behind the slash is {ON_HEAD}, or equal shares of the draft, whose "
            f"ranks compute every layer together; give {equal}"
        )
    return len(words)


def is_equal_share(word: str, count: int) -> bool:
    """Whether `word` is 1 / `count` in as many digits as it has."""
    if word != "1" and not SHARE.fullmatch(word):
        return False
    digits = len(word.partition(".")[2])
    return 0 < float(word) == round(1 / count, digits)
