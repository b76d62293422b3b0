"""A plot of the passes of one command: bars of the speed of a request, of its time to the first
token, and of the time between commits, as in the plots of PipeInfer. Imports matplotlib only to
draw.

Must not know how a metric is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magicdec.pipelined_run.measured.record import SpeculationRecord
from magicdec.pipelined_run.measured.table import title
from magicdec.report.figures.style import look, styled

PANELS = (  # (metric, title, unit)
    ("request_tokens_per_s", "speed of a request", "tokens/s"),
    ("mean_ttft_ms", "time to first token", "ms, mean"),
    ("mean_itl_ms", "between two commits", "ms, mean"),
)
DOTS_PER_INCH = 150


def draw_bars(flag: str, path: Path, records: Sequence[SpeculationRecord]) -> None:
    """Draw the passes that have metrics. Raises ValueError, naming the flag, if the file cannot be
    written."""
    from matplotlib.figure import Figure

    shown = [record for record in records if record.metrics is not None]
    with styled():
        figure = Figure(figsize=(7.4, 2.8), layout="constrained")
        for ax, (metric, name, unit) in zip(figure.subplots(1, 3), PANELS, strict=True):
            values = [getattr(record.metrics, metric) or 0.0 for record in shown]
            colours = [look(index).colour for index in range(len(shown))]
            bars = ax.bar(range(len(shown)), values, color=colours, width=0.7)
            ax.bar_label(bars, [f"{value:,.1f}" for value in values], fontsize=7)
            ax.set_xticks(range(len(shown)), [record.name for record in shown], rotation=20)
            ax.grid(axis="x", visible=False)
            ax.set_title(name)
            ax.set_ylabel(unit)
        figure.suptitle(title(records[-1]))
        try:
            figure.savefig(path, dpi=DOTS_PER_INCH)
        except OSError as error:
            raise ValueError(f"{flag} {path}: {error.strerror}") from None
