"""`magicdec advise`: does speculation pay for this model on this machine? It probes the machine,
runs a few drafts on a short workload, predicts longer contexts, and ends in one sentence.

    magicdec advise --model checkpoints/Llama-3.2-1B --dataset books.jsonl
    magicdec advise --model checkpoints/Llama-3.2-1B --dataset books.jsonl --nproc 2

`magicdec probe` and `magicdec run` measure, each in a process of its own, so that advice for
several ranks is the same code. The prediction is that of `magicdec plan`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from magicdec.cli.drivers import RUN
from magicdec.cli.flags import refuse
from magicdec.cli.parsing.parser import Parser
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
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
from magicdec.config.setting import same
from magicdec.console import spinner
from magicdec.distributed.groups import Launch
from magicdec.distributed.ranks import INTERRUPTED, is_launched, run_command
from magicdec.hardware.ceiling_file import load_machine
from magicdec.model.checkpoint.hub import with_local_models
from magicdec.pipelined_speculation.options import Options
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord, append_record
from magicdec.records.table import method
from magicdec.records.writing import append_file, check_writable

if TYPE_CHECKING:
    from magicdec.cost_model.plan import Plan

CLOSE = 0.15  # a plan within this share of the measurement is said to agree with it


@dataclass(frozen=True)
class Measured:
    """A short run with a draft: the flags that name it, and its net speedup over decoding without
    one. `interval` is the 95 % interval, None if the run had too few batches. `predicted` is the
    plan's net speedup at the same place, None where it has none."""

    draft: str
    speedup: float
    interval: tuple[float, float] | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class Outlook:
    """What the plan expects of longer contexts: from which one speculation pays (None: from none),
    and the speedup, budget and gamma at the longest one that was predicted."""

    pays_from: int | None
    context: int
    speedup: float
    budget: int | None
    gamma: int


def advise(measured: list[Measured], place: str, outlook: Outlook) -> str:
    """Whether speculation pays, with which draft, from which context on, and how sure that is.
    `place` says where it was measured, such as `B 4 and 2048 tokens of context`."""
    best = max(measured, key=lambda m: m.speedup)
    verdict = f"pays here: at {place}, `{best.draft}` was"
    if best.speedup <= 1:
        verdict = f"does not pay here: at {place}, the best draft, `{best.draft}`, was"
    between = ""
    if best.interval is not None:
        between = f" (95 % interval {best.interval[0]:.2f} to {best.interval[1]:.2f})"
    expected = "pay at no context"
    if outlook.pays_from is not None:
        expected = f"pay from {outlook.pays_from} tokens on"
        if outlook.budget is not None and outlook.gamma:
            expected += (
                f", and {outlook.speedup:.2f} times at {outlook.context} with "
                f"`--budget {outlook.budget} --gamma {outlook.gamma}`"
            )
    return (
        f"Speculation {verdict} {best.speedup:.2f} times as fast as decoding without drafts"
        f"{between}; the plan expects self-speculation to {expected}; {_how_sure(best)}."
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


ALONE = Launch(rank=0, world_size=1, local_rank=0, local_world_size=1)
LONGEST = 16  # the plan looks at contexts of up to so many times the measured one


def main() -> NoReturn:
    """`magicdec advise`"""
    try:
        args = read(sys.argv[1:])
        commands = make_commands(args)
        check_writable("--out", args.out)
        check_runs(commands.values(), args.num_ranks)
        find_machine(args)
        records = {name: measure(words, args.out) for name, words in commands.items()}
        print(find_advice(args, records))
    except ValueError as error:
        refuse(error, ALONE)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(0 if all(record.passed for record in records.values()) else 1)


@dataclass(frozen=True)
class AdviceSection:
    """The runs that advice rests on, and the files."""

    model: str = same(ModelSection, "model")
    draft: tuple[str, ...] = same(DraftChoice, "draft", (SELF, NGRAM))
    budget: tuple[int, ...] = same(KVSection, "budget", (65, 257), least=1)
    gamma: int = same(Options, "gamma")
    dataset: str = same(WorkloadSection, "dataset")
    B: int = same(WorkloadSection, "batch_size", 1)
    prefix_len: int = same(WorkloadSection, "prefix_len", 2048)
    gen_len: int | None = same(WorkloadSection, "gen_len")
    num_batches: int = same(WorkloadSection, "num_batches", 3)
    nproc: int | None = same(ParallelSection, "nproc")
    machine: Path = same(DecodingSection, "machine", Path("machine.json"))
    out: Path = same(OutputSection, "results", Path(OutputSection.results))

    @property
    def num_new_tokens(self) -> int:
        return self.gen_len or DEFAULT_GEN_LEN

    @property
    def num_ranks(self) -> int:
        return self.nproc or 1


def build_parser() -> Parser:
    return Parser(
        "Find out whether speculation pays for a model on this machine: probe the machine, run "
        "several drafts on the same prompts, predict longer contexts, and say it in one sentence.",
        {"advice": AdviceSection()},
    )


def read(words: Sequence[str]) -> AdviceSection:
    """The flags. Raises ValueError for an unknown one, and under torchrun."""
    if is_launched():
        raise ValueError("advise starts the ranks itself; give --nproc instead of torchrun")
    return build_parser().read(words)[AdviceSection]


def make_commands(args: AdviceSection) -> dict[str, list[str]]:
    """The run of each draft, by the flags that name the draft. Models that are named as on the hub
    are fetched. Raises ValueError for what cannot run."""
    commands = {}
    for draft in args.draft:
        if draft == NONE:
            raise ValueError(f"--draft {NONE}: every draft is compared with it; leave it out")
        for budget in args.budget if draft == SELF else [None]:
            name = f"--draft {draft}" + ("" if budget is None else f" --budget {budget}")
            flags = [*name.split(), "--gamma", args.gamma, "--model", args.model]
            flags += ["--dataset", args.dataset, "--B", args.B, "--prefix_len", args.prefix_len]
            flags += ["--gen_len", args.num_new_tokens, "--num_batches", args.num_batches]
            words = [*map(str, flags), "--nproc", str(args.num_ranks), "--ignore_eos"]
            config = RUN.read(words)
            config.check(args.num_ranks)
            with_local_models(config)
            commands[name] = ["run", *words]
    return commands


def check_runs(commands: Iterable[list[str]], nproc: int) -> None:
    """Raises ValueError for a model, a text or a length that cannot be, which the runs would refuse
    only after the machine was probed."""
    from magicdec.setup.prepare import Known, complete, find

    known, launch = Known(), Launch(0, nproc, 0, nproc)
    with spinner("checking the runs", True):
        for _, *words in commands:
            inputs = find(with_local_models(RUN.read(words)), launch, known)
            complete(inputs, known, agree=lambda _, check: check())


def find_machine(args: AdviceSection) -> None:
    """Probe the machine if there is no machine file yet. Raises ValueError for a file of another
    number of ranks, which share the machine differently."""
    if args.machine.exists():
        ranks = load_machine(args.machine).description.get("world_size", args.num_ranks)
        if ranks != args.num_ranks:
            raise ValueError(
                f"--machine {args.machine} was probed with --nproc {ranks}, not {args.num_ranks}; "
                "name another file, which need not exist"
            )
        print(f"machine    {args.machine}, probed before")
        return
    check_writable("--machine", args.machine)
    print("machine    probing", flush=True)
    with spinner("probing the machine", True):
        ended = run_command(["probe", "--nproc", args.num_ranks, "--out", args.machine])
    if ended.code:
        raise ValueError(ended.error)
    print(ended.stderr, end="", file=sys.stderr)


def measure(words: list[str], out: Path) -> RunRecord:
    """The record of a run, which is appended to `out`. Raises ValueError if the run leaves none,
    and KeyboardInterrupt if it was interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "records.jsonl")
        with spinner(" ".join(words), True):
            ended = run_command([*words, "--out", file])
        append_file("--out", file, out)
        if ended.code == INTERRUPTED:
            raise KeyboardInterrupt
        if not file.exists():
            raise ValueError(ended.error)
        record = load_records(file)[-1]
    metrics, speedup = record.metrics, ""
    if metrics is not None and metrics.net_speedup is not None:
        ends = metrics.net_speedup_interval
        between = f" [{ends[0]:.2f}, {ends[1]:.2f}]" if ends else ""
        speedup = f", {metrics.net_speedup:.2f}x{between}"
    print(f"{'run':<10} {method(record)}: {record.status}{speedup}", flush=True)
    return record


def find_advice(args: AdviceSection, records: dict[str, RunRecord]) -> str:
    """The sentence. Raises ValueError if no run has a speedup."""
    plan = make_plan(args, list(records.values()))
    measured = []
    for name, record in records.items():
        metrics = record.metrics
        if metrics is None or metrics.net_speedup is None:
            continue
        ends = metrics.net_speedup_interval
        predicted = None
        if plan is not None and name.startswith(f"--draft {SELF}"):
            budget = record.config["kv"]["budget"]
            candidate = next(c for c in plan.candidates() if c.budget == budget)
            here = candidate.predict(args.B, args.prefix_len, args.gamma)
            predicted = here.net_speedup(args.num_new_tokens)
        interval = None if ends is None else (ends[0], ends[1])
        draft = f"{name} --gamma {args.gamma}"
        measured.append(Measured(draft, metrics.net_speedup, interval, predicted))
    if not measured:
        raise ValueError("no run has a speedup: their tokens differ, or the weights are random")
    outlook = Outlook(None, args.prefix_len, 1.0, None, 0)
    if plan is not None:
        context = plan.prefix_lens[-1]
        far = plan.predict(args.B, context)
        net = far.net_speedup(args.num_new_tokens)
        outlook = Outlook(plan.break_even(args.B), context, net, far.budget, far.gamma)
    return advise(measured, f"B {args.B} and {args.prefix_len} tokens of context", outlook)


def make_plan(args: AdviceSection, records: list[RunRecord]) -> Plan | None:
    """The plan with the acceptance of these runs. None if none of them is self-speculation with
    a budget and an acceptance."""
    from magicdec.cli import plan
    from magicdec.model.presets.presets import find_config

    own = [r for r in records if r.config["decoding"]["drafter"] == SELF and r.metrics]
    if not any(r.metrics and r.metrics.acceptance_per_position for r in own):
        return None
    model, dtype = own[0].config["model"]["model"], own[0].config["model"]["dtype"]
    longest = find_config("--model", model).max_length
    contexts = sorted({min(args.prefix_len * n, longest) for n in (1, 4, LONGEST)})
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "runs.jsonl")
        for record in own:
            append_record(file, record)
        return plan.make_plan(
            plan.PlanSection(
                model=model,
                machine=args.machine,
                acceptance=(str(file),),
                dtype=dtype,
                B=(args.B,),
                gen_len=args.gen_len,
                tp=args.num_ranks,
                prefix_len=tuple(contexts),
            )
        )
