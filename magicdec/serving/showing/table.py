"""Prints the records of one command as a table with a column for each batching and a row for each
metric. Must not know how a metric is computed."""

from __future__ import annotations

from collections.abc import Sequence

from magicdec.serving.metrics import ServingMetrics
from magicdec.serving.record import ServingRecord
from magicdec.serving.showing.passes import print_passes, rows_of


def print_table(records: Sequence[ServingRecord]) -> None:
    """Print the records, with the comparison of the tokens above them."""
    rows = rows_of(ServingMetrics, [record.metrics for record in records])
    print_passes(title(records[0]), records, rows)


def title(record: ServingRecord) -> str:
    model, w = record.config["model"], record.config["workload"]
    output = "" if w["gen_len"] is None else f", output length {w['gen_len']}"
    return (
        f"{model['model']} ({model['dtype']}), {record.workload.dataset}: {w['num_requests']} "
        f"requests, arrival {w['arrival']}{output}, max concurrency {w['max_concurrency']}"
    )
