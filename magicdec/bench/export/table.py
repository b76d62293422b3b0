"""Records of every kind as one flat table, CSV or Parquet, with a row for each pass."""

from __future__ import annotations

from magicdec.bench.export.export_format import ExportFormat
from magicdec.bench.report.frame import SUFFIXES, columns_of, flat_rows, write_columns
from magicdec.names import RECORDS

TABLE = ExportFormat(
    rows=dict.fromkeys(RECORDS, flat_rows),
    holds="every pass",
    suffixes=SUFFIXES,
    write=write_columns,
    collect=columns_of,
)
