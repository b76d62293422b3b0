"""The figure of `magicdec audit`: the speedup of decoding by context and by requests at once, and
whether drafts pay there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from magicdec.bench.audit.pays import LOSES, PAYS, UNDECIDED, ComparedCell
from magicdec.output.figures import COLOURS, GREY, saved_figure

# The fill and the hatch of a cell; the text in it has the verdict in words, too.
LOOKS = {PAYS: (COLOURS[4], ""), LOSES: (COLOURS[5], ""), UNDECIDED: ("white", "///")}
WIDTH = 1.7  # inches of a cell
HEIGHT = 0.75
MARGIN = 1.2  # inches, for labels


def draw(flag: str, path: Path, cells: Sequence[ComparedCell]) -> None:
    """Draws a cell for each context, from the top down, and concurrency. Raises ValueError, naming
    the flag."""
    from matplotlib.patches import Rectangle

    contexts = sorted({cell.context for cell in cells})
    concurrency = sorted({cell.concurrency for cell in cells})
    size = (WIDTH * len(concurrency) + MARGIN, HEIGHT * len(contexts) + MARGIN)
    with saved_figure(flag, path, size) as (_, (axes,)):
        for cell in cells:
            column = concurrency.index(cell.concurrency)
            row = contexts.index(cell.context)
            colour, hatch = LOOKS[cell.verdict]
            corner = (column - 0.5, row - 0.5)
            shape = Rectangle(corner, 1, 1, facecolor=colour, edgecolor=GREY, hatch=hatch)
            axes.add_patch(shape)
            speedup = cell.speedup
            text = f"{speedup.value:.2f}\n[{speedup.low:.2f}, {speedup.high:.2f}]\n{cell.verdict}"
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
            weight = "normal" if cell.verdict == UNDECIDED else "bold"
            axes.text(
                column, row, text, ha="center", va="center", bbox=box, size="small", weight=weight
            )
        axes.set_xlim(-0.5, len(concurrency) - 0.5)
        axes.set_ylim(len(contexts) - 0.5, -0.5)
        axes.set_xticks(range(len(concurrency)), list(map(str, concurrency)))
        axes.set_yticks(range(len(contexts)), list(map(str, contexts)))
        axes.tick_params(length=0)
        axes.grid(False)
        axes.set_xlabel("requests at once")
        axes.set_ylabel("context (tokens)")
        axes.set_title("Speedup [its range]")
