"""The split of `--layer_split auto`: chosen from the times that all ranks find, so that every rank
comes to the same one. Imports no torch.

Owns what ranks tell each other about the split, before any process group exists. Must not know how
a rank finds its times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from magicdec.distributed.groups import Launch, exchange_texts
from magicdec.distributed.layer_split import FLAG, StageTimes, is_auto, split_layers
from magicdec.distributed.stages import StageGrid


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a decode step on one rank: of a layer, and beside its layers (`fixed`), for any
    stage and for the first one, which also embeds, computes the head, samples and schedules. The
    last is None on a rank that is not in the first stage."""

    layer_s: float
    fixed_s: float
    first_fixed_s: float | None


@dataclass(frozen=True)
class ChosenSplit:
    """`asked` is what the record has for the flag: layer counts in place of `auto`. `reason` says
    in one line what `auto` chose and from which times; it is empty for another split."""

    layers: tuple[range, ...]
    asked: str | None
    reason: str = ""


def choose_split(
    asked: str | None,
    grid: StageGrid,
    num_layers: int,
    launch: Launch,
    source: str,
    find_times: Callable[[], RankTimes],
) -> ChosenSplit:
    """The split of a model among the stages. All ranks must call it, with any split. `source` says
    where the times of `find_times` come from. Raises ValueError, on every rank, if a rank asked for
    another split or cannot find its times."""
    needs_times = is_auto(asked) and grid.num_stages > 1
    said: dict[str, Any] = {"asked": asked, "host": launch.rank - launch.local_rank}
    if needs_times:
        try:
            said |= {"times": asdict(find_times())}
        except ValueError as error:
            said |= {"refusal": str(error)}
    told = [json.loads(text) for text in exchange_texts(launch, json.dumps(said), "layer split")]
    for rank, theirs in enumerate(told):
        if theirs["asked"] != told[0]["asked"]:
            here, there = told[0]["asked"], theirs["asked"]
            raise ValueError(f"{FLAG}: rank 0 has {here}, rank {rank} has {there}")
        if "refusal" in theirs:
            raise ValueError(theirs["refusal"])
    times = stage_times(grid, told) if needs_times else None
    layers = split_layers(asked, grid.num_stages, num_layers, times)
    if not is_auto(asked):
        return ChosenSplit(layers, asked)
    counts = [len(each) for each in layers]
    reason = "" if times is None else explain(counts, times, source)
    return ChosenSplit(layers, ",".join(map(str, counts)), reason)


def stage_times(grid: StageGrid, told: Sequence[Mapping[str, Any]]) -> list[StageTimes]:
    """The times of each stage. The ranks of one host count as equally fast, by the median of what
    they found, because a difference between them is noise. A stage is as slow as its slowest rank.
    """
    hosts: dict[int, list[RankTimes]] = {}
    for theirs in told:
        hosts.setdefault(theirs["host"], []).append(RankTimes(**theirs["times"]))
    found = []
    for stage in range(grid.num_stages):
        of_hosts = [hosts[told[rank]["host"]] for rank in grid.ranks_of(stage)]
        layer_s = max(median(rank.layer_s for rank in host) for host in of_hosts)
        fixed_s = max(median(rank.fixed_s for rank in host) for host in of_hosts)
        if stage == 0:
            first = [told[rank]["times"]["first_fixed_s"] for rank in grid.ranks_of(stage)]
            fixed_s = max(first)
        found.append(StageTimes(fixed_s, layer_s))
    return found


def explain(counts: Sequence[int], times: Sequence[StageTimes], source: str) -> str:
    """What was chosen, and from which numbers."""
    stages = [time.seconds(count) for count, time in zip(counts, times, strict=True)]
    layers = sorted({f"{1e3 * time.layer_s:.3g}" for time in times})
    return (
        f"{FLAG} {','.join(map(str, counts))}: a decode step is predicted to take "
        f"{', '.join(f'{1e3 * seconds:.3g}' for seconds in stages)} ms on the stages, from "
        f"{' to '.join((layers[0], *layers[1:][-1:]))} ms a layer, and beside layers "
        f"{1e3 * times[0].fixed_s:.3g} ms on the first stage and "
        f"{1e3 * max(time.fixed_s for time in times[1:]):.3g} ms on the others ({source})"
    )
