"""A measured pass as a record. It has metrics only if its tokens are not known to be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from magicdec.bench.check.passes import Checked
from magicdec.bench.runner import MeasuredGroup, MeasuredPass
from magicdec.records.acceptance import ReportedCounts, Verifications
from magicdec.records.computing import (
    Beside,
    Measured,
    acceptances_by_group,
    pass_metrics,
    times_by_turn,
)
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment, MemoryRecord
from magicdec.records.metrics import REPORTABLE
from magicdec.records.pass_record import (
    EXACT_DTYPE,
    GroupRecord,
    PassRecord,
    RequestRecord,
    hash_output,
)
from magicdec.records.record import Status
from magicdec.records.workload import WorkloadRecord
from magicdec.runner.request import UNKNOWN_ID, Moves, Request
from magicdec.setup.prepare import Prepared
from magicdec.systems.details import Details
from magicdec.workload.answers import answer_scores


@dataclass(frozen=True)
class MeasuredParts:
    """The requests and the groups of a pass, as its record has them."""

    requests: Sequence[RequestRecord]
    groups: Sequence[GroupRecord]


def pass_record(
    measured: MeasuredPass,
    checked: Checked,
    reference: MeasuredPass | None,
    *,
    config: dict[str, Any],
    environment: Environment,
    workload: WorkloadRecord,
    memory: MemoryRecord | None,
    goodput: dict[str, float] | None = None,
) -> PassRecord:
    """The record of a pass. `reference` is None if it is the only pass."""
    planned = measured.planned
    system = planned.system
    is_drafting = planned.serving_pass.is_drafting
    is_external = system.is_external
    if reference is not None:
        is_external |= reference.planned.system.is_external
    dtype = config["model"]["dtype"]
    status = status_of(checked.num_differing, checked.correctness, dtype, is_external)
    passed = status is not Status.MISMATCH
    parts = parts_of(measured)
    verifications = verifications_by_group(measured)
    beside = Beside(
        is_drafting=is_drafting,
        is_random=system.run.is_random,
        bandwidth=environment.read_bandwidth_bytes_per_s,
        goodput=goodput or {},
        categories=workload.categories,
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
        config=config,
        environment=environment,
        workload=workload,
        correctness=checked.correctness,
        reference=None if reference is None else reference.name,
        num_differing=checked.num_differing,
        details=details_of(measured),
        memory=memory if passed else without_measured(memory),
    )
    if record.details is None:
        return record
    missing = [name for name in REPORTABLE if getattr(record.metrics, name, None) is None]
    has_drafts = any(verification.has_drafts for verification in verifications)
    return replace(record, details=record.details.completed(missing, has_drafts))


def status_of(
    num_differing: int | None, correctness: Correctness, dtype: str, is_external: bool = False
) -> Status:
    """The status of a pass. `num_differing` is None if the tokens of some requests cannot be
    compared; others may differ all the same. `is_external`: another program made some of them."""
    if correctness.has_wrong_steps or correctness.has_alarms:
        return Status.MISMATCH
    if correctness.num_diverged:
        return Status.MISMATCH
    differs = bool(num_differing) or correctness.identical is False
    if differs and correctness.num_diverged is None:  # it was not judged
        is_wrong = dtype == EXACT_DTYPE and not is_external
        return Status.MISMATCH if is_wrong else Status.UNVERIFIED
    if num_differing is None:
        return Status.UNVERIFIED
    return Status.VERIFIED_WITH_TIES if num_differing else Status.VERIFIED


def is_comparable(ours: Measured, theirs: Measured) -> bool:
    """Whether both passes began from one prefill, so that the times of their steps are compared."""
    groups = (*ours.groups, *theirs.groups)
    return bool(groups) and all(group.prefill_ms is not None for group in groups)


def record_pass(
    name: str,
    parts: MeasuredParts,
    beside: Beside,
    *,
    status: Status,
    config: dict[str, Any],
    environment: Environment,
    workload: WorkloadRecord,
    correctness: Correctness,
    reference: str | None,
    num_differing: int | None,
    details: Any = None,
    memory: MemoryRecord | None = None,
) -> PassRecord:
    """The record. Raises AssertionError if passes that share a prefill had other threads."""
    passed = status is not Status.MISMATCH
    if beside.reference is not None and is_comparable(parts, beside.reference):
        ours, theirs = (measured.groups[0].threads for measured in (parts, beside.reference))
        assert ours == theirs, f"{name}: the ranks had {ours} threads, but {theirs} in {reference}"
    by_group = dict[str, Any]()
    if passed and not beside.is_random:
        by_group = acceptances_by_group(parts.requests)
    return PassRecord(
        status=status,
        name=name,
        config=config,
        environment=environment,
        workload=workload,
        reference=reference,
        num_differing=num_differing,
        metrics=pass_metrics(parts, beside) if passed else None,
        details=details if passed else None,
        requests=list(parts.requests),
        groups=list(parts.groups),
        times_by_turn=times_by_turn(parts.requests) if passed else None,
        **by_group,
        memory=memory,
        correctness=correctness,
    )


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
        blocks_to_host=counts.blocks_to_host,
        blocks_from_host=counts.blocks_from_host,
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


def describe_requests(
    requests: Sequence[Request],
    moves: Mapping[int, Moves],
    begin_s: float,
    verifications: Verifications | None = None,
    scores: Sequence[float] | None = None,
) -> list[RequestRecord]:
    """The time stamps of finished requests, of which the first arrived at `begin_s`. `moves` has
    those of each request by its id. `verifications` are None where they have no meaning; `scores`
    are those of answers."""
    judged = Verifications() if verifications is None else verifications

    def ms(at_s: float | None) -> float:
        assert at_s is not None, "the request has ended"
        return 1e3 * (at_s - begin_s)

    def after(request: Request, at_s: float) -> float:
        return ms(next((t for t in request.token_times_s if t >= at_s), None))

    return [
        RequestRecord(
            arrival_ms=ms(request.arrived_s),
            joined_ms=[ms(at_s) for at_s in moves[request.request_id].joined_s],
            preempted_ms=[ms(at_s) for at_s in moves[request.request_id].preempted_s],
            prefilled_ms=[after(request, at_s) for at_s in moves[request.request_id].joined_s],
            first_token_ms=ms(request.first_token_s),
            finished_ms=ms(request.finished_s),
            prompt_len=len(request.prompt_ids),
            output_len=len(request.output_ids),
            output_hash=hash_output(request.output_ids),
            conversation=None if request.turn is None else request.turn.conversation,
            turn=None if request.turn is None else request.turn.number,
            **describe_session(request),
            answer_score=None if scores is None else scores[number],
            **describe_drafts(judged, request.request_id),
            **describe_prefixes(moves[request.request_id]),
        )
        for number, request in enumerate(requests)
    ]


def describe_drafts(judged: Verifications, request_id: int) -> dict[str, Any]:
    """What is known of the drafts of a request; nothing without drafts."""
    counts = judged.counts_of(request_id) or ReportedCounts()
    steps = judged.by_request.get(request_id, ())
    positions = [step.position for step in steps if step.position is not None]
    contexts = [step.context for step in steps if step.context is not None]
    digests = [step.digest for step in steps if step.digest is not None]
    is_logged = bool(digests) and len(digests) == len(steps)
    drafted = None
    accepted = None
    if counts.steps is not None:
        drafted, accepted = ([step[part] for step in counts.steps] for part in range(2))
    return {
        "num_draft_tokens": counts.drafted,
        "num_accepted_draft_tokens": counts.accepted,
        "num_spec_steps": counts.verifications,
        "acceptance_histogram": None if counts.histogram is None else list(counts.histogram),
        "per_step_drafted": drafted,
        "per_step_accepted": accepted,
        "per_step_emitted": [step.emitted for step in steps] or None,
        "per_step_position": positions or None,
        "per_step_context": contexts or None,
        "draft_hashes": [hashed for hashed, _ in digests] if is_logged else None,
        "num_draft_kv_read": [num_read for _, num_read in digests] if is_logged else None,
        "num_cancelled_draft_tokens": judged.num_cancelled.get(request_id),
    }


def describe_session(request: Request) -> dict[str, Any]:
    """What a trace says of a request by the ids of its blocks."""
    turn = request.turn
    if turn is None or turn.num_known is None:
        return {}
    return {"branch": turn.branch, "num_known_tokens": turn.num_known}


def describe_prefixes(moves: Moves) -> dict[str, Any]:
    if not moves.num_looked_up:
        return {}
    return {
        "num_looked_up_tokens": moves.num_looked_up,
        "joined_prefix_tokens": moves.found,
        "joined_host_tokens": moves.from_host if any(moves.from_host) else None,
    }
