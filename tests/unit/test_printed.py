"""The table of one run prints what its sample can carry, in numbers that agree."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.table import table_rows


@pytest.fixture(scope="module")
def record() -> RunRecord:
    """Of 8 sequences."""
    path = Path(ROOT, "results", "baselines", "acceptance.jsonl")
    return next(r for r in load_records(path) if r.baseline_metrics is not None)


def test_the_first_speedup_is_the_ratio_of_the_rates_beside_it(record: RunRecord) -> None:
    rows = dict(table_rows(record))
    rates = [float(cell.split()[0].replace(",", "")) for cell in rows["decode, tokens/s"]]
    shown = float(rows["speedup of decode steps"][1].removesuffix("x"))
    assert shown == pytest.approx(rates[1] / rates[0], abs=0.01)
    labels = list(rows)
    assert labels.index("speedup of decode steps") == labels.index("decode, tokens/s") + 1


def test_medians_say_over_how_many_batches(record: RunRecord) -> None:
    metrics = record.metrics
    assert metrics is not None and metrics.speedup_per_batch is not None
    for count, words in ((1, "1 batch"), (2, "2 batches"), (5, "5 batches")):
        each = dict.fromkeys(("speedup_per_batch", "net_speedup_per_batch"), [1.5] * count)
        labels = dict(table_rows(replace(record, metrics=replace(metrics, **each))))
        assert f"  median of {words}" in labels and f"net speedup, median of {words}" in labels


@pytest.mark.parametrize(
    ("num_prompts", "shown"), [(9, {"p50"}), (10, {"p50", "p90"}), (100, {"p50", "p90", "p99"})]
)
def test_a_percentile_needs_enough_sequences(
    num_prompts: int, shown: set[str], record: RunRecord
) -> None:
    assert record.workload is not None
    workload = replace(record.workload, num_prompts=num_prompts)
    rows = dict(table_rows(replace(record, workload=workload)))
    assert {m[1] for label in rows if (m := re.match(r"TPOT (p\d+)", label))} == shown
