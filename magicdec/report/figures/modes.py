"""The modes of one or several commands as bars of the speed of a request, of its time to the first
token, and of the time between its tokens. As in the plots of PipeInfer, the modes stand side by
side, and each command, with its models and split, is a series. Knows no definition of a metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.figures import look, saved_figure
from magicdec.serving.record import ServingRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PANELS = (  # (metric, title, unit)
    ("request_tokens_per_s", "speed of a request", "tokens/s"),
    ("mean_ttft_ms", "time to first token", "ms, mean"),
    ("mean_itl_ms", "between two commits", "ms, mean"),
)
# Keys of `config.workload` that name a series where they differ, and what is said before a value.
NAMED = {
    "draft": "",
    "layer_split": "",
    "gamma": "gamma ",
    "emulate_acceptance": "acceptance ",
}
HEIGHT, LEGEND_LINE = 2.8, 0.22  # inches

Records = Sequence[ServingRecord]


def draw_bars(commands: Sequence[Records], path: Path) -> None:
    """A picture of the passes of these commands, all of which have metrics."""
    labels = labels_of(commands) if len(commands) > 1 else []
    size = 7.4, HEIGHT + LEGEND_LINE * len(labels)
    with saved_figure("--out", path, size, 1, len(PANELS)) as (figure, axes):
        for ax, (metric, name, unit) in zip(axes, PANELS, strict=True):
            draw_panel(ax, metric, commands)
            ax.set(title=name, ylabel=unit)
        if labels:
            handles = [container[0] for container in axes[0].containers]
            figure.legend(handles, labels, loc="outside lower left", ncols=1)


def draw_panel(ax: Axes, metric: str, commands: Sequence[Records]) -> None:
    """A group of bars for each way to decode, with a bar of each command that has it. The bars of
    a single command differ in colour."""
    names = list(dict.fromkeys(record.name for records in commands for record in records))
    width = 0.8 / len(commands)
    for index, records in enumerate(commands):
        at = [names.index(r.name) + (index - (len(commands) - 1) / 2) * width for r in records]
        values = [getattr(r.metrics, metric) or 0.0 for r in records]
        is_alone = len(commands) == 1
        colours = [look(i if is_alone else index).colour for i in range(len(records))]
        bars = ax.bar(at, values, width=0.9 * width, color=colours)
        ax.bar_label(
            bars, [f"{value:,.1f}" for value in values], fontsize=7 if is_alone else 6,
            rotation=0 if is_alone else 90, padding=2,
        )  # fmt: skip
    ax.margins(y=0.05 if len(commands) == 1 else 0.2)
    ax.set_xticks(range(len(names)), names, rotation=20)
    ax.grid(axis="x", visible=False)


def labels_of(commands: Sequence[Records]) -> list[str]:
    """The model of each command, and its settings that are not the same in all of them."""
    first = [records[0].config for records in commands]
    keys = [key for key in NAMED if len({str(c["workload"].get(key)) for c in first}) > 1]
    return [
        ", ".join(
            [
                str(config["model"]["model"]),
                *(f"{NAMED[key]}{config['workload'].get(key)}" for key in keys),
            ]
        )
        for config in first
    ]
