"""The files that `magicdec recurrent` writes beside its records: charts, curves and run times.

Owns their flags. Must not know how anything is measured or drawn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.config.sections import PictureSection
from magicdec.config.setting import setting
from magicdec.figures import check_picture
from magicdec.memory.sampler import STATM
from magicdec.names import SEQUENTIAL
from magicdec.pipeline.options import RING, RINGS, WITH_CURVES
from magicdec.records.writing import check_directory, check_files

if TYPE_CHECKING:
    from magicdec.pipeline.passes import Outcome
    from magicdec.pipeline.prepare import PreparedRing
    from magicdec.pipeline.showing import Curves


@dataclass(frozen=True)
class RingFilesSection(PictureSection):
    """The files that this command writes. A ring with drafts gets a chart of its own, whose file
    has its name too."""

    curves: Path | None = setting(
        None,
        "Write the tokens and the memory of each rank against time to CSV files in this directory, "
        "for the ring and the sequential baseline, and draw curves of all numbers of nodes that "
        "have files there.",
        metavar="DIR",
    )
    time_run: Path | None = setting(
        None,
        "Append the times of the ring and of the sequential baseline to this CSV file, a line "
        "each.",
    )

    def check(self, out: Path, is_writer: bool) -> None:
        """Raises ValueError, naming the flag, for a file that the writer cannot write."""
        if self.plot_ms is not None and self.plot is None:
            raise ValueError("--plot_ms does nothing without --plot; leave it out")
        if self.plot is not None:
            check_picture("--plot", self.plot)
        if is_writer:
            check_files({"--out": out, "--plot": self.plot, "--time_run": self.time_run})
            if self.curves is not None:
                check_directory("--curves", self.curves)
        if self.curves is not None and not STATM.exists():
            raise ValueError(
                f"--curves {self.curves}: this system has no {STATM}, which says how much memory a "
                "rank uses; leave it out"
            )


@dataclass(frozen=True)
class RingOutputs:
    """Writes these files. `failures` has what could not be written, `to_draw` the curves that
    were."""

    files: RingFilesSection
    failures: list[str] = field(default_factory=list)
    to_draw: list[Curves] = field(default_factory=list)

    def write(self, prepared: PreparedRing, name: str, outcome: Outcome) -> None:
        """Write the files of the pass `name`. One that cannot be written costs nothing else."""
        if self.files.plot is not None and name in RINGS:
            self._try("--plot", lambda: self._draw_gantt(name, outcome))
        if name not in WITH_CURVES:
            return
        num_nodes = 1 if name == SEQUENTIAL else prepared.grid.world_size
        if self.files.time_run is not None:
            self._try("--time_run", lambda: self._append_run(prepared, num_nodes, outcome))
        if self.files.curves is not None:
            self._try("--curves", lambda: self._write_curves(prepared, num_nodes, outcome))

    def draw(self) -> None:
        """Draw the curves of all passes. Not before the last pass, because what draws them takes
        memory, which would count as that of the next pass."""
        if self.to_draw:
            self._try("--curves", self.to_draw[0].draw)

    def _try(self, flag: str, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError) as error:
            self.failures.append(
                str(error) if isinstance(error, ValueError) else f"{flag}: {error}"
            )
            print(self.failures[-1], file=sys.stderr)

    def _append_run(self, prepared: PreparedRing, num_nodes: int, outcome: Outcome) -> None:
        from magicdec.pipeline.showing import append_run, points_of

        assert self.files.time_run is not None
        flags, layers = prepared.options.flags, prepared.run.source.config.num_layers
        seconds, _ = points_of(outcome.requests, outcome.begin_s)[-1]
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        row = now, len(flags.shapes), layers, flags.longest, f"{seconds:.6f}", num_nodes
        append_run(self.files.time_run, row)

    def _write_curves(self, prepared: PreparedRing, num_nodes: int, outcome: Outcome) -> None:
        from magicdec.pipeline.showing import Curves

        assert self.files.curves is not None
        model, count = prepared.run.config.model.model, len(outcome.requests)
        curves = Curves("--curves", self.files.curves, model, count)
        curves.write(num_nodes, outcome.requests, outcome.memory, outcome.begin_s)
        self.to_draw.append(curves)

    def _draw_gantt(self, name: str, outcome: Outcome) -> None:
        """The ring with drafts has a chart of its own, whose file has its name too."""
        from magicdec.pipeline.showing import draw_ring

        path = self.files.plot
        assert path is not None and outcome.ring is not None
        path = path if name == RING else path.with_stem(f"{path.stem}_{name}")
        draw_ring("--plot", path, outcome.ring.trace, self.files.plot_ms)
