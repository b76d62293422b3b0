"""`magicdec gate`: runs the cases of a baseline file again and compares. `magicdec gate save`
makes or renews such a file. Owns the command line; `bench/gate/` runs the cases, and
`records/comparison/` compares."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from magicdec.bench.gate.cases import (
    Case,
    Places,
    Subject,
    check_case,
    margin_of,
    quick,
    standard_cases,
    unfounded,
)
from magicdec.bench.gate.files import (
    read_baselines,
    to_compare_with,
    to_renew,
    void_on_others,
)
from magicdec.bench.gate.measuring import Finished, Result, groups_of, measure
from magicdec.bench.gate.resuming import FinishedCases
from magicdec.cli.compare import EXIT_CODES, RuleSection, conclude
from magicdec.cli.flags import LoneCommand
from magicdec.cli.parsing.parser import ParsedValues
from magicdec.cli.parsing.rank_checks import check_heads
from magicdec.cli.parsing.record_files import COMMITTED, BaselineFileSection
from magicdec.config.sections import OutputSection
from magicdec.config.setting import same, setting
from magicdec.hardware.other_load import warn_of_load
from magicdec.output.writing import check_files, check_record_file, check_writable, write_text
from magicdec.records.comparison.compare import CHANGED, case_failed, compare
from magicdec.records.comparison.conditions import describe
from magicdec.records.drafted import JudgedRecord
from magicdec.records.record import append_records

PACKAGED = Path(__file__).parents[1] / "bench" / "gate" / "baselines" / COMMITTED.name


@dataclass(frozen=True)
class BaselineSection(BaselineFileSection):
    processes: int = setting(
        2,
        "Processes that run cases side by side, and share the CPU cores; each holds a KV cache of "
        "its own. A case of more ranks than that has as many.",
        least=1,
    )


@dataclass(frozen=True)
class GateSection(BaselineSection):
    quick: bool = setting(
        False,
        "Run one case for each drafter and policy, and for each other way to draft (chains "
        "that stop, low-bit drafts, sampling, ...), the middle one in the file.",
    )
    out: Path | None = same(OutputSection, "results", None, is_default=True)


@dataclass(frozen=True)
class SaveSection(BaselineSection):
    margin: float | None = same(RuleSection, "margin")


def run_gate(values: ParsedValues) -> int:
    """Run the cases, compare, and return the exit code. Raises ValueError for a file that cannot be
    read or written, or that has a case of no config or of too few prompts, and for a model or text
    that is not the baseline's."""
    args = values[GateSection]
    rule = values[RuleSection]
    places = values[Places]
    is_packaged = args.baseline == COMMITTED and not COMMITTED.exists()
    path = to_compare_with(PACKAGED if is_packaged else args.baseline)
    baselines = read_baselines(path)
    for baseline in baselines:
        if (problem := unfounded(baseline)) is not None:
            renew = f"renew it with `magicdec gate save --baseline {path}`"
            raise ValueError(f"{path}: {describe(baseline)}: {problem}; {renew}")
    check_files({"--junit": rule.junit, "--summary": rule.summary})
    if args.out is not None:
        check_record_file("--out", args.out)
    chosen = quick(baselines) if args.quick else baselines
    cases = [places.moved(Case.from_record(baseline)) for baseline in chosen]
    for case in cases:
        check_case(case, num_cores())
    if places != Places():
        from magicdec.bench.gate.moved import with_names_here

        chosen = with_names_here(cases, chosen)
    if path.stem != COMMITTED.stem and path != args.baseline:
        print(f"baselines of this kind of CPU: {path}", flush=True)
    results = [founded(result) for result in run(args.processes, cases)]
    records = [result for result in results if not isinstance(result, str)]
    if args.out is not None:
        append_records("--out", args.out, records)
    failed = [
        case_failed(baseline, result)
        for baseline, result in zip(chosen, results, strict=True)
        if isinstance(result, str)
    ]
    return conclude(rule, failed + compare(records, chosen, rule))


def save_cases(values: ParsedValues) -> int:
    """Renew the cases of a file, or make new ones, and return the exit code. No file is written
    unless every case has passed."""
    args = values[SaveSection]
    path = to_renew(args.baseline)
    check_writable("--baseline", path)
    old: list[JudgedRecord] = []
    if args.baseline.exists() and not any(name.startswith("subject.") for name in values.given):
        # Files of other kinds of CPU have the same cases, and gain what this one has gained.
        listed = read_baselines(args.baseline)
        old = read_baselines(path) if path.exists() else listed
        cases = [Case.from_record(b) for b in listed]
        margins = [b.margin for b in listed]
    else:
        subject = values[Subject]
        cases = standard_cases(subject)
        if subject.nproc > 1:
            check_heads(cases[0].config, subject.nproc)
        margins = [margin_of(case) for case in cases]
    for case in cases:
        check_case(case, num_cores())
    if args.margin is not None:
        margins = [0.0 if margin == 0 else args.margin for margin in margins]
    results = run(args.processes, cases)
    records: list[JudgedRecord] = []
    for case, margin, result in zip(cases, margins, results, strict=True):
        if not isinstance(result, str) and result.passed:
            records.append(dataclasses.replace(result, margin=margin))
        else:
            why = f"{case.name}: {_describe(result)}"
            print(f"magicdec gate save: {why}", file=sys.stderr)
    if len(records) < len(cases):
        print(f"{path} is as it was", file=sys.stderr)
        return 1
    write_text("--baseline", path, "".join(record.to_json() + "\n" for record in records))
    comparisons = compare(records, old) if old else []
    for comparison in comparisons:
        print(comparison)
    print(f"{len(records)} baselines written to {path}")
    pairs = zip(records, comparisons, strict=False)
    changed = [record for record, comparison in pairs if comparison.verdict == CHANGED]
    for other in void_on_others(args.baseline, path, changed):
        print(f"{other}: statistics compare what has changed until its kind of CPU renews it")
    return 0


def run(processes: int, cases: Sequence[Case]) -> list[Result]:
    """The result of each case. Prints a line for each that has ended. Raises ValueError if kernels
    would be compiled for another CPU."""
    from magicdec.kernels.build import check_cpu

    check_cpu()
    shared = [case.with_threads(threads_of(case, processes)) for case in cases]
    kept = FinishedCases.of(shared)
    results: dict[int, Result] = dict(kept.read())
    left = [number for number in range(len(shared)) if number not in results]
    started = time.monotonic()
    side = f", {processes} side by side" if processes > 1 else ""
    print(f"{len(cases)} cases{side}; each has a line when it has ended", flush=True)
    if results:
        print(f"{len(results)} of them had ended when this command was interrupted", flush=True)

    def finished(finished_case: Finished) -> None:
        number = left[finished_case.number]
        results[number] = finished_case.result
        if not isinstance(finished_case.result, str):
            kept.keep(number, finished_case.result)
        spent = time.monotonic() - started
        rest = (
            f", about {spent / finished_case.done - spent:.0f} s left"
            if 0 < finished_case.done < 1
            else ""
        )
        text = f"{len(results)} of {len(cases)} cases, {spent:.0f} s{rest}"
        print(f"{text}: {_describe(finished_case.result)}", flush=True)

    try:
        found = measure([shared[number] for number in left], processes, finished)
    except KeyboardInterrupt:
        ended = f"{len(results)} of {len(cases)} cases are kept"
        raise KeyboardInterrupt(f"{ended}; the same command goes on from there") from None
    results |= zip(left, found, strict=True)
    kept.forget()
    measured = [result.environment for result in results.values() if not isinstance(result, str)]
    warn_of_load(measured, "cases")
    return [results[number] for number in range(len(shared))]


def founded(result: Result) -> Result:
    """The result, or why the metrics of its record cannot be right."""
    return result if isinstance(result, str) else unfounded(result) or result


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def threads_of(case: Case, processes: int) -> int:
    """The threads of each rank of a case, so that all that run side by side share the cores."""
    ranks = case.num_ranks
    side_by_side = processes if ranks == 1 else ranks * groups_of(ranks, processes)
    return max(1, num_cores() // side_by_side)


def _describe(result: Result) -> str:
    if isinstance(result, str):
        return f"failed: {result}"
    if result.error is not None:
        return f"{describe(result)}: failed: {result.error}"
    rate = result.draft_acceptance_rate
    return f"{describe(result)}: {result.status if rate is None else f'{rate:.4f}'}"


main = LoneCommand(
    run_gate,
    "Run the cases of a baseline file again, on as many ranks, and compare what was drafted, read "
    "and accepted with the baseline, prompt by prompt and step by step. Where unchanged code "
    "repeats every step, any difference fails, gain or loss, until `magicdec gate save` accepts "
    "it; elsewhere statistics decide. `magicdec gate save` makes such a file. --model, --draft and "
    "--dataset say where its models and its text are here, if not where they were; other models "
    "and other text are refused.",
    {"gate": GateSection(), "places": Places(), "rule": RuleSection()},
    epilog=EXIT_CODES,
)
save = LoneCommand(
    save_cases,
    "Run the cases of a baseline file and put the new records in their place, or make a file for "
    "your own model and text. What has changed since is printed, and accepted by this. The cases "
    "of a new file are the standard ones: every drafter and KV policy, at several budgets, "
    "every other way to draft, some cases on the ranks of --nproc, on the CPU (1: none), and "
    "drafts at every position of a batch of short texts.",
    {"save": SaveSection(), "subject": Subject()},
)
