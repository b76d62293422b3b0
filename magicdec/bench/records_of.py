"""Records of measured passes, one of each. It is the only place that knows both what the spine
measures and what a record is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from magicdec.bench.check.passes import Checked
from magicdec.bench.prepare import PreparedServing
from magicdec.bench.recording import MeasuredParts, describe_requests, record_pass, status_of
from magicdec.bench.runner import MeasuredGroup, MeasuredPass, PlannedPass, Runner
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.run_config import split_draft
from magicdec.hardware.other_load import OtherLoad
from magicdec.names import BASELINE, SPECULATIVE
from magicdec.records.acceptance import ReportedCounts, Verifications
from magicdec.records.computing import Beside
from magicdec.records.environment import Environment, MemoryRecord
from magicdec.records.metrics import REPORTABLE
from magicdec.records.pass_record import GroupRecord, PassRecord, RequestRecord
from magicdec.records.record import Status
from magicdec.records.workload import WorkloadRecord
from magicdec.runner.request import UNKNOWN_ID, Moves, Request
from magicdec.setup.memory_sampler import NOT_MEASURED, MemoryTaken, describe_memory
from magicdec.setup.prepare import Prepared
from magicdec.systems.details import Details
from magicdec.systems.modes import DRAFTING, PLAIN
from magicdec.workload.answers import answer_scores

PARTS = ("model", "parallel", "attention", "decoding", "sampling")  # of a config that are recorded
DRAFT_PARTS = ("draft", "kv")  # and those of a pass with drafts


@dataclass(frozen=True)
class RecordContext:
    """What the record of a pass says beside its measurements."""

    config: dict[str, Any]
    environment: Environment
    workload: WorkloadRecord
    reference: MeasuredPass | None  # None if it is the only pass
    goodput: dict[str, float]
    memory: MemoryRecord | None = None


def pass_record(measured: MeasuredPass, checked: Checked, context: RecordContext) -> PassRecord:
    """The record of a pass, which has metrics only if its tokens are not known to be wrong."""
    planned = measured.planned
    system = planned.system
    reference = context.reference
    is_drafting = planned.serving_pass.is_drafting
    is_external = system.is_external
    if reference is not None:
        is_external |= reference.planned.system.is_external
    dtype = context.config["model"]["dtype"]
    status = status_of(checked.num_differing, checked.correctness, dtype, is_external)
    passed = status is not Status.MISMATCH
    parts = parts_of(measured)
    verifications = verifications_by_group(measured)
    beside = Beside(
        is_drafting=is_drafting,
        is_random=system.run.is_random,
        bandwidth=context.environment.read_bandwidth_bytes_per_s,
        goodput=context.goodput,
        categories=context.workload.categories,
        gaps_ms=[gap for group in measured.groups for gap in gaps_of(group)],
        reported_total=ReportedCounts.sum_of(
            [verification.reported_total for verification in verifications]
        ),
        warmup_calibration_ms=warm_up_calibration_of(measured),
        reference=None if reference in (None, measured) else parts_of(reference),
    )
    record = record_pass(
        planned.name,
        parts,
        beside,
        status=status,
        config=context.config,
        environment=context.environment,
        workload=context.workload,
        correctness=checked.correctness,
        reference=None if reference is None else reference.name,
        num_differing=checked.num_differing,
        details=details_of(measured),
        memory=context.memory if passed else without_measured(context.memory),
    )
    if record.details is None:
        return record
    missing = [name for name in REPORTABLE if getattr(record.metrics, name, None) is None]
    has_drafts = any(verification.has_drafts for verification in verifications)
    return replace(record, details=record.details.completed(missing, has_drafts))


def without_measured(memory: MemoryRecord | None) -> MemoryRecord | None:
    return None if memory is None else replace(memory, process_bytes=None, peak_bytes=None)


def parts_of(measured: MeasuredPass) -> MeasuredParts:
    """The requests and the groups of a pass."""
    system = measured.planned.system
    is_random = system.run.is_random
    has_counts = measured.planned.serving_pass.is_drafting and not is_random
    pairs = zip(measured.groups, verifications_by_group(measured), strict=True)
    requests = [
        request
        for group, group_requests in pairs
        for request in requests_of(group, group_requests, system.run)
    ]
    groups = [group_of(group, has_counts, system.counts_reads) for group in measured.groups]
    return MeasuredParts(requests, groups)


def verifications_by_group(measured: MeasuredPass) -> list[Verifications]:
    """Those of each group. What a server reports of its requests counts if it does so in every
    group, as its counters do: sums of some groups would stand beside the tokens of all."""
    found = [group.observer.verifications for group in measured.groups]
    if all(own.reported for own in found):
        return found
    return [replace(own, reported={}) for own in found]


def details_of(measured: MeasuredPass) -> Details | None:
    """What its system measured beside the requests, in all groups together."""
    recorded = [group.details.recorded for group in measured.groups]
    found = [details for details in recorded if details is not None]
    return type(found[0]).joined(found) if found else None


def requests_of(
    group: MeasuredGroup, verifications: Verifications, run: Prepared
) -> list[RequestRecord]:
    # With random weights a draft and its target agree by chance alone.
    judged = None if run.is_random else verifications
    scores = scores_of(run, group.requests)
    prefill = group.prefill
    if prefill is None:
        begin_s = group.requests[0].arrived_s
        return describe_requests(
            group.requests, group.observer.counts.moves, begin_s, judged, scores
        )
    moves = {request.request_id: Moves(joined_s=[request.arrived_s]) for request in group.requests}
    shifted = [as_if_alone(request, group) for request in group.requests]
    return describe_requests(shifted, moves, prefill.snapshots[0].arrived_s, judged, scores)


def as_if_alone(request: Request, group: MeasuredGroup) -> Request:
    """A request whose pass began just after the prefill that passes share: other passes, and what
    was measured between them, are left out of the times of its later tokens."""
    prefill = group.prefill
    assert prefill is not None, "its prompts were kept"
    begun_s = group.observer.begun_s
    end_s = prefill.snapshots[0].arrived_s + prefill.seconds + preparation_s(group)
    times_s = [
        at_s if number == 0 else end_s + (at_s - begun_s)
        for number, at_s in enumerate(request.token_times_s)
    ]
    return replace(request, token_times_s=times_s, finished_s=times_s[-1])


def preparation_s(group: MeasuredGroup) -> float:
    """What came between prefill and the first step, with calibration."""
    preparation = group.observer.preparation
    return 0.0 if preparation is None else preparation.seconds


def gaps_of(group: MeasuredGroup) -> list[float]:
    """The times in ms between steps that emitted tokens of the same request."""
    requests = group.requests
    if group.prefill is not None:
        requests = [as_if_alone(request, group) for request in requests]
    return [
        1e3 * (later - earlier)
        for request in requests
        for earlier, later in pairwise(sorted(set(request.token_times_s)))
    ]


def group_of(group: MeasuredGroup, has_counts: bool, counts_reads: bool) -> GroupRecord:
    """With the drafts of each step if they have a meaning (`has_counts`), and what decode steps
    have read if its system counts it."""
    observer = group.observer
    counts = observer.counts
    steps = observer.steps if observer.is_timed else []
    preparation = observer.preparation
    is_kept = group.prefill is not None
    phases = {} if observer.phases is None else observer.phases.seconds
    prompt_tokens = [step.prompt_tokens for step in steps]
    return GroupRecord(
        num_requests=len(group.requests),
        prefill_ms=None if group.prefill is None else to_ms(group.prefill.seconds),
        begin_ms=begin_ms(group),
        calibration_ms=calibration_ms(group),
        draft_prefill_ms=begin_ms(group) if preparation and preparation.is_draft_prefill else None,
        num_steps=(len(steps) if is_kept else counts.num_steps) or None,
        num_in_flight=counts.num_in_flight or None,
        step_ms=[to_ms(step.seconds) for step in steps],
        step_prompt_tokens=prompt_tokens if any(prompt_tokens) else None,
        step_forwards=[step.num_forwards for step in steps] if steps else None,
        step_max_gamma=[step.draft_width for step in steps] if has_counts and steps else None,
        step_rows=[len(step.request_ids) for step in steps] if steps else None,
        draft_ms=[to_ms(seconds) for seconds in phases.get("draft", ())],
        verify_ms=[to_ms(seconds) for seconds in phases.get("verify", ())],
        decode_ms=[to_ms(seconds) for seconds in phases.get("decode", ())],
        bytes_read=group.ranks.bytes_read if counts_reads else None,
        draft_kv_tokens=group.ranks.draft_kv_tokens if counts_reads else None,
        draft_rows=group.ranks.draft_rows if counts_reads else None,
        peak_memory_bytes=peaks_of(group),
        threads=group.ranks.threads,
    )


def peaks_of(group: MeasuredGroup) -> list[int] | None:
    """By rank; None if the system does not let a rank reset its own peak."""
    return None if group.ranks.total_peak is None else group.ranks.peaks


def begin_ms(group: MeasuredGroup) -> float | None:
    preparation = group.observer.preparation
    if preparation is None:
        return None
    return to_ms(preparation.seconds - (preparation.calibration_s or 0.0))


def calibration_ms(group: MeasuredGroup) -> float | None:
    preparation = group.observer.preparation
    seconds = None if preparation is None else preparation.calibration_s
    return None if seconds is None else to_ms(seconds)


def warm_up_calibration_of(measured: MeasuredPass) -> float | None:
    """The time in ms that a drafting pass spent on measuring steps in its warm-up."""
    seconds = measured.planned.system.warm_up_calibration_s
    is_drafting = measured.planned.serving_pass.is_drafting
    return to_ms(seconds) if is_drafting and seconds is not None else None


def to_ms(seconds: float) -> float:
    """Milliseconds, rounded to 1 ns, the resolution of the clock."""
    return round(1e3 * seconds, 6)


def scores_of(prepared: Prepared, requests: Sequence[Request]) -> list[float] | None:
    """The score of each answer; None without known answers, and where tokens or later questions
    have none. Those of a target with random weights would say nothing."""
    answers = None if prepared.source.is_random else prepared.workload.answers
    has_turns = any(request.turn is not None for request in requests)
    if has_turns or any(UNKNOWN_ID in request.output_ids for request in requests):
        return None
    return answer_scores(answers, requests, prepared.tokenizer)


# --- The contexts of records: of a run, and of modes that serve.


def context_of_run(
    prepared: Prepared,
    passes: Sequence[MeasuredPass],
    measured: MeasuredPass,
    environment: Environment,
    taken: MemoryTaken,
) -> RecordContext:
    is_drafting = measured.planned.serving_pass.is_drafting
    config = prepared.config if is_drafting else prepared.config.without_drafts()
    return RecordContext(
        config=config.to_dict(),
        environment=environment,
        workload=prepared.describe_workload(),
        reference=passes[0] if len(passes) > 1 else None,
        goodput={},
        memory=describe_memory(prepared.plan, prepared.free, taken),
    )


def context_of_modes(
    prepared: PreparedServing, measured: MeasuredPass, runner: Runner
) -> RecordContext:
    planned = measured.planned
    system = planned.system
    environment = runner.gpu.add_to(runner.session.describe_environment(runner.bandwidth))
    loads = [group.load.found for group in measured.groups]
    memory = None
    if not system.is_external:
        memory = describe_memory(measured.plan, None, measured.memory)
    return RecordContext(
        config=describe_config(prepared, planned),
        environment=OtherLoad.worst_of(loads).add_to(environment),
        workload=replace(system.run, workload=prepared.run.workload).describe_workload(),
        reference=runner.measured[runner.passes[0]] if len(runner.passes) > 1 else None,
        goodput=prepared.options.goodput or {},
        memory=memory,
    )


def failed_record(
    prepared: PreparedServing, measured: MeasuredPass, runner: Runner, error: str
) -> PassRecord:
    """The record of a pass that an error ended, with the groups that it had served before."""
    planned = measured.planned
    parts = parts_of(measured)
    run = replace(planned.system.run, workload=prepared.run.workload)
    return PassRecord(
        status=Status.FAILED,
        name=planned.name,
        config=describe_config(prepared, planned),
        environment=runner.session.describe_environment(),
        workload=run.describe_workload(),
        reference=runner.passes[0].name if len(runner.passes) > 1 else None,
        requests=list(parts.requests),
        groups=list(parts.groups),
        error=error,
    )


def unfinished_record(
    config: ResolvedConfig,
    prepared: Prepared | None,
    environment: Environment,
    error: str,
) -> PassRecord:
    """The record of a failed run. `prepared` is None if it was refused before."""
    serving_pass = PLAIN if config.decoding.strategy == BASELINE else DRAFTING
    memory = None
    if prepared is not None:
        memory = describe_memory(prepared.plan, prepared.free, NOT_MEASURED)
    return PassRecord(
        status=Status.FAILED,
        name=serving_pass.name,
        config=config.to_dict(),
        environment=environment,
        workload=None if prepared is None else prepared.describe_workload(),
        requests=[],
        groups=[],
        memory=memory,
        error=error,
    )


def describe_config(prepared: PreparedServing, planned: PlannedPass) -> dict[str, Any]:
    """The resolved config of a pass, with the flags of the load and of its system. It says what
    drafts also where stages draft nothing themselves."""
    system = planned.system
    serving_pass = planned.serving_pass
    options = prepared.options
    config = system.config_of(serving_pass)
    asked = system.run.config.workload
    settings: dict[str, Any] = {
        "dataset": asked.dataset,
        "prompt_format": asked.prompt_format,
        "seed": prepared.run.workload.seed,
    }
    settings |= options.describe() | system.describe_settings()
    settings |= {"mode": serving_pass.mode, "concurrency": serving_pass.concurrency}
    decoding = config["decoding"]
    has_draft = serving_pass.is_drafting and bool(decoding["drafter"] or config["draft"])
    if serving_pass.is_drafting:
        drafter, _ = split_draft(options.draft)
        config = config | {"decoding": decoding | {"strategy": SPECULATIVE, "drafter": drafter}}
    names = (*PARTS, *DRAFT_PARTS) if has_draft else PARTS
    return {name: config[name] for name in names} | {"workload": settings}
