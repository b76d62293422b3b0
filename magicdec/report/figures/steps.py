"""Times of decode steps: their phases, stacked, and how steady the machine was over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.figures import COLOURS, look
from magicdec.names import BASELINE
from magicdec.report.figures.panels import (
    Drawn,
    LeftOut,
    caption_of,
    legend_below,
    make_axes,
    richest,
    said,
    sentences,
    shown_of,
)
from magicdec.report.figures.passes import GB, MACHINE, READ
from magicdec.report.frame import ENVIRONMENT
from magicdec.report.settings import rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD = ("model", "draft_model", "dtype", "dataset", *MACHINE)
# What is equal where the step of one run is compared with that of another.
SAME = ("model", "dtype", "target_dtype", "attention", "B", "prefix_len", "gen_len", *MACHINE)
ALONG = ["drafter", "kv_policy", "budget", "gamma", "B", "prefix_len"]
# (colour, hatch) by phase
PHASES = {"draft": (COLOURS[4], ""), "verify": (COLOURS[0], "///"), "decode": (COLOURS[5], "..."),
          "other": (COLOURS[7], "xxx")}  # fmt: skip
SHORT = {"gamma": "g", "budget": "K", "prefix_len": "prefix"}
TEXTS = {"mean_emitted_tokens": "{:.1f} tokens", "speedup": "{:.2f}x"}  # at the end of a bar
MOST_BARS = 24


def draw_phases(runs: pd.DataFrame) -> Drawn | LeftOut:
    name, heading = "step_phases", "Phases of a decode step"
    known = runs[runs["drafter"].notna() & runs["mean_step_ms"].notna() & runs["other_ms"].notna()]
    if known.empty:
        return LeftOut(name, heading, "no run timed its phases; on CUDA --benchmark does")
    panels, total = richest(known, HELD, ALONG, 1)
    of = panels[0].runs
    share = pd.Series([drafting_share(m) for m in of.itertuples()], of.index)
    weights = {"draft": share, "verify": share, "decode": 1 - share, "other": 1}
    steps = of.rename(columns={"mean_step_ms": "step_ms"})
    for phase, weight in weights.items():
        values = weight * of[f"{phase}_ms"].astype(float).fillna(0.0)
        steps[f"{phase}_ms"] = values.where(values != 0)
    # The middle one of repeated runs.
    order = steps.sort_values("step_ms", key=lambda ms: ms.astype(float), kind="stable")
    groups = order.groupby(ALONG, dropna=False)
    middles = order[groups.cumcount() == groups["run"].transform("size") // 2]
    places = sorted(middles.index, key=lambda i: [*map(rank, middles.loc[i, ALONG[::-1]])])
    middles = middles.loc[places]
    count = min(MOST_BARS, len(middles))
    bars = middles.iloc[[i * len(middles) // count for i in range(count)]]
    caption = caption_of(
        panels, total, "combinations of model and machine",
        "Mean time of a step by phase. The black tick is the autoregressive step of the same run: "
        "a step pays if it takes less than its tokens times that. At the right end: tokens of a "
        "step and row, and the speedup of the steps",
        shown_of(len(bars), len(middles), "settings, evenly chosen"),
    )  # fmt: skip
    times = [*(f"{phase}_ms" for phase in PHASES), "step_ms", "autoregressive_step_ms"]
    table = middles[[*HELD, *ALONG, "run", *times]]
    return Drawn(name, heading, caption, draw_bars(bars), table)


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


def draw_bars(bars: pd.DataFrame) -> Figure:
    figure, (ax,) = make_axes(1, height=1.3 + 0.27 * len(bars))
    bars, handles = bars.reset_index(drop=True), dict[str, Any]()
    left = pd.Series(0.0, bars.index)
    for phase, (colour, hatch) in PHASES.items():
        widths = bars[f"{phase}_ms"].dropna().astype(float)
        if not widths.empty:
            handles[phase] = ax.barh(
                widths.index, widths, left=left[widths.index], height=0.72, color=colour,
                hatch=hatch, edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            left = left.add(widths, fill_value=0)
    theirs = bars["autoregressive_step_ms"].astype(float)
    if theirs.notna().any():
        handles["autoregressive step"] = ax.vlines(
            theirs, bars.index - 0.42, bars.index + 0.42, color="black", linewidth=2
        )
    keys = [key for key in ALONG if bars[key].nunique(dropna=False) > 1] or ["B"]
    ends = left.combine(theirs, max)
    rows = bars.to_dict("records")
    for at, bar in enumerate(rows):
        texts = [form.format(bar[key]) for key, form in TEXTS.items() if bar[key] is not None]
        text = ", ".join(texts)
        ax.annotate(text, (ends[at], at), (5, 0), textcoords="offset points", va="center", size=7)
    ax.set_yticks(bars.index, [name_of(bar, keys) for bar in rows])
    ax.invert_yaxis()
    ax.margins(x=0.24, y=0.01)
    ax.set_xlabel("time of a step (ms)")
    ax.grid(axis="y", visible=False)
    legend_below(figure, handles)
    return figure


def name_of(bar: dict[str, Any], keys: list[str]) -> str:
    """The settings `keys` in short. A policy says that the model drafts for itself."""
    names = [
        f"{SHORT[key]} {bar[key]}" if key in SHORT else said(key, bar[key])
        for key in keys
        if bar[key] is not None
        and not (key == "drafter" and bar["kv_policy"] and bar[key] == "self")
    ]
    return ", ".join(text.removeprefix("drafter ") for text in names)


def draw_drift(passes: pd.DataFrame) -> Drawn | LeftOut:
    name, heading = "drift", "The machine over time"
    runs = passes[passes["is_run"].astype(bool)]
    known = runs[runs[READ].notna()]
    machines, _ = richest(known, MACHINE, ["run"], 1)
    if not machines or len(machines[0].runs) < 2:
        reason = "fewer than two runs of one machine have a read bandwidth"
        return LeftOut(name, heading, reason)
    of = machines[0].runs.sort_values(f"{ENVIRONMENT}time_utc", kind="stable")
    starts = pd.to_datetime(of[f"{ENVIRONMENT}time_utc"], format="ISO8601")
    table = pd.DataFrame({
        "run": of["run"],
        "time_utc": of[f"{ENVIRONMENT}time_utc"],
        "minutes": (starts - starts.iloc[0]).dt.total_seconds() / 60,
        "read_gb_per_s": of[READ].astype(float) / GB,
        "host_load": of[f"{ENVIRONMENT}host_load"],
        "relative_step_time": relative_steps(passes).reindex(of["run"]).to_numpy(),
    })  # fmt: skip
    relative = table["relative_step_time"].dropna()
    spread = f"took {relative.min():.2f} to {relative.max():.2f} of their median"
    caption = sentences(
        "Each mark is one run. On a steady machine both sides are flat: what varies here varies in "
        "every time of this report as well, while speedups compare two passes of one run",
        "" if relative.empty else f"Repeated autoregressive steps {spread}",
        shown_of(len(of), len(known), "runs: those of the most used machine"),
    )
    return Drawn(name, heading, caption, draw_sides(table), table)


def draw_sides(table: pd.DataFrame) -> Figure:
    """The read bandwidth of each run on the left, its relative step time on the right."""
    figure, (left, right) = make_axes(2, height=2.6)
    right.axhline(1, color="black", linewidth=1)
    for index, (ax, column) in enumerate(((left, "read_gb_per_s"), (right, "relative_step_time"))):
        style = look(index)
        ax.plot(table["minutes"], table[column], style.marker, color=style.colour, markersize=4)
        ax.set_xlabel("minutes after the first run")
    title = "bandwidth, measured in each run"
    left.set(ylim=(0, None), ylabel="read bandwidth (GB/s)", title=title)
    title = "autoregressive step, where repeated"
    right.set(ylabel="step time / median of its settings", title=title)
    if table["relative_step_time"].isna().all():
        right.text(0.5, 0.5, "no settings were repeated", transform=right.transAxes, ha="center")
    return figure


def relative_steps(passes: pd.DataFrame) -> pd.Series:
    """The time of the autoregressive step over the median of its settings, by the number of the
    run; without a value where the settings were not repeated."""
    of = passes[(passes["series"] == BASELINE) & passes["mean_step_ms"].notna()].set_index("run")
    times = of["mean_step_ms"].astype(float)
    groups = times.groupby([of[name] for name in SAME], dropna=False)
    return (times / groups.transform("median")).where(groups.transform("size") > 1)
