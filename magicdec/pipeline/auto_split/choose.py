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


@dataclass(frozen=True)
class RankTimes:
    """Seconds of a step on one rank: of a layer, and beside its layers (`fixed`), for a stage that
    has no end of the model, and for this rank's own stage with the ends that it has. The last is
    None on a rank whose stage has none."""

    layer_s: float
    fixed_s: float
    own_fixed_s: float | None


@dataclass(frozen=True)
class ChosenSplit:
    """`asked` is what the record has for the flag: layer counts in place of `auto`. `reason` says
    from which times `auto` chose; it is empty for another split."""

    layers: tuple[range, ...]
    asked: str | None
    reason: str = ""


def choose_split(
    asked: str | None,
    stages: Sequence[Sequence[int]],
    num_layers: int,
    launch: Launch,
    source: str,
    find_times: Callable[[], RankTimes | None],
) -> ChosenSplit:
    """The split of a model among `stages`, which are the ranks of each. All ranks must call it,
    with any split. `find_times` is called on all ranks, and gives None on one without a stage;
    `source` says where its times come from. Raises ValueError, on every rank, if a rank asked for
    another split or cannot find its times."""
    needs_times = is_auto(asked) and len(stages) > 1
    said: dict[str, Any] = {"asked": asked, "host": launch.local_ranks[0]}
    if needs_times:
        try:
            found = find_times()
            said |= {"times": None if found is None else asdict(found)}
        except ValueError as error:
            said |= {"refusal": str(error)}
    told = [json.loads(text) for text in exchange_texts(launch, json.dumps(said), "layer split")]
    for rank, theirs in enumerate(told):
        if theirs["asked"] != told[0]["asked"]:
            here, there = told[0]["asked"], theirs["asked"]
            raise ValueError(f"{FLAG}: rank 0 has {here}, rank {rank} has {there}")
        if "refusal" in theirs:
            raise ValueError(theirs["refusal"])
    times = stage_times(stages, told) if needs_times else None
    layers = split_layers(asked, len(stages), num_layers, times)
    if not is_auto(asked):
        return ChosenSplit(layers, asked)
    counts = [len(each) for each in layers]
    reason = "" if times is None else explain(counts, times, source)
    return ChosenSplit(layers, ",".join(map(str, counts)), reason)


def stage_times(
    stages: Sequence[Sequence[int]], told: Sequence[Mapping[str, Any]]
) -> list[StageTimes]:
    """The times of each stage. The ranks of one host count as equally fast, by the median of what
    they found, because a difference between them is noise. A stage is as slow as its slowest rank.
    """
    hosts: dict[int, list[RankTimes]] = {}
    for theirs in told:
        if theirs["times"] is not None:
            hosts.setdefault(theirs["host"], []).append(RankTimes(**theirs["times"]))
    found = []
    for ranks in stages:
        of_hosts = [hosts[told[rank]["host"]] for rank in ranks]
        layer_s = max(median(rank.layer_s for rank in host) for host in of_hosts)
        own = [told[rank]["times"]["own_fixed_s"] for rank in ranks]
        with_ends = [fixed_s for fixed_s in own if fixed_s is not None]
        without = (median(rank.fixed_s for rank in host) for host in of_hosts)
        found.append(StageTimes(max(with_ends or without), layer_s))
    return found


def explain(counts: Sequence[int], times: Sequence[StageTimes], source: str) -> str:
    """What was chosen, and from which numbers."""
    stages = [time.seconds(count) for count, time in zip(counts, times, strict=True)]
    layers = sorted({1e3 * time.layer_s for time in times})
    beside = ", ".join(f"{1e3 * time.fixed_s:.3g}" for time in times)
    return (
        f"the stages are predicted to take {', '.join(f'{1e3 * each:.3g}' for each in stages)} ms, "
        f"from {' to '.join(dict.fromkeys(f'{each:.3g}' for each in (layers[0], layers[-1])))} ms "
        f"a layer and {beside} ms beside layers ({source})"
    )
