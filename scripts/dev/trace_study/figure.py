"""The figure of the study."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.transforms import offset_copy
from trace_study.arms import ARMS, IN_FLIGHT, LLAMA, VLLM
from trace_study.cells import DRAFTS, Study, first_turn, form_of
from trace_study.pieces import MLPERF, MOONCAKE, WEKA

from magicdec.output.figures import GREY, look, saved_figure

LABEL_POINTS = 28  # from an axis to below its label
WIDTH = 5.2  # inches, so that a phone shows the text large enough
FORMS = {WEKA: "Weka's agents", MLPERF: "MLPerf's agents", MOONCAKE: "Mooncake's conversations"}


def draw(study: Study, path: Path) -> None:
    heights = [1.1 + 0.3 * len(study.arms), 1.1 + 0.22 * len(study.traces), 3.0]
    with saved_figure(
        "--out",
        path,
        (WIDTH, sum(heights)),
        rows=3,
        gridspec_kw={"height_ratios": heights},
    ) as (_, axes):
        draw_sessions(axes[0], study)
        draw_hits(axes[1], study)
        draw_turns(axes[2], study)


def draw_sessions(ax: Any, study: Study) -> None:
    forms = list(FORMS)
    for place, arm in enumerate(study.arms):
        cells = study.by_trace(arm.name)
        for name, cell in cells.items():
            at = place + 0.054 * (list(cells).index(name) - (len(cells) - 1) / 2)
            ax.plot(cell.ratio, at, linestyle="none", **marks(forms.index(form_of(name))))
        mean = geometric_mean(cell.ratio for cell in cells.values())
        ax.plot([mean, mean], [place - 0.36, place + 0.36], color="black", linewidth=2)
        ax.annotate(
            f"{mean:.2f}",
            (1, place),
            (4, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    ax.axvline(1, color=GREY, linewidth=0.8)
    ax.set_yticks(range(len(study.arms)), [arm.label for arm in study.arms])
    ax.set_ylim(len(study.arms) - 0.4, -0.6)
    ax.set_xscale("log")
    ticks = nice_ticks([cell.ratio for cell in study.cells.values()])
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.set_xlabel("sessions an hour, those of in flight = 1; bar: geometric mean")
    ax.set_title("How many sessions end in an hour")
    below(ax, list(FORMS.values()))


def marks(number: int) -> dict[str, Any]:
    style = look(number)
    return {"color": style.colour, "marker": style.marker, "markersize": 4}


def below(ax: Any, labels: Sequence[str]) -> None:
    """A legend of marks, in their order, below the label of the axis."""
    handles = [
        Line2D([], [], linestyle="none", label=label, **marks(number))
        for number, label in enumerate(labels)
    ]
    add_legend(ax, 3, handles=handles)


def add_legend(ax: Any, columns: int, **more: Any) -> None:
    """Below the label of the horizontal axis, whatever the height of the panel."""
    place = offset_copy(ax.transAxes, fig=ax.figure, y=-LABEL_POINTS, units="points")
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.4, 0),
        bbox_transform=place,
        ncols=columns,
        fontsize=7,
        **more,
    )


def nice_ticks(ratios: Sequence[float]) -> list[float]:
    """Ticks of a logarithmic axis around the ratios and 1."""
    low = min(1.0, *ratios)
    high = max(1.0, *ratios)
    known = [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)]
    if high / low < 4:
        known = sorted({*known, 0.7, 1.5, 3.0})
    return [tick for tick in known if low / 1.3 <= tick <= high * 1.3]


def draw_hits(ax: Any, study: Study) -> None:
    """Of each trace what a cache without limits has, as a bar, and what each program found."""
    programs = (IN_FLIGHT, LLAMA, VLLM)
    for place, trace in enumerate(study.traces):
        plain = study.plain_of(trace.name)
        passes = {IN_FLIGHT: plain}
        passes |= {name: cell.record for name, cell in study.by_arm(trace.name).items()}
        for number, name in enumerate(programs):
            metrics = passes[name].metrics if name in passes else None
            if metrics is not None and metrics.prefix_hit_rate is not None:
                at = place + 0.2 * (number - 1)
                ax.plot(metrics.prefix_hit_rate, at, linestyle="none", **marks(number))
        assert plain.metrics is not None
        ax.barh(place, plain.metrics.theoretical_hit_rate or 0.0, height=0.7, color="#dddddd")
    ax.set_yticks(range(len(study.traces)), [trace.name for trace in study.traces])
    ax.set_ylim(len(study.traces) - 0.4, -0.6)
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of prompt tokens found; grey: of a cache without limits")
    ax.set_title("What prefix caches find")
    below(ax, ["in flight", LLAMA, VLLM])


def draw_turns(ax: Any, study: Study) -> None:
    """Filled and solid: real text; hollow and dotted: text that stands for blocks."""
    every = dict[str, None]()
    lines = list[tuple[int, str, str, dict[str, float]]]()
    for number, arm in enumerate(DRAFTS):
        for form in (MLPERF, WEKA):
            lengths = study.by_turn(arm, form)
            every |= dict.fromkeys(lengths)
            lines.append((number, arm, form, lengths))
    turns = sorted(every, key=first_turn)
    labels = {arm.name: arm.label for arm in ARMS}
    for number, arm, form, lengths in lines:
        style = look(number)
        is_real = form == MLPERF
        at = [turns.index(name) for name in lengths]
        ax.plot(
            at,
            list(lengths.values()),
            color=style.colour,
            marker=style.marker,
            markersize=4,
            linestyle="-" if is_real else ":",
            markerfacecolor=style.colour if is_real else "none",
            label=f"{labels[arm]}, {'real text' if is_real else 'blocks'}",
        )
    ax.set_xticks(range(len(turns)), [name.replace(" to ", "-") for name in turns])
    ax.set_ylim(bottom=1)
    ax.set_xlabel("turn of the session")
    ax.set_ylabel("tokens a step")
    ax.set_title("What a step emits, by turn")
    add_legend(ax, 3)
