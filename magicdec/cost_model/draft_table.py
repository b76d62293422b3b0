"""Draft lengths by batch size and context as other programs take them: the configuration of vLLM's
dynamic speculative decoding, and CSV for people. Imports no torch.

An entry of vLLM is `[bs_lo, bs_hi, ctx_lo, ctx_hi, K]` (its pull request 48944), or
`[bs_lo, bs_hi, K]` where no contexts are told apart, as its releases have it. Bounds are inclusive.
The entries are a grid: all ranges of batch sizes have the same ranges of contexts. Both kinds of
ranges begin at 1 and have neither gaps nor overlaps. Beyond the last range vLLM keeps its K.

What is predicted for a batch size and a context holds up to the next one, as more context seldom
makes speculation worse. So the first of both is 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from magicdec.config.sections import SELF
from magicdec.cost_model.plan import PlanCell
from magicdec.records.reading import load_records
from magicdec.tables import csv_text

Bounds = tuple[int, int]  # the smallest and the largest value of a range
Run = tuple[int, int, float]  # gamma, budget and speedup of steps
COLUMNS = (
    *("bs_lo", "bs_hi", "ctx_lo", "ctx_hi", "K", "batch_size", "prefix_len", "budget"),
    *("predicted_speedup", "predicted_net_speedup"),
    *("measured_K", "measured_budget", "measured_speedup"),
)


@dataclass(frozen=True)
class DraftTable:
    """`cells` predict every batch size with every context, of which the model supports
    `max_length`. `draft` are the keys with which vLLM names the draft, and `measured` has the
    fastest run at a batch size and a context."""

    cells: Sequence[PlanCell]
    max_length: int
    draft: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[tuple[int, int], Run] = field(default_factory=dict)

    def ranges(self) -> dict[tuple[int, int], tuple[Bounds, Bounds]]:
        """The ranges of batch sizes and of contexts in which each cell lies, in their order."""
        gammas = {(cell.batch_size, cell.prefix_len): cell.gamma for cell in self.cells}
        batch_sizes, prefix_lens = (sorted(set(axis)) for axis in zip(*gammas, strict=True))
        rows = merge({B: [gammas[B, S] for S in prefix_lens] for B in batch_sizes}, 1)
        columns = merge(
            {S: [gammas[B, S] for B in batch_sizes] for S in prefix_lens}, self.max_length
        )
        return {(B, S): (rows[B], columns[S]) for B in batch_sizes for S in prefix_lens}

    def vllm(self) -> str:
        """JSON for `vllm serve --speculative-config`."""
        ranges, gammas = self.ranges(), {(c.batch_size, c.prefix_len): c.gamma for c in self.cells}
        has_contexts = len({context for _, context in ranges.values()}) > 1
        entries = {
            (*batch, *(context if has_contexts else ())): gammas[place]
            for place, (batch, context) in ranges.items()
        }
        config = dict(self.draft) | {
            "num_speculative_tokens": max(1, *gammas.values()),  # vLLM refuses 0
            "num_speculative_tokens_per_batch_size": [[*key, K] for key, K in entries.items()],
        }
        return json.dumps(config) + "\n"

    def csv(self) -> str:
        """A line for each cell: the ranges in which it lies, the prediction and the measurement."""
        rows, cells = [], {(cell.batch_size, cell.prefix_len): cell for cell in self.cells}
        for place, (batch, context) in self.ranges().items():
            cell, measured = cells[place], self.measured.get(place, (None,) * 3)
            predicted = cell.budget, cell.speedup, cell.net_speedup
            rows.append([*batch, *context, cell.gamma, *place, *predicted, *measured])
        return csv_text([COLUMNS, *rows])


FORMATS = {"vllm": DraftTable.vllm, "csv": DraftTable.csv}


def merge(gammas: Mapping[int, Sequence[int]], end: int) -> dict[int, Bounds]:
    """The range of each value of one axis, from its draft lengths along the other axis. Neighbours
    with equal draft lengths share a range. The last range goes up to `end` at least."""
    groups = [list(group) for _, group in groupby(sorted(gammas), key=gammas.__getitem__)]
    lows = [group[0] for group in groups]
    highs = [*(low - 1 for low in lows[1:]), max(end, groups[-1][-1])]
    return {
        value: (low, high)
        for group, low, high in zip(groups, lows, highs, strict=True)
        for value in group
    }


def fastest_runs(
    path: Path, model: str, dtype: str, draft: str | None, policy: str
) -> dict[tuple[int, int], Run]:
    """Of the runs of a model in a file of records, the fastest at each batch size and context.
    `draft` is the name of a standalone draft; None: the model drafts for itself."""
    runs: dict[tuple[int, int], Run] = {}
    for record in load_records(path):
        config, metrics = record.config, record.metrics
        target, workload, decoding = config["model"], config["workload"], config["decoding"]
        place = workload["batch_size"], workload["prefix_len"]
        own = None if decoding["drafter"] == SELF else (config["draft"] or {}).get("model", "")
        run_of = target["model"], target["dtype"], own, config["kv"]["policy"]
        gamma, speedup = decoding["num_draft_tokens"], None if metrics is None else metrics.speedup
        if run_of != (model, dtype, draft, policy) or speedup is None or gamma == "auto":
            continue
        if place not in runs or speedup > runs[place][2]:
            runs[place] = gamma, config["kv"]["budget"], speedup
    return runs
