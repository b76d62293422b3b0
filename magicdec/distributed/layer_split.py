"""The layers of each stage by `--layer_split`. Imports nothing of this package and no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise

FLAG = "--layer_split"
AUTO = "auto"
SHARE = re.compile(r"\d+\.\d*|\.\d+")
NAMED = re.compile(rf"{AUTO}(?::([1-9]\d*))?")
GRAMMAR = "layers or shares of the stages (10,12 or 0.25,0.75), auto, or auto:2"


@dataclass(frozen=True)
class StageTimes:
    """The time of a stage with n layers: `fixed_s` + n * `layer_s` seconds."""

    fixed_s: float
    layer_s: float

    def seconds(self, num_layers: int) -> float:
        return self.fixed_s + num_layers * self.layer_s


def split_layers(
    text: str | None,
    num_stages: int,
    num_layers: int,
    times: Sequence[StageTimes] | None = None,
) -> tuple[range, ...]:
    """The layers of each stage. `text` has layer counts (10,12), shares (0.25,0.75), or is `auto`,
    which minimises the slowest stage by `times`; None: equal shares. Raises ValueError, naming the
    flag."""
    if (text is None or is_auto(text)) and num_stages > num_layers:
        flag_text = "" if text is None else f"{FLAG} {text}: "
        raise ValueError(
            f"{flag_text}{num_stages} stages cannot share {num_layers} layers; use fewer"
        )
    if text is None:
        return _ranges(round_shares([Fraction(1, num_stages)] * num_stages, num_layers))
    if not is_auto(text):
        return _ranges(read_counts(text, num_layers))
    if num_stages == 1:
        return (range(num_layers),)
    if times is None:
        raise ValueError(
            f"{FLAG} {text} needs the times of stages, which are not known here; give a layer "
            "count for each stage, such as 10,12"
        )
    return _ranges(balance(times, num_layers))


def is_auto(text: str | None) -> bool:
    return text is not None and NAMED.fullmatch(text) is not None


def count_stages(text: str | None, world_size: int) -> int:
    """The number of stages; without `text` and with plain `auto` every rank is one."""
    if text is None:
        return world_size
    rule = NAMED.fullmatch(text)
    if rule is None:
        return len(text.split(","))
    return int(rule[1] or world_size)


def read_counts(text: str, num_layers: int) -> list[int]:
    """Layers of each stage from counts or shares, by largest remainders; of equal ones the later
    stage, because the first computes the embedding and the head too."""
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
        raise ValueError(f"{FLAG} {text} is not known; choose from {GRAMMAR}")
    if 0 in counts:
        raise ValueError(
            f"{FLAG} {text} leaves stage {counts.index(0)} without a layer of {num_layers}"
        )
    return counts


def round_shares(shares: Sequence[Fraction], total: int) -> list[int]:
    """Whole numbers in proportion to `shares`, which add up to 1, by largest remainders."""
    counts = [int(share * total) for share in shares]
    remainders = [share * total - count for share, count in zip(shares, counts, strict=True)]
    order = sorted(range(len(shares)), key=lambda stage: (remainders[stage], stage), reverse=True)
    for stage in order[: total - sum(counts)]:
        counts[stage] += 1
    return counts


def balance(times: Sequence[StageTimes], num_layers: int) -> list[int]:
    """Layer counts, at least one per stage, that make the slowest stage fastest. Each layer goes to
    the stage that is fastest with it, of equal ones the later: optimal, since times grow with
    layers."""
    counts = [1] * len(times)
    for _ in range(num_layers - len(times)):
        fastest = min(
            range(len(times)), key=lambda stage: (times[stage].seconds(counts[stage] + 1), -stage)
        )
        counts[fastest] += 1
    return counts


def round_seconds(stages_s: Sequence[float], links_s: Sequence[float], num_lanes: int) -> float:
    """Seconds until each of `num_lanes` lanes has gained a token: the slowest stage never waits, or
    a lane finds every stage free."""
    return max(num_lanes * max(stages_s), sum(stages_s) + sum(links_s))


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))
