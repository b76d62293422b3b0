"""`magicdec serve`: the same requests in every named mode, in one table; and its short names
`inflight`, `recurrent` and `pipeline`, which differ in their defaults alone.

    magicdec serve --nproc 3 --draft model:demo-draft --modes sequential inflight ring async
    torchrun --nproc_per_node 2 tests/pipeline_benchmark.py --layer_split 0,1.0/head

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.flags import (
    FAILED,
    announce_backend,
    announce_limits,
    announce_plain_words,
    config_of,
    ended_at_once,
    preparing,
    run_on_ranks,
    run_ranks,
    say_interrupted,
    sections_of,
)
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import ConfigFile, ParsedValues, Parser
from magicdec.cli.parsing.rank_checks import check_nproc
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    CHAT,
    NONE,
    PLAIN,
    DecodingSection,
    DraftChoice,
    DraftSection,
    PictureSection,
)
from magicdec.config.setting import setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.distributed.watching.watch import watch_ranks
from magicdec.hardware.other_load import warn_of_load
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.output.console import START, labelled, spinner
from magicdec.output.figures import check_picture
from magicdec.output.tables import print_tables
from magicdec.output.writing import append_line, check_files, check_record_file, to_json, write_text
from magicdec.records.record import Status
from magicdec.systems.modes import (
    BATCHING,
    ENDPOINT,
    MODES,
    SPECULATIVE,
    Pass,
    Ranks,
    default_names,
)
from magicdec.systems.options import WINDOWED, ServeOptions, check_passes
from magicdec.systems.pipeinfer.options import Options
from magicdec.workload.prompt_sets import is_prompt_set
from magicdec.workload.request_shapes import BURST, TRACE, UNIFORM

if TYPE_CHECKING:
    from magicdec.bench.serving.measure import MeasuredPasses
    from magicdec.bench.serving.prepare import PreparedServing
    from magicdec.records.pass_record import PassRecord

EXTERNAL = tuple(name for name, mode in MODES.items() if mode.ranks is Ranks.NONE)
EVERYDAY = (
    *("--model", "--dataset", "--num_requests", "--arrival", "--concurrency", "--turns"),
    *("--prefix_len", "--gen_len"),
    *("--modes", "--draft", "--gamma", "--B", "--n_samples", "--layer_split", "--temperature"),
    *("--goodput", "--nproc", "--plot", "--trace", "--out"),
)
WITHOUT_EOS = ("gamma", "draft_weights", "cuda_graphs")
# Sections of which only some settings have a flag here.
ONLY = {
    "draft": ("rank_group",),
    "decoding": (*WITHOUT_EOS, "ignore_eos"),
    "workload": ("dataset", "prompt_format", "skip_tokens", "seed"),
    "speculation": ("pa", "pr", "pd", "max_in_flight", "lanes"),
    "output": ("results", "verbose"),
}


@dataclass(frozen=True)
class ServeFilesSection(PictureSection):
    trace: Path | None = setting(
        None,
        "Write what every request and every stage did when in the Chrome trace format, for "
        "chrome://tracing or ui.perfetto.dev.",
    )

    def check(self, out: Path, is_writer: bool) -> None:
        """Raises ValueError, naming the flag, for a file that the writer cannot write."""
        if self.plot_ms is not None and self.plot is None:
            raise ValueError("--plot_ms does nothing without --plot; leave it out")
        if self.plot is not None:
            check_picture("--plot", self.plot)
        if is_writer:
            check_record_file("--out", out)
            check_files({"--plot": self.plot, "--trace": self.trace})


@dataclass(frozen=True)
class Command:
    """A name of the command, with its help and defaults. It compares those of `modes` that the
    ranks can have, and with a draft also `drafting`. With `ignore_eos` it decodes to the full
    length."""

    description: str
    modes: tuple[str, ...]
    drafting: tuple[str, ...] = ()
    options: ServeOptions = ServeOptions()
    draft: str = NONE
    ignore_eos: bool = False

    def build_parser(self) -> Parser:
        sections = {
            "file": ConfigFile(),
            "drafts": DraftChoice(self.draft),
            **sections_of(self.base),
            "serving": self.options,
            "speculation": Options(),
            "files": ServeFilesSection(),
        }
        only = ONLY if not self.ignore_eos else ONLY | {"decoding": WITHOUT_EOS}
        return Parser(self.description, sections, only, everyday=EVERYDAY)

    @property
    def base(self) -> RunConfig:
        return RunConfig(draft=DraftSection(), decoding=DecodingSection(ignore_eos=self.ignore_eos))

    def parse(self, words: Sequence[str], launch: Launch) -> ServeCommand:
        """The experiment of a command line. Raises ValueError, one line naming the flag, for errors
        of any model."""
        values = self.build_parser().read(words)
        options = values[ServeOptions]
        files = values[ServeFilesSection]
        config = config_of(values, self.base)
        world_size = find_world_size(config.parallel.nproc, launch)
        draft = values[DraftChoice].draft
        is_named = "drafts.draft" in values.given
        config.with_draft(draft)
        passes = self.passes(options, draft, world_size, is_named)
        drafting = [each for each in passes if each.is_drafting]
        is_emulated = options.emulate_stage_ms is not None
        has_script = is_emulated and options.emulate_acceptance is not None
        needs_draft = [each for each in drafting if not (has_script and each.drafts_ahead)]
        if not is_named and not needs_draft:
            draft = NONE
        elif drafting and not needs_draft and draft != NONE:
            values.refuse_given(["drafts.draft"], "--emulate_acceptance drafts")
        if is_emulated:
            values.refuse_given(OF_WEIGHTS, "emulated stages have no weights")
        config = config.with_draft(draft)
        ahead = [each.drafts_ahead for each in drafting]
        if draft != NONE and any(map(options.accepts_by_chance, passes)):
            rates = options.emulate_acceptance
            config = replace(config, decoding=replace(config.decoding, emulate_acceptance=rates))
        # Modes that draft in turns stop by `--pa` as `run` does, which refuses it for lookups.
        # Beside a mode that drafts ahead, for which lookups have it, it is for that mode alone.
        is_for_turns = not all(ahead) and not (any(ahead) and config.decoding.looks_up)
        if "speculation.pa" in values.given and is_for_turns:
            pa = values[Options].pa
            config = replace(config, decoding=replace(config.decoding, pa=pa))
        config.check(world_size)
        refuse_unused(values, passes)
        used = ["decoding.gamma"] if drafting else []
        refuse_ignored(config, values, used)
        options = self.settle(options, values, passes, config, world_size)
        options = replace(options, draft=draft)
        check_passes(options, config, world_size)
        files.check(Path(config.output.results), launch.rank == 0)
        return ServeCommand(config, options, files)

    def passes(
        self, options: ServeOptions, draft: str, world_size: int, is_named: bool
    ) -> list[Pass]:
        """The named modes, or the possible ones of this command."""
        has_draft = draft != NONE or options.emulate_acceptance is not None
        names = options.modes
        if names is None:
            every = default_names(self.modes, world_size, has_draft)
            names = (*every, *(self.drafting if draft != NONE and is_named else ()))
            names += tuple(name for name in EXTERNAL if options.endpoint is not None)
            if options.emulate_stage_ms is not None:
                names = tuple(each for each in names if has_stages(Pass.named(each))) or names
        servers = range(len(options.endpoint or ()) or 1)
        return [
            replace(each, server=server, concurrency=concurrency)
            for each in map(Pass.named, names)
            for server in (servers if each.system == ENDPOINT else (0,))
            for concurrency in options.concurrency or (None,)
        ]

    def settle(
        self,
        options: ServeOptions,
        values: ParsedValues,
        passes: Sequence[Pass],
        config: RunConfig,
        world_size: int,
    ) -> ServeOptions:
        dataset = config.workload.dataset
        has_trace = options.arrival.startswith(f"{TRACE}:")
        if is_prompt_set(dataset) and (has_trace or options.prefix_len.startswith(UNIFORM)):
            raise ValueError(
                f"--dataset {dataset}: its prompts have their own lengths; --prefix_len is "
                f"the largest of them; leave {UNIFORM} and {TRACE} out"
            )
        if config.workload.prompt_format == CHAT and (
            has_trace or options.prefix_len.startswith(UNIFORM)
        ):
            raise ValueError(
                f"--prompt_format {CHAT}: prompts that are cut to several lengths would lose the "
                f"template's end; leave {UNIFORM} and {TRACE} out, or use --prompt_format {PLAIN}"
            )
        if options.turns > 1 and not is_prompt_set(dataset):
            raise ValueError(
                f"--turns {options.turns}: --dataset {dataset} has no conversations; give a set "
                "that has some, such as mt_bench:FILE"
            )
        if has_trace:
            lengths = ("serving.prefix_len", "serving.gen_len")
            values.refuse_given(lengths, "the trace has the lengths")
        gamma = config.decoding.gamma
        speculation = values[Options]
        if isinstance(gamma, int):
            speculation = replace(speculation, gamma=gamma)
        if options.concurrency is not None:
            values.refuse_given(["serving.arrival"], "--concurrency says when requests arrive")
            if "speculation.lanes" not in values.given:
                speculation = replace(speculation, lanes=options.most_in_flight)
        options = replace(options, speculation=speculation)
        return options.settle(passes, config.workload.seed, world_size)


def has_stages(each: Pass) -> bool:
    return each.ranks is Ranks.STAGES


# What only some modes use, by the beginnings of names of settings.
USED_BY: dict[str, Callable[[Pass], bool]] = {
    "parallel.rank_group": lambda each: each.system == BATCHING,
    "speculation.max_in_flight": lambda each: each.system == SPECULATIVE,
    "speculation.lanes": lambda each: each.system == SPECULATIVE,
    "speculation.pa": lambda each: each.is_drafting,
    "speculation.pr": lambda each: each.drafts_ahead,
    "speculation.pd": lambda each: each.drafts_ahead,
    "draft.rank_group": lambda each: each.system == BATCHING and each.is_drafting,
    "decoding.cuda_graphs": lambda each: each.system == BATCHING,
    "serving.window_ms": lambda each: each.mode == WINDOWED,
    "serving.block_tokens": lambda each: each.system == BATCHING,
    "serving.cache_tokens": lambda each: each.system == BATCHING,
    "serving.prefix_cache": lambda each: each.system in (BATCHING, ENDPOINT),
    "serving.batch_ranks": lambda each: each.ranks is Ranks.FIRST,
    "serving.prefill_tokens": lambda each: each.system != SPECULATIVE,
    "serving.batch_size": lambda each: each.system != SPECULATIVE,
    "serving.n_samples": lambda each: each.system != SPECULATIVE,
    "serving.layer_split": has_stages,
    "serving.emulate_link_": has_stages,
    "serving.emulate_acceptance": lambda each: each.is_drafting,
    "serving.emulate_draft_ms": lambda each: each.drafts_ahead,
    "serving.endpoint": lambda each: each.system == ENDPOINT,
}


OF_WEIGHTS = (
    "decoding.draft_weights",
    *(f"model.{name}" for name in ("linear", "elementwise", "native_steps", "target_dtype")),
)


def is_unused(setting_name: str, passes: Sequence[Pass]) -> bool:
    """Whether no pass uses a setting, such as `serving.window_ms`."""
    return any(
        setting_name.startswith(beginning) and not any(map(uses, passes))
        for beginning, uses in USED_BY.items()
    )


def refuse_unused(values: ParsedValues, passes: Sequence[Pass]) -> None:
    """Raises ValueError for a given flag that no mode uses."""
    modes = " ".join(dict.fromkeys(each.name for each in passes))
    names = [name for name in sorted(values.given) if is_unused(name, passes)]
    values.refuse_given(names, f"no mode of --modes {modes} uses it")


BURST_OPTIONS = ServeOptions(arrival=BURST)
COMMANDS = {
    "serve": Command(
        "Serve the same requests in every mode that is named: one after the other, in batches, in "
        "flight, by tensor parallelism, in a ring of stages, and by pipelined speculation. All "
        "tokens are compared with those of the first mode.",
        tuple(name for name in MODES if name not in (WINDOWED, *EXTERNAL)),
        ("inflight+draft",),
    ),
    "inflight": Command(
        "Serve requests that arrive over time: one after the other, in static and dynamic batches, "
        "and in flight (`serve` with these modes, and with all ranks in each of them).",
        ("sequential", "static", "dynamic", "inflight"),
        ("inflight+draft",),
        ServeOptions(batch_ranks="all"),
        ignore_eos=True,
    ),
    "recurrent": Command(
        "Divide a model by its layers among ranks; samples circulate through them (`serve` with a "
        "ring, beside one process and tensor parallelism).",
        ("sequential", "inflight", "tensor_parallel", "ring"),
        ("ring+draft",),
        ServeOptions(arrival=BURST, batch_size=1, has_rows_of_ring=True),
    ),
    "pipeline": Command(
        "Divide a model by its layers among ranks, and let a draft run ahead of it: asynchronous "
        "pipelined speculation, whose wrong runs are cancelled inside the stages, beside "
        "synchronous speculation and plain decoding (`serve` with these modes).",
        ("sequential", "iterative", "sync", "async"),
        (),
        BURST_OPTIONS,
        draft="model:demo-draft",
    ),
}


class RecordFile:
    """A file of records with their number. One that cannot be written is lost with a message, and
    the command goes on: later results may still be printed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.records: list[PassRecord] = []  # lost ones too

    def append(self, record: PassRecord) -> None:
        self.records.append(record)
        try:
            append_line(self.path, to_json(record))
            self.count += 1
        except OSError as error:
            print(f"--out {self.path}: {error.strerror}; the record is lost", file=sys.stderr)


@dataclass(frozen=True)
class ServeCommand:
    config: RunConfig
    options: ServeOptions
    files: ServeFilesSection
    failures: list[str] = field(default_factory=list)  # files that could not be written

    def run(self, words: Sequence[str], launch: Launch) -> int:
        """Runs the whole command on this rank. Returns its exit code."""
        config = with_local_models(self.config)
        out = Path(self.config.output.results)
        nproc = config.parallel.nproc
        check = partial(check_nproc, config, self.options)
        run_on_ranks(
            nproc, words, launch, check, f"the records of modes that had ended are in {out}"
        )
        watch_ranks(launch)
        with spinner(preparing(config), launch.rank == 0):
            with ended_at_once(launch):
                from magicdec.bench.serving.prepare import prepare

            prepared = prepare(config, self.options, launch)
        if launch.rank == 0:
            announce(prepared)
        record_file = RecordFile(out)
        try:
            measured = self.measure(prepared, record_file)
        except BaseException as error:
            if record_file.records:  # of the modes before
                self.print_tables(record_file.records)
            if not isinstance(error, KeyboardInterrupt):
                raise
            count = record_file.count
            records = "1 record is" if count == 1 else f"{count} records are"
            return say_interrupted(launch, f"{records} in {out}")
        if launch.rank != 0:
            return 0
        self.show(measured)
        code = conclude(record_file, measured.records, self.config.output.verbose)
        return FAILED if self.failures else code

    def measure(self, prepared: PreparedServing, record_file: RecordFile) -> MeasuredPasses:
        from magicdec.bench.serving.measure import measure

        return measure(prepared, record_file.append)

    def print_tables(self, records: Sequence[PassRecord]) -> None:
        from magicdec.bench.showing import tables

        print_tables(tables(records, self.config.output.verbose))

    def show(self, measured: MeasuredPasses) -> None:
        from magicdec.bench.timeline import draw_timeline, trace_events

        self.print_tables(measured.records)
        records = measured.records
        traces = measured.traces
        plot = self.files.plot
        trace = self.files.trace
        try:
            if plot is not None:
                draw_timeline(records, traces, plot, self.files.plot_ms)
                print(f"drawn to {plot}", file=sys.stderr)
            if trace is not None:
                events = trace_events(records, traces)
                write_text("--trace", trace, json.dumps({"traceEvents": events}))
        except ValueError as error:
            self.failures.append(str(error))
            print(error, file=sys.stderr)


def announce(prepared: PreparedServing) -> None:
    splits = [system.split for system in prepared.systems if system.split]
    messages = [
        system.transport.describe() for system in prepared.systems if system.transport is not None
    ]
    for split in dict.fromkeys(splits):
        print(labelled("split", split, START))
    for transport in dict.fromkeys(messages):
        print(labelled("messages", transport))
    announce_backend(prepared.run.config, prepared.launch)
    options = prepared.options
    output_len = max(shape.output_len for shape in options.shapes)
    drafting = [each for each in options.passes if each.is_drafting]
    for system in [prepared.system_of(drafting[0])] if drafting else ():
        announce_limits(system.run.config, options.longest_prompt, output_len, prepared.launch)
    announce_plain_words(prepared.run)
    print(labelled("memory", prepared.memory, START), flush=True)


def conclude(
    record_file: RecordFile, records: Sequence[PassRecord], is_verbose: bool = True
) -> int:
    """Says where the records are. Returns the exit code: `FAILED` if one was lost, or has wrong
    tokens."""
    warn_of_load([record.environment for record in records], "modes")
    noun = "record" if record_file.count == 1 else "records"
    path = record_file.path
    more = "" if is_verbose else f"; all metrics: magicdec table {path}"
    print(f"{record_file.count} {noun} appended to {path}{more}", file=sys.stderr)
    is_wrong = any(record.status == Status.MISMATCH for record in records)
    return FAILED if is_wrong or record_file.count < len(records) else 0


def run(name: str) -> NoReturn:

    def serve(words: Sequence[str], launch: Launch) -> int:
        with ended_at_once(launch):
            experiment = COMMANDS[name].parse(words, launch)
        return experiment.run(words, launch)

    run_ranks(serve)


main, inflight, recurrent, pipeline = (partial(run, name) for name in COMMANDS)
