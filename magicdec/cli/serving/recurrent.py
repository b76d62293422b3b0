"""`magicdec recurrent`: samples that circulate through a pipeline of stages, each on a rank of its
own (recurrent pipeline parallelism), beside one process and tensor parallelism.

    magicdec recurrent --nproc 2 --n_samples 4 --prefix_len 512 --gen_len 64
    torchrun --nproc_per_node 3 tests/recurrent_benchmark.py --layer_split 0.25,0.25,0.5

Owns the flags of the command and its steps. Heavy imports happen after the flags are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.flags import config_of, sections_of
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import ConfigFile, Parser
from magicdec.cli.parsing.rank_checks import check_stages
from magicdec.cli.serving.ring_outputs import RingFilesSection, RingOutputs
from magicdec.cli.serving.steps import Experiment, RecordFile, run_command
from magicdec.config.run_config import DRAFTS as ALL_DRAFTS
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DEFAULT_GEN_LEN, SELF, DraftSection
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.pipeline.options import (
    RingOptions,
    read_modes,
)
from magicdec.tables import print_tables
from magicdec.workload.request_shapes import BURST, Arrival, make_shapes

if TYPE_CHECKING:
    from magicdec.pipeline.metrics import PipelineRecord
    from magicdec.pipeline.passes import Outcome
    from magicdec.pipeline.prepare import PreparedRing

EVERYDAY = (
    *("--model", "--dataset", "--layer_split", "--n_samples", "--B", "--num_requests"),
    *("--prefix_len", "--gen_len", "--modes", "--draft", "--temperature", "--nproc"),
    "--out",
)
# Sections of which only some settings have a flag here.
ONLY = {
    "parallel": ("device", "collectives", "threads", "nproc"),
    "decoding": ("num_draft_tokens", "ignore_eos"),
    "draft": ("draft_dtype",),
    "workload": ("dataset", "seed"),
    "output": ("results",),
}
DRAFTS = tuple(draft for draft in ALL_DRAFTS if draft != SELF)
BASE = RunConfig(draft=DraftSection())


@dataclass(frozen=True)
class Recurrent(Experiment):
    """A ring of stages, and its baselines."""

    options: RingOptions
    outputs: RingOutputs

    def check_ranks(self, nproc: int) -> None:
        check_stages(self.config, self.options.layer_split, nproc)

    def prepare(self, launch: Launch) -> PreparedRing:
        from magicdec.pipeline.prepare import prepare

        return prepare(self.config, self.options, launch)

    def measure(self, prepared: PreparedRing, record_file: RecordFile) -> list[PipelineRecord]:
        from magicdec.pipeline.measure import measure

        def keep(record: PipelineRecord, outcome: Outcome) -> None:
            record_file.append(record)
            if record.metrics is not None:
                self.outputs.write(prepared, record.name, outcome)

        return measure(prepared, keep)

    def show(self, prepared: PreparedRing, records: list[PipelineRecord]) -> bool:
        from magicdec.pipeline.showing import tables

        self.outputs.draw()
        print_tables(tables(records))
        return not self.outputs.failures


def main() -> NoReturn:
    """Serve the requests in every pass, and print one table."""
    run_command(parse)


def build_parser() -> Parser:
    sections = {
        "file": ConfigFile(),
        **sections_of(BASE),
        "ring": RingOptions(),
        "files": RingFilesSection(),
    }
    return Parser(
        "Divide a model by its layers among ranks, and let samples circulate through them, so that "
        "every stage works on a different one. All tokens are compared with those of one process.",
        sections,
        ONLY,
        everyday=EVERYDAY,
    )


def parse(words: Sequence[str], launch: Launch) -> Recurrent:
    """Raises ValueError, one line naming the flag, for what is wrong whatever the model."""
    values = build_parser().read(words)
    options, files = values[RingOptions], values[RingFilesSection]
    if options.draft == SELF:
        raise ValueError(
            f"--draft {SELF}: the first stage lacks layers to draft with; choose from "
            f"{', '.join(DRAFTS)}"
        )
    config = config_of(values, BASE).with_draft(options.draft, DRAFTS)
    if config.decoding.num_draft_tokens == "auto":
        raise ValueError("--gamma auto: a ring drafts a fixed number of tokens; name one")
    world_size = find_world_size(config.parallel.nproc, launch)
    config.check(world_size)
    refuse_ignored(config, values)
    lengths = options.num_requests, options.prefix_len, options.gen_len
    shapes = make_shapes(Arrival(BURST), *lengths, config.workload.seed)
    is_emulated = options.emulate_stage_ms is not None
    options = replace(
        options,
        baselines=read_modes(options.modes, world_size, is_emulated),
        gen_len=options.gen_len or str(DEFAULT_GEN_LEN),
        shapes=tuple(shapes),
        has_spans=files.plot is not None,
        has_memory=files.curves is not None,
    )
    files.check(Path(config.output.results), launch.rank == 0)
    return Recurrent(config, options, RingOutputs(files))
