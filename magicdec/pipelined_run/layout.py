"""Layout: what each rank does in pipelined speculation, as `--layer_split` says it. Imports no
torch.

    0.1,0.4,0.5/1.0    three stages, and the draft on a rank of its own, which is the last
    0.5,0.5/0.5,0.5    two stages, and the draft on the last two ranks, which share its layers
    0.5,0.5/head       two stages, and the draft on the head
    0,1.0/head         the head has no layers: it schedules and drafts; one stage
    auto/1.0           all ranks but the last are stages, whose layers follow from times

Rank 0 is the head and, unless its share is 0, the first stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from magicdec.distributed.layer_split import (
    FLAG,
    MDI_LLM,
    SHARE,
    StageTimes,
    count_stages,
    is_mdi_llm,
    split_layers,
)

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

    def with_layers(self, layers: Sequence[range]) -> Layout:
        """The same with other layers of the stages, in their order."""
        of_stages = dict(zip(self.stages, layers, strict=True))
        of_ranks = (of_stages.get(rank, range(0)) for rank in range(self.world_size))
        return replace(self, layers=tuple(of_ranks))

    def describe(self, rank: int) -> str:
        parts = ["head"] if rank == 0 else []
        if rank in self.stages:
            parts.append(f"stage {self.stages.index(rank)}")
        if rank in self.draft_ranks:
            place = self.draft_ranks.index(rank)
            parts.append("draft" if len(self.draft_ranks) == 1 else f"draft shard {place}")
        return ", ".join(parts)


@dataclass(frozen=True)
class SplitText:
    """The parts of `--layer_split`: the share 0 of a head without layers (`0,`, or empty), what
    `split_layers` takes for the stages, and the place of the draft behind the slash (None: there is
    no slash)."""

    head: str
    stages: str | None
    draft: str | None

    def __str__(self) -> str:
        return f"{self.head}{self.stages}{'' if self.draft is None else f'/{self.draft}'}"

    @property
    def num_apart(self) -> int:
        """The number of ranks that only draft. Raises ValueError, naming the flag, if what is
        behind the slash is none of its forms."""
        if self.draft is None or self.draft == ON_HEAD:
            return 0
        return count_shares(str(self), self.draft)

    def num_stages(self, world_size: int) -> int:
        """The number of stages on so many ranks. Raises ValueError as `num_apart` does."""
        return count_stages(self.stages, world_size - self.num_apart - bool(self.head))


def read_split(text: str | None) -> SplitText:
    if text is None:
        return SplitText("", None, None)
    target, slash, draft = text.partition("/")
    first, comma, rest = target.partition(",")
    has_head_layers = not comma or first.strip("0.") != ""
    head, stages = ("", target) if has_head_layers else (f"{first},", rest)
    return SplitText(head, stages, draft if slash else None)


def make_layout(text: str | None, world_size: int, num_layers: int) -> Layout:
    """`text` as the user wrote it; None stands for equal shares of all ranks, with the draft on the
    head. Times are not known here, so that `auto` gives equal shares until `with_layers` replaces
    them. Raises ValueError, naming the flag."""
    split = read_split(text)
    if is_mdi_llm(split.stages):
        raise ValueError(
            f"{FLAG} {text}: {MDI_LLM} divides the layers of a ring (`magicdec recurrent`); choose "
            "from counts, shares and auto"
        )
    num_apart, is_headless = split.num_apart, split.head != ""
    num_stages = max(1, split.num_stages(world_size))
    if (count := num_stages + num_apart + is_headless) != world_size:
        raise ValueError(
            f"{FLAG} {text} names {count} ranks, but {world_size} were started; start {count}"
        )
    any_times = [StageTimes(0.0, 1.0)] * num_stages
    layers = split_layers(split.stages, num_stages, num_layers, any_times)
    empty = (range(0),)
    layers = (*(empty if is_headless else ()), *layers, *(empty * num_apart))
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
