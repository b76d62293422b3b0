"""`magicdec gate`: runs the cases of a baseline file again and compares. `magicdec gate save`
makes or renews such a file. Owns the command line; `gate/` runs the cases, `records/comparison/`
compares."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from magicdec.cli.compare import EXIT_CODES, add_rule_flags, conclude, read_rule, share
from magicdec.cli.parsing.parser import Parser
from magicdec.config.run_config import RunConfig
from magicdec.gate.cases import Subject, config_of, margin_of, name_of, quick, standard_cases
from magicdec.gate.coverage import failures, not_run, results_of
from magicdec.gate.measuring import Arrival, Result, measure, with_threads
from magicdec.names import DTYPES
from magicdec.records.comparison.compare import compare
from magicdec.records.comparison.conditions import describe
from magicdec.records.reading import load_records
from magicdec.records.record import RunRecord, append_record
from magicdec.records.writing import check_files, check_writable, write_text

COMMITTED = Path("results/baselines/acceptance.jsonl")


def main() -> None:
    """`magicdec gate`"""
    try:
        args = make_parser().parse_args()
        sys.exit(save(args) if args.action == "save" else gate(args))
    except ValueError as error:
        print(f"magicdec gate: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def make_parser() -> Parser:
    parser = Parser(
        prog="magicdec gate",
        description="Run the cases of a baseline file again, on one rank, and compare their "
        "acceptance with the baseline's, prompt by prompt. `magicdec gate save` makes such a file.",
        epilog=EXIT_CODES,
    )
    _add_file(parser)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="run one case for each drafter and policy, the middle one in the file",
    )
    parser.add_argument(
        "--out", "--results", type=Path, metavar="FILE",
        help="append the new records to this file",
    )  # fmt: skip
    add_rule_flags(parser)
    _add_save(parser.add_subparsers(dest="action", metavar="save"))
    return parser


def _add_save(actions: Any) -> None:
    own = Subject()
    parser = actions.add_parser(
        "save",
        help="make or renew a baseline file",
        description="Run the cases of a baseline file and put the new records in their place, or "
        "make a file for your own model and text. The cases of a new file are the standard ones: "
        "every drafter and KV policy, at several budgets.",
    )
    _add_file(parser)
    parser.add_argument("--model", metavar="NAME", help="the target of a new file [demo]")
    parser.add_argument(
        "--draft", metavar="NAME", help="a standalone draft for it [none; demo-draft for demo]"
    )
    parser.add_argument("--dataset", metavar="NAME", help="the text of its prompts [demo]")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and activations [float32]")
    for flag, name, meaning in (
        ("--prefix_len", "prefix_len", "prompt tokens of each sequence"),
        ("--B", "batch_size", "sequences of a batch"),
        ("--num_batches", "num_batches", "batches"),
        ("--gen_len", "gen_len", "tokens that each sequence generates"),
    ):
        parser.add_argument(
            flag, dest=name, type=int, metavar="N", help=f"{meaning} [{getattr(own, name)}]"
        )
    parser.add_argument(
        "--margin",
        type=share,
        metavar="X",
        help="margin of the new records, in place of the old ones' or of the default",
    )


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--baseline", type=Path, default=COMMITTED, metavar="FILE",
        help="the baseline file [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        metavar="N",
        help="processes that run cases side by side, and share the CPU cores; each holds a KV "
        "cache of its own [%(default)s]",
    )


def gate(args: argparse.Namespace) -> int:
    """Run the cases, compare, and return the exit code. Raises ValueError for a file that cannot be
    read or written, or that has a case of no config."""
    baselines = _read(args.baseline)
    check_files({"--out": args.out, "--junit": args.junit, "--summary": args.summary})
    cases = quick(baselines) if args.quick else baselines
    results = results_of(len(cases), run(args, [config_of(baseline) for baseline in cases]))
    records = [result for result in results if isinstance(result, RunRecord)]
    for record in records if args.out is not None else ():
        append_record(args.out, record)
    failed = not_run(baselines, cases, args.quick) + failures(cases, results)
    return conclude(args, failed + compare(records, cases, read_rule(args)))


def save(args: argparse.Namespace) -> int:
    """Renew the cases of a file, or make new ones, and return the exit code. No file is written
    unless every case has passed."""
    path = args.baseline
    check_writable("--baseline", path)
    old, cases = _cases_to_save(args)
    results = results_of(len(cases), run(args, [config for config, _ in cases]))
    records = [result for result in results if _passed(result)]
    if len(records) < len(cases):
        for (config, _), result in zip(cases, results, strict=True):
            if not _passed(result):
                why = f"{name_of(config)}: {_describe(result)}"
                print(f"magicdec gate save: {why}", file=sys.stderr)
        print(f"{path} is as it was", file=sys.stderr)
        return 1
    pairs = zip(records, (margin for _, margin in cases), strict=True)
    records = [dataclasses.replace(record, margin=margin) for record, margin in pairs]
    write_text("--baseline", path, "".join(record.to_json() + "\n" for record in records))
    for comparison in compare(records, old) if old else ():
        print(comparison)
    print(f"{len(records)} baselines written to {path}")
    return 0


def _cases_to_save(
    args: argparse.Namespace,
) -> tuple[list[RunRecord], list[tuple[RunConfig, float | None]]]:
    """The old records, if they are renewed; and each case with the margin of its record."""
    given = {
        field.name: value
        for field in dataclasses.fields(Subject)
        if (value := getattr(args, field.name)) is not None
    }
    if given or not args.baseline.exists():
        old, configs = [], standard_cases(_subject(given))
        margins = [margin_of(config) for config in configs]
    else:
        old = _read(args.baseline)
        configs, margins = [config_of(b) for b in old], [b.margin for b in old]
    if args.margin is not None:
        margins = [0.0 if margin == 0 else args.margin for margin in margins]
    return old, list(zip(configs, margins, strict=True))


def _subject(given: dict[str, object]) -> Subject:
    """The models and prompts of a new file. The packaged draft is only for the packaged target."""
    if "model" in given and given["model"] != Subject.model:
        given = {"draft": None} | given
    return Subject(**given)  # type: ignore[arg-type]


def run(args: argparse.Namespace, configs: Sequence[RunConfig]) -> list[Arrival]:
    """What came back from running the cases. Prints a line for each that has ended."""
    if args.processes < 1:
        raise ValueError(f"--processes {args.processes} is too small; it must be at least 1")
    threads = max(1, len(os.sched_getaffinity(0)) // args.processes)
    started, done = time.monotonic(), 0

    def finished(number: int, result: Result) -> None:
        nonlocal done
        done += 1
        spent = time.monotonic() - started
        print(f"{done} of {len(configs)} cases, {spent:.0f} s: {_describe(result)}", flush=True)

    return measure([with_threads(c, threads) for c in configs], args.processes, finished)


def _describe(result: Result) -> str:
    if not isinstance(result, RunRecord):
        return f"failed: {result}"
    if result.error is not None:
        return f"{describe(result)}: failed: {result.error}"
    rate = None if result.metrics is None else result.metrics.acceptance_rate
    return f"{describe(result)}: {result.status if rate is None else f'{rate:.4f}'}"


def _passed(result: Result) -> TypeGuard[RunRecord]:
    return isinstance(result, RunRecord) and result.passed and result.metrics is not None


def _read(path: Path) -> list[RunRecord]:
    """Raises ValueError if there are no baselines."""
    records = load_records(path, is_strict=True)
    if not records:
        raise ValueError(
            f"{path} holds no records; make it with `magicdec gate save --baseline {path}`"
        )
    return records
