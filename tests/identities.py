"""What must hold between the steps, the requests and the metrics of the record of a pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from recomputed_metrics import contexts_of, grown_of, metrics_of, turns_of

from magicdec.records.acceptance import Verification
from magicdec.records.metrics import SUFFIX
from magicdec.records.pass_record import (
    GroupRecord,
    PassRecord,
    RequestRecord,
    reference_of,
    unequal_threads,
)
from magicdec.records.recomputing import follows, unfounded_metric

ROUNDING_MS = 1e-5  # a time is rounded to 1e-6 ms; times a few of them
PHASE_TOLERANCE = 0.01  # on CUDA phases have the device's clock and steps the host's


def check_metrics(record: PassRecord, command: Sequence[PassRecord] = ()) -> list[str]:
    """The names of the metrics of a pass that are not what its requests and groups give, by the
    package and by the second definition, or are lacking although no server says so. Ratios are
    checked if `command` has the pass that they are to."""
    if record.metrics is None:
        return []
    wrong = unfounded_metric(record, command)
    missing = getattr(record.details, "missing", None) or []
    expected = metrics_of(record, reference_of(record, command))
    is_random = record.workload is not None and record.workload.is_random
    if reference_of(record, command) is None or (is_random and record.is_drafting):
        stated = asdict(record.metrics)
        expected = {name: value for name, value in expected.items() if value is not None}
        expected = {name: value for name, value in expected.items() if stated[name] is not None}
    expected["times_by_turn"] = turns_of(record.requests)
    if not is_random:
        expected["acceptance_by_context"] = contexts_of(record)
        grown = grown_of(record)
        # Records of pipelines from before it was measured have positions all the same.
        is_older = not any(request.per_step_context for request in record.requests)
        if not is_older or record.acceptance_by_grown_context is not None:
            expected["acceptance_by_grown_context"] = grown
    stated = asdict(record)
    stated |= stated["metrics"]
    lacking = [name for name in expected if lacks(stated, expected, name, missing)]
    others = [
        name
        for name, value in expected.items()
        if name not in lacking and not agrees(stated[name], value)
    ]
    return [*([] if wrong is None else [wrong]), *lacking, *others]


def check_command(command: Sequence[PassRecord]) -> list[str]:
    """The same of each pass of a command."""
    return [
        f"{record.name}: {name}" for record in command for name in check_metrics(record, command)
    ]


def agrees(stated: Any, expected: Any) -> bool:
    """Whether a stated value is the expected one, as far as both are known."""
    if stated is None or expected is None:
        return True
    if isinstance(stated, dict) and isinstance(expected, dict):
        return all(agrees(value, expected.get(key)) for key, value in stated.items())
    if isinstance(stated, list) and isinstance(expected, list):
        return len(stated) == len(expected) and all(map(agrees, stated, expected))
    return follows(stated, expected)


def lacks(stated: Any, expected: Any, key: Any, missing: Sequence[str]) -> bool:
    """Whether the value of that key, or one inside it, is None although it could be known."""
    ours = stated[key]
    theirs = expected[key]
    if str(key).removesuffix(SUFFIX) in missing:
        return False
    if ours is None or theirs is None:
        return ours is not theirs
    if isinstance(theirs, dict):
        return any(lacks(ours, theirs, shared, missing) for shared in ours.keys() & theirs.keys())
    if isinstance(theirs, list):
        return any(lacks(ours, theirs, place, missing) for place in range(len(theirs)))
    return False


def acceptance(requests: Iterable[RequestRecord]) -> tuple[float, float, list[float]]:
    """The acceptance rate, length and acceptance by position of requests with drafts."""
    rows = [
        (drafted, accepted)
        for request in requests
        for drafted, accepted in zip(
            request.per_step_drafted or (), request.per_step_accepted or (), strict=True
        )
    ]
    survived: list[float] = []
    for k in range(1, max(drafted for drafted, _ in rows) + 1):
        judged = [count for drafted, count in rows if drafted >= k and count >= k - 1]
        share = sum(count >= k for count in judged) / len(judged) if judged else 0.0
        survived.append(share * (survived[-1] if survived else 1.0))
    accepted = sum(count for _, count in rows)
    return accepted / sum(drafted for drafted, _ in rows), 1 + accepted / len(rows), survived


def must_equal(name: str, value: float, other: str, expected: float) -> None:
    """Both values are the same up to rounding."""
    if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=ROUNDING_MS):
        raise AssertionError(f"{name} is {value!r}, but {other} is {expected!r}")


def must_not_exceed(name: str, value: float, other: str, limit: float) -> None:
    """The value is at most the limit, up to rounding."""
    if value > limit + ROUNDING_MS + 1e-6 * abs(limit):
        raise AssertionError(f"{name} is {value!r}, but {other} is {limit!r}")


def check_record(record: PassRecord) -> None:
    """The requests and groups of a pass that shares its prefill do not contradict each other. The
    prompts of a group are prefilled one after the other, and the last is the end of it."""
    for number, (group, requests) in enumerate(record.groups_of_requests):
        check_group(f"{record.name}, group {number}", group, requests)
    problem = unequal_threads(record)
    assert problem is None, problem


def check_group(name: str, group: GroupRecord, requests: Sequence[RequestRecord]) -> None:
    ttft_ms = [request.first_token_ms - request.arrival_ms for request in requests]
    assert group.prefill_ms is not None, "passes share its prefill"
    must_not_exceed(f"{name}: the last TTFT", max(ttft_ms), "prefill_ms", group.prefill_ms)
    if any(later <= earlier for earlier, later in pairwise(ttft_ms)):
        raise AssertionError(f"{name}: the TTFT {ttft_ms} does not rise from row to row")
    for key in ("begin_ms", "calibration_ms"):
        must_not_exceed(f"{name}: 0", 0.0, key, getattr(group, key) or 0.0)
    columns = {
        key: len(values)
        for key in ("step_forwards", "step_max_gamma", "step_rows")
        if (values := getattr(group, key)) is not None
    }
    for key, count in columns.items():
        must_equal(f"{name}: steps in {key}", count, "steps in step_ms", len(group.step_ms))
    must_equal(f"{name}: num_steps", group.num_steps or 0, "steps", len(group.step_ms))
    check_steps(name, group, requests)
    check_phases(name, group)


def check_steps(name: str, group: GroupRecord, requests: Sequence[RequestRecord]) -> None:
    """A verification emits a token and one for each of its accepted drafts, up to the end of the
    request. A step decodes the rows that have not ended, and drafts as many tokens as the row with
    the most. No request ends before the steps that it took part in."""
    gammas = group.step_max_gamma or [0] * len(group.step_ms)
    for number, request in enumerate(requests):
        check_verifications(f"{name}, request {number}", request, max(gammas, default=0))
    if all(gammas) and gammas:
        counts = [len(measured.per_step_drafted or ()) for measured in requests]
    elif not any(gammas):
        counts = [measured.output_len - 1 for measured in requests]
    else:
        return  # steps without drafts stand between others
    must_equal(f"{name}: steps", len(gammas), "steps of the longest row", max(counts))
    for step, rows in enumerate(group.step_rows or ()):
        running = sum(count > step for count in counts)
        must_equal(f"{name}, step {step}: its rows", rows, "running requests", running)
    begin_ms = (group.prefill_ms or 0.0) + (group.begin_ms or 0.0) + (group.calibration_ms or 0.0)
    for number, (request, count) in enumerate(zip(requests, counts, strict=True)):
        label = f"{name}, request {number}: the end of its steps"
        ends_ms = begin_ms + sum(group.step_ms[:count]) if count else 0.0
        must_not_exceed(label, ends_ms, "its finished_ms", request.finished_ms)


def check_verifications(name: str, request: RequestRecord, gamma: int) -> None:
    steps: list[Verification] = request.verifications()
    num_emitted = sum(verification.emitted for verification in steps)
    must_not_exceed(f"{name}: emitted tokens", num_emitted, "its tokens", request.output_len - 1)
    for step, verification in enumerate(steps):
        is_last = step == len(steps) - 1  # maybe the end of the request
        is_right = 0 <= verification.accepted <= verification.drafted <= gamma
        is_right &= 1 <= verification.emitted <= verification.accepted + 1
        if not is_right or (verification.emitted != verification.accepted + 1 and not is_last):
            raise AssertionError(
                f"{name}, verification {step}: gamma {gamma}, drafted {verification.drafted}, "
                f"accepted {verification.accepted}, emitted {verification.emitted}"
            )


def check_phases(name: str, group: GroupRecord) -> None:
    """Where phases are timed, every step has those of its kind, and they lie within the step."""
    phases = {key: getattr(group, key) for key in ("draft_ms", "verify_ms", "decode_ms")}
    if not any(phases.values()):
        return
    gammas = group.step_max_gamma or [0] * len(group.step_ms)
    num_drafting = sum(gamma > 0 for gamma in gammas)
    for key, times in phases.items():
        num_expected = len(gammas) - num_drafting if key == "decode_ms" else num_drafting
        must_equal(f"{name}: times in {key}", len(times), "steps that have it", num_expected)
    draft, verify, decode = map(iter, phases.values())
    for step, (ms, gamma) in enumerate(zip(group.step_ms, gammas, strict=True)):
        phases_ms = next(draft) + next(verify) if gamma else next(decode)
        label = f"{name}, step {step}: the time of its phases"
        limit = ms * (1 + PHASE_TOLERANCE)
        must_not_exceed(label, phases_ms, "its step_ms, with a tolerance,", limit)
