"""Distributions of TTFT and TPOT over sequences."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.names import BASELINE
from magicdec.records.metrics import percentile
from magicdec.report.figures.panels import Drawn, Form, LeftOut, Looks, each_series
from magicdec.report.frame import frame_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MACHINE = ("model", "draft_model", "dtype", "dataset", "device", "ranks", "threads")
PERCENTS = (5, 25, 50, 75, 90, 95, 99)


def draw_ttft(passes: pd.DataFrame) -> Drawn | LeftOut:
    caption = (
        "Share of sequences whose first token came within this time after their batch was "
        "submitted. The prompts of a batch are prefilled one after the other, so that later ones "
        "wait: a batch of B makes B groups of times. Both passes of a run share one prefill"
    )
    held = (MACHINE[0], *MACHINE[2:], "prefix_len")
    ordered = passes.assign(series=[f"B {B}" for B in passes["B"]]).sort_values(
        "B", key=lambda B: B.astype(int), kind="stable"
    )
    return _draw("ttft", "Time to first token", ordered, held, caption)


def draw_tpot(passes: pd.DataFrame) -> Drawn | LeftOut:
    caption = (
        "Share of sequences whose mean time per token after their first was at most this. The "
        "autoregressive curve is of the baselines in the same runs"
    )
    ordered = passes.assign(series=passes["method"]).sort_values(
        "method", key=lambda method: method != BASELINE, kind="stable"
    )
    return _draw("tpot", "Time per output token", ordered, (*MACHINE, "B", "prefix_len"), caption)


def _draw(
    name: str, heading: str, passes: pd.DataFrame, held: tuple[str, ...], caption: str
) -> Drawn | LeftOut:
    """A curve for each series over the times in the column `name`_ms."""
    column = f"{name}_ms"
    cuts = [f"p{percent}_ms" for percent in PERCENTS]

    def show(of: pd.DataFrame) -> pd.DataFrame:
        times = of.groupby("series", sort=False)[column].agg(lambda lists: [*chain(*lists)])
        return frame_of(
            {"series": series, "sequences": len(each), "times": each}
            | dict(zip(cuts, [percentile(each, cut) for cut in PERCENTS], strict=True))
            for series, each in times.items()
        )

    def draw(ax: Axes, table: pd.DataFrame, looks: Looks) -> dict[str, Any]:
        ax.set_ylim(0, 1.02)
        ax.margins(x=0.03)
        return {
            series: ax.ecdf(of["times"].iloc[0], color=style.colour, linestyle=style.line)
            for series, of, style in each_series(table, looks)
        }

    form = Form(
        held=held, places=["series"], show=show, draw=draw, most_series=7,
        labels=(f"{name.upper()} (ms)", "share of sequences"),
        caption=(
            caption, "The table beside it has the percentiles and the number of sequences"
        ),
        axes={"height": 2.7, "sharey": True},
    )  # fmt: skip
    known = passes[passes[column].map(len) > 0]
    drawn = form.of(name, heading, known, "no record has the times of its sequences")
    if isinstance(drawn, Drawn):
        drawn.table = drawn.table.drop(columns="times")
    return drawn
