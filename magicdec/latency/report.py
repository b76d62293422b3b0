"""The output of `magicdec latency`: the table, and the rows as JSON and CSV files.

Owns the structure of the JSON and the columns of the CSV (docs/latency.md).
"""

from __future__ import annotations

import csv
import io
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from magicdec.config.resolved import ResolvedConfig
from magicdec.console import print_table as print_fitting
from magicdec.latency.rows import KV_FIELDS, Grid, Row
from magicdec.model.checkpoint.source import ModelSource
from magicdec.names import FULL_KV_POLICY
from magicdec.records.environment import Environment, threads_of_ranks
from magicdec.records.writing import write_file, write_text
from magicdec.setup.prepare import describe_model


@dataclass(frozen=True)
class Latency:
    """The content of the JSON file."""

    environment: Environment
    config: dict[str, Any]
    rows: list[Row]


def make_latency(
    config: ResolvedConfig,
    grid: Grid,
    source: ModelSource,
    environment: Environment,
    rows: list[Row],
) -> Latency:
    """The content of the JSON file. It keeps only the parts of `config` on which a forward
    depends."""
    sections = config.to_dict()
    attention, decoding, kv = (sections[name] for name in ("attention", "decoding", "kv"))
    kept = {
        "model": sections["model"] | asdict(describe_model(source)),
        "parallel": sections["parallel"],
        "attention": {name: attention[name] for name in ("backend", "backend_reason")},
        "decoding": {name: decoding[name] for name in ("cuda_graphs", "cuda_graphs_reason")},
        "kv": {name: kv[name] for name in KV_FIELDS if name != "recent_window"},
        "grid": _describe_grid(grid),
    }
    return Latency(environment, kept, rows)


def _describe_grid(grid: Grid) -> dict[str, Any]:
    drafts = [
        {
            "kv_policy": kv.policy,
            "budget": None if kv.policy == FULL_KV_POLICY else kv.budget,
            "recent_window": kv.resolve().recent_window,
        }
        for kv in grid.drafts
    ]
    return asdict(grid) | {"drafts": drafts}


def write_files(found: Latency, json_path: Path | None, csv_path: Path | None) -> None:
    """Write the files whose paths are given. Raises ValueError, naming the flag, if a file cannot
    be written."""
    if json_path is not None:
        write_file("--out", json_path, "latency", found)
        print(f"written to {json_path}", file=sys.stderr)
    if csv_path is not None:
        write_text("--csv", csv_path, to_csv(found.rows))
        print(f"written to {csv_path}", file=sys.stderr)


def to_csv(rows: list[Row]) -> str:
    """A header and one line for each row. A null is an empty field."""
    text = io.StringIO()
    names = [item.name for item in fields(Row)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    return text.getvalue()


def print_table(found: Latency) -> None:
    """One section for each (B, context), one line for each forward. Every time is also shown as a
    multiple of the decode step of its section."""
    from rich.table import Table

    table = Table(title=_title(found), title_justify="left")
    labels = ("B", "context", "forward", "tokens", "median, ms", "p10", "p90", "of decode")
    for label in (*labels, "MB read", "of the roofline"):
        justify: Any = "left" if label == "forward" else "right"
        table.add_column(label, justify=justify, no_wrap=True)
    decode_ms = 0.0
    for row in found.rows:
        place = ("", "")
        if row.phase == "decode":  # the first of each section
            table.add_section()
            place, decode_ms = (str(row.B), str(row.context)), row.ms_median
        times = (f"{ms:.3f}" for ms in (row.ms_median, row.ms_p10, row.ms_p90))
        table.add_row(
            *place, _label(row), str(row.tokens), *times,
            f"{row.ms_median / decode_ms:.2f}x", f"{row.bytes / 1e6:,.1f}",
            f"{100 * row.roofline_fraction:.1f} %",
        )  # fmt: skip
    print_fitting(table)


def _label(row: Row) -> str:
    if row.phase in ("draft", "first_draft"):
        name = row.phase.replace("_", " ")
        return f"{name}, {row.kv_policy} {row.budget or ''}".rstrip()
    if row.phase == "decode":
        return "decode"
    watched = f", watched for {row.kv_policy}" if row.kv_policy else ""
    return f"verify, T {row.T}{watched}"


def _title(found: Latency) -> str:
    c, e = found.config, found.environment
    assert e.read_bandwidth_bytes_per_s is not None, "measured with the forwards"
    return (
        f"{c['model']['model']} ({c['model']['dtype']}, weights {c['model']['target_dtype']}): "
        f"forwards at fixed cache lengths, "
        f"{c['grid']['repeats']} repeats; ranks {e.world_size} x threads {threads_of_ranks(c, e)}, "
        f"{c['parallel']['collectives'] or c['parallel']['device']}, "
        f"{c['attention']['backend']}, {e.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s read"
    )
