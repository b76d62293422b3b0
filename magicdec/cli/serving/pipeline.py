"""`magicdec pipeline`: pipelined speculation on ranks that hold a model's layers (Butler et al.
2024, PipeInfer), beside synchronous speculation and plain decoding on the same stages.

    magicdec pipeline --nproc 3 --layer_split 0.5,0.5/1.0 --modes sequential sync async
    torchrun --nproc_per_node 2 tests/pipeline_benchmark.py --layer_split 0,1.0/head

Owns the flags of the command and its steps. Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.flags import config_of, sections_of
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import ConfigFile, Parser, Values
from magicdec.cli.parsing.rank_checks import check_roles
from magicdec.cli.serving.steps import Experiment, RecordFile, run_command
from magicdec.config.run_config import DRAFTS as ALL_DRAFTS
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    NONE,
    SELF,
    DraftSection,
    PictureSection,
)
from magicdec.config.setting import setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.figures import check_picture
from magicdec.names import BASELINE
from magicdec.pipeline.tracing import trace_events
from magicdec.pipelined_run.options import SpeculationOptions
from magicdec.pipelined_speculation.options import Options
from magicdec.records.writing import check_files, write_text
from magicdec.tables import print_tables
from magicdec.workload.arrivals import BURST, Arrival
from magicdec.workload.request_shapes import make_shapes

if TYPE_CHECKING:
    from magicdec.pipelined_run.layout import Layout
    from magicdec.pipelined_run.measured.measure import Traces
    from magicdec.pipelined_run.measured.metrics import SpeculationRecord
    from magicdec.pipelined_run.prepare import PreparedPipeline

EVERYDAY = (
    *("--model", "--draft", "--dataset", "--layer_split", "--modes", "--gamma", "--pa"),
    *("--num_requests", "--prefix_len", "--gen_len", "--temperature", "--nproc", "--plot"),
    *("--trace", "--out"),
)
# Sections of which only some settings have a flag here.
ONLY = {
    "parallel": ("device", "collectives", "threads", "nproc"),
    "decoding": ("ignore_eos",),
    "draft": ("draft_dtype",),
    "workload": ("dataset", "seed"),
    "files": ("plot", "trace"),
    "output": ("results",),
}
BASE = RunConfig(draft=DraftSection())
DRAFTS = tuple(draft for draft in ALL_DRAFTS if draft != NONE)


@dataclass(frozen=True)
class FilesSection(PictureSection):
    """The files that this command writes."""

    trace: Path | None = setting(
        None,
        "Write what every rank did when in the Chrome trace format, for chrome://tracing or "
        "ui.perfetto.dev.",
    )


@dataclass(frozen=True)
class Pipeline(Experiment):
    """Speculation on stages in several modes. `traces` has what was traced of each pass."""

    options: SpeculationOptions
    files: FilesSection
    traces: Traces = field(default_factory=dict)

    def check_ranks(self, nproc: int) -> None:
        check_roles(self.config, self.options.layer_split, nproc)

    def prepare(self, launch: Launch) -> PreparedPipeline:
        from magicdec.pipelined_run.prepare import prepare

        return prepare(self.config, self.options, launch)

    def measure(
        self, prepared: PreparedPipeline, record_file: RecordFile
    ) -> list[SpeculationRecord]:
        from magicdec.pipelined_run.measured.measure import measure

        records, traces = measure(prepared, record_file.append)
        self.traces.update(traces)
        return records

    def show(self, prepared: PreparedPipeline, records: list[SpeculationRecord]) -> bool:
        from magicdec.pipelined_run.measured.bars import draw_bars, tables

        print_tables(tables(records))
        if self.files.plot is not None:
            draw_bars("--plot", self.files.plot, [records])
        if self.files.trace is not None:
            write_trace(self.files.trace, self.traces, prepared.layout)
        return True


def main() -> NoReturn:
    """Serve the requests in every pass, and print one table."""
    run_command(parse)


def write_trace(path: Path, traces: Traces, layout: Layout) -> None:
    """Raises ValueError if the file cannot be written."""
    names = [f"rank {rank}: {layout.describe(rank)}" for rank in range(layout.world_size)]
    write_text("--trace", path, json.dumps({"traceEvents": trace_events(traces, names)}))


def build_parser() -> Parser:
    sections = {
        "file": ConfigFile(),
        **sections_of(BASE),
        "pipeline": SpeculationOptions(),
        "speculation": Options(),
        "files": FilesSection(),
    }
    return Parser(
        "Divide a model by its layers among ranks, and let a draft run ahead of it: asynchronous "
        "pipelined speculation, whose wrong runs are cancelled inside the stages, beside "
        "synchronous speculation and plain decoding. All tokens are compared with those of one "
        "process.",
        sections,
        ONLY,
        everyday=EVERYDAY,
    )


def parse(words: Sequence[str], launch: Launch) -> Pipeline:
    """Raises ValueError, one line naming the flag, for what is wrong whatever the model."""
    values = build_parser().read(words)
    options, files = values[SpeculationOptions], values[FilesSection]
    config = config_of(values, BASE).with_draft(options.draft, DRAFTS)
    config = settle_draft(config, values[DraftSection])
    if options.emulate_acceptance is not None:
        config = without_model(config, values, "--emulate_acceptance drafts")
    elif set(options.pipelined) == {"iterative"}:
        config = without_model(config, values, "--modes iterative drafts nothing")
    config.check(find_world_size(config.parallel.nproc, launch))
    refuse_ignored(config, values)
    for name in ("temperature", "repetition_penalty", "presence_penalty"):
        value = getattr(config.sampling, name)
        if options.emulate_stage_ms is not None and value != getattr(BASE.sampling, name):
            raise ValueError(
                f"--{name} {value:g} does nothing with --emulate_stage_ms, whose stages choose no "
                "tokens; leave it out"
            )
    if options.emulate_stage_ms is not None:  # emulated tokens are numbers of positions
        config = replace(config, decoding=replace(config.decoding, ignore_eos=True))
    lengths = options.num_requests, options.prefix_len, options.gen_len
    options = replace(
        options,
        speculation=values[Options],
        gen_len=options.gen_len or str(DEFAULT_GEN_LEN),
        shapes=tuple(make_shapes(Arrival(BURST), *lengths, config.workload.seed)),
    )
    if files.plot is not None:
        check_picture("--plot", files.plot)
    if launch.rank == 0:
        out = Path(config.output.results)
        check_files({"--out": out, "--plot": files.plot, "--trace": files.trace})
    return Pipeline(config, options, files)


def settle_draft(config: RunConfig, draft: DraftSection) -> RunConfig:
    """`config` with the draft model that runs. To the ranks, self-speculation is a whole model on
    the draft's ranks with a KV cache of its own: the target, with its dtype unless `draft` has
    one."""
    if config.decoding.drafter != SELF:
        return config
    dtype = config.model.target_dtype if draft.draft_dtype == "auto" else draft.draft_dtype
    decoding = replace(config.decoding, drafter="model")
    own = replace(draft, model=config.model.model, draft_dtype=dtype)
    return replace(config, draft=own, decoding=decoding)


def without_model(config: RunConfig, values: Values, reason: str) -> RunConfig:
    """`config` of a command in which no model drafts. Raises ValueError, with the `reason`, for a
    flag of a draft that was given."""
    names = [name for name in sorted(values.given) if name.startswith(("kv.", "draft."))]
    values.refuse_given(names, reason)
    decoding = replace(config.decoding, strategy=BASELINE, drafter=None)
    return replace(config, draft=None, decoding=decoding)
