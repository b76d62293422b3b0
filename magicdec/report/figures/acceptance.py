"""Acceptance against the KV budget, and acceptance by draft position."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from magicdec.report.figures.figure import Cell, Drawn, LeftOut, sentences, shown_of
from magicdec.report.figures.style import (
    MOST_SERIES,
    legend_below,
    look,
    make_axes,
    plain_ticks,
    plot_values,
)
from magicdec.report.panels import (
    Value,
    choose,
    common,
    group,
    make_panels,
    richest,
    summarize,
    title,
    varying,
)
from magicdec.report.point import Point

HELD = ("model", "draft_model", "drafter", "dtype", "dataset", "temperature", "prefix_len", "gamma")
MOST_PANELS = 4


def draw_by_budget(points: Sequence[Point]) -> Drawn | LeftOut:
    name, heading = "acceptance_by_budget", "Acceptance rate against the draft's KV budget"
    known = [p for p in points if p.metrics and p.metrics.acceptance_rate is not None]
    known = [p for p in known if p.settings["budget"] is not None]
    panels = make_panels(known, HELD)
    panels = [p for p in panels if len({point.settings["budget"] for point in p.points}) > 1]
    if not panels:
        reason = "no model and policy was measured with two KV budgets and else equal settings"
        return LeftOut(name, heading, reason)
    kept = richest(panels, lambda p: (p.settings["budget"], p.settings["kv_policy"]), MOST_PANELS)
    policies = sorted({str(p.settings["kv_policy"]) for panel in kept for p in panel.points})
    looks = {policy: look(index) for index, policy in enumerate(policies)}
    columns = (*HELD, "kv_policy", "budget", "acceptance_rate", "low", "high", "runs")
    rows: list[list[Cell]] = []
    figure, axes = make_axes(len(kept), sharey=True)
    handles = {}
    for panel, ax in zip(kept, axes, strict=True):
        budgets: set[int] = set()
        for policy, of in panel.series(lambda p: str(p.settings["kv_policy"])).items():
            at = group(of, lambda p: int(p.settings["budget"] or 0))
            values = {budget: summarize([_rate(p) for p in at[budget]]) for budget in sorted(at)}
            budgets |= set(values)
            handles[policy] = plot_values(ax, list(values), list(values.values()), looks[policy])
            rows += [
                [*panel.held.values(), policy, budget, v.middle, v.low, v.high, v.runs]
                for budget, v in values.items()
            ]
        ax.set(xscale="log", xlabel="KV budget (tokens that a draft reads)")
        ax.set_title(title(panel, varying(kept)))
        plain_ticks(ax.xaxis, sorted(budgets))
    for ax in axes[::2]:
        ax.set_ylabel("acceptance rate")
    legend_below(figure, list(handles.values()), list(handles), columns=4)
    caption = sentences(
        "Accepted draft tokens over drafted ones, by KV policy",
        f"Everywhere: {common(kept)}" if common(kept) else "",
        "Bars are 95 % intervals over prompts; of repeated runs the median and the range",
        shown_of(len(kept), len(panels), "combinations of settings; the table of runs has all"),
    )
    return Drawn(name, heading, caption, figure, columns, rows)


def _rate(point: Point) -> tuple[float, list[float] | None]:
    assert point.metrics is not None and point.metrics.acceptance_rate is not None
    return point.metrics.acceptance_rate, point.metrics.acceptance_rate_interval


def draw_by_position(points: Sequence[Point]) -> Drawn | LeftOut:
    name, heading = "acceptance_by_position", "Acceptance by draft position"
    known = [p for p in points if p.metrics and len(p.metrics.acceptance_per_position or ()) > 1]
    if not known:
        return LeftOut(name, heading, "no run drafted two tokens in a step")
    held = ("model", "draft_model", "dtype", "dataset", "temperature", "prefix_len")
    panels = make_panels(known, held)
    kept = richest(panels, _series, MOST_PANELS)
    columns = (*held, "series", "run", "position", "share", "low", "high", "verifications")
    rows: list[list[Cell]] = []
    inside = [list(panel.series(_series)) for panel in kept]
    names = set(chain.from_iterable(inside))
    chosen = sorted(choose(inside, MOST_SERIES))
    looks = {series: look(index) for index, series in enumerate(chosen)}
    figure, axes = make_axes(len(kept), sharey=True)
    handles = {}
    for panel, ax in zip(kept, axes, strict=True):
        longest = 1
        for series, of in panel.series(_series).items():
            if series not in looks:
                continue
            # Positions do not depend on gamma, so the longest curve says the most.
            point = max(of, key=lambda p: (len(_shares(p)), p.number))
            shares = _shares(point)
            longest = max(longest, len(shares))
            positions = range(1, len(shares) + 1)
            ends = _ends(point)
            values = [Value(s, *both, 1) for s, both in zip(shares, ends, strict=True)]
            handles[series] = plot_values(ax, positions, values, looks[series])
            judged = _judged(point)
            rows += [
                [*panel.held.values(), series, point.number, k, s, *ends[k - 1], judged[k - 1]]
                for k, s in zip(positions, shares, strict=True)
            ]
        plain_ticks(ax.xaxis, list(range(1, longest + 1)))
        ax.set(xlabel="draft position in its step", ylim=(0, 1.04))
        ax.set_title(title(panel, varying(kept)))
    for ax in axes[::2]:
        ax.set_ylabel("share of verifications")
    legend_below(figure, list(handles.values()), list(handles), columns=3)
    caption = sentences(
        "Share of verifications that accepted this draft token and all before it in the step",
        f"Everywhere: {common(kept)}" if common(kept) else "",
        "Of each way to draft the run with the most draft tokens. Bars are 95 % intervals over "
        "prompts",
        shown_of(len(kept), len(panels), "combinations of settings"),
        shown_of(len(chosen), len(names), "ways to draft"),
    )
    return Drawn(name, heading, caption, figure, columns, rows)


def _series(point: Point) -> str:
    """Drafter, policy and budget, without gamma."""
    return point.method.rpartition(", gamma ")[0]


def _shares(point: Point) -> list[float]:
    assert point.metrics is not None and point.metrics.acceptance_per_position is not None
    return point.metrics.acceptance_per_position


def _ends(point: Point) -> list[tuple[float, float]]:
    """The ends of each interval; the share itself where there is none."""
    assert point.metrics is not None
    intervals = point.metrics.acceptance_per_position_interval or [[]] * len(_shares(point))
    return [
        (ends[0], ends[1]) if ends else (share, share)
        for share, ends in zip(_shares(point), intervals, strict=True)
    ]


def _judged(point: Point) -> list[int | None]:
    assert point.metrics is not None
    judged: Sequence[int | None] | None = point.metrics.judged_per_position
    return list(judged or [None] * len(_shares(point)))
