"""What `magicdec latency` gives the user: the table, and the rows as JSON and CSV.

Owns the shape of the JSON and the columns of the CSV (docs/latency.md).
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import Any

from magicdec.config.run_config import RunConfig
from magicdec.console import make_console
from magicdec.latency.grid import KV_FIELDS, Grid
from magicdec.model.checkpoint.source import ModelSource
from magicdec.setup.prepare import describe_model

SCHEMA_VERSION = 1


def as_dict(
    config: RunConfig,
    grid: Grid,
    source: ModelSource,
    environment: dict[str, Any],
    rows: list[dict[str, Any]],
) -> dict[str, Any]:
    """The content of the JSON file; `config` is resolved."""
    sections = config.to_dict()
    attention, decoding, kv = (sections[name] for name in ("attention", "decoding", "kv"))
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": environment,
        "config": {
            "model": sections["model"] | describe_model(source),
            "parallel": sections["parallel"],
            "attention": {name: attention[name] for name in ("backend", "backend_reason")},
            "decoding": {name: decoding[name] for name in ("cuda_graphs", "cuda_graphs_reason")},
            "kv": {name: kv[name] for name in KV_FIELDS if name != "recent_window"},
            "grid": _describe_grid(grid),
        },
        "rows": rows,
    }


def _describe_grid(grid: Grid) -> dict[str, Any]:
    drafts = [
        {
            "kv_policy": kv.policy,
            "budget": None if kv.policy == "full" else kv.budget,
            "recent_window": kv.num_recent_tokens if kv.policy == "verified" else None,
        }
        for kv in grid.drafts
    ]
    return dataclasses.asdict(grid) | {"drafts": drafts}


def write_files(found: dict[str, Any], json_path: Path | None, csv_path: Path | None) -> None:
    """Each file appears whole or not at all. Raises ValueError, naming the flag, for one that
    cannot be written."""
    if json_path is not None:
        _write("--json", json_path, json.dumps(found, indent=1, allow_nan=False) + "\n")
    if csv_path is not None:
        _write("--csv", csv_path, to_csv(found["rows"]))


def to_csv(rows: list[dict[str, Any]]) -> str:
    """A header and a line a row; null is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write(flag: str, path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
    print(f"written to {path}", file=sys.stderr)


def print_table(found: dict[str, Any]) -> None:
    """One section for each (B, context), one line for each forward. Every time is also shown as a
    multiple of the decode step of its section."""
    from rich.table import Table

    table = Table(title=_title(found), title_justify="left")
    labels = ("B", "context", "forward", "tokens", "median, ms", "p10", "p90", "of decode")
    for label in (*labels, "MB read", "of the roofline"):
        justify: Any = "left" if label == "forward" else "right"
        table.add_column(label, justify=justify, no_wrap=True)
    decode_ms = 0.0
    for row in found["rows"]:
        place = ("", "")
        if row["phase"] == "decode":  # the first of each section
            table.add_section()
            place, decode_ms = (str(row["B"]), str(row["context"])), row["ms_median"]
        times = (f"{row[name]:.3f}" for name in ("ms_median", "ms_p10", "ms_p90"))
        table.add_row(
            *place, _label(row), str(row["tokens"]), *times,
            f"{row['ms_median'] / decode_ms:.2f}x", f"{row['bytes'] / 1e6:,.1f}",
            f"{100 * row['roofline_fraction']:.1f} %",
        )  # fmt: skip
    make_console().print(table)


def _label(row: dict[str, Any]) -> str:
    if row["phase"] in ("draft", "first_draft"):
        name = row["phase"].replace("_", " ")
        return f"{name}, {row['kv_policy']} {row['budget'] or ''}".rstrip()
    if row["phase"] == "decode":
        return "decode"
    watched = f", watched for {row['kv_policy']}" if row["kv_policy"] else ""
    return f"verify, T {row['T']}{watched}"


def _title(found: dict[str, Any]) -> str:
    c, e = found["config"], found["environment"]
    return (
        f"{c['model']['model']} ({c['model']['dtype']}, weights {c['model']['target_dtype']}): "
        f"forwards at fixed cache lengths, "
        f"{c['grid']['repeats']} repeats; ranks {e['world_size']} x threads {e['threads']}, "
        f"{c['parallel']['collectives'] or c['parallel']['device']}, "
        f"{c['attention']['backend']}, {e['read_bandwidth_bytes_per_s'] / 1e9:.1f} GB/s read"
    )
