"""`magicdec inflight`: requests that arrive over time, served one after the other, in static and
dynamic batches, and in flight.

    magicdec inflight --num_requests 32 --arrival poisson:100 --gen_len uniform:16:128
    magicdec inflight --arrival trace:requests.jsonl --modes static inflight --goodput ttft:500

Owns the flags and the steps of the command, and its files. Heavy imports happen after the flags are
read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.flags import config_of, sections_of
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import ConfigFile, Parser, Values
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.cli.serving.steps import Experiment, RecordFile, run_command
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    NONE,
    DecodingSection,
    DraftChoice,
    DraftSection,
    PictureSection,
)
from magicdec.config.setting import setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.figures import check_picture
from magicdec.records.writing import check_files
from magicdec.serving.options import DRAFTED, Pass, ServingOptions, make_passes
from magicdec.tables import print_tables
from magicdec.workload.request_shapes import TRACE

if TYPE_CHECKING:
    from magicdec.serving.record import ServingRecord
    from magicdec.setup.prepare import Prepared

SWEPT = "poisson:1"  # what --sweep_rate stretches
EVERYDAY = (
    *("--model", "--dataset", "--num_requests", "--arrival", "--prefix_len", "--gen_len"),
    *("--B", "--prefill_tokens", "--modes", "--draft", "--temperature", "--goodput"),
    *("--nproc", "--out"),
)
# Sections of which only some settings have a flag here.
ONLY = {
    "draft": ("rank_group", "draft_dtype"),
    "decoding": ("num_draft_tokens", "cuda_graphs"),
    "workload": ("dataset", "seed"),
    "picture": ("plot",),
    "output": ("results",),
}
BASE = RunConfig(draft=DraftSection(), decoding=DecodingSection(ignore_eos=True))


@dataclass(frozen=True)
class FilesSection:
    """The file that this command alone writes."""

    view: Path | None = setting(
        None,
        "Write the last frame of the live display of each batching to this text file. The display "
        "itself is shown on a terminal only.",
    )


@dataclass(frozen=True)
class Inflight(Experiment):
    """Batchings of requests that arrive over time."""

    options: ServingOptions
    passes: tuple[Pass, ...]
    plot: Path | None
    view: Path | None

    def check_ranks(self, nproc: int) -> None:
        check_heads(self.config, nproc)

    def prepare(self, launch: Launch) -> Prepared:
        from magicdec.serving.prepare import prepare

        return prepare(self.config, self.options, launch)

    def measure(self, prepared: Prepared, record_file: RecordFile) -> list[ServingRecord]:
        """Serve the requests in every pass, or at every rate."""
        from magicdec.serving.live_view import Display
        from magicdec.serving.measure import measure, measure_rates

        is_leader, options = prepared.launch.rank == 0, self.options
        keep = record_file.append if is_leader else lambda record: None
        display = Display.of_rank(is_leader, self.view)
        if options.sweep_rate is None:
            return measure(prepared, options, self.passes, display, keep)
        (each,) = self.passes
        return measure_rates(prepared, options, each, options.sweep_rate, display, keep)

    def show(self, prepared: Prepared, records: list[ServingRecord]) -> bool:
        from magicdec.serving.showing import draw_rates, draw_timeline, tables

        print_tables(tables(records))
        if self.plot is not None:
            is_sweep = self.options.sweep_rate is not None
            (draw_rates if is_sweep else draw_timeline)(records, self.plot)
            print(f"drawn to {self.plot}", file=sys.stderr)
        return True


def main() -> NoReturn:
    """Serve the requests under each batching, and print one table."""
    run_command(parse)


def build_parser() -> Parser:
    sections = {
        "file": ConfigFile(),
        "files": FilesSection(),
        "drafts": DraftChoice(NONE),
        **sections_of(BASE),
        "serving": ServingOptions(),
        "picture": PictureSection(),
    }
    return Parser(
        "Serve requests that arrive over time: one after the other, in static and dynamic batches, "
        "and in flight. All tokens are compared.",
        sections,
        ONLY,
        everyday=EVERYDAY,
    )


def parse(words: Sequence[str], launch: Launch) -> Inflight:
    """Raises ValueError, one line naming the flag, for what is wrong whatever the model."""
    values = build_parser().read(words)
    config = config_of(values, BASE).with_draft(values[DraftChoice].draft)
    config.check(find_world_size(config.parallel.nproc, launch))
    refuse_ignored(config, values)
    options = read_options(values, config.workload.seed)
    plot, view = values[PictureSection].plot, values[FilesSection].view
    if plot is not None:
        check_picture("--plot", plot)
    if launch.rank == 0:
        check_files({"--out": Path(config.output.results), "--plot": plot, "--view": view})
    drafts = config.decoding.drafter is not None
    passes = make_passes(options.batchings, drafts)
    passes = passes if options.sweep_rate is None else passes[-1:]
    return Inflight(config, options, tuple(passes), plot, view)


def read_options(values: Values, seed: int) -> ServingOptions:
    """What is served. Raises ValueError for flags that exclude each other, and for a malformed
    trace."""
    options = values[ServingOptions]
    if options.sweep_rate is not None:
        values.refuse_typed(
            ("serving.arrival", "serving.modes"),
            "--sweep_rate serves Poisson arrivals in flight",
        )
        if options.num_requests == 1:
            raise ValueError("--num_requests 1 is too small for --sweep_rate, which needs 2")
        options = replace(options, arrival=SWEPT, modes=(DRAFTED,))
    if options.arrival.startswith(f"{TRACE}:"):
        lengths = ("serving.prefix_len", "serving.gen_len")
        values.refuse_given(lengths, "the trace has the lengths")
    return options.with_shapes(seed)
