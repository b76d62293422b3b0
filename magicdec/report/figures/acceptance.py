"""Acceptance against the KV budget, by draft position, and as a distribution over steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pandas as pd

from magicdec.report.figures.panels import (
    Drawn,
    Form,
    LeftOut,
    Looks,
    each_series,
    plain_ticks,
    plot_values,
    summarize,
)
from magicdec.report.frame import frame_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PROMPTS = ["model", "draft_model", "dtype", "dataset", "temperature", "prefix_len"]
SHARE = "share of verifications"


def draw_by_budget(runs: pd.DataFrame) -> Drawn | LeftOut:
    def show(of: pd.DataFrame) -> pd.DataFrame:
        return frame_of(
            {"kv_policy": policy, "budget": budget} | summarize(same, "acceptance_rate")
            for (policy, budget), same in of.groupby(["kv_policy", "budget"])
        )

    def draw(ax: Axes, rates: pd.DataFrame, looks: Looks) -> dict[str, Any]:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis, sorted(rates["budget"].unique()))
        return {
            policy: plot_values(ax, of, "budget", "acceptance_rate", style)
            for policy, of, style in each_series(rates, looks, "kv_policy")
        }

    known = runs[runs["acceptance_rate"].notna() & runs["budget"].notna()]
    held = [*PROMPTS[:2], "drafter", *PROMPTS[2:], "gamma"]
    form = Form(
        held=held, places=["budget", "kv_policy"], series="kv_policy", show=show, draw=draw,
        labels=("KV budget (tokens that a draft reads)", "acceptance rate"),
        caption=(
            "Accepted draft tokens over drafted ones, by KV policy",
            "Bars are 95 % intervals over prompts; of repeated runs the median and the range",
        ),
        what="combinations of settings; the table of runs has all", axes={"sharey": True},
    )  # fmt: skip
    return form.of(
        "acceptance_by_budget", "Acceptance rate against the draft's KV budget",
        known[known.groupby(held, dropna=False)["budget"].transform("nunique") > 1],
        "no model and policy was measured with two KV budgets and else equal settings",
    )  # fmt: skip


def draw_by_position(runs: pd.DataFrame) -> Drawn | LeftOut:
    def show(of: pd.DataFrame) -> pd.DataFrame:
        """Of each way to draft the run with the most positions. They do not depend on gamma, so
        that the longest curve says the most."""
        ordered = of.sort_values(["series", "length", "run"])
        longest = ordered.drop_duplicates("series", keep="last")
        return pd.concat([curve_of(run) for run in longest.to_dict("records")])

    def draw(ax: Axes, curves: pd.DataFrame, looks: Looks) -> dict[str, Any]:
        plain_ticks(ax.xaxis, sorted(curves["position"].unique()))
        ax.set_ylim(0, 1.04)
        return {
            series: plot_values(ax, of, "position", "share", style)
            for series, of, style in each_series(curves, looks)
        }

    lengths = runs["acceptance_per_position"].map(lambda shares: len(shares or ()))
    form = Form(
        held=PROMPTS, places=["series"], show=show, draw=draw, axes={"sharey": True},
        labels=("draft position in its step", SHARE),
        caption=(
            "Share of verifications that accepted this draft token and all before it in the step",
            "Of each way to draft the run with the most draft tokens. Bars are 95 % intervals over "
            "prompts",
        ),
    )  # fmt: skip
    known = by_draft(runs.assign(length=lengths)[lengths > 1])
    reason = "no run drafted two tokens in a step"
    return form.of("acceptance_by_position", "Acceptance by draft position", known, reason)


def by_draft(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with the way to draft as their series: drafter, policy and budget, without gamma."""
    names = runs["method"].str.split(", gamma |, tree ", regex=True).str[0]
    return runs.assign(series=names.astype(object))


def curve_of(run: dict[str, Any]) -> pd.DataFrame:
    """The share of each position with the ends of its interval; the share itself where there is
    none."""
    shares = run["acceptance_per_position"]
    intervals = run["acceptance_per_position_interval"] or [None] * len(shares)
    ends = [each or [share, share] for share, each in zip(shares, intervals, strict=True)]
    return frame_of(
        {"series": run["series"], "run": run["run"], "position": position, "share": share,
         "low": low, "high": high, "verifications": count}
        for position, share, (low, high), count in zip(
            range(1, 1 + len(shares)), shares, ends,
            run["judged_per_position"] or [None] * len(shares), strict=True,
        )
    )  # fmt: skip


def draw_lengths(runs: pd.DataFrame) -> Drawn | LeftOut:
    def show(of: pd.DataFrame) -> pd.DataFrame:
        counts = {series: sum(map(Counter, each), Counter[int]())
                  for series, each in of.groupby("series")["accepted"]}  # fmt: skip
        return frame_of(
            {"series": series, "tokens": 1 + accepted, "verifications": count[accepted],
             "share": count[accepted] / count.total()}
            for series, count in counts.items()
            for accepted in range(max(count) + 1)
        )  # fmt: skip

    def draw(ax: Axes, shares: pd.DataFrame, looks: Looks) -> dict[str, Any]:
        plain_ticks(ax.xaxis, sorted(shares["tokens"].unique()))
        ax.grid(axis="x", visible=False)
        series = list(each_series(shares, looks))
        width = 0.84 / len(series)
        return {
            name: ax.bar(
                of["tokens"].astype(float) + (index - (len(series) - 1) / 2) * width, of["share"],
                width, color=style.colour, hatch=style.hatch, edgecolor="white", linewidth=0.5,
            )
            for index, (name, of, style) in enumerate(series)
        }  # fmt: skip

    known = by_draft(runs[runs["accepted"].map(len) > 0])
    held = [*PROMPTS, "gamma"]
    budgets = known.groupby(held, dropna=False)["budget"]
    common = budgets.transform(lambda values: values.mode().iloc[0] if values.any() else None)
    form = Form(
        held=held, places=["series"], show=show, draw=draw, axes={"sharey": True}, most_panels=2,
        labels=("tokens of a step", SHARE),
        caption=(
            "Share of verifications by the tokens that they yield: the accepted drafts and one "
            "more. The mean is the acceptance length",
            "Of KV budgets the one that most runs of a panel have",
        ),
    )  # fmt: skip
    return form.of(
        "acceptance_lengths", "Tokens of a step, as a distribution",
        known[known["budget"].isna() | (known["budget"] == common)],
        "no record has the accepted drafts of its steps",
    )  # fmt: skip
