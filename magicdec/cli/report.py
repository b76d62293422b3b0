"""Executes a prepared run and reports it: the table, the saved tokens, the record and the exit
code.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from magicdec.bench.measure import Outcome, execute
from magicdec.bench.records_of import unfinished_record
from magicdec.bench.showing import tables
from magicdec.cli.flags import NO_RECORD, say_interrupted
from magicdec.config.resolved import ResolvedConfig
from magicdec.hardware.other_load import warn_of_load
from magicdec.output.console import START, labelled
from magicdec.output.tables import print_tables
from magicdec.output.writing import write_text
from magicdec.records.describe import dtypes_of
from magicdec.records.pass_record import PassRecord
from magicdec.records.record import append_together
from magicdec.setup.prepare import Prepared


def conclude(prepared: Prepared) -> int:
    """Executes and reports the run, and returns the exit code. If it raises an exception, the
    leading rank records the failure, and the exception ends this rank. Ctrl-C leaves no record."""
    is_leader = prepared.launch.rank == 0
    path = Path(prepared.config.output.results)
    started = datetime.datetime.now(datetime.UTC)
    try:
        outcome = execute(prepared)
    except KeyboardInterrupt:
        return say_interrupted(prepared.launch, NO_RECORD)
    except Exception as error:
        if is_leader:
            message = f"{type(error).__name__}: {error}"
            failed = unfinished_record(prepared.config, prepared, prepared.launch, started, message)
            notice, is_kept = append(path, [failed])
            if not is_kept:
                print(notice, file=sys.stderr)
        raise
    if is_leader and not publish(prepared, outcome, path):
        return 1
    return int(not all(record.passed for record in outcome.records))


def announce(prepared: Prepared) -> None:
    """Prints model, ranks and memory in two lines, and with `--verbose` every setting before."""
    config = prepared.config
    launch = prepared.launch
    if config.output.verbose:
        print(describe_config(config))
    ranks = f"ranks {launch.world_size} x threads {config.parallel.threads}"
    about = [config.model.model, dtypes_of(config.to_dict()), ranks, str(config.parallel.device)]
    print(labelled("model", ", ".join(about), START))
    print(labelled("memory", prepared.memory, START), flush=True)


def publish(prepared: Prepared, outcome: Outcome, path: Path) -> bool:
    """Writes the files of the run, then prints its outcome. Returns False if a file could not be
    written, which costs neither the other file nor the table."""
    output = prepared.config.output
    # The record comes first, because a reader of the output, such as `head`, may end before it.
    notice, is_kept = append(path, outcome.records)
    if output.save_tokens:
        try:
            save_tokens(Path(output.save_tokens), outcome)
        except ValueError as error:
            notice = f"{notice}\n{error}; the tokens are lost"
            is_kept = False
    if output.printoutput:
        for request in outcome.requests:
            text = prepared.tokenizer.show(request.output_ids)
            print(f"--- sequence {request.request_id}\n{text}")
    print_tables(tables(outcome.records, output.verbose))
    warn_of_load([outcome.record.environment], "runs")
    print(notice, file=sys.stderr)
    return is_kept


def append(path: Path, records: Sequence[PassRecord]) -> tuple[str, bool]:
    """Appends the records. Returns a line for the user, and whether they were kept."""
    has_one = len(records) == 1
    try:
        append_together(path, records)
    except OSError as error:
        what = "record is" if has_one else "records are"
        return f"--out {path}: {error.strerror}; the {what} lost", False
    return f"{len(records)} {'record' if has_one else 'records'} appended to {path}", True


def save_tokens(path: Path, outcome: Outcome) -> None:
    """Writes one JSON line for each sequence, in the order of the prompts. Raises ValueError if
    that fails."""
    lines = [
        json.dumps({"prompt_ids": list(r.prompt_ids), "output_ids": r.output_ids}) + "\n"
        for r in sorted(outcome.requests, key=lambda r: r.request_id)
    ]
    write_text("--save_tokens", path, "".join(lines))


def describe_config(config: ResolvedConfig) -> str:
    lines = []
    for section, values in config.to_dict().items():
        if values is None:
            continue
        text = " ".join(f"{k}={v}" for k, v in values.items() if v is not None)
        lines.append(labelled(section, text))
    return "\n".join(lines)
