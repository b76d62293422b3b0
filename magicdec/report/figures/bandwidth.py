"""The memory of the machine: achieved bandwidth against the roofline, and how steady it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.figures import look
from magicdec.names import BASELINE
from magicdec.report.figures.panels import (
    Drawn,
    Form,
    LeftOut,
    Looks,
    log_ticks,
    make_axes,
    sentences,
    shown_of,
)
from magicdec.report.figures.throughput import draw_marks
from magicdec.report.frame import ENVIRONMENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MACHINE = ("device", "ranks", "threads")
SAME = ("model", "dtype", "target_dtype", "attention", "B", "prefix_len", "gen_len", *MACHINE)
READ = f"{ENVIRONMENT}read_bandwidth_bytes_per_s"
GB = 1e9


def draw_roofline(passes: pd.DataFrame) -> Drawn | LeftOut:
    x, y, roof = "bytes_per_step", "achieved_bytes_per_s", "measured_bytes_per_s"

    def show(of: pd.DataFrame) -> pd.DataFrame:
        read = of[READ].astype(float)
        rate = of["roofline_fraction"].astype(float) * read
        size = rate * of["mean_step_ms"].astype(float) / 1e3
        table = of[["series", "run"]].assign(**{x: size, y: rate, roof: read})
        return pd.concat([each for _, each in table.groupby("series", sort=False)])

    def draw(ax: Axes, table: pd.DataFrame, looks: Looks) -> dict[str, Any]:
        handles = draw_marks(ax, table, looks, x, y, GB)
        handles |= draw_roof(ax, table[roof].drop_duplicates() / GB)
        ax.set(xscale="log", ylim=(0, None))
        log_ticks(ax.xaxis)
        return handles

    form = Form(
        held=("model", "dtype", "target_dtype", *MACHINE), places=["series"], show=show, draw=draw,
        labels=("bytes that a step must read (GB)", "achieved (GB/s)"), axes={"height": 3.2},
        caption=(
            "Bytes that the steps of a run must read at least (weights and the visible KV cache) "
            "over the time of the steps. The line is the bandwidth measured in the runs "
            "themselves: all ranks together reading memory. What lies far below it is bound by "
            "something else; marks above it read partly from caches",
        ),
        what="combinations of model and machine",
    )  # fmt: skip
    known = passes[(passes[["roofline_fraction", "mean_step_ms", READ]].fillna(0) != 0).all(axis=1)]
    reason = "no run measured the bandwidth that this machine reads with and its own steps"
    return form.of("bandwidth", "Achieved bandwidth against the memory roofline", known, reason)


def draw_roof(ax: Axes, roofs: pd.Series) -> dict[str, Any]:
    """The median of the measured read bandwidths and their range."""
    middle = roofs.quantile(interpolation="higher")
    line = ax.axhline(middle, color="black", linewidth=1.4)
    handles: dict[str, Any] = {"measured read bandwidth (median)": line}
    if len(roofs) > 1:
        span = ax.axhspan(roofs.min(), roofs.max(), color="#bbbbbb", alpha=0.4, linewidth=0)
        handles["its range over the runs"] = span
    return handles


def draw_drift(passes: pd.DataFrame) -> Drawn | LeftOut:
    name, heading = "drift", "The machine over time"
    runs = passes[passes["is_run"].astype(bool)]
    known = runs[runs[READ].notna()]
    sizes = known.groupby(list(MACHINE), dropna=False)["run"].transform("size")
    if known.empty or sizes.max() < 2:
        reason = "fewer than two runs of one machine have a read bandwidth"
        return LeftOut(name, heading, reason)
    largest = known.loc[sizes.idxmax(), list(MACHINE)]
    of = known[(known[list(MACHINE)] == largest).all(axis=1)]
    of = of.sort_values(f"{ENVIRONMENT}time_utc", kind="stable")
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
    left.set(ylim=(0, None), ylabel="read bandwidth (GB/s)")
    left.set_title("bandwidth, measured in each run")
    right.set_ylabel("step time / median of its settings")
    right.set_title("autoregressive step, where repeated")
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
