"""Tokens against time, as CSV files and as a plot with a curve for each number of nodes.

Owns the names and the columns of the files. `tokens_time_samples_*.csv` has the form of MDI-LLM's
logs: seconds and the number of tokens so far, without a header. Imports matplotlib only to draw.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.files import save_figure
from magicdec.records.writing import append_line, write_text
from magicdec.report.figures.style import look, styled
from magicdec.request import Request

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, int]]  # seconds, and tokens until then
SAMPLE_COLUMNS = ("sample", "tokens", "time_s")
RUN_COLUMNS = ("timestamp", "n_samples", "n_layers", "context_size", "gen_time", "n_nodes")
DOTS_PER_INCH = 150


@dataclass(frozen=True)
class Curves:
    """The files of runs that generate `num_samples` samples with one model, in `folder`, which the
    user named by `flag`."""

    flag: str
    folder: Path
    model: str
    num_samples: int

    @property
    def name(self) -> str:
        model = re.sub(r"[^\w.-]+", "-", self.model.rstrip("/").rpartition("/")[2])
        return f"{model}_{self.num_samples}samples"

    @property
    def plot(self) -> Path:
        return self.folder / f"time_vs_tokens_{self.name}.png"

    def path(self, num_nodes: int) -> Path:
        """Of the tokens of all samples together."""
        return self.folder / f"tokens_time_samples_{num_nodes}nodes_{self.name}.csv"

    def samples_path(self, num_nodes: int) -> Path:
        """Of the tokens of each sample."""
        return self.folder / f"tokens_time_per_sample_{num_nodes}nodes_{self.name}.csv"

    def write(self, num_nodes: int, requests: Sequence[Request], begin_s: float) -> None:
        """Write both files of a run, in place of those of an earlier one. Raises ValueError."""
        together = [(f"{at_s:.6f}", count) for at_s, count in points_of(requests, begin_s)]
        write_text(self.flag, self.path(num_nodes), csv_of(together))
        rows = [
            (request.request_id, count, f"{at_s - begin_s:.6f}")
            for request in requests
            for count, at_s in enumerate(request.token_times_s, 1)
        ]
        write_text(self.flag, self.samples_path(num_nodes), csv_of([SAMPLE_COLUMNS, *rows]))

    def numbers_of_nodes(self, path: Callable[[int], Path]) -> list[int]:
        """Of all runs whose files there are. `path` names the file of each."""
        begin, end = re.escape(path(0).name).split("0", 1)
        found = (re.fullmatch(rf"{begin}(\d+){end}", path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match is not None)

    def draw(self) -> None:
        """Draw the files of all numbers of nodes. Raises ValueError if one cannot be read, or the
        plot cannot be written."""
        from matplotlib.figure import Figure

        with styled():
            figure = Figure(figsize=(7.4, 3.6), layout="constrained")
            ours, each = figure.subplots(1, 2)
            for index, num_nodes in enumerate(self.numbers_of_nodes(self.path)):
                points = [(float(s), int(count)) for s, count in self.rows(self.path(num_nodes))]
                draw_curve(ours, index, points, label_of(num_nodes, points))
                for curve in by_sample(self.rows(self.samples_path(num_nodes))[1:]):
                    draw_curve(each, index, curve)
            finish(ours, f"all {self.num_samples} samples", "output tokens of all samples")
            finish(each, "each sample", "output tokens of a sample")
            figure.suptitle(self.model)
            figure.legend(loc="outside lower center", ncols=3)
            save_figure(self.flag, self.plot, figure)

    def rows(self, path: Path) -> list[list[str]]:
        """Of a file. Raises ValueError if it cannot be read."""
        try:
            with path.open(encoding="utf-8", newline="") as file:
                return list(csv.reader(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{self.flag} {path} cannot be read: {error}") from None


def points_of(requests: Sequence[Request], begin_s: float) -> Points:
    """When how many tokens of all requests together were known, from (0, 0) on."""
    times_s = sorted(at_s - begin_s for request in requests for at_s in request.token_times_s)
    return [(0.0, 0), *((at_s, count) for count, at_s in enumerate(times_s, 1))]


def by_sample(rows: Sequence[Sequence[str]]) -> Iterable[Points]:
    """The curves of the samples in a file of SAMPLE_COLUMNS."""
    found: dict[str, Points] = defaultdict(list)
    for sample, count, at_s in rows:
        found[sample].append((float(at_s), int(count)))
    return found.values()


def label_of(num_nodes: int, points: Points) -> str:
    end_s, count = points[-1]
    return f"{num_nodes} node{'s' * (num_nodes > 1)}: {count / end_s:,.1f} tokens/s"


def draw_curve(ax: Axes, index: int, points: Points, label: str | None = None) -> None:
    """A curve of the plot of all samples, which has a label, or the thinner one of a sample."""
    style, width = look(index), 1.6 if label else 0.6
    times, counts = [at_s for at_s, _ in points], [count for _, count in points]
    ax.plot(
        counts, times, color=style.colour, linestyle=style.line, linewidth=width, label=label
    )  # fmt: skip


def finish(ax: Axes, title: str, what: str) -> None:
    ax.set_title(title)
    ax.set_xlabel(what)
    ax.set_ylabel("seconds")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)


def csv_of(rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def append_run(path: Path, values: Sequence[object]) -> None:
    """Append a line with the values of RUN_COLUMNS; a new file gets their names first. Raises
    OSError."""
    if not path.exists() or not path.stat().st_size:
        append_line(path, ",".join(RUN_COLUMNS))
    append_line(path, csv_of([values]).rstrip())
