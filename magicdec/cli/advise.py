"""`magicdec advise`: does speculation pay for this model on this machine? It runs a few drafts on a
short workload, probes the machine, predicts longer contexts, and ends in one sentence and the
command to run.

    magicdec advise --model checkpoints/Llama-3.2-1B --dataset books.jsonl --nproc 2

All drafts share one prefill and one baseline (`bench/study/drafts.py`). What is done when the user
or `--time` ends it is kept and reported.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from magicdec.cli.advice import describe_runs, find_advice, make_plan
from magicdec.cli.drivers import RUN
from magicdec.cli.flags import run_on_ranks, run_ranks
from magicdec.cli.parsing.parser import Parser
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.cli.plan import PlanSection
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    FIXED_GAMMA,
    NGRAM,
    NONE,
    SELF,
    DecodingSection,
    DraftChoice,
    KVSection,
    ModelSection,
    OutputSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.config.setting import same, setting
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import LAUNCHER, find_world_size, has_lost_launcher
from magicdec.distributed.watching.watch import stop_watching, watch_ranks
from magicdec.hardware.ceiling_file import MachineFile, load_machine, load_quiet_machine
from magicdec.hardware.other_load import warn_of_load
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.names import (
    DEFAULT_KV_POLICY,
    FULL_KV_POLICY,
    KV_POLICIES,
    LOW_BIT,
    NGRAM_AND,
    WITHOUT_BUDGET,
)
from magicdec.output.console import labelled, make_progress
from magicdec.output.writing import check_record_file, check_writable
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import append_records

if TYPE_CHECKING:
    from magicdec.bench.study.drafts import BaselineTimes, Found

# The ways to draft that are tried if `--draft` names their draft. What drafts for itself is tried
# with every `--budget`, or with the largest if it has flags of its own.
SOURCES = (
    ["--draft", SELF],
    *(
        ["--draft", SELF, "--kv_policy", policy]
        for policy in KV_POLICIES
        if policy not in (DEFAULT_KV_POLICY, FULL_KV_POLICY)
    ),
    *(["--draft", SELF, "--draft_weights", weights] for weights in LOW_BIT),
    ["--draft", NGRAM],
    ["--draft", NGRAM_AND + SELF],
)


COMPARED_S = 120.0  # at most about this for the comparison with transformers
LEAST_S = 30.0  # of --time: loading, a trial and a few passes
PROBED_S = 180.0  # of --time, from which there is time to probe
UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_time(text: str) -> float:
    """Seconds of a text such as 90s, 5m, 1h or 90. Raises ValueError."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS else (text, "s")
    try:
        seconds = float(number) * UNITS[unit]
    except ValueError:
        seconds = math.nan
    if not LEAST_S <= seconds < math.inf:
        raise ValueError(
            f"{text} is no time of at least {LEAST_S:.0f}s; give one such as 90s or 5m"
        )
    return seconds


@dataclass(frozen=True)
class AdviceSection:
    model: str = same(ModelSection, "model")
    draft: tuple[str, ...] = same(DraftChoice, "draft", tuple({words[1]: 0 for words in SOURCES}))
    budget: tuple[int, ...] = same(KVSection, "budget", (65, 257), least=1)
    gamma: int = same(DecodingSection, "gamma", FIXED_GAMMA, words=())
    dataset: str = same(WorkloadSection, "dataset")
    B: int = same(WorkloadSection, "batch_size", 1)
    prefix_len: int = same(WorkloadSection, "prefix_len", 2048)
    gen_len: int | None = same(WorkloadSection, "gen_len")
    num_batches: int = same(WorkloadSection, "num_batches", 5)
    time: float | None = setting(
        None,
        "The answer comes within this time, such as 90s or 5m: lengths and batches that were not "
        "given are cut down, then drafts, batches and texts left out, and it is said which.",
        parse=parse_time,
        metavar="TIME",
        other_defaults="120 s in model check",
    )
    nproc: int | None = same(ParallelSection, "nproc")
    machine: Path = same(PlanSection, "machine", Path("machine.json"))
    allow_busy_machine: bool = same(PlanSection, "allow_busy_machine")
    out: Path = same(OutputSection, "results", Path(OutputSection.results))

    @property
    def num_new_tokens(self) -> int:
        return self.gen_len or DEFAULT_GEN_LEN

    @property
    def num_ranks(self) -> int:
        return self.nproc or 1

    @property
    def workload(self) -> list[str]:
        """The flags of all runs and of the advised command."""
        values = {
            "model": self.model,
            "dataset": self.dataset,
            "B": self.B,
            "prefix_len": self.prefix_len,
            "gen_len": self.num_new_tokens,
            "nproc": self.num_ranks,
        }
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def run(words: Sequence[str], launch: Launch) -> int:
    """Probes, runs and plans on all ranks; the first one reports."""
    began_s = time.monotonic()
    values = build_parser().read(words)
    args = values[AdviceSection]
    args = replace(args, nproc=find_world_size(args.nproc, launch))
    configs, notes = make_configs(args)
    if launch.rank == 0:
        check_record_file("--out", args.out)
    machine, note = find_machine(args)
    configs = {name: with_local_models(config) for name, config in configs.items()}
    compare_model(next(iter(configs.values())).model.model, args, launch)
    run_on_ranks(args.nproc, words, launch, partial(check_heads, next(iter(configs.values()))))
    for line in (*notes, *note) if launch.rank == 0 else ():
        print(line, flush=True)
    with StopRequests(launch) as stop:
        advice = Advice(replace(args, machine=machine), values.given, launch, began_s, stop)
        try:
            return advice.give(configs)
        except KeyboardInterrupt:
            stop_watching()
            if launch.rank == 0:
                print(f"interrupted; {advice.kept}", file=sys.stderr)
            return stop.code


main = partial(run_ranks, run)


def build_parser() -> Parser:
    return Parser(
        "Find out whether speculation pays for a model on this machine: probe it, run several "
        "drafts on the same prompts, predict longer contexts, and say it in one sentence, with the "
        "command to run.",
        {"advice": AdviceSection()},
    )


class StopRequests:
    """A context in which SIGINT and SIGTERM end the measuring, not the report. Ranks that wait for
    each other end after the current pass. A second request ends the command."""

    def __init__(self, launch: Launch) -> None:
        self.has_other_ranks = launch.world_size > 1
        self.number = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequests:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.number
        self.number = self.number or number
        if has_lost_launcher():  # nobody waits for a report
            os._exit(self.code)
        if not (self.has_other_ranks and is_first):
            raise KeyboardInterrupt

    def is_requested(self) -> bool:
        return self.number != 0

    @property
    def code(self) -> int:
        return 128 + (self.number or signal.SIGINT)


class Advice:
    """One rank's part. `given` has the names of settings that the user gave."""

    def __init__(
        self,
        args: AdviceSection,
        given: frozenset[str],
        launch: Launch,
        began_s: float,
        stop: StopRequests,
    ) -> None:
        self.args = args
        self.given = given
        self.launch = launch
        self.stop = stop
        self.is_leader = launch.rank == 0
        self.kept = "nothing was measured yet"
        self.deadline_s = None if args.time is None else began_s + args.time

    def give(self, configs: dict[str, RunConfig]) -> int:
        from magicdec.bench.study.drafts import DraftTrials
        from magicdec.bench.study.progress import PassProgress
        from magicdec.distributed.start import close_groups

        watch_ranks(self.launch)
        first = next(iter(configs.values()))
        has_rates = self.find_rates(first)
        progress = make_progress(self.is_leader)
        is_requested = self.stop.is_requested
        pace = PassProgress(progress, self.launch, self.deadline_s, is_requested)
        drafts = DraftTrials(self.launch, pace)
        if self.deadline_s is not None:
            configs = self.cut_down(configs, drafts.trial(first))
        found = drafts.measure(configs)
        if not (has_rates or found.is_broken or found.is_interrupted or self.args.time):
            has_rates = self.find_rates(first, is_last=True)
        if found.is_broken:
            stop_watching()
        else:
            close_groups()
        if self.is_leader:
            self.report(found, has_rates)
        if found.error is not None:
            raise found.error
        if self.stop.is_requested():
            return self.stop.code
        return int(not all(record.passed for record in found.records.values()))

    def find_rates(self, config: RunConfig, is_last: bool = False) -> bool:
        """Probes the machine unless its file exists. Returns whether there are rates to plan with.
        On a busy host it is asked once more when the drafts are measured (`is_last`), since the
        other load may have ended; with `--time` there is no time for that."""
        args = self.args
        prediction = "the prediction for other contexts"
        if args.machine.exists():
            return True
        if args.time is not None and args.time < PROBED_S:
            self.leave_out(f"{prediction}: a probe needs --time {PROBED_S:.0f}s, or --machine")
            return False
        machine = self.probe(config)
        if not machine.busy or args.allow_busy_machine:
            if self.is_leader:
                machine.save(args.machine, "--machine")
            return True
        if is_last or args.time is not None:
            words = ["magicdec", "probe", "--nproc", str(args.num_ranks), "--out", args.machine]
            command = shlex.join(map(str, words))
            self.leave_out(
                f"{prediction}: {machine.busy} when the machine was probed. When nothing else "
                f"runs: `{command}`, then this command again; or with --allow_busy_machine"
            )
        elif self.is_leader:
            again = f"{machine.busy}, so it is probed again when the drafts are measured"
            print(labelled("machine", again), flush=True)
        return False

    def probe(self, config: RunConfig) -> MachineFile:
        from magicdec.config.resolve import resolve
        from magicdec.hardware.environment import probe_machine
        from magicdec.predict.probe import measure_in
        from magicdec.setup.session import RankSession

        if self.is_leader:
            print(labelled("machine", "probing, about half a minute"), flush=True)
        machine = probe_machine(self.launch)
        resolved = resolve(RunConfig(parallel=config.parallel), machine)
        session = RankSession(self.launch, resolved.parallel)
        session.open()
        found = measure_in(session, resolved, machine)
        return session.groups.target.all_gather_values(found, MachineFile)[0]

    def cut_down(self, configs: dict[str, RunConfig], rates: BaselineTimes) -> dict[str, RunConfig]:
        from magicdec.bench.study.drafts import fitting

        assert self.deadline_s is not None
        asked = next(iter(configs.values())).workload
        fixed = frozenset(name.removeprefix("advice.") for name in self.given)
        seconds = self.deadline_s - time.monotonic()
        fitted = fitting(asked, fixed, rates, len(configs), seconds)
        for name in ("prefix_len", "num_batches", "gen_len"):
            wanted = getattr(asked, name)
            taken = getattr(fitted, name)
            if wanted != taken:
                self.leave_out(f"--{name} {wanted}, for which there is no time; {taken} instead")
        self.args = replace(
            self.args,
            prefix_len=fitted.prefix_len,
            gen_len=fitted.num_new_tokens,
            num_batches=fitted.most_batches,
        )
        return {name: replace(config, workload=fitted) for name, config in configs.items()}

    def leave_out(self, what: str) -> None:
        if self.is_leader:
            print(labelled("left out", what), flush=True)

    def report(self, found: Found, has_rates: bool) -> None:
        """Keeps the records, and prints the advice. Raises ValueError if there is none."""
        args = self.args
        records = found.records
        if not records and found.is_interrupted:
            raise KeyboardInterrupt
        if not records and found.error is not None:
            return
        if not records and args.time is not None:
            raise ValueError(f"--time {args.time:.0f}s is too short for a pass; give more")
        passes = [record for draft_records in found.passes.values() for record in draft_records]
        append_records("--out", args.out, passes)
        self.kept = f"{len(passes)} records are in {args.out}"
        for what in found.left_out:
            self.leave_out(what)
        for line in describe_runs(records):
            print(line, flush=True)
        if found.is_interrupted:
            print(f"interrupted; {self.kept}, and this is what they say:", file=sys.stderr)
        warn_of_load([record.environment for record in records.values()], "runs")
        plan = None
        if has_rates:
            warn_of_other_machine(args, records)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "records.jsonl")
                append_records("--out", file, records.values())
                plan = make_plan(args, records, file)
        print(find_advice(args, records, plan))


def make_configs(args: AdviceSection) -> tuple[dict[str, RunConfig], list[str]]:
    """The run of each source by its flags, and lines for policies or weights that cannot run.
    Raises ValueError for other runs that cannot."""
    configs = dict[str, RunConfig]()
    notes = list[str]()
    for source in find_sources(args):
        # A lookup drafts as many tokens as its evidence supports.
        flags = source + ([] if NGRAM in source[1] else ["--gamma", str(args.gamma)])
        words = [*flags, *args.workload, "--num_batches", str(args.num_batches), "--ignore_eos"]
        config = RUN.read(words)
        try:
            config.check(args.num_ranks)
        except ValueError as error:
            if not {"--kv_policy", "--draft_weights"} & {*source}:
                raise
            notes.append(labelled("left out", f"{shlex.join(source)}: {error}"))
            continue
        configs[shlex.join(flags)] = config
    return configs, notes


def compare_model(name: str, args: AdviceSection, launch: Launch) -> None:
    """Compares the model with that of transformers, unless this was done before, in the process
    that the user started. Raises ValueError if they differ."""
    from magicdec.bench.model_check import check_model
    from magicdec.model.checkpoint.checked import DIFFERS, TOLD, is_exempt, outcome_of
    from magicdec.model.checkpoint.source import find_model

    if launch.rank != 0 or LAUNCHER in os.environ:
        return
    source = find_model("--model", name)
    if is_exempt(source):
        return
    outcome = outcome_of(source)
    if outcome in (None, TOLD):
        most_s = COMPARED_S if args.time is None else min(COMPARED_S, args.time / 5)
        outcome = check_model(name, most_s, lambda line: print(line, flush=True)).outcome
    else:
        print(labelled("model", f"compared with transformers before: {outcome}"), flush=True)
    if outcome == DIFFERS:
        raise ValueError(
            f"--model {name} is not computed as transformers computes it, so that there is no "
            f"advice; see magicdec model check {name}"
        )


def find_sources(args: AdviceSection) -> list[list[str]]:
    """The flags of each way to draft, in the order of `--draft`."""
    sources = []
    for draft in args.draft:
        if draft == NONE:
            raise ValueError(f"--draft {NONE}: every draft is compared with it; leave it out")
        for words in [words for words in SOURCES if words[1] == draft] or [["--draft", draft]]:
            budgets: Sequence[int] = args.budget if words[2:] == [] else [max(args.budget)]
            ends = [["--budget", str(budget)] for budget in budgets]
            has_budget = SELF in draft.split("+") and not set(words) & set(WITHOUT_BUDGET)
            sources += [words + end for end in (ends if has_budget else [[]])]
    return sources


def find_machine(args: AdviceSection) -> tuple[Path, list[str]]:
    """The machine file, new or not, and notes for the user: `--machine`, or one beside it if that
    was probed with another number of ranks, which share the machine differently. Raises ValueError
    for a file that cannot be read or written, or of a busy host."""
    path = args.machine
    wanted = args.num_ranks
    notes = list[str]()
    ranks = probed_ranks(path, wanted)
    if ranks != wanted:
        path = path.with_stem(f"{path.stem}-nproc{wanted}")
        probed = f"{args.machine} was probed with --nproc {ranks}; {path} is for {wanted}"
        notes.append(labelled("machine", probed))
        ranks = probed_ranks(path, wanted)
    if ranks != wanted:
        raise ValueError(
            f"--machine {path} was probed with --nproc {ranks}, not {wanted}; make it again: "
            f"magicdec probe --nproc {wanted} --out {shlex.quote(str(path))}"
        )
    if path.exists():
        load_quiet_machine(path, args.allow_busy_machine)
        notes.append(labelled("machine", f"{path}, probed before"))
    else:
        check_writable("--machine", path)
    return path, notes


def probed_ranks(path: Path, default: int) -> int:
    if not path.exists():
        return default
    return int(load_machine(path).description.get("world_size", default))


def warn_of_other_machine(args: AdviceSection, records: Mapping[str, PassRecord]) -> None:
    """Warns if the machine file is of another machine or other threads than the runs."""
    probed = load_machine(args.machine).description
    here = vars(next(iter(records.values())).environment)
    kinds = [key for key in ("cpu", "gpu", "threads") if probed.get(key, here[key]) != here[key]]
    if kinds:
        differences = ", ".join(f"{key} {probed[key]}, here {here[key]}" for key in kinds)
        print(
            f"warning: --machine {args.machine} was probed with {differences}; what the plan "
            "expects is of that machine. Name another file, which need not exist.",
            file=sys.stderr,
        )
