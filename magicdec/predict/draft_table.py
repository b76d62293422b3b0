"""Draft lengths by batch size and context: the configuration of vLLM's dynamic speculative
decoding, and CSV. Imports no torch.

An entry of vLLM is `[bs_lo, bs_hi, ctx_lo, ctx_hi, K]` (its pull request 48944), or `[bs_lo, bs_hi,
K]` in its releases. Bounds are inclusive. Entries form a grid of ranges from 1, without gaps or
overlaps; beyond the last vLLM keeps its K. A prediction holds up to the next batch size and
context.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from magicdec.output.tables import csv_text
from magicdec.predict.acceptance_file import Drafting, budget_of, drafting_of
from magicdec.predict.plan import PlanCell
from magicdec.records.pass_record import PassRecord

LookupRun = tuple[int, int, float]  # gamma, budget and speedup of steps
COLUMNS = (
    "bs_lo",
    "bs_hi",
    "ctx_lo",
    "ctx_hi",
    "K",
    "batch_size",
    "prefix_len",
    "budget",
    "predicted_speedup",
    "predicted_net_speedup",
    "measured_K",
    "measured_budget",
    "measured_speedup",
)


@dataclass(frozen=True)
class DraftTable:
    """A grid of `cells`, in rising order of batch size and context, up to `max_length` tokens.
    `draft` has vLLM's keys for the draft, `measured` the fastest run of each place."""

    cells: Sequence[PlanCell]
    max_length: int
    draft: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[tuple[int, int], LookupRun] = field(default_factory=dict)

    def ranges(self) -> list[tuple[int, ...]]:
        """`bs_lo`, `bs_hi`, `ctx_lo` and `ctx_hi` by cell."""
        rows = defaultdict[int, list[int]](list)
        columns = defaultdict[int, list[int]](list)
        for cell in self.cells:
            rows[cell.batch_size].append(cell.gamma)
            columns[cell.prefix_len].append(cell.gamma)
        batches = merge(rows, 1)
        contexts = merge(columns, self.max_length)
        return [(*batches[cell.batch_size], *contexts[cell.prefix_len]) for cell in self.cells]

    def vllm(self) -> str:
        """JSON for `vllm serve --speculative-config`."""
        ranges = self.ranges()
        gammas = [cell.gamma for cell in self.cells]
        used = 4 if len({ctx_lo for _, _, ctx_lo, _ in ranges}) > 1 else 2
        entries = dict(zip((lengths[:used] for lengths in ranges), gammas, strict=True))
        config = dict(self.draft) | {
            "num_speculative_tokens": max(1, *gammas),  # vLLM refuses 0
            "num_speculative_tokens_per_batch_size": [[*key, K] for key, K in entries.items()],
        }
        return json.dumps(config) + "\n"

    def csv(self) -> str:
        rows: list[Sequence[object]] = [COLUMNS]
        for cell, bounds in zip(self.cells, self.ranges(), strict=True):
            place = cell.batch_size, cell.prefix_len
            predicted = cell.gamma, *place, cell.budget, cell.speedup, cell.net_speedup
            rows.append([*bounds, *predicted, *self.measured.get(place, (None,) * 3)])
        return csv_text(rows)


FORMATS = {"vllm": DraftTable.vllm, "csv": DraftTable.csv}


def merge(gammas: Mapping[int, Sequence[int]], end: int) -> dict[int, tuple[int, int]]:
    """The range of each value of an axis. Neighbours with equal draft lengths along the other axis
    share one; the last goes up to `end` at least."""
    groups = [list(group) for _, group in groupby(gammas, key=gammas.__getitem__)]
    highs = [*(group[0] - 1 for group in groups[1:]), max(end, groups[-1][-1])]
    bounds = [(group[0], high) for group, high in zip(groups, highs, strict=True)]
    return {value: ends for group, ends in zip(groups, bounds, strict=True) for value in group}


def fastest_runs(
    records: Sequence[PassRecord], target: Mapping[str, str], draft: str | None, like: Drafting
) -> dict[tuple[int, int], LookupRun]:
    """The fastest run at each batch size and context, of records with this target and standalone
    draft, drafting as `like` with a constant gamma."""
    runs: dict[tuple[int, int], LookupRun] = {}
    for record in records:
        config = record.config
        workload = record.config["workload"]
        gamma = config["decoding"]["gamma"]
        metrics = record.metrics
        speedup = (metrics and metrics.speedup) or 0.0
        own = (config.get("draft") or {}).get("model")
        place = workload.get("batch_size"), workload["prefix_len"]
        is_like = target.items() <= config["model"].items() and drafting_of(config) == like
        is_like = is_like and own == draft and gamma != "auto"
        if is_like and speedup > runs.get(place, (0, 0, 0.0))[2]:
            runs[place] = gamma, budget_of(config), speedup
    return runs
