"""StagedDetails: what systems whose ranks are stages measure of them. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from magicdec.records.fields import recorded
from magicdec.systems.details import Details, StageOccupancy
from magicdec.systems.stages.spans import Span

WORK = ("STAGE", "DRAFT", "HEAD")  # spans in which a stage is busy
NUM_PARTS = 100  # of the time of a pass, in which the share that stages are busy is recorded
DIGITS = 3  # of these shares after the decimal point


def averaged(meaning: str, unit: str = "", **more: Any) -> Any:
    """A field that is the mean of the groups of requests."""
    return recorded(meaning, unit, over_groups=statistics.fmean, **more)


def mean_share(shares: Sequence[float]) -> float:
    return round(statistics.fmean(shares), DIGITS)


@dataclass(frozen=True, kw_only=True)
class StagedDetails(Details):
    occupancy: list[list[float]] | None = recorded(
        f"the share of each of {NUM_PARTS} equal parts of the pass, from the first work of a stage "
        "to the last, in which each stage, or each rank of a pipeline with a head, computed, "
        "drafted or chose tokens",
        "0 to 1",
        null="in records of earlier versions",
        default=None,
        over_groups=mean_share,
    )

    def stages_of(self, names: Sequence[str], busy: Sequence[float]) -> list[StageOccupancy]:
        """The load of stages that are busy in these shares of the time."""
        parts = self.occupancy or [[share] for share in busy]
        return [
            StageOccupancy(*parts_of_stage)
            for parts_of_stage in zip(names, busy, parts, strict=True)
        ]


def occupancy_of(spans: Sequence[Sequence[Span]]) -> list[list[float]]:
    """[stages, NUM_PARTS] the share of each part of the time in which each stage was busy, from
    what the stages did when."""
    working = [
        sorted((s.begin_s, s.end_s) for s in stage_times if s.what.name in WORK)
        for stage_times in spans
    ]
    times = [np.array(stage_times).reshape(-1, 2).T for stage_times in working]
    edges = np.linspace(
        min(begins_s.min(initial=np.inf) for begins_s, _ in times),
        max(ends_s.max(initial=-np.inf) for _, ends_s in times),
        NUM_PARTS + 1,
    )
    shares = []
    for begins_s, ends_s in times:
        until_s = np.maximum.accumulate(ends_s)  # what overlaps counts once
        from_s = np.maximum(begins_s, np.concatenate(([-np.inf], until_s))[: len(begins_s)])
        inside_s = np.minimum(until_s[:, None], edges[1:]) - np.maximum(from_s[:, None], edges[:-1])
        shares.append(inside_s.clip(min=0).sum(axis=0) / (edges[1] - edges[0]))
    return [share.clip(max=1).round(DIGITS).tolist() for share in shares]
