"""Figures over the passes of many runs: tokens/s against the speed of one request, acceptance, and
the bandwidth that steps reach."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.figures import GREY
from magicdec.names import BASELINE
from magicdec.report.figures.panels import (
    MOST_SERIES,
    Drawn,
    Form,
    LeftOut,
    Series,
    draw_curves,
    draw_marks,
    plain_ticks,
    summarize,
)
from magicdec.report.frame import ENVIRONMENT, frame_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MACHINE = ("device", "ranks", "threads")
PROMPTS = ["model", "draft_model", "dtype", "dataset", "temperature", "prefix_len"]
TPOT, X, Y = "mean_tpot_ms", "request_tokens_per_s", "decode_tokens_per_s"
READ = f"{ENVIRONMENT}read_bandwidth_bytes_per_s"
GB = 1e9
SHARE = "share of verifications"


def draw_pareto(passes: pd.DataFrame) -> Drawn | LeftOut:
    """Tokens/s of all rows against those of one request, with the Pareto fronts of the baselines
    and of the passes that draft or serve requests."""

    def show(of: pd.DataFrame) -> pd.DataFrame:
        of = of.assign(**{X: 1e3 / of[TPOT].astype(float)})
        fronts = [pareto(of[is_kind], X, Y).index for is_kind in kinds_of(of).values()]
        columns = ["series", "run", "B", X, Y, "on_front", f"{Y}_interval_low"]
        return of.assign(on_front=of.index.isin(chain(*fronts)))[[*columns, f"{Y}_interval_high"]]

    def draw(ax: Axes, table: pd.DataFrame, series: Series) -> dict[str, Any]:
        handles = draw_marks(ax, series, X, Y)
        for kind, is_kind in kinds_of(table).items():
            front = table[is_kind & table["on_front"]].sort_values(X)
            colour, line = (GREY, ":") if kind == BASELINE else ("black", "-")
            if not front.empty:
                drawn = ax.plot(front[X], front[Y], line, color=colour, linewidth=1, zorder=1)
                handles[f"Pareto front, {kind}"] = drawn[0]
            changed = front[front["B"].notna() & (front["B"] != front["B"].shift())]
            for x, y, B in changed[[X, Y, "B"]].itertuples(index=False):
                ax.annotate(f"B {B}", (x, y), (4, 4), textcoords="offset points", fontsize=7,
                            color=colour)  # fmt: skip
        ax.margins(0.14)
        ax.set(xlim=(0, None), ylim=(0, None))
        return handles

    form = Form(
        name="pareto_front", title="Tokens/s of all rows against tokens/s of one request",
        reason="no record has both a throughput and a TPOT",
        held=("model", "dtype", "device", "prefix_len"), places=["B", "series"], show=show,
        draw=draw, labels=("one request (tokens/s)", "all rows (tokens/s)"),
        caption=(
            "Each mark is one pass; up and to the right is better. A pass is on a front if no "
            "other one of its kind has both more tokens/s and a faster request. Numbers are the "
            "batch sizes on the fronts. The autoregressive marks are the baselines in the same "
            "runs. Upright lines are 95 % intervals over batches",
            "One request decodes at 1 / TPOT. All rows together count decode steps in a run; where "
            "requests were served, they count the whole time from the first arrival to the last "
            "token",
        ),
        axes={"height": 3.1}, most_series=2 * MOST_SERIES,
    )  # fmt: skip
    served = passes.get("output_throughput", pd.Series(dtype=object))
    measured = passes.assign(**{Y: passes[Y].combine_first(served)})
    return form.of(measured[measured[TPOT].notna() & measured[Y].notna()])


def kinds_of(passes: pd.DataFrame) -> dict[str, pd.Series]:
    """Which passes are baselines, and which are not."""
    is_baseline = passes["series"] == BASELINE
    return {BASELINE: is_baseline, "others": ~is_baseline}


def pareto(frame: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The rows that no other one beats by both a larger `x` and a larger `y`, by falling `x`."""
    values = frame[[x, y]].astype(float).sort_values([x, y], ascending=False)
    best_before = values[y].cummax().shift(fill_value=float("-inf"))
    return frame.loc[values.index[values[y] > best_before]]


def draw_roofline(passes: pd.DataFrame) -> Drawn | LeftOut:
    """The bandwidth that steps reach against the bytes that they must read."""
    x, y, roof = "bytes_per_step", "achieved_bytes_per_s", "measured_bytes_per_s"

    def show(of: pd.DataFrame) -> pd.DataFrame:
        read = of[READ].astype(float)
        rate = of["roofline_fraction"].astype(float) * read
        size = rate * of["mean_step_ms"].astype(float) / 1e3
        return of[["series", "run"]].assign(**{x: size, y: rate, roof: read})

    def draw(ax: Axes, table: pd.DataFrame, series: Series) -> dict[str, Any]:
        """The roof is the median of the measured read bandwidths, with their range."""
        handles = draw_marks(ax, series, x, y, GB)
        roofs = table[roof].drop_duplicates() / GB
        middle = roofs.quantile(interpolation="higher")
        line = ax.axhline(middle, color="black", linewidth=1.4)
        handles["measured read bandwidth (median)"] = line
        if len(roofs) > 1:
            span = ax.axhspan(roofs.min(), roofs.max(), color="#bbbbbb", alpha=0.4, linewidth=0)
            handles["its range over the runs"] = span
        ax.set(xscale="log", ylim=(0, None))
        plain_ticks(ax.xaxis)
        return handles

    form = Form(
        name="bandwidth", title="Achieved bandwidth against the memory roofline",
        reason="no run measured the bandwidth that this machine reads with and its own steps",
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
    is_known = (passes[["roofline_fraction", "mean_step_ms", READ]].fillna(0) != 0).all(axis=1)
    return form.of(passes[is_known])


def draw_by_budget(runs: pd.DataFrame) -> Drawn | LeftOut:
    """The acceptance rate against the KV budget."""

    def show(of: pd.DataFrame) -> pd.DataFrame:
        return frame_of(
            {"kv_policy": policy, "budget": budget} | summarize(same, "acceptance_rate")
            for (policy, budget), same in of.groupby(["kv_policy", "budget"])
        )

    form = Form(
        name="acceptance_by_budget", title="Acceptance rate against the draft's KV budget",
        reason="no model and policy was measured with two KV budgets and else equal settings",
        held=[*PROMPTS[:2], "drafter", *PROMPTS[2:], "gamma"], places=["budget", "kv_policy"],
        series="kv_policy", show=show,
        draw=partial(draw_curves, x="budget", y="acceptance_rate", xscale="log"),
        labels=("KV budget (tokens that a draft reads)", "acceptance rate"),
        caption=(
            "Accepted draft tokens over drafted ones, by KV policy",
            "Bars are 95 % intervals over prompts; of repeated runs the median and the range",
        ),
        what="combinations of settings; the table of runs has all", axes={"sharey": True},
    )  # fmt: skip
    drafting = runs[runs["acceptance_rate"].notna() & runs["budget"].notna()]
    num_budgets = drafting.groupby([*form.held], dropna=False)["budget"].transform("nunique")
    return form.of(drafting[num_budgets > 1])


def draw_by_position(runs: pd.DataFrame) -> Drawn | LeftOut:
    """The acceptance of each draft position."""

    def show(of: pd.DataFrame) -> pd.DataFrame:
        """Of each way to draft the run with the most positions. They do not depend on gamma, so
        that the longest curve says the most."""
        ordered = of.sort_values(["series", "length", "run"])
        longest = ordered.drop_duplicates("series", keep="last")
        return pd.concat([curve_of(run) for run in longest.to_dict("records")])

    form = Form(
        name="acceptance_by_position", title="Acceptance by draft position",
        reason="no run drafted two tokens in a step",
        held=PROMPTS, places=["series"], show=show, axes={"sharey": True},
        draw=partial(draw_curves, x="position", y="share", ylim=(0, 1.04)),
        labels=("draft position in its step", SHARE),
        caption=(
            "Share of verifications that accepted this draft token and all before it in the step",
            "Of each way to draft the run with the most draft tokens. Bars are 95 % intervals over "
            "prompts",
        ),
    )  # fmt: skip
    lengths = runs["acceptance_per_position"].map(lambda shares: len(shares or ()))
    return form.of(by_draft(runs.assign(length=lengths)[lengths > 1]))


def by_draft(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with the way to draft as their series: drafter, policy and budget, without gamma."""
    names = runs["method"].str.split(", gamma |, tree ", regex=True).str[0]
    return runs.assign(series=names.astype(object))


def curve_of(run: dict[str, Any]) -> pd.DataFrame:
    """The share of each position with the ends of its interval; the share itself where there is
    none."""
    shares = run["acceptance_per_position"]
    intervals = run["acceptance_per_position_interval"] or [None] * len(shares)
    counts = run["judged_per_position"] or [None] * len(shares)
    return frame_of(
        {"series": run["series"], "run": run["run"], "position": position, "share": share,
         "low": (ends or [share])[0], "high": (ends or [share])[-1], "verifications": count}
        for position, (share, ends, count) in enumerate(
            zip(shares, intervals, counts, strict=True), 1
        )
    )  # fmt: skip
