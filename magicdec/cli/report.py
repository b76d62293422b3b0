"""From a prepared run to what the user gets: the resolved config, the table, tokens, the record,
the exit code."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

from magicdec.config.resolved import ResolvedConfig
from magicdec.hardware.environment import describe_environment
from magicdec.memory.watch import describe_memory
from magicdec.records.record import RunRecord, append_record
from magicdec.records.table import print_record
from magicdec.run.run import Outcome, execute
from magicdec.setup.prepare import Prepared


def conclude(prepared: Prepared) -> int:
    """Run and report; the exit code. On a failure the leader records it, and the error goes on to
    end this rank."""
    is_leader = prepared.launch.rank == 0
    path = Path(prepared.config.output.results)
    started = datetime.datetime.now(datetime.timezone.utc)
    if is_leader:
        print(describe_config(prepared.config))
        print(f"{'memory':<10} {prepared.memory}", flush=True)
    try:
        outcome = execute(prepared, is_leader)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if is_leader:
            environment = describe_environment(
                prepared.launch, prepared.config.parallel.device, started
            )
            message = f"{type(error).__name__}: {error}"
            config, workload = prepared.config.to_dict(), prepared.describe_workload()
            memory = describe_memory(prepared.plan, prepared.free)
            failed = RunRecord("failed", config, environment, message, workload, memory=memory)
            append_record(path, failed)
        raise
    if is_leader:
        publish(prepared, outcome, path)
    return 0 if outcome.record.status == "ok" else 1


def publish(prepared: Prepared, outcome: Outcome, path: Path) -> None:
    output = prepared.config.output
    append_record(path, outcome.record)
    if output.save_tokens:
        save_tokens(Path(output.save_tokens), outcome)
    if output.printoutput:
        for request in outcome.requests:
            text = prepared.tokenizer.decode(request.output_ids)
            print(f"--- sequence {request.request_id}\n{text}")
    print_record(outcome.record)
    print(f"record appended to {path}", file=sys.stderr)


def save_tokens(path: Path, outcome: Outcome) -> None:
    """One JSON line a sequence, in prompt order; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"prompt_ids": list(r.prompt_ids), "output_ids": r.output_ids})
        for r in sorted(outcome.requests, key=lambda r: r.request_id)
    ]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(line + "\n" for line in lines))
    partial.replace(path)


def describe_config(config: ResolvedConfig) -> str:
    """The resolved config, a line a section."""
    lines = []
    for section, values in config.to_dict().items():
        if values is None:
            continue
        shown = " ".join(f"{k}={v}" for k, v in values.items() if v is not None)
        lines.append(f"{section:<10} {shown}")
    return "\n".join(lines)
