"""The record of a pass that has been measured. It has metrics only if its tokens are not known to
be wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.records.acceptance import ReportedCounts, Verifications
from magicdec.records.computing import (
    Beside,
    Measured,
    acceptance_by_context,
    pass_metrics,
    times_by_turn,
)
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment, MemoryRecord
from magicdec.records.pass_record import (
    EXACT_DTYPE,
    GroupRecord,
    PassRecord,
    RequestRecord,
    hash_output,
    verifications_of,
)
from magicdec.records.record import Status
from magicdec.records.workload import WorkloadRecord
from magicdec.runner.request import Moves, Request


@dataclass(frozen=True)
class MeasuredParts:
    """The requests and the groups of a pass, as its record has them."""

    requests: Sequence[RequestRecord]
    groups: Sequence[GroupRecord]


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
    contexts = None
    if not beside.is_random:
        contexts = acceptance_by_context(parts.requests, verifications_of(parts.requests))
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
        acceptance_by_context=contexts if passed else None,
        memory=memory,
        correctness=correctness,
    )


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
        "draft_hashes": [hashed for hashed, _ in digests] if is_logged else None,
        "num_draft_kv_read": [num_read for _, num_read in digests] if is_logged else None,
        "num_cancelled_draft_tokens": judged.num_cancelled.get(request_id),
    }


def describe_prefixes(moves: Moves) -> dict[str, Any]:
    if not moves.num_looked_up:
        return {}
    return {"num_looked_up_tokens": moves.num_looked_up, "joined_prefix_tokens": moves.found}
