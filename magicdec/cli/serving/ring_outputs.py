"""The files that `magicdec recurrent` writes beside its records: charts, curves and run times.

Owns their flags. Must not know how anything is measured or drawn.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.cli.parsing.parser import Parser
from magicdec.cli.serving.common_flags import add_files
from magicdec.memory.sampler import STATM
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.options import RING, RINGS, WITH_CURVES
from magicdec.records.writing import check_directory, check_files
from magicdec.report.figures.style import check_picture

if TYPE_CHECKING:
    from magicdec.pipeline.measured_pass import Outcome
    from magicdec.pipeline.prepare import PreparedRing
    from magicdec.pipeline.showing.curves import Curves

FILES = (  # (flag, metavar, help text)
    ("--plot", "FILE",
     "draw which sample every stage computes when; .png, .svg or .pdf. A ring with drafts gets a "
     "file of its own, FILE_ring_speculative. Default: no chart, and no times are noted"),
    ("--curves", "DIR",
     "write the tokens and the memory of each rank against time to CSV files in this directory, "
     "for the ring and the sequential baseline, and draw curves of all numbers of nodes that have "
     "files there. Default: no files"),
    ("--time_run", "FILE",
     "append the times of the ring and of the sequential baseline to this CSV file, a line each. "
     "Default: no file"),
)  # fmt: skip


@dataclass(frozen=True)
class RingOutputs:
    """The flags of the same names. `failures` has what could not be written, `to_draw` the curves
    that were."""

    plot: Path | None
    plot_ms: float | None
    curves: Path | None
    time_run: Path | None
    failures: list[str] = field(default_factory=list)
    to_draw: list[Curves] = field(default_factory=list)

    def write(self, prepared: PreparedRing, name: str, outcome: Outcome) -> None:
        """Write the files of the pass `name`. One that cannot be written costs nothing else."""
        if self.plot is not None and name in RINGS:
            self._try("--plot", lambda: self._draw_gantt(name, outcome))
        if name not in WITH_CURVES:
            return
        num_nodes = 1 if name == SEQUENTIAL else prepared.grid.world_size
        if self.time_run is not None:
            self._try("--time_run", lambda: self._append_run(prepared, num_nodes, outcome))
        if self.curves is not None:
            self._try("--curves", lambda: self._write_curves(prepared, num_nodes, outcome))

    def draw(self) -> None:
        """Draw the curves of all passes. Not before the last pass, because what draws them takes
        memory, which would count as that of the next pass."""
        if self.to_draw:
            self._try("--curves", lambda: draw_curves(self.to_draw[0]))

    def _try(self, flag: str, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError) as error:
            self.failures.append(
                str(error) if isinstance(error, ValueError) else f"{flag}: {error}"
            )
            print(self.failures[-1], file=sys.stderr)

    def _append_run(self, prepared: PreparedRing, num_nodes: int, outcome: Outcome) -> None:
        from magicdec.pipeline.showing.curves import append_run, points_of

        assert self.time_run is not None
        asked, layers = prepared.options.asked, prepared.run.source.config.num_layers
        seconds, _ = points_of(outcome.requests, outcome.begin_s)[-1]
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        row = now, len(asked.shapes), layers, asked.longest, f"{seconds:.6f}", num_nodes
        append_run(self.time_run, row)

    def _write_curves(self, prepared: PreparedRing, num_nodes: int, outcome: Outcome) -> None:
        from magicdec.pipeline.showing.curves import Curves
        from magicdec.pipeline.showing.memory import MemoryCurves

        assert self.curves is not None
        model, count = prepared.run.config.model.model, len(outcome.requests)
        curves = Curves("--curves", self.curves, model, count)
        curves.write(num_nodes, outcome.requests, outcome.begin_s)
        MemoryCurves(curves).write(num_nodes, outcome.memory, outcome.begin_s)
        self.to_draw.append(curves)

    def _draw_gantt(self, name: str, outcome: Outcome) -> None:
        """The ring with drafts has a chart of its own, whose file has its name too."""
        from magicdec.pipeline.showing.gantt import draw_ring

        assert self.plot is not None and outcome.ring is not None
        assert outcome.ring.trace is not None, "it was asked for"
        path = self.plot if name == RING else self.plot.with_stem(f"{self.plot.stem}_{name}")
        draw_ring("--plot", path, outcome.ring.trace, self.plot_ms)


def draw_curves(curves: Curves) -> None:
    from magicdec.pipeline.showing.memory import MemoryCurves

    curves.draw()
    MemoryCurves(curves).draw()


def add_outputs(parser: Parser) -> None:
    group = add_files(parser, "results/runs.jsonl", FILES)
    group.add_argument("--plot_ms", type=float, metavar="X",
        help="the chart shows so much time from the first message on, in ms. Default: 60 times "
        "what the slowest stage takes for a message that decodes, from shortly before the first of "
        "these on")  # fmt: skip


def read_outputs(args: argparse.Namespace, is_writer: bool) -> RingOutputs:
    """Raises ValueError, naming the flag, for a file that the writer cannot write."""
    if args.plot_ms is not None:
        if args.plot is None:
            raise ValueError("--plot_ms does nothing without --plot; leave it out")
        if not 0 < args.plot_ms < float("inf"):
            raise ValueError(f"--plot_ms {args.plot_ms} is out of range; it must be more than 0")
    if args.plot is not None:
        check_picture("--plot", args.plot)
    if is_writer:
        check_files({"--out": args.out, "--plot": args.plot, "--time_run": args.time_run})
        if args.curves is not None:
            check_directory("--curves", args.curves)
    if args.curves is not None and not STATM.exists():
        raise ValueError(f"--curves {args.curves}: this system has no {STATM}, which says how much "
                         "memory a rank uses; leave it out")  # fmt: skip
    return RingOutputs(args.plot, args.plot_ms, args.curves, args.time_run)
