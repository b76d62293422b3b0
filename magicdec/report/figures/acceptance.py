"""Acceptance against the KV budget, and acceptance by draft position."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

from magicdec.report.figures.style import (
    MOST_SERIES,
    Cell,
    Drawn,
    LeftOut,
    legend_below,
    look,
    make_axes,
    plain_ticks,
    plot_values,
    put_title,
    sentences,
    shown_of,
)
from magicdec.report.panels import (
    Panel,
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    rows: list[list[Cell]] = [
        [*panel.held.values(), policy, budget, v.middle, v.low, v.high, v.runs]
        for panel in kept
        for policy, values in _rates(panel).items()
        for budget, v in values.items()
    ]
    columns = (*HELD, "kv_policy", "budget", "acceptance_rate", "low", "high", "runs")
    caption = sentences(
        "Accepted draft tokens over drafted ones, by KV policy",
        f"Everywhere: {common(kept)}" if common(kept) else "",
        "Bars are 95 % intervals over prompts; of repeated runs the median and the range",
        shown_of(len(kept), len(panels), "combinations of settings; the table of runs has all"),
    )
    return Drawn(name, heading, caption, _draw_budgets(kept), columns, rows)


def _rates(panel: Panel) -> dict[str, dict[int, Value]]:
    """The acceptance rates of a panel by policy, then by budget."""
    found = {}
    for policy, of in panel.series(lambda p: str(p.settings["kv_policy"])).items():
        at = group(of, lambda p: int(p.settings["budget"] or 0))
        found[policy] = {b: summarize([_rate(p) for p in at[b]]) for b in sorted(at)}
    return found


def _draw_budgets(panels: list[Panel]) -> Figure:
    found = [_rates(panel) for panel in panels]
    policies = sorted(set(chain.from_iterable(found)))
    looks = {policy: look(index) for index, policy in enumerate(policies)}
    figure, axes = make_axes(len(panels), sharey=True)
    handles = {}
    for panel, rates, ax in zip(panels, found, axes, strict=True):
        for policy, values in rates.items():
            handles[policy] = plot_values(ax, list(values), list(values.values()), looks[policy])
        ax.set(xscale="log", xlabel="KV budget (tokens that a draft reads)")
        put_title(ax, title(panel, varying(panels)))
        plain_ticks(ax.xaxis, sorted(set(chain.from_iterable(rates.values()))))
    for ax in axes[::2]:
        ax.set_ylabel("acceptance rate")
    legend_below(figure, list(handles.values()), list(handles), columns=4)
    return figure


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
    inside = [list(panel.series(_series)) for panel in kept]
    names, chosen = set(chain.from_iterable(inside)), sorted(choose(inside, MOST_SERIES))
    curves = [_curves(panel, chosen) for panel in kept]
    rows = [
        [*panel.held.values(), *row]
        for panel, of in zip(kept, curves, strict=True)
        for series, point in of.items()
        for row in _position_rows(series, point)
    ]
    columns = (*held, "series", "run", "position", "share", "low", "high", "verifications")
    caption = sentences(
        "Share of verifications that accepted this draft token and all before it in the step",
        f"Everywhere: {common(kept)}" if common(kept) else "",
        "Of each way to draft the run with the most draft tokens. Bars are 95 % intervals over "
        "prompts",
        shown_of(len(kept), len(panels), "combinations of settings"),
        shown_of(len(chosen), len(names), "ways to draft"),
    )
    return Drawn(name, heading, caption, _draw_curves(kept, curves, chosen), columns, rows)


def _curves(panel: Panel, chosen: Sequence[str]) -> dict[str, Point]:
    """The run of each chosen way to draft that is shown. Positions do not depend on gamma, so the
    longest curve says the most."""
    return {
        series: max(of, key=lambda p: (len(_shares(p)), p.number))
        for series, of in panel.series(_series).items()
        if series in chosen
    }


def _position_rows(series: str, point: Point) -> list[list[Cell]]:
    places = zip(_shares(point), _ends(point), _judged(point), strict=True)
    return [
        [series, point.number, position, share, *ends, judged]
        for position, (share, ends, judged) in enumerate(places, 1)
    ]


def _draw_curves(
    panels: list[Panel], curves: list[dict[str, Point]], chosen: Sequence[str]
) -> Figure:
    looks = {series: look(index) for index, series in enumerate(chosen)}
    figure, axes = make_axes(len(panels), sharey=True)
    handles = {}
    for panel, of, ax in zip(panels, curves, axes, strict=True):
        for series, point in of.items():
            shares, ends = _shares(point), _ends(point)
            values = [Value(s, *both, 1) for s, both in zip(shares, ends, strict=True)]
            handles[series] = plot_values(ax, range(1, len(shares) + 1), values, looks[series])
        longest = max(len(_shares(point)) for point in of.values())
        plain_ticks(ax.xaxis, list(range(1, longest + 1)))
        ax.set(xlabel="draft position in its step", ylim=(0, 1.04))
        put_title(ax, title(panel, varying(panels)))
    for ax in axes[::2]:
        ax.set_ylabel("share of verifications")
    legend_below(figure, list(handles.values()), list(handles), columns=3)
    return figure


def _series(point: Point) -> str:
    """Drafter, policy and budget, without gamma."""
    return re.split(", (?:gamma|tree) ", point.method)[0]


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
