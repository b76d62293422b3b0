"""`magicdec advise`: does speculation pay for this model on this machine? It runs a few drafts on a
short workload, probes the machine, predicts longer contexts, and ends in one sentence and the
command to run.

    magicdec advise --model checkpoints/Llama-3.2-1B --dataset books.jsonl
    magicdec advise --model checkpoints/Llama-3.2-1B --dataset books.jsonl --nproc 2

`magicdec probe` and `magicdec run` measure, each in a process of its own, so that advice for
several ranks is the same code. The prediction is that of `magicdec plan`.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from magicdec.cli.drivers import RUN
from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import Values
from magicdec.cli.plan import PlanSection
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    NGRAM,
    NONE,
    SELF,
    DraftChoice,
    KVSection,
    ModelSection,
    OutputSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.config.setting import same
from magicdec.console import spinner
from magicdec.distributed.ranks import INTERRUPTED, is_launched, run_command
from magicdec.hardware.ceiling_file import load_machine
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.names import DEFAULT_KV_POLICY, FULL_KV_POLICY, KV_POLICIES, LOW_BIT, NGRAM_AND
from magicdec.pipelined_speculation.options import Options
from magicdec.records.intervals import LEVEL, ratio_interval
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord
from magicdec.records.table import method
from magicdec.records.writing import append_file, check_writable

if TYPE_CHECKING:
    from magicdec.cost_model.plan import Plan

CLOSE = 0.15  # a plan within this share of the measurement is said to agree with it
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


@dataclass(frozen=True)
class Measured:
    """A short run with a draft: the flags that name it, and its net speedup over decoding without
    one. `interval` is its interval, which holds with 95 % for all `num_drafts` that were tried, of
    which this is the best; None if the run had too few batches. `predicted` is the plan's net
    speedup at the same place, None where it has none."""

    draft: str
    speedup: float
    interval: Sequence[float] | None = None
    predicted: float | None = None
    num_drafts: int = 1


def describe_advice(best: Measured, place: str, expectation: str) -> str:
    """Whether speculation pays, with which draft, what the plan expects of other contexts, and how
    sure that is. `place` says where it was measured, such as `B 4 and 2048 tokens of context`."""
    verdict, draft = "pays here", f"`{best.draft}`"
    if best.speedup <= 1:
        verdict, draft = "does not pay here", f"the best draft, {draft},"
    between = ""
    if best.interval is not None:
        of_all = f" for all {best.num_drafts} drafts together" if best.num_drafts > 1 else ""
        low, high = best.interval
        between = f" (95 % interval{of_all}: {low:.2f} to {high:.2f})"
        if best.interval[0] <= 1 <= best.interval[1]:
            verdict = "may or may not pay here"
    return (
        f"Speculation {verdict}: at {place}, {draft} was {best.speedup:.2f} times as fast as "
        f"decoding without drafts{between}; {expectation}{_how_sure(best)}."
    )


def _how_sure(best: Measured) -> str:
    if best.interval is None:
        return "unsure, because so few batches have no interval: give --num_batches 3 or more"
    if best.interval[0] <= 1 <= best.interval[1]:
        return "unsure, because the interval includes 1: give more --num_batches"
    if best.predicted is None:
        return "sure of this place, which says nothing of other contexts for this draft"
    expectation = f"because the plan expected {best.predicted:.2f} times here"
    if abs(best.predicted / best.speedup - 1) <= CLOSE:
        return f"sure, {expectation} too"
    return f"sure of this place but not of other contexts, {expectation}"


LONGEST = 16  # the plan looks at contexts of up to so many times the measured one


@dataclass(frozen=True)
class AdviceSection:
    """The runs that advice rests on, and the files."""

    model: str = same(ModelSection, "model")
    draft: tuple[str, ...] = same(DraftChoice, "draft", tuple({words[1]: 0 for words in SOURCES}))
    budget: tuple[int, ...] = same(KVSection, "budget", (65, 257), least=1)
    gamma: int = same(Options, "gamma")
    dataset: str = same(WorkloadSection, "dataset")
    B: int = same(WorkloadSection, "batch_size", 1)
    prefix_len: int = same(WorkloadSection, "prefix_len", 2048)
    gen_len: int | None = same(WorkloadSection, "gen_len")
    num_batches: int = same(WorkloadSection, "num_batches", 5)
    nproc: int | None = same(ParallelSection, "nproc")
    machine: Path = same(PlanSection, "machine", Path("machine.json"))
    out: Path = same(OutputSection, "results", Path(OutputSection.results))

    @property
    def num_new_tokens(self) -> int:
        return self.gen_len or DEFAULT_GEN_LEN

    @property
    def num_ranks(self) -> int:
        return self.nproc or 1

    @property
    def workload(self) -> list[str]:
        """The flags that all runs have, and the command to run has too."""
        values = {
            "model": self.model, "dataset": self.dataset, "B": self.B,
            "prefix_len": self.prefix_len, "gen_len": self.num_new_tokens, "nproc": self.num_ranks,
        }  # fmt: skip
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def advise(values: Values) -> int:
    """Run, probe and plan, and say what follows."""
    if is_launched():
        raise ValueError("advise starts the ranks itself; give --nproc instead of torchrun")
    args = values[AdviceSection]
    commands = make_commands(args)
    check_writable("--out", args.out)
    args = replace(args, machine=find_machine(args))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "records.jsonl")
        try:
            records = {name: measure(words, file) for name, words in commands.items()}
        finally:
            append_file("--out", file, args.out)
        if not args.machine.exists():
            probe(args)
        warn_of_other_machine(args, records)
        print(find_advice(args, records, make_plan(args, records, file)))
    return 0 if all(record.passed for record in records.values()) else 1


def make_commands(args: AdviceSection) -> dict[str, list[str]]:
    """The run of each source, by the flags that name it. Models that are named as on the hub are
    fetched. Raises ValueError for what cannot run; a policy or weights that cannot are left out
    with a line."""
    commands = {}
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
            print(f"left out   {shlex.join(source)}: {error}")
            continue
        with_local_models(config)
        commands[shlex.join(flags)] = ["run", *words]
    return commands


def find_sources(args: AdviceSection) -> list[list[str]]:
    """The flags of each way to draft, in the order of `--draft`."""
    sources = []
    for draft in args.draft:
        if draft == NONE:
            raise ValueError(f"--draft {NONE}: every draft is compared with it; leave it out")
        for words in [words for words in SOURCES if words[1] == draft] or [["--draft", draft]]:
            budgets: Sequence[int] = args.budget if words[2:] == [] else [max(args.budget)]
            ends = [["--budget", str(budget)] for budget in budgets]
            sources += [words + end for end in (ends if SELF in draft.split("+") else [[]])]
    return sources


def find_machine(args: AdviceSection) -> Path:
    """The machine file, which is written if it does not exist: that of `--machine`, or one beside
    it if that was probed with another number of ranks, which share the machine differently and
    whose link it lacks. Raises ValueError for one that cannot be read or written."""
    path, wanted = args.machine, args.num_ranks
    ranks = probed_ranks(path, wanted)
    if ranks != wanted:
        path = path.with_stem(f"{path.stem}-nproc{wanted}")
        print(f"machine    {args.machine} was probed with --nproc {ranks}; {path} is for {wanted}")
        ranks = probed_ranks(path, wanted)
    if ranks != wanted:
        raise ValueError(
            f"--machine {path} was probed with --nproc {ranks}, not {wanted}; make it again: "
            f"magicdec probe --nproc {wanted} --out {shlex.quote(str(path))}"
        )
    if path.exists():
        print(f"machine    {path}, probed before")
    else:
        check_writable("--machine", path)
    return path


def probed_ranks(path: Path, default: int) -> int:
    """The number of ranks with which a machine file was probed; `default` if there is no file."""
    if not path.exists():
        return default
    return int(load_machine(path).description.get("world_size", default))


def warn_of_other_machine(args: AdviceSection, records: dict[str, RunRecord]) -> None:
    """Say what of the machine file is not of the machine, or of the threads, of the runs."""
    probed = load_machine(args.machine).description
    here = vars(next(iter(records.values())).environment)
    kinds = [key for key in ("cpu", "gpu", "threads") if probed.get(key, here[key]) != here[key]]
    if kinds:
        of = ", ".join(f"{key} {probed[key]}, here {here[key]}" for key in kinds)
        print(
            f"warning: --machine {args.machine} was probed with {of}; what the plan expects is of "
            "that machine. Name another file, which need not exist.",
            file=sys.stderr,
        )


def probe(args: AdviceSection) -> None:
    """Measure the rates of the machine."""
    print("machine    probing", flush=True)
    with spinner("probing the machine", True):
        ended = run_command(["probe", "--nproc", args.num_ranks, "--out", args.machine])
    if ended.code:
        raise ValueError(ended.error)
    print(ended.stderr, end="", file=sys.stderr)


def measure(words: list[str], file: Path) -> RunRecord:
    """The record of a run, which is appended to `file`. Raises ValueError if the run leaves none,
    and KeyboardInterrupt if it was interrupted."""
    from magicdec.study.progress import shown

    num_before = len(load_records(file)) if file.exists() else 0
    with spinner(" ".join(words), True):
        ended = run_command([*words, "--out", file])
    if ended.code == INTERRUPTED:
        raise KeyboardInterrupt
    records = load_records(file) if file.exists() else []
    if len(records) == num_before:
        raise ValueError(ended.error)
    record, net = records[-1], net_speedup(records[-1])
    ending = f", net {net:.2f}x" if net else ""
    print(f"{'run':<10} {method(record)}: {shown(record)}{ending}", flush=True)
    return record


def net_speedup(record: RunRecord) -> float:
    """0 for a run without one."""
    return (record.metrics.net_speedup if record.metrics else None) or 0.0


def least_speedup(record: RunRecord) -> float:
    """The lower end of the interval of the net speedup, or the speedup where there is no interval.
    Drafts are ranked by it: of many noisy runs, the one with the highest speedup is often the one
    that was disturbed most."""
    interval = record.metrics.net_speedup_interval if record.metrics else None
    return interval[0] if interval else net_speedup(record)


def find_advice(args: AdviceSection, records: dict[str, RunRecord], plan: Plan | None) -> str:
    """The sentence, and in a line of its own the command to run. Raises ValueError if no run has a
    speedup."""
    flags, record = max(records.items(), key=lambda item: least_speedup(item[1]))
    if not net_speedup(record) or record.metrics is None:
        raise ValueError("no run has a speedup: their tokens differ, or the weights are random")
    predicted, kv = None, record.config["kv"]
    if plan is not None and record.config["decoding"]["drafter"] == SELF:
        candidate = next(each for each in plan.candidates() if each.budget == kv["budget"])
        here = candidate.predict(args.B, args.prefix_len, args.gamma)
        predicted = here.net_speedup(args.num_new_tokens)
    # The best of many drafts without a gain has a gain by chance: each has a share of the 5 %.
    ratios, num_drafts = record.metrics.net_speedup_per_batch or (), len(records)
    interval = ratio_interval(ratios, 1 - (1 - LEVEL) / num_drafts)
    best = Measured(flags, net_speedup(record), interval, predicted, num_drafts)
    place = f"B {args.B} and {args.prefix_len} tokens of context"
    sentence = describe_advice(best, place, "" if plan is None else expectation_of(plan, args))
    drafts = shlex.split(flags) if best.speedup > 1 else ["--draft", NONE]
    return f"{sentence}\n\n    {shlex.join(['magicdec', 'run', *drafts, *args.workload])}"


def expectation_of(plan: Plan, args: AdviceSection) -> str:
    """The contexts in which the plan expects self-speculation to pay, as a part of a sentence."""
    pays_from = plan.break_even(args.B)
    expected = "not to pay at long contexts"
    if pays_from is not None:
        context = plan.prefix_lens[-1]
        far = plan.predict(args.B, context)
        expected = f"to pay from {pays_from} tokens on"
        if far.gamma:
            expected += (
                f", and {far.net_speedup(args.num_new_tokens):.2f} times at {context} with "
                f"`--kv_policy {plan.kv_policy} --budget {far.budget} --gamma {far.gamma}`"
            )
    return f"the plan expects self-speculation {expected}; "


def make_plan(args: AdviceSection, records: dict[str, RunRecord], file: Path) -> Plan | None:
    """The plan for the KV policy and the weights of the fastest self-speculation, with the
    acceptance of the runs in the file. None if none of them is self-speculation that has one."""
    from magicdec.cli import plan
    from magicdec.model.presets.presets import find_config

    own = [
        record for record in records.values()
        if record.config["decoding"]["drafter"] == SELF
        and record.metrics and record.metrics.acceptance_per_position
    ]  # fmt: skip
    if not own:
        return None
    config = max(own, key=least_speedup).config
    name = config["model"]["model"]
    longest = find_config("--model", name).max_length
    contexts = sorted({min(args.prefix_len * n, longest) for n in (1, 4, LONGEST)})
    section = plan.PlanSection(
        model=name,
        machine=args.machine,
        acceptance=(str(file),),
        dtype=config["model"]["dtype"],
        kv_policy=config["kv"]["policy"],
        draft_weights=config["decoding"].get("draft_weights"),
        B=(args.B,),
        gen_len=args.gen_len,
        tp=args.num_ranks,
        prefix_len=tuple(contexts),
    )
    return plan.make_plan(section)


main = LoneCommand(
    advise,
    "Find out whether speculation pays for a model on this machine: run several drafts on the same "
    "prompts, probe the machine, predict longer contexts, and say it in one sentence, with the "
    "command to run.",
    {"advice": AdviceSection()},
)
