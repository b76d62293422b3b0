"""Records of passes as JSON values whose numbers tests change by hand: of a run, of requests that
were served, and of passes that failed or whose tokens are wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from synthetic_records import (
    ENVIRONMENT,
    IDENTICAL,
    PLAIN_PASS,
    WORKLOAD,
    drawn_command,
    serving_config,
)

from magicdec.bench.recording import MeasuredParts, record_pass
from magicdec.records.computing import Beside
from magicdec.records.correctness import Correctness, Divergence
from magicdec.records.pass_record import GroupRecord, PassRecord, RequestRecord
from magicdec.records.record import Status
from magicdec.systems.mdi_llm.details import StageUse, ring_metrics
from magicdec.systems.modes import SYSTEM_OF, Pass
from magicdec.systems.pipeinfer.details import PipeInferDetails

Line = dict[str, Any]
LOAD = {"num_requests": 1, "arrival": "burst", "gen_len": 4, "batch_size": 1, "goodput": {}}
LOAD |= {"prefix_len": "8", "draft": "ngram", "layer_split": "3,3", "lanes": 1}
FIRST = "first"  # when a command has begun
PIPELINE = PipeInferDetails(
    runs=3,
    speculative_runs=2,
    invalid_runs=1,
    skipped_before=0,
    skipped_inside=1,
    layers_computed=9,
    layers_skipped=1,
    failed_attempts=0,
    mean_in_flight=1.5,
    most_in_flight=2,
    num_layers=[2, 2],
    draft_rank=0,
    busy=[0.75, 0.25],
    idle_s=[0.5, 1.5],
    draft_busy=0.375,
)
WITHOUT_RESULT = ("metrics", "acceptance_by_context", "times_by_turn", "memory", "details")


def line_of(record: PassRecord) -> Line:
    found: Line = json.loads(record.to_json())
    return found


def run_lines(**drawing: Any) -> list[Line]:
    """The passes `static` and `static+draft` of a run."""
    return [line_of(record) for record in drawn_command(**drawing)]


def run_line(**drawing: Any) -> Line:
    """The pass of a run that drafts."""
    return run_lines(**drawing)[-1]


def failed(line: Line | None = None) -> Line:
    """A pass that an error ended."""
    none = dict.fromkeys((*WITHOUT_RESULT, "correctness", "workload", "num_differing"))
    ended = {"status": "failed", "error": "RuntimeError: [enforce fail] in [/x] :fire:"}
    return (line or run_line()) | none | ended | {"requests": [], "groups": []}


def mismatch(line: Line | None = None, margin: float | None = 2.5) -> Line:
    """A pass of which a request has a wrong token."""
    first = Divergence(3, 5, 1, None, margin)
    found = Correctness(PLAIN_PASS, False, 99, first, 0, 1, 1e-4)
    wrong = {"status": "mismatch", "num_differing": 1, "correctness": asdict(found)}
    return (line or run_line()) | dict.fromkeys(WITHOUT_RESULT) | wrong


def with_ties(line: Line) -> Line:
    """The pass, of which two requests differ and rounding explains it."""
    found = mismatch(line, 0.07)["correctness"] | {
        "num_excused": 2,
        "num_diverged": 0,
        "margin_bound": 0.15,
        "expected_differing": 2.6,
        "most_differing": 7,
        "num_short": 3,
        "num_short_reference": 4,
    }
    return line | {"status": "verified_with_ties", "num_differing": 2, "correctness": found}


def served_pass(
    name: str, parts: MeasuredParts, gaps_ms: Sequence[float], start: str = FIRST, **load: Any
) -> PassRecord:
    """A pass of a loop, compared with `sequential`. `load` are flags of the command."""
    is_drafting = Pass.named(name).is_drafting
    config = serving_config(is_drafting, **LOAD | {"mode": name} | load)
    return record_pass(
        name,
        parts,
        Beside(is_drafting=is_drafting, gaps_ms=gaps_ms, goodput=load.get("goodput", {})),
        status=Status.VERIFIED,
        config=config,
        environment=replace(ENVIRONMENT, time_utc=start),
        workload=replace(WORKLOAD, num_prompts=len(parts.requests)),
        correctness=IDENTICAL,
        reference="sequential",
        num_differing=0,
    )


def served(name: str, seconds: float, start: str = FIRST, **load: Any) -> Line:
    """A pass that served one request of three tokens, each of which took `seconds`."""
    ms = 1e3 * seconds
    request = RequestRecord(
        arrival_ms=0.0,
        joined_ms=[0.0],
        preempted_ms=[],
        prefilled_ms=[ms],
        first_token_ms=ms,
        finished_ms=3 * ms,
        prompt_len=1,
        output_len=3,
        output_hash="0",
    )
    record = served_pass(name, MeasuredParts([request], [group(1)]), [ms, ms], start, **load)
    if name == "ring":
        uses = [StageUse(4.0, waiting, 0.1, 8, 2, 0.0) for waiting in (1.0, 3.0)]
        record = replace(record, details=ring_metrics([1, 1], 1, (1, 1), uses, 8, 2.0))
    if SYSTEM_OF[Pass.named(name).mode].name == "pipeinfer":
        record = replace(record, details=PIPELINE)
    return line_of(record)


def group(num_requests: int) -> GroupRecord:
    """The group of served requests whose steps were not timed."""
    return GroupRecord(
        num_requests=num_requests,
        num_steps=3,
        num_in_flight=3,
        step_ms=[],
        draft_ms=[],
        verify_ms=[],
        decode_ms=[],
        threads=[2],
    )


def write(path: Path, lines: Sequence[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
