"""`--layer_split`: which layers each stage of a pipeline owns. Imports nothing of this package and
no torch.

Owns the rule that turns shares into whole layers. Must not know of ranks or of a model's weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

FLAG = "--layer_split"
SHARE = re.compile(r"\d+\.\d*|\.\d+")


def split_layers(text: str | None, num_stages: int, num_layers: int) -> tuple[range, ...]:
    """The layers of each stage. `text` has a layer count for each stage (10,12), or shares of all
    layers, which contain a point (0.25,0.75). None stands for `num_stages` equal shares; otherwise
    the text says how many stages there are.

    A stage gets the whole layers of its share. The layers that are left go, one each, to the stages
    with the largest remainders; of equal ones, to the later stage, because the first stage computes
    the embedding and the head too. Raises ValueError, naming the flag.
    """
    if text is None:
        if num_stages > num_layers:
            raise ValueError(f"{num_stages} stages cannot share {num_layers} layers; use fewer")
        return _ranges(round_shares([Fraction(1, num_stages)] * num_stages, num_layers))
    words = text.split(",")
    if len(words) > num_layers:
        raise ValueError(f"{FLAG} {text} names {len(words)} stages for {num_layers} layers")
    if all(re.fullmatch(r"\d+", word) for word in words):
        counts = [int(word) for word in words]
        if sum(counts) != num_layers:
            raise ValueError(
                f"{FLAG} {text} adds up to {sum(counts)} layers; the model has {num_layers}"
            )
    elif all(SHARE.fullmatch(word) for word in words):
        shares = [Fraction(word) for word in words]
        if sum(shares) != 1:
            raise ValueError(f"{FLAG} {text} adds up to {float(sum(shares)):g}; shares add up to 1")
        counts = round_shares(shares, num_layers)
    else:
        raise ValueError(
            f"{FLAG} {text} is not known; choose a layer count for each stage, such as 10,12, or "
            "shares, such as 0.25,0.75"
        )
    if 0 in counts:
        raise ValueError(
            f"{FLAG} {text} leaves stage {counts.index(0)} without a layer of {num_layers}"
        )
    return _ranges(counts)


def count_stages(text: str | None, world_size: int) -> int:
    """The number of stages that `text` names; without it, every rank is a stage."""
    return world_size if text is None else len(text.split(","))


def round_shares(shares: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers in proportion to `shares`, which add up to 1, by largest remainders."""
    counts = [int(share * total) for share in shares]
    remainders = [share * total - count for share, count in zip(shares, counts, strict=True)]
    order = sorted(range(len(shares)), key=lambda stage: (remainders[stage], stage), reverse=True)
    for stage in order[: total - sum(counts)]:
        counts[stage] += 1
    return counts


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))
