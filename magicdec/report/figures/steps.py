"""The phases of decode steps, stacked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.figures import COLOURS
from magicdec.report.figures.panels import WIDTH, Drawn, Form, LeftOut, Series, said
from magicdec.report.figures.passes import MACHINE
from magicdec.report.settings import rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALONG = ["drafter", "kv_policy", "budget", "gamma", "B", "prefix_len"]
# (colour, hatch) by phase
PHASES = {"draft": (COLOURS[4], ""), "verify": (COLOURS[0], "///"), "decode": (COLOURS[5], "..."),
          "other": (COLOURS[7], "xxx")}  # fmt: skip
SHORT = {"gamma": "g", "budget": "K", "prefix_len": "prefix"}
TEXTS = {"mean_emitted_tokens": "{:.1f} tokens", "speedup": "{:.2f}x"}  # at the end of a bar
MOST_BARS = 24


def draw_phases(runs: pd.DataFrame) -> Drawn | LeftOut:
    """A bar for each setting of one model on one machine."""
    form = Form(
        name="step_phases", title="Phases of a decode step",
        reason="no run timed its phases; on CUDA --benchmark does",
        held=("model", "draft_model", "dtype", "dataset", *MACHINE), places=ALONG, most_panels=1,
        what="combinations of model and machine", show=phases_of, draw=draw_bars, series="",
        labels=("time of a step (ms)", ""),
        caption=(
            "Mean time of a step by phase. The black tick is the autoregressive step of the same "
            "run: a step pays if it takes less than its tokens times that. At the right end: "
            "tokens of a step and row, and the speedup of the steps",
            f"Of more than {MOST_BARS} settings so many are shown, evenly chosen; of repeated runs "
            "the middle one",
        ),
    )  # fmt: skip
    has_phases = runs["drafter"].notna() & runs["mean_step_ms"].notna() & runs["other_ms"].notna()
    return form.of(runs[has_phases])


def phases_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The middle one of the runs of each setting, with the time that each phase has in the mean
    step: a phase that only some steps have counts in part."""
    share = pd.Series([drafting_share(m) for m in runs.itertuples()], runs.index)
    weights = {"draft": share, "verify": share, "decode": 1 - share, "other": 1}
    for phase, weight in weights.items():
        values = weight * runs[f"{phase}_ms"].astype(float).fillna(0.0)
        runs = runs.assign(**{f"{phase}_ms": values.where(values != 0)})
    ordered = runs.sort_values("mean_step_ms", key=lambda ms: ms.astype(float), kind="stable")
    groups = ordered.groupby(ALONG, dropna=False)
    middles = ordered[groups.cumcount() == groups["run"].transform("size") // 2]
    places = sorted(middles.index, key=lambda i: [*map(rank, middles.loc[i, ALONG[::-1]])])
    times = [*(f"{phase}_ms" for phase in PHASES), "mean_step_ms", "autoregressive_step_ms"]
    return middles.loc[places, [*ALONG, "run", *times, *TEXTS]]


def drafting_share(m: Any) -> float:
    """The share of the steps that draft, of the metrics of a run. Each phase's time is a mean over
    the steps that have it, and all of them together make the mean step."""
    if m.draft_ms is None or m.verify_ms is None:
        return 0.0
    if m.decode_ms is None:
        return 1.0
    both = m.draft_ms + m.verify_ms
    share = (m.mean_step_ms - m.other_ms - m.decode_ms) / (both - m.decode_ms or 1.0)
    return min(1.0, max(0.0, share))


def draw_bars(ax: Axes, table: pd.DataFrame, _: Series) -> dict[str, Any]:
    """The phases of each step after each other."""
    count = min(MOST_BARS, len(table))
    bars = table.iloc[[i * len(table) // count for i in range(count)]].reset_index(drop=True)
    figure = ax.get_figure(root=True)
    assert figure is not None, "the axes are in it"
    figure.set_size_inches(WIDTH, 1.3 + 0.27 * count)
    left, handles = pd.Series(0.0, bars.index), dict[str, Any]()
    for phase, (colour, hatch) in PHASES.items():
        widths = bars[f"{phase}_ms"].astype(float).fillna(0.0)
        if widths.any():
            handles[phase] = ax.barh(
                bars.index, widths, left=left, height=0.72, color=colour, hatch=hatch,
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            left += widths
    theirs = bars["autoregressive_step_ms"].astype(float)
    if theirs.notna().any():
        handles["autoregressive step"] = ax.vlines(
            theirs, bars.index - 0.42, bars.index + 0.42, color="black", linewidth=2
        )
    rows, ends = bars.to_dict("records"), left.combine(theirs, max)
    for at, bar in enumerate(rows):
        text = ", ".join(form.format(bar[k]) for k, form in TEXTS.items() if bar[k] is not None)
        ax.annotate(text, (ends[at], at), (5, 0), textcoords="offset points", va="center", size=7)
    keys = [key for key in ALONG if bars[key].nunique(dropna=False) > 1] or ["B"]
    ax.set_yticks(bars.index, [name_of(bar, keys) for bar in rows])
    ax.invert_yaxis()
    ax.margins(x=0.24, y=0.01)
    ax.grid(axis="y", visible=False)
    return handles


def name_of(bar: dict[str, Any], keys: list[str]) -> str:
    """The settings `keys` in short. A policy says that the model drafts for itself."""
    names = [
        f"{SHORT[key]} {bar[key]}" if key in SHORT else said(key, bar[key])
        for key in keys
        if bar[key] is not None
        and not (key == "drafter" and bar["kv_policy"] and bar[key] == "self")
    ]
    return ", ".join(text.removeprefix("drafter ") for text in names)
