"""`magicdec gate`: runs the cases of a baseline file again and compares. `magicdec gate save`
makes or renews such a file. Owns the command line; `gate/` runs the cases, `records/comparison/`
compares."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from magicdec.cli.compare import EXIT_CODES, RuleSection, conclude
from magicdec.cli.flags import exit_with
from magicdec.cli.parsing.parser import Parser, Values
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    MODEL_PREFIX,
    NONE,
    DraftChoice,
    ModelSection,
    OutputSection,
    WorkloadSection,
)
from magicdec.config.setting import same, setting
from magicdec.gate.cases import Subject, config_of, margin_of, name_of, quick, standard_cases
from magicdec.gate.coverage import failures, not_run
from magicdec.gate.measuring import Result, measure, with_threads
from magicdec.names import DTYPES
from magicdec.records.comparison.compare import compare
from magicdec.records.comparison.conditions import describe
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord, append_record
from magicdec.records.writing import check_files, check_writable, write_text

COMMITTED = Path("results/baselines/acceptance.jsonl")


@dataclass(frozen=True)
class BaselineSection:
    """The baseline file, and how its cases are run."""

    baseline: Path = setting(COMMITTED, "The baseline file.")
    processes: int = setting(
        2,
        "Processes that run cases side by side, and share the CPU cores; each holds a KV cache of "
        "its own.",
        least=1,
    )


@dataclass(frozen=True)
class GateSection(BaselineSection):
    quick: bool = setting(
        False, "Run one case for each drafter and policy, the middle one in the file."
    )
    out: Path | None = same(OutputSection, "results", None, is_default=True)


@dataclass(frozen=True)
class SaveSection(BaselineSection):
    """The subject of a new file, as `gate.cases.Subject`."""

    model: str = same(ModelSection, "model")
    draft: str = same(DraftChoice, "draft", NONE)
    dataset: str = same(WorkloadSection, "dataset")
    dtype: str = same(ModelSection, "dtype", Subject.dtype, choices=DTYPES)
    prefix_len: int = same(WorkloadSection, "prefix_len")
    batch_size: int = same(WorkloadSection, "batch_size", Subject.batch_size)
    num_batches: int = same(WorkloadSection, "num_batches")
    gen_len: int | None = same(WorkloadSection, "gen_len")
    margin: float | None = same(RuleSection, "margin")


def main() -> NoReturn:
    """`magicdec gate` and `magicdec gate save`"""
    exit_with(run_command)


def run_command() -> int:
    words = sys.argv[1:]
    if words[:1] == ["save"]:
        return save(build_save_parser().read(words[1:]))
    values = build_parser().read(words)
    return gate(values[GateSection], values[RuleSection])


def build_parser() -> Parser:
    return Parser(
        "Run the cases of a baseline file again, on one rank, and compare their acceptance with "
        "the baseline's, prompt by prompt. `magicdec gate save` makes such a file.",
        {"gate": GateSection(), "rule": RuleSection()},
        epilog=EXIT_CODES,
    )


def build_save_parser() -> Parser:
    return Parser(
        "Run the cases of a baseline file and put the new records in their place, or make a file "
        "for your own model and text. The cases of a new file are the standard ones: every drafter "
        "and KV policy, at several budgets.",
        {"save": SaveSection()},
        prog="magicdec gate save",
    )


def gate(args: GateSection, rule: RuleSection) -> int:
    """Run the cases, compare, and return the exit code. Raises ValueError for a file that cannot be
    read or written, or that has a case of no config."""
    baselines = _read(args.baseline)
    check_files({"--out": args.out, "--junit": rule.junit, "--summary": rule.summary})
    cases = quick(baselines) if args.quick else baselines
    configs = [config_of(baseline) for baseline in cases]
    results = run(args.processes, configs)
    records = [result for result in results if isinstance(result, RunRecord)]
    if args.out is not None:
        for record in records:
            append_record(args.out, record)
    failed = not_run(baselines, cases, args.quick) + failures(cases, results)
    return conclude(rule, failed + compare(records, cases, rule))


def save(values: Values) -> int:
    """Renew the cases of a file, or make new ones, and return the exit code. No file is written
    unless every case has passed."""
    args = values[SaveSection]
    path = args.baseline
    check_writable("--baseline", path)
    old, cases = _cases_to_save(values)
    results = run(args.processes, [config for config, _ in cases])
    records: list[RunRecord] = []
    for (config, margin), result in zip(cases, results, strict=True):
        if isinstance(result, RunRecord) and result.passed and result.metrics is not None:
            records.append(dataclasses.replace(result, margin=margin))
        else:
            why = f"{name_of(config)}: {_describe(result)}"
            print(f"magicdec gate save: {why}", file=sys.stderr)
    if len(records) < len(cases):
        print(f"{path} is as it was", file=sys.stderr)
        return 1
    write_text("--baseline", path, "".join(record.to_json() + "\n" for record in records))
    for comparison in compare(records, old) if old else ():
        print(comparison)
    print(f"{len(records)} baselines written to {path}")
    return 0


def _cases_to_save(
    values: Values,
) -> tuple[list[RunRecord], list[tuple[RunConfig, float | None]]]:
    """The old records, if they are renewed; and each case with the margin of its record."""
    args = values[SaveSection]
    names = [field.name for field in dataclasses.fields(Subject)]
    subject = {name: getattr(args, name) for name in names if f"save.{name}" in values.given}
    if subject or not args.baseline.exists():
        old, configs = [], standard_cases(_subject(subject))
        margins = [margin_of(config) for config in configs]
    else:
        old = _read(args.baseline)
        configs, margins = [config_of(b) for b in old], [b.margin for b in old]
    if args.margin is not None:
        margins = [0.0 if margin == 0 else args.margin for margin in margins]
    return old, list(zip(configs, margins, strict=True))


def _subject(given: dict[str, Any]) -> Subject:
    """The models and prompts of a new file. The packaged draft is only for the packaged target."""
    draft = given.get("draft", NONE)
    name = str(draft).removeprefix(MODEL_PREFIX)
    if draft != NONE and name == draft:
        raise ValueError(f"--draft {draft} is not known; choose from {MODEL_PREFIX}NAME, {NONE}")
    if "draft" in given or given.get("model", Subject.model) != Subject.model:
        given = given | {"draft": None if draft == NONE else name}
    return Subject(**given)


def run(processes: int, configs: Sequence[RunConfig]) -> list[Result]:
    """The result of each case. Prints a line for each that has ended."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    started, done = time.monotonic(), 0

    def finished(result: Result) -> None:
        nonlocal done
        done += 1
        spent = time.monotonic() - started
        print(f"{done} of {len(configs)} cases, {spent:.0f} s: {_describe(result)}", flush=True)

    return measure([with_threads(c, threads) for c in configs], processes, finished)


def _describe(result: Result) -> str:
    if not isinstance(result, RunRecord):
        return f"failed: {result}"
    if result.error is not None:
        return f"{describe(result)}: failed: {result.error}"
    rate = None if result.metrics is None else result.metrics.acceptance_rate
    return f"{describe(result)}: {result.status if rate is None else f'{rate:.4f}'}"


def _read(path: Path) -> list[RunRecord]:
    """Raises ValueError if there are no baselines."""
    records = load_records(path, is_strict=True)
    if not records:
        raise ValueError(
            f"{path} holds no records; make it with `magicdec gate save --baseline {path}`"
        )
    return records
