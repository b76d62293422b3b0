"""The memory of ranks against time, as CSV files and as a plot with the ranks of each number of
nodes, beside the files of tokens against time (`curves`).

Owns the names and the columns of the files. Imports matplotlib only to draw.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.files import save_figure
from magicdec.pipeline.showing.curves import Curves, csv_of
from magicdec.records.writing import write_text
from magicdec.report.figures.style import LINES, look, styled

if TYPE_CHECKING:
    from torch import Tensor

COLUMNS = ("rank", "time_s", "memory_mb")
BYTES_PER_MB = 1e6
Points = list[tuple[float, float]]  # seconds and MB


@dataclass(frozen=True)
class MemoryCurves:
    """The files of the runs of `curves`."""

    curves: Curves

    @property
    def plot(self) -> Path:
        return self.curves.folder / f"memory_vs_time_{self.curves.name}.png"

    def path(self, num_nodes: int) -> Path:
        return self.curves.folder / f"memory_{num_nodes}nodes_{self.curves.name}.csv"

    def write(self, num_nodes: int, memory: Sequence[Tensor], begin_s: float) -> None:
        """Write the file of a run in place of that of an earlier one. `memory` has the samples of
        each rank, [N, 2]: seconds and bytes. Times count from `begin_s`. Raises ValueError."""
        rows = [
            (rank, f"{at_s - begin_s:.3f}", f"{num_bytes / BYTES_PER_MB:.3f}")
            for rank, samples in enumerate(memory)
            for at_s, num_bytes in samples.tolist()
        ]
        write_text(self.curves.flag, self.path(num_nodes), csv_of([COLUMNS, *rows]))

    def draw(self) -> None:
        """Draw the files of all numbers of nodes: a colour for each number, a line style for each
        rank. Raises ValueError if one cannot be read, or the plot cannot be written."""
        from matplotlib.figure import Figure

        with styled():
            figure = Figure(figsize=(7.4, 3.6), layout="constrained")
            ax = figure.subplots()
            for index, num_nodes in enumerate(self.curves.numbers_of_nodes(self.path)):
                ranks = by_rank(self.curves.rows(self.path(num_nodes))[1:])
                for rank, points in enumerate(ranks):
                    style = look(index).colour, LINES[rank % len(LINES)]
                    ax.plot(*zip(*points, strict=True), color=style[0], linestyle=style[1],
                            label=label_of(num_nodes, rank, points))  # fmt: skip
            ax.axvline(0, color="black", linewidth=0.6)
            ax.set_title("memory of each rank")
            ax.set_xlabel("seconds since the prompts arrived; loading and warm-up before")
            ax.set_ylabel("MB")
            ax.set_ylim(bottom=0)
            figure.suptitle(self.curves.model)
            figure.legend(loc="outside lower center", ncols=3)
            save_figure(self.curves.flag, self.plot, figure)


def by_rank(rows: Sequence[Sequence[str]]) -> list[Points]:
    """The curves of the ranks in a file of COLUMNS, in their order."""
    found: dict[int, Points] = defaultdict(list)
    for rank, at_s, megabytes in rows:
        found[int(rank)].append((float(at_s), float(megabytes)))
    return [found[rank] for rank in sorted(found)]


def label_of(num_nodes: int, rank: int, points: Points) -> str:
    most = max(megabytes for _, megabytes in points)
    place = "1 node" if num_nodes == 1 else f"{num_nodes} nodes, rank {rank}"
    return f"{place}: at most {most:,.0f} MB"
