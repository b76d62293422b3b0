"""`magicdec serve`: the same requests in every named mode, in one table; and its presets, which
differ in their defaults alone (`cli/presets.py`).

    magicdec serve --nproc 3 --draft model:demo-draft --modes sequential inflight ring
    torchrun --nproc_per_node 2 tests/pipeline_benchmark.py --layer_split 0,1.0/head

Heavy imports happen after the flags are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from magicdec.cli.flags import (
    FAILED,
    announce_run,
    config_of,
    measure_on_ranks,
    say_interrupted,
    sections_of,
    start,
)
from magicdec.cli.parsing.ignored import refuse_ignored
from magicdec.cli.parsing.parser import ConfigFile, ParsedValues, Parser
from magicdec.cli.parsing.rank_checks import check_nproc
from magicdec.cli.presets import PRESETS
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
from magicdec.config.setting import declared, setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import find_world_size
from magicdec.hardware.other_load import warn_of_load
from magicdec.output.console import START, labelled
from magicdec.output.figures import check_picture
from magicdec.output.tables import print_tables
from magicdec.output.writing import append_line, check_files, check_record_file, to_json, write_text
from magicdec.records.record import Status
from magicdec.systems.declaration import Ranks, SystemSettings
from magicdec.systems.modes import DEFAULT_NAMES, MODES, SYSTEMS, Pass
from magicdec.systems.options import ServeOptions, with_values
from magicdec.workload.prompt_sets import is_prompt_set
from magicdec.workload.request_shapes import TRACE, UNIFORM, parse_arrival
from magicdec.workload.traces.replay import Replay

if TYPE_CHECKING:
    from magicdec.bench.measure import MeasuredPasses
    from magicdec.bench.prepare import PreparedServing
    from magicdec.records.pass_record import PassRecord

SettingsT = TypeVar("SettingsT", ServeOptions, SystemSettings)
EXTERNAL = tuple(name for name, mode in MODES.items() if mode.ranks is Ranks.NONE)
DRAFTING_SETTINGS = ("serving.emulate_acceptance",)  # settings of every pass that drafts
WEIGHT_SETTINGS = (
    "decoding.draft_weights",
    *(f"model.{name}" for name in ("linear", "elementwise", "native_steps", "target_dtype")),
)
EVERYDAY = (
    *("--model", "--dataset", "--num_requests", "--arrival", "--concurrency", "--turns"),
    *("--prefix_len", "--gen_len"),
    *("--modes", "--draft", "--gamma", "--B", "--n_samples", "--layer_split", "--temperature"),
    *("--goodput", "--nproc", "--plot", "--trace", "--out"),
)
WITHOUT_EOS = ("gamma", "draft_weights", "cuda_graphs", "pa")
# Sections of which only some settings have a flag here.
ONLY = {
    "draft": ("rank_group",),
    "decoding": (*WITHOUT_EOS, "ignore_eos"),
    "workload": ("dataset", "prompt_format", "skip_tokens", "seed"),
    "output": ("results", "verbose"),
}


@dataclass(frozen=True)
class ServeFilesSection(PictureSection):
    trace: Path | None = setting(
        None,
        "Write what every request and every stage did when, in all repeats, in the Chrome trace "
        "format, for chrome://tracing or ui.perfetto.dev.",
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
    """A name of the command, as `presets.PRESETS` has it, with its help, its modes, and `defaults`
    by names of settings."""

    description: str
    modes: tuple[str, ...] = DEFAULT_NAMES
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rows_of: str | None = None

    def build_parser(self) -> Parser:
        sections = {
            "file": ConfigFile(),
            "drafts": DraftChoice(self.defaults.get("draft", NONE)),
            **sections_of(self.base),
            "serving": self._with_defaults(ServeOptions()),
            **{name: self._with_defaults(system.settings()) for name, system in SYSTEMS.items()},
            "files": ServeFilesSection(),
        }
        has_eos = not self.base.decoding.ignore_eos
        only = ONLY if has_eos else ONLY | {"decoding": WITHOUT_EOS}
        return Parser(self.description, sections, only, everyday=EVERYDAY)

    def _with_defaults(self, section: SettingsT) -> SettingsT:
        kind: type = type(section)
        own = declared(kind)
        return replace(section, **{k: value for k, value in self.defaults.items() if k in own})

    @property
    def base(self) -> RunConfig:
        ignore_eos = self.defaults.get("ignore_eos", False)
        return RunConfig(draft=DraftSection(), decoding=DecodingSection(ignore_eos=ignore_eos))

    def parse(self, words: Sequence[str], launch: Launch) -> ServeCommand:
        """The experiment of a command line. Raises ValueError, one line naming the flag, for errors
        of any model."""
        values = self.build_parser().read(words)
        options = values[ServeOptions]
        settings = {name: values.sections[name] for name in SYSTEMS}
        files = values[ServeFilesSection]
        config = config_of(values, self.base)
        world_size = find_world_size(config.parallel.nproc, launch)
        draft = values[DraftChoice].draft
        is_named = "drafts.draft" in values.given
        config.with_draft(draft)
        passes = self.passes(options, settings, draft, world_size)
        drafting = [serving_pass for serving_pass in passes if serving_pass.is_drafting]
        sleeping = [
            serving_pass for serving_pass in passes if settings[serving_pass.system.name].emulates
        ]
        has_rates = options.emulate_acceptance is not None
        needs_draft = [
            serving_pass
            for serving_pass in drafting
            if not (has_rates and serving_pass.drafts_ahead and serving_pass in sleeping)
        ]
        if not is_named and not needs_draft:
            draft = NONE
        elif drafting and not needs_draft and draft != NONE:
            values.refuse_given(["drafts.draft"], "--emulate_acceptance drafts")
        if sleeping:
            values.refuse_given(WEIGHT_SETTINGS, "emulated stages have no weights")
        config = config.with_draft(draft)
        if draft != NONE and any(map(options.accepts_by_chance, passes)):
            rates = options.emulate_acceptance
            config = replace(config, decoding=replace(config.decoding, emulate_acceptance=rates))
        # Modes that draft in turns stop by `--pa` as `run` does, which refuses it for lookups.
        # Beside a mode that drafts ahead, for which lookups have it, it is for that mode alone.
        ahead = [serving_pass.drafts_ahead for serving_pass in drafting]
        if all(ahead) or (any(ahead) and config.decoding.looks_up):
            config = replace(config, decoding=replace(config.decoding, pa=DecodingSection.pa))
        config.check(world_size)
        refuse_unused(values, passes)
        used = ["decoding.gamma", "decoding.pa"] if drafting else []
        refuse_ignored(config, values, used)
        self.check_shapes(options, values, config)
        options = options.settle(passes, config.workload.seed, settings)
        if options.replay is not None:
            form = f"--arrival {parse_arrival(options.arrival).process}"
            self.check_sessions(form, options.replay, values, config)
        options = replace(self.with_equal_rows(options, world_size), draft=draft)
        options.check(config, world_size)
        files.check(Path(config.output.results), launch.rank == 0)
        return ServeCommand(config, options, files)

    def passes(
        self,
        options: ServeOptions,
        settings: Mapping[str, SystemSettings],
        draft: str,
        world_size: int,
    ) -> list[Pass]:
        """The named modes, or the possible ones of this command."""
        if options.modes is not None:
            chosen = list(map(Pass.named, options.modes))
        else:
            has_rates = options.emulate_acceptance is not None
            chosen = [
                serving_pass
                for serving_pass in map(Pass.named, dict.fromkeys((*self.modes, *EXTERNAL)))
                if settings[serving_pass.system.name].num_instances
                and (serving_pass.ranks is not Ranks.ALL or world_size > 1)
                and (
                    not serving_pass.is_drafting
                    or draft != NONE
                    or (has_rates and serving_pass.drafts_ahead)
                )
            ]
            chosen = [
                serving_pass
                for serving_pass in chosen
                if settings[serving_pass.system.name].emulates
            ] or chosen
        return [
            replace(serving_pass, server=server, concurrency=concurrency)
            for serving_pass in chosen
            for server in range(settings[serving_pass.system.name].num_instances or 1)
            for concurrency in options.concurrency or (None,)
        ]

    def check_shapes(self, options: ServeOptions, values: ParsedValues, config: RunConfig) -> None:
        """Raises ValueError, naming the flag, for prompts that cannot have the lengths of the load,
        or its turns."""
        dataset = config.workload.dataset
        arrival = parse_arrival(options.arrival)
        has_trace = arrival.process == TRACE
        if arrival.has_sessions:
            return
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
        if options.concurrency is not None:
            values.refuse_given(["serving.arrival"], "--concurrency says when requests arrive")

    def check_sessions(
        self, form: str, replay: Replay, values: ParsedValues, config: RunConfig
    ) -> None:
        """Raises ValueError, naming the flag, for what the sessions of a trace say themselves."""
        dataset = config.workload.dataset
        kind = dataset.partition(":")[0]
        lengths = ["serving.prefix_len", *([] if replay.lacks_lengths else ["serving.gen_len"])]
        values.refuse_given(lengths, "the trace has the lengths")
        if not replay.has_blocks:
            texts = ["workload.dataset", "workload.skip_tokens"]
            return values.refuse_given(texts, "the trace has texts of its own")
        if is_prompt_set(dataset) or kind in ("ruler", "recall"):
            raise ValueError(
                f"--dataset {dataset}: {form} cuts its blocks from running text; give demo, or "
                "files of text"
            )
        if config.workload.prompt_format == CHAT:
            raise ValueError(
                f"--prompt_format {CHAT}: the prompts of {form} are blocks, around which no "
                f"template is; use --prompt_format {PLAIN}"
            )

    def with_equal_rows(self, options: ServeOptions, world_size: int) -> ServeOptions:
        """The options in which every mode has as many rows as `rows_of`."""
        found = [
            serving_pass for serving_pass in options.passes if serving_pass.mode == self.rows_of
        ]
        if not found:
            return options
        rows = options.settings_of(found[0]).rows(options, world_size)
        systems = {
            name: with_values(settings, {"n_samples": rows})
            for name, settings in options.systems.items()
        }
        return replace(options, systems=systems)


def refuse_unused(values: ParsedValues, passes: Sequence[Pass]) -> None:
    """Raises ValueError for a given flag that no named mode declares."""
    modes = " ".join(dict.fromkeys(serving_pass.name for serving_pass in passes))
    names = [name for name in sorted(values.given) if not is_used(name, values, passes)]
    values.refuse_given(names, f"no mode of --modes {modes} uses it")


def is_used(name: str, values: ParsedValues, passes: Sequence[Pass]) -> bool:
    """Whether a pass uses a setting, such as `serving.turns`: one of all runs, or of its system."""
    section, _, own_name = name.partition(".")
    drafts = any(serving_pass.is_drafting for serving_pass in passes)
    owners = [SYSTEMS[owner] for owner in values.owners[name] if owner in SYSTEMS]
    if section in SYSTEMS:
        used = [serving_pass for serving_pass in passes if serving_pass.system in owners]
        return any(
            serving_pass.system.uses_setting(own_name, serving_pass) for serving_pass in used
        )
    if any(own_name in system.draft_settings for system in owners) or name in DRAFTING_SETTINGS:
        return drafts
    users = [system for system in SYSTEMS.values() if name in system.uses]
    used = [serving_pass for serving_pass in passes if serving_pass.system in users]
    return not users or any(serving_pass.is_drafting or section != "draft" for serving_pass in used)


COMMANDS = {name: Command(**preset) for name, preset in PRESETS.items()}


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

    @property
    def kept(self) -> str:
        return (
            f"the records of modes and repeats that had ended are in {self.config.output.results}"
        )

    def run(self, words: Sequence[str], launch: Launch) -> int:
        """Runs the whole command on this rank. Returns its exit code."""
        return measure_on_ranks(self, words, launch)

    def check_ranks(self, config: RunConfig, nproc: int) -> None:
        check_nproc(config, self.options, nproc)

    def preparation(self) -> Callable[[RunConfig, Launch], PreparedServing]:
        from magicdec.bench.prepare import prepare

        return lambda config, launch: prepare(config, self.options, launch)

    def announce(self, prepared: PreparedServing) -> None:
        announce(prepared)

    def conclude(self, prepared: PreparedServing) -> int:
        launch = prepared.launch
        out = Path(self.config.output.results)
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
        from magicdec.bench.measure import measure_modes

        return measure_modes(prepared, record_file.append)

    def print_tables(self, records: Sequence[PassRecord]) -> None:
        from magicdec.bench.showing import tables

        print_tables(tables(records, self.config.output.verbose))

    def show(self, measured: MeasuredPasses) -> None:
        from magicdec.bench.timeline import draw_timeline, served_groups, trace_events

        self.print_tables(measured.records)
        groups = served_groups(measured.records, measured.traces)
        plot = self.files.plot
        trace = self.files.trace
        try:
            if plot is not None:
                draw_timeline(groups, plot, self.files.plot_ms)
                print(f"drawn to {plot}", file=sys.stderr)
            if trace is not None:
                events = trace_events(groups)
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
    options = prepared.options
    output_len = max(shape.output_len for shape in options.shapes)
    drafting = [
        prepared.system_of(serving_pass).run
        for serving_pass in options.passes
        if serving_pass.is_drafting
    ]
    announce_run(prepared.run, next(iter(drafting), None), options.longest_prompt, output_len)
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
    start(COMMANDS[name].parse)


main, inflight, recurrent, pipeline = (partial(run, name) for name in COMMANDS)
