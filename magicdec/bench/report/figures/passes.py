"""Figures over all passes that have the numbers: speedup, tokens/s, acceptance, phases of decode
steps and bandwidth.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from math import log
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from magicdec.bench.report.figures.panels import (
    MOST_SERIES,
    WIDTH,
    Drawn,
    Form,
    LeftOut,
    Series,
    draw_curves,
    draw_marks,
    num_different,
    plain_ticks,
    quiet,
    setting_text,
    summarize,
    values_of,
)
from magicdec.bench.report.frame import ENVIRONMENT, frame_of
from magicdec.bench.report.listing import rank
from magicdec.config.sections import SELF
from magicdec.names import BASELINE, HEADS
from magicdec.output.figures import COLOURS, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MACHINE = ("device", "ranks", "threads")
WEIGHTS = ("model", "target_dtype", "draft_model", "draft_weights")
HELD = [
    *WEIGHTS,
    "drafter",
    "kv_policy",
    "dtype",
    "dataset",
    "gen_len",
    "temperature",
    *MACHINE,
    "reselect_every",
    "draft_kv_dtype",
]
NET = "net_speedup"
KINDS = [NET, "speedup"]
PLACE = ["B", "prefix_len"]
MOST = 4.0  # speedup with the darkest colour; 1 / MOST has the darkest of the other side
MOST_CELLS = 5  # of a row or a column of a map, with text inside
DARK = 2.5  # from this speedup on, or from 1 / DARK, text is white


def draw_speedup(passes: pd.DataFrame) -> Drawn | LeftOut:
    known = passes[(passes[KINDS].fillna(0) != 0).all(axis=1)]
    form = Form(
        name="speedup_map",
        title="Net speedup over batch size and prefix length",
        reason="no method was measured at two batch sizes or two prefix lengths",
        held=HELD,
        places=PLACE,
        show=best_by_place,
        draw=draw_map,
        labels=("batch size (sequences)", "prefix length (tokens)"),
        series="",
        what="methods",
        caption=(
            "Of each batch size and prefix length the budget and gamma (K and g in the cells) "
            "with the best net speedup, which counts all time after prefill: the colour and the "
            "first number. Above 1 speculation is faster than autoregressive decoding of the same "
            "prompts. The second number is the speedup of decode steps alone, without stalls",
            "A cell has no colour where the 95 % interval of its net speedup over batches, which "
            "it shows, is wider than the difference from 1 that the colour would claim, or where "
            "another load took cores during each run of its place",
        ),
        axes={"height": max(3.2, 1.4 + 0.6 * min(MOST_CELLS, known["prefix_len"].nunique()))},
    )
    return form.of(known[[count > 1 for count in num_different(known, HELD, PLACE)]])


SPEEDUP_ENDS = ("speedup_interval_low", "speedup_interval_high")
NET_ENDS = (f"{NET}_interval_low", f"{NET}_interval_high")
CLAIM = "claim"  # the column that says what its run lets the colour of a cell claim
HOLDS = "holds"
BUSY = "busy host"
DOUBTFUL = "interval wider than the difference"
UNKNOWN = "no interval"
# What marks cells whose colour may claim nothing, and those of which that is not known.
CELL_MARKS: dict[str, dict[str, Any]] = {
    BUSY: {"hatch": "....", "edgecolor": "#c4c4c4", "linewidth": 0},
    DOUBTFUL: {"hatch": "////", "edgecolor": "#d4d4d4", "linewidth": 0},
    UNKNOWN: {"linestyle": (0, (1, 1.5)), "edgecolor": "#444444", "linewidth": 1.2},
}
COLOURED = (HOLDS, UNKNOWN)
INSET = 0.05  # of a mark, within its cell


def best_by_place(passes: pd.DataFrame) -> pd.DataFrame:
    """The run with the best net speedup at each place of the map, and the number of runs there."""
    columns = [*PLACE, "run", "gamma", "budget", *KINDS, *NET_ENDS, "is_busy"]
    best = best_last(passes, NET)[columns].groupby(PLACE).tail(1).sort_values(PLACE)
    counts = passes.groupby(PLACE).size().to_numpy()
    ends = best[["is_busy", NET, *NET_ENDS]].itertuples(index=False)
    return best.assign(runs=counts, **{CLAIM: [claim_of(*ends_of_run) for ends_of_run in ends]})


def best_last(passes: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The runs by what can be said of a speedup, the best one last. Those of a quiet host are
    better than others, and the lower ends of intervals decide, if any: the highest of many noisy
    speedups is often the most disturbed."""
    values = passes[metric].astype(float)
    lows = passes[f"{metric}_interval_low"].astype(float)
    order = {"is_quiet": ~passes["is_busy"].astype(bool), "has": lows.notna()}
    ranked = pd.DataFrame(order | {"low": lows.fillna(values)})
    return passes.loc[ranked.sort_values([*ranked], kind="stable").index]


def claim_of(is_busy: bool, speedup: float, low: float | None, high: float | None) -> str:
    """Whether a colour may say how far a speedup is from 1: its interval must not be wider than
    that, on the log scale, nor hold 1, and the host not busy."""
    if is_busy:
        return BUSY
    if low is None or high is None:
        return UNKNOWN
    is_wide = log(high / low) > abs(log(speedup))
    return DOUBTFUL if is_wide or low <= 1 <= high else HOLDS


def draw_map(ax: Axes, cells: pd.DataFrame, _: Series) -> dict[str, Any]:
    from matplotlib.colors import LogNorm

    table = cells.pivot(index="prefix_len", columns="B")
    shades = table[NET].astype(float).where(table[CLAIM].isin(COLOURED))
    image = ax.pcolormesh(
        shades.to_numpy(),
        cmap="PuOr_r",
        norm=LogNorm(1 / MOST, MOST),
        edgecolors="white",
        linewidth=1,
    )
    handles = dict[str, Any]()
    is_crowded = max(shades.shape) > MOST_CELLS
    for cell in cells.to_dict("records"):
        x = shades.columns.get_loc(cell["B"])
        y = shades.index.get_loc(cell["prefix_len"])
        if cell[CLAIM] != HOLDS:
            handles[cell[CLAIM]] = mark_cell(ax, x, y, cell[CLAIM])
        if not is_crowded:
            write_cell(ax, x + 0.5, y + 0.5, cell)
    step = -(-max(shades.shape) // MOST_CELLS)  # of ticks, so that their labels have room
    columns = shades.columns[::step]
    rows = shades.index[::step]
    ax.set_xticks(0.5 + step * np.arange(len(columns)), list(map(str, columns)))
    ax.set_yticks(0.5 + step * np.arange(len(rows)), [f"{S:,}" for S in rows])
    ax.grid(False)
    ax.set_facecolor("#f2f2f2")
    bar = ax.figure.colorbar(image, ax=ax, label="net speedup (x)", shrink=0.9, extend="both")
    assert bar.solids is not None, "the map has colours"
    bar.solids.set_rasterized(True)  # viewers of SVG show seams between its colours
    plain_ticks(bar.ax.yaxis, [1 / MOST, 0.5, 1, 2, MOST])
    return handles


CELL_LETTERS = 8  # of a line's settings that fit into one of four columns


def mark_cell(ax: Axes, x: float, y: float, claim: str) -> Any:
    from matplotlib.patches import Rectangle

    size = 1 - 2 * INSET
    marks = Rectangle((x + INSET, y + INSET), size, size, facecolor="none", **CELL_MARKS[claim])
    return ax.add_patch(marks)


def write_cell(ax: Axes, x: float, y: float, cell: dict[str, Any]) -> None:
    has_colour = cell[CLAIM] in COLOURED
    is_dark = has_colour and not 1 / DARK < cell[NET] < DARK
    more: dict[str, Any] = {"ha": "center", "color": "white" if is_dark else "black"}
    first = f"{cell[NET]:.2f}x"
    if not has_colour and cell[NET_ENDS[0]] is not None:
        first = "{:.2f} to\n{:.2f}x".format(*(cell[end] for end in NET_ENDS))
    about = f"steps {cell['speedup']:.2f}x\n" if has_colour else ""
    settings = [f"g {cell['gamma']}"]
    if cell["budget"] is not None:
        settings.append(f"K {cell['budget']}")
    is_long = sum(map(len, settings)) > CELL_LETTERS
    about += (",\n" if is_long else ", ").join(settings)
    size = None if has_colour else 7
    weight = "bold" if has_colour else "normal"
    ax.text(x, y + 0.05, first, va="bottom", weight=weight, fontsize=size, **more)
    ax.text(x, y, about, va="top", fontsize=6, **more)


PROMPTS = [*WEIGHTS, "dtype", "dataset", "temperature", "prefix_len"]
TPOT = "request_step_ms"
X = "request_tokens_per_s"
Y = "decode_tokens_per_s"
READ = f"{ENVIRONMENT}read_bandwidth_bytes_per_s"
GB = 1e9
SHARE = "share of verifications"
MOST_LABELS = 8  # of a front that have room


def draw_pareto(passes: pd.DataFrame) -> Drawn | LeftOut:
    """Tokens/s of all rows against those of one request, with the Pareto fronts of baselines and of
    other passes."""

    def show(rows: pd.DataFrame) -> pd.DataFrame:
        rows = rows.assign(**{X: 1e3 / rows[TPOT].astype(float)})
        fronts = [pareto(quiet(rows[is_kind]), X, Y).index for is_kind in kinds_of(rows).values()]
        columns = ["series", "run", "B", X, Y, "on_front", f"{Y}_interval_low"]
        return rows.assign(on_front=rows.index.isin(chain(*fronts)))[
            [*columns, f"{Y}_interval_high"]
        ]

    def draw(ax: Axes, table: pd.DataFrame, series: Series) -> dict[str, Any]:
        from matplotlib.patheffects import withStroke

        handles = draw_marks(ax, series, X, Y)
        for kind, is_kind in kinds_of(table).items():
            front = table[is_kind & table["on_front"]].sort_values(X)
            colour, line = (GREY, ":") if kind == BASELINE else ("black", "-")
            if not front.empty:
                drawn = ax.plot(front[X], front[Y], line, color=colour, linewidth=1, zorder=1)
                handles[f"Pareto front, {kind}"] = drawn[0]
            changed = front[front["B"].notna() & (front["B"] != front["B"].shift())]
            changed = changed.iloc[:: max(1, -(-len(changed) // MOST_LABELS))]
            place, vertical = ((4, -4), "top") if kind == BASELINE else ((4, 4), "bottom")
            for x, y, B in changed[[X, Y, "B"]].itertuples(index=False):
                text = ax.annotate(
                    f"B {B}",
                    (x, y),
                    place,
                    textcoords="offset points",
                    fontsize=7,
                    color=colour,
                    va=vertical,
                    zorder=5,
                )
                text.set_path_effects([withStroke(linewidth=2, foreground="white")])
        ax.margins(0.14)
        ax.set(xlim=(0, None), ylim=(0, None))
        return handles

    form = Form(
        name="pareto_front",
        title="Tokens/s of all rows against tokens/s of one request",
        reason="no record has both a throughput and a TPOT",
        held=("model", "dtype", "device", "prefix_len"),
        places=["B", "series"],
        show=show,
        draw=draw,
        labels=("one request (tokens/s)", "all rows (tokens/s)"),
        caption=(
            "Each mark is one pass; up and to the right is better. A pass is on a front if no "
            "other one of its kind has both more tokens/s and a faster request; where some were "
            "measured on a quiet host, it is of these. Numbers are the batch sizes on the fronts. "
            "The autoregressive marks are the baselines in the same runs",
            "One request decodes at 1 / TPOT, which counts from the first decode step where passes "
            "share a prefill. All rows together count decode steps there; where requests were "
            "served, they count the whole time from the first arrival to the last token",
        ),
        intervals="Upright lines are 95 % intervals over batches",
        axes={"height": 3.1},
        most_series=2 * MOST_SERIES,
    )
    is_served = passes["is_served"].astype(bool)
    measured = passes.assign(**{Y: passes[Y].where(~is_served, passes["output_throughput"])})
    return form.of(measured[measured[TPOT].notna() & measured[Y].notna()])


def kinds_of(passes: pd.DataFrame) -> dict[str, pd.Series]:
    is_baseline = passes["series"] == BASELINE
    return {BASELINE: is_baseline, "others": ~is_baseline}


def pareto(frame: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """The rows that none beats in both `x` and `y`, by falling `x`."""
    values = frame[[x, y]].astype(float).sort_values([x, y], ascending=False)
    best_before = values[y].cummax().shift(fill_value=float("-inf"))
    return frame.loc[values.index[values[y] > best_before]]


def draw_roofline(passes: pd.DataFrame) -> Drawn | LeftOut:
    x = "bytes_per_step"
    y = "achieved_bytes_per_s"
    roof = "measured_bytes_per_s"

    def show(rows: pd.DataFrame) -> pd.DataFrame:
        read = rows[READ].astype(float)
        rate = rows["roofline_fraction"].astype(float) * read
        size = rate * rows["mean_step_ms"].astype(float) / 1e3
        return rows[["series", "run"]].assign(**{x: size, y: rate, roof: read})

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
        name="bandwidth",
        title="Achieved bandwidth against the memory roofline",
        reason="no run measured the bandwidth that this machine reads with and its own steps",
        held=("model", "dtype", "target_dtype", *MACHINE),
        places=["series"],
        show=show,
        draw=draw,
        labels=("bytes that a step must read (GB)", "achieved (GB/s)"),
        axes={"height": 3.2},
        caption=(
            "Bytes that the steps of a run must read at least (weights and the visible KV cache) "
            "over the time of the steps. The line is the bandwidth measured in the runs "
            "themselves: all ranks together reading memory. What lies far below it is bound by "
            "something else; marks above it read partly from caches",
        ),
        what="combinations of model and machine",
    )
    is_known = (passes[["roofline_fraction", "mean_step_ms", READ]].fillna(0) != 0).all(axis=1)
    return form.of(passes[is_known])


def draw_by_budget(passes: pd.DataFrame) -> Drawn | LeftOut:

    def show(rows: pd.DataFrame) -> pd.DataFrame:
        return frame_of(
            {"kv_policy": policy, "budget": budget} | summarize(same, "draft_acceptance_rate")
            for (policy, budget), same in rows.groupby(["kv_policy", "budget"])
        )

    form = Form(
        name="acceptance_by_budget",
        title="Acceptance rate against the draft's KV budget",
        reason="no model and policy was measured with two KV budgets and else equal settings",
        held=["drafter", *PROMPTS, "gamma", "pa", "reselect_every"],
        places=["budget", "kv_policy"],
        series="kv_policy",
        show=show,
        draw=partial(draw_curves, x="budget", y="draft_acceptance_rate", xscale="log"),
        labels=("KV budget (tokens that a draft reads)", "acceptance rate"),
        caption=(
            "Accepted draft tokens over drafted ones, by KV policy",
            "Of repeated runs the median is shown",
        ),
        intervals="Bars are 95 % intervals over prompts, of repeated runs the range",
        what="combinations of settings; the table of runs has all",
        axes={"sharey": True},
    )
    drafting = passes[passes["draft_acceptance_rate"].notna() & passes["budget"].notna()]
    num_budgets = num_different(drafting, form.held, ["budget"])
    return form.of(drafting[[count > 1 for count in num_budgets]])


def draw_by_context(passes: pd.DataFrame) -> list[Drawn | LeftOut]:
    """Which drafter wins at which context: emitted tokens with what would pay, and speedup. Each
    model has figures of its own, in which columns are kinds of drafts, and rows batch sizes where
    each has been measured with every kind."""
    held = ["model", "target_dtype", "dtype", "dataset", "gen_len", "temperature", *MACHINE]
    held += ["B", "kind_of_draft"]
    emitted = passes["tokens_per_verification"].astype(float)
    speedups = passes["speedup"].astype(float)
    pays_from = emitted / speedups
    named = passes.assign(
        series=names_of_drafts(passes),
        pays_from=pays_from,
        kind_of_draft=[kind_of_draft(drafter) for drafter in passes["drafter"]],
    )
    figures: list[Drawn | LeftOut] = []
    for metric, name, title, label, caption, also in (
        (
            "tokens_per_verification",
            "length_by_context",
            "Emitted tokens of a step against context",
            "emitted tokens of a step",
            "Accepted drafts and the target's own token, mean over steps. The dotted line of the "
            "same colour is the length from which that drafter pays: the time of its steps over "
            "that of the baseline's. A drafter is worth its time where its line is above its "
            "dotted one",
            "pays_from",
        ),
        (
            "speedup",
            "speedup_by_context",
            "Speedup against context",
            "speedup of decode steps (x)",
            "Decode tokens/s relative to autoregressive decoding of the same run",
            None,
        ),
    ):

        def show(rows: pd.DataFrame, metric: str = metric, also: str | None = also) -> pd.DataFrame:
            places = rows.groupby(["series", "prefix_len"])
            return frame_of(
                {"series": series, "prefix_len": prefix}
                | summarize(quiet(same), metric)
                | ({also: quiet(same)[also].astype(float).median()} if also else {})
                for (series, prefix), same in places
            )

        measured = named[named[metric].notna()]
        num_contexts = num_different(measured, [*held, "series"], ["prefix_len"])
        shown = measured[np.array(num_contexts, dtype=int) > 1]
        num_models = shown["model"].nunique()
        for model_passes in [rows for _, rows in shown.groupby("model")] or [shown]:
            num_kinds = max(1, model_passes["kind_of_draft"].nunique())
            form = Form(
                name=f"{name}_{file_name(model_passes)}" if num_models > 1 else name,
                title=title,
                reason="no way to draft was measured at two contexts and else equal settings",
                held=held,
                places=["prefix_len", "series"],
                show=show,
                draw=partial(draw_along_contexts, y=metric, also=also),
                labels=("prompt tokens", label),
                caption=(caption, "Of repeated runs the median is shown, of those on a quiet host"),
                intervals="Bars are 95 % intervals, of repeated runs the range",
                axes={"sharey": True, "height": 3.2, "columns": num_kinds},
                most_panels=max(4, 2 * num_kinds),
                most_series=2 * MOST_SERIES,
            )
            figures.append(form.of(model_passes))
    return figures


def file_name(model_passes: pd.DataFrame) -> str:
    """The model of all rows in small letters, digits and underscores."""
    return re.sub("[^a-z0-9]+", "_", str(model_passes["model"].iloc[0]).lower()).strip("_")


def names_of_drafts(passes: pd.DataFrame) -> list[str]:
    """The ways to draft in words, with gamma and the draft model where these differ."""
    drafting = passes[passes["drafter"].notna()]
    has_models = drafting["draft_model"].nunique() > 1
    has_gammas = drafting["gamma"].nunique() > 1
    names = []
    for method, model in values_of(passes, ["method", "draft_model"]):
        name = str(method) if has_gammas else re.sub(", gamma [^,]+", "", str(method))
        name = name.replace("self-speculation", "self")
        names.append(f"{name}, {model}" if model and has_models else name)
    return names


def kind_of_draft(drafter: str | None) -> str | None:
    if drafter is None:
        return None
    kinds = {SELF: "the model itself", "model": "draft models"}
    kinds |= dict.fromkeys(HEADS, "trained heads")
    return kinds.get(drafter, "lookups")


def draw_along_contexts(
    ax: Axes, table: pd.DataFrame, series: Series, y: str, also: str | None
) -> dict[str, Any]:
    handles = draw_curves(ax, table, series, x="prefix_len", y=y, xscale="log")
    for _, rows, style in series if also else ():
        pays_from = rows[also].astype(float)
        ax.plot(
            rows["prefix_len"], pays_from, color=style.colour, linestyle=(0, (1, 3)), linewidth=1
        )
    if also is None:
        ax.axhline(1, color=GREY, linewidth=1, linestyle=":")
    return handles


def draw_by_acceptance(passes: pd.DataFrame) -> Drawn | LeftOut:
    form = Form(
        name="speedup_by_acceptance",
        title="Speedup against the acceptance rate of the same runs",
        reason="no run has both an acceptance rate and a speedup",
        held=[*WEIGHTS[:2], "dtype", "dataset", "prefix_len", "gen_len", *MACHINE],
        places=["series", "B", "budget", "gamma"],
        draw=draw_against_acceptance,
        show=lambda rows: rows[["series", "run", "budget", "gamma", "pa", "B", *BOTH]],
        labels=("acceptance rate", "speedup of decode steps (x)"),
        axes={"height": 3.1},
        caption=(
            "Each mark is one run. At equal acceptance a method that drafts at a lower cost is "
            "higher; below the line it is slower than autoregressive decoding",
        ),
        intervals="Upright lines are 95 % intervals of the speedup over batches",
    )
    return form.of(passes[passes[["draft_acceptance_rate", "speedup"]].notna().all(axis=1)])


BOTH = ("draft_acceptance_rate", "speedup", *SPEEDUP_ENDS)


def draw_against_acceptance(ax: Axes, _: pd.DataFrame, series: Series) -> dict[str, Any]:
    handles = draw_marks(ax, series, "draft_acceptance_rate", "speedup")
    ax.axhline(1, color=GREY, linewidth=1, linestyle=":")
    ax.margins(0.1)
    ax.set(ylim=(0, None))
    return handles


def draw_by_position(passes: pd.DataFrame) -> Drawn | LeftOut:

    def show(rows: pd.DataFrame) -> pd.DataFrame:
        """The run with the most positions for each way to draft. Positions do not depend on
        gamma."""
        ordered = rows.sort_values(["series", "length", "run"])
        longest = ordered.drop_duplicates("series", keep="last")
        return pd.concat([curve_of(run) for run in longest.to_dict("records")])

    form = Form(
        name="acceptance_by_position",
        title="Acceptance by draft position",
        reason="no run drafted two tokens in a step",
        held=[key for key in PROMPTS if key != "draft_weights"],  # which the series have
        places=["series"],
        show=show,
        axes={"sharey": True},
        draw=partial(draw_curves, x="position", y="share", ylim=(0, 1.04)),
        labels=("draft position in its step", SHARE),
        caption=(
            "Share of verifications that accepted this draft token and all before it in the step",
            "Of each way to draft the run with the most draft tokens",
        ),
        intervals="Bars are 95 % intervals over prompts",
    )
    lengths = passes["acceptance_per_position"].map(lambda shares: len(shares or ()))
    return form.of(by_draft(passes.assign(length=lengths)[lengths > 1]))


def by_draft(passes: pd.DataFrame) -> pd.DataFrame:
    """The runs with drafter, policy and budget, without gamma, as their series."""
    names = passes["method"].str.split(", gamma ").str[0]
    return passes.assign(series=names.astype(object))


def curve_of(run: dict[str, Any]) -> pd.DataFrame:
    """The shares of positions with the ends of their intervals, or the shares again."""
    shares = run["acceptance_per_position"]
    intervals = run["acceptance_per_position_interval"] or [None] * len(shares)
    counts = run["judged_per_position"] or [None] * len(shares)
    return frame_of(
        {
            "series": run["series"],
            "run": run["run"],
            "position": position,
            "share": share,
            "low": (ends or [share])[0],
            "high": (ends or [share])[-1],
            "verifications": count,
        }
        for position, (share, ends, count) in enumerate(
            zip(shares, intervals, counts, strict=True), 1
        )
    )


ALONG = [
    "mode",
    "drafter",
    "draft_weights",
    "kv_policy",
    "budget",
    "gamma",
    "pa",
    "B",
    "prefix_len",
]
# (colour, hatch) by phase
PHASES = {
    "draft": (COLOURS[4], ""),
    "verify": (COLOURS[0], "///"),
    "decode": (COLOURS[5], "..."),
    "other": (COLOURS[7], "xxx"),
}
SHORT = {"gamma": "g", "budget": "K", "prefix_len": "prefix"}
TEXTS = {"tokens_per_verification": "{:.1f} tokens", "speedup": "{:.2f}x"}  # at the end of a bar
MOST_BARS = 24


def draw_phases(passes: pd.DataFrame) -> Drawn | LeftOut:
    form = Form(
        name="step_phases",
        title="Phases of a decode step",
        reason="no run timed its phases; on CUDA --benchmark does",
        held=("model", "draft_model", "target_dtype", "dtype", "dataset", *MACHINE),
        places=ALONG,
        most_panels=1,
        what="combinations of model and machine",
        show=phases_of,
        draw=draw_bars,
        series="",
        labels=("time of a step (ms)", ""),
        caption=(
            "Mean time of a step by phase. The black tick is the autoregressive step of the same "
            "run: a step pays if it takes less than its tokens times that. At the right end: "
            "tokens of a step and row, and the speedup of the steps",
            f"Of more than {MOST_BARS} settings so many are shown, evenly chosen; of repeated runs "
            "the middle one",
        ),
    )
    has_phases = (
        passes["drafter"].notna() & passes["mean_step_ms"].notna() & passes["other_ms"].notna()
    )
    return form.of(passes[has_phases])


def phases_of(passes: pd.DataFrame) -> pd.DataFrame:
    """The middle run of each setting, with the time of each phase in the mean step: a phase that
    only some steps have counts in part."""
    share = pd.Series([drafting_share(m) for m in passes.itertuples()], passes.index)
    weights = {"draft": share, "verify": share, "decode": 1 - share, "other": 1}
    for phase, weight in weights.items():
        values = weight * passes[f"{phase}_ms"].astype(float).fillna(0.0)
        passes = passes.assign(**{f"{phase}_ms": values.where(values != 0)})
    ordered = passes.sort_values("mean_step_ms", key=lambda ms: ms.astype(float), kind="stable")
    groups = ordered.groupby(ALONG, dropna=False)
    middles = ordered[groups.cumcount() == groups["run"].transform("size") // 2]
    order = [[*map(rank, row)] for row in middles[ALONG[::-1]].to_numpy().tolist()]
    places = [place for _, place in sorted(zip(order, middles.index, strict=True))]
    times = [*(f"{phase}_ms" for phase in PHASES), "mean_step_ms", "autoregressive_step_ms"]
    return middles.loc[places, [*ALONG, "run", *times, *TEXTS]]


def drafting_share(m: Any) -> float:
    """The share of steps that draft. A phase's time is a mean over the steps that have it; together
    they make the mean step."""
    if m.draft_ms is None or m.verify_ms is None:
        return 0.0
    if m.decode_ms is None:
        return 1.0
    both = m.draft_ms + m.verify_ms
    share = (m.mean_step_ms - m.other_ms - m.decode_ms) / (both - m.decode_ms or 1.0)
    return min(1.0, max(0.0, share))


def draw_bars(ax: Axes, table: pd.DataFrame, _: Series) -> dict[str, Any]:
    count = min(MOST_BARS, len(table))
    bars = table.iloc[[i * len(table) // count for i in range(count)]].reset_index(drop=True)
    figure = ax.get_figure(root=True)
    assert figure is not None, "the axes are in it"
    figure.set_size_inches(WIDTH, 1.3 + 0.27 * count)
    left = pd.Series(0.0, bars.index)
    handles = dict[str, Any]()
    for phase, (colour, hatch) in PHASES.items():
        widths = bars[f"{phase}_ms"].astype(float).fillna(0.0)
        if widths.any():
            handles[phase] = ax.barh(
                bars.index,
                widths,
                left=left,
                height=0.72,
                color=colour,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
            )
            left += widths
    theirs = bars["autoregressive_step_ms"].astype(float)
    if theirs.notna().any():
        handles["autoregressive step"] = ax.vlines(
            theirs, bars.index - 0.42, bars.index + 0.42, color="black", linewidth=2
        )
    rows = bars.to_dict("records")
    ends = left.combine(theirs, max)
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
    """The settings `keys` in short. A policy implies that the model drafts for itself."""
    names = [
        f"{SHORT[key]} {bar[key]}" if key in SHORT else setting_text(key, bar[key])
        for key in keys
        if bar[key] is not None
        and not (key == "drafter" and bar["kv_policy"] and bar[key] == "self")
    ]
    return ", ".join(text.removeprefix("drafter ") for text in names)
