"""The table of one run prints what its sample can carry, in numbers that agree."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from magicdec.names import BASELINE
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
    ("num_sequences", "shown"),
    [(4, {"p50", "max"}), (9, {"p50", "max"}), (10, {"p50", "p90", "max"}),
     (99, {"p50", "p90", "max"}), (100, {"p50", "p90", "p99"})],
)  # fmt: skip
def test_a_percentile_needs_enough_sequences(
    num_sequences: int, shown: set[str], record: RunRecord
) -> None:
    assert record.samples is not None
    samples = {
        name: replace(
            record.samples[name],
            sequence_tokens=[[3] * num_sequences],
            sequence_ms=[[3.0 * n for n in range(1, num_sequences + 1)]],
        )
        for name in (BASELINE, record.config["decoding"]["strategy"])
    }
    rows = dict(table_rows(replace(record, samples=samples)))
    found = {m[1] for label in rows if (m := re.match(r"TPOT (p\d+|max)", label))}
    assert found == shown
    if "max" in shown:
        cells = rows[f"TPOT max of {num_sequences}, ms"]
        assert cells == [f"{num_sequences:.2f}"] * 2


def test_a_record_without_samples_is_printed_as_it_is(record: RunRecord) -> None:
    labels = [label for label, _ in table_rows(replace(record, samples=None))]
    assert "TPOT p99, ms" in labels and not any("max of" in label for label in labels)
