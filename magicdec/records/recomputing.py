"""Whether the metrics of a pass follow from its requests and groups, as those of every record do
that was not edited by hand. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from operator import le
from typing import Any

from magicdec.records.acceptance import ReportedCounts
from magicdec.records.computing import (
    Beside,
    acceptances_by_group,
    pass_metrics,
    times_by_turn,
)
from magicdec.records.drafted import JudgedRecord
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import PassRecord, RequestRecord, reference_of

# Times of a record are differences of a clock of nanoseconds, which may stand at weeks.
ROUNDING = 1e-5
ROUNDING_MS = 1e-6
MOST_DRAFTS = 4096  # of a verification; a record may be a stranger's, and is read to its end
NOT_OF_REQUESTS = ("mean_itl_ms", "p50_itl_ms", "p90_itl_ms", "p99_itl_ms")
# Endings of the names of what records of earlier versions lack; and of the parts of their turns.
ADDED_LATER = (
    "_session_ms",
    "sessions_per_hour",
    "theoretical_hit_rate",
    "acceptance_by_turn",
    "acceptance_by_hit",
    "acceptance_by_grown_context",
)
ADDED_TO_TURNS = ("_tpot_ms",)
RATIO_METRICS = (
    "throughput_ratio",
    "speedup",
    "total_speedup",
    "net_speedup",
    "break_even_gen_len",
)


def unfounded_metric(record: JudgedRecord, command: Sequence[PassRecord] = ()) -> str | None:
    """The name of the first metric that is not what the requests and groups of the record give, or
    that nothing can have measured beside them; None if there is none, and of drafts at every
    position, whose counts alone are compared. Ratios are checked if `command` has the pass that
    they are to. Raises ValueError without requests."""
    if not isinstance(record, PassRecord):
        return None
    metrics = record.metrics
    if metrics is None:
        return None
    if not record.requests or not record.groups or record.workload is None:
        raise ValueError("it has metrics without the requests that they follow from")
    for number, request in enumerate(record.requests):
        if (name := contradiction_in(request)) is not None:
            return f"requests[{number}].{name}"
    reference = reference_of(record, command)
    if reference is not None and metrics.speedup is not None and has_others(record, reference):
        return "speedup"
    expected = pass_metrics(record, beside_of(record, reference))
    for name in (item.name for item in fields(PassMetrics)):
        is_ratio = name.startswith(RATIO_METRICS)
        if name in NOT_OF_REQUESTS or (is_ratio and reference is None):
            continue
        stated = getattr(metrics, name)
        if not (is_older(name, stated) or follows(stated, getattr(expected, name))):
            return name
    groups: dict[str, Any] = {"times_by_turn": times_by_turn(record.requests)}
    if not record.workload.is_random:
        groups |= acceptances_by_group(record.requests)
    for name, found in groups.items():
        stated = getattr(record, name)
        if not (is_older(name, stated) or follows(_plain(stated), _plain(found, stated))):
            return name
    return next((name for name, holds in conditions(record, metrics) if not holds), None)


def has_others(record: PassRecord, reference: PassRecord) -> bool:
    """Whether two passes had other ranks or threads, so that their times say nothing together."""
    pairs = zip(record.groups, reference.groups, strict=False)
    return any(ours.threads != theirs.threads for ours, theirs in pairs)


def beside_of(record: PassRecord, reference: PassRecord | None) -> Beside:
    """What its metrics need beside its requests and groups, from the record. What a server's
    counters say of the whole pass is in the metrics alone."""
    assert record.workload is not None and record.metrics is not None, "it has passed"
    metrics = record.metrics
    total = None
    if "counters" in (getattr(record.details, "source", None) or ""):
        histogram = metrics.acceptance_histogram
        num_later = sum(request.output_len - 1 for request in record.requests)
        has_emitted = metrics.tokens_per_verification is not None  # steps may draft nothing
        total = ReportedCounts(
            drafted=metrics.num_draft_tokens,
            accepted=metrics.num_accepted_draft_tokens,
            verifications=metrics.num_spec_steps,
            emitted=num_later if has_emitted else None,
            histogram=None if histogram is None else tuple(histogram),
        )
    return Beside(
        is_drafting=record.is_drafting,
        is_random=record.workload.is_random,
        bandwidth=record.environment.read_bandwidth_bytes_per_s,
        goodput=record.config["workload"].get("goodput") or {},
        categories=record.workload.categories,
        reported_total=total,
        warmup_calibration_ms=metrics.warmup_calibration_ms,
        reference=reference,
    )


def is_older(name: str, stated: Any, added: tuple[str, ...] = ADDED_LATER) -> bool:
    """Whether a value may be missing, because the record is older than it."""
    return stated is None and name.endswith(added)


def _plain(parts: Any, stated: Any = None) -> Any:
    """Parts of a record as values. Those that an older record, as `stated`, may lack are left out
    if it does."""
    if isinstance(parts, dict):
        return {name: asdict(part) for name, part in parts.items()}
    if parts is None:
        return None
    older = stated or ()
    lacking = {
        name
        for part in older
        for name, value in vars(part).items()
        if is_older(name, value, ADDED_TO_TURNS)
    }
    return [
        {name: None if name in lacking else value for name, value in asdict(part).items()}
        for part in parts
    ]


def follows(stated: Any, expected: Any) -> bool:
    """Whether a stated value is the expected one, but for rounding."""
    if hasattr(stated, "__dataclass_fields__") and hasattr(expected, "__dataclass_fields__"):
        return follows(asdict(stated), asdict(expected))
    if isinstance(stated, dict) and isinstance(expected, dict):
        same_keys = stated.keys() == expected.keys()
        return same_keys and all(follows(value, expected[key]) for key, value in stated.items())
    if isinstance(stated, list) and isinstance(expected, list):
        return len(stated) == len(expected) and all(map(follows, stated, expected))
    if stated is None or expected is None:
        return stated is expected
    if isinstance(stated, dict | list) or isinstance(expected, dict | list):
        return False
    return math.isclose(stated, expected, rel_tol=ROUNDING, abs_tol=ROUNDING_MS)


def contradiction_in(request: RequestRecord) -> str | None:
    """The name of what a request says of itself that cannot be: times that go back, or sums that
    are not those of its verifications."""
    drafted = request.per_step_drafted or []
    accepted = request.per_step_accepted or []
    histogram = request.acceptance_histogram
    has_steps = request.per_step_drafted is not None
    sums = {
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_spec_steps": len(drafted),
    }
    holds = {
        "first_token_ms": request.arrival_ms <= request.first_token_ms + ROUNDING_MS,
        "finished_ms": request.first_token_ms <= request.finished_ms + ROUNDING_MS,
        "prompt_len": request.prompt_len > 0,
        "output_len": request.output_len > 0,
        "per_step_drafted": max(drafted, default=0) < MOST_DRAFTS,
        "per_step_accepted": len(drafted) == len(accepted)
        and all(a <= d for d, a in zip(drafted, accepted, strict=True)),
        **{
            name: not has_steps or getattr(request, name) in (None, count)
            for name, count in sums.items()
        },
        "per_step_context": has_room_for(request),
        "acceptance_histogram": histogram is None
        or (
            len(histogram) <= MOST_DRAFTS
            and (not has_steps or histogram == [accepted.count(n) for n in range(len(histogram))])
        ),
    }
    return next((name for name, is_right in holds.items() if not is_right), None)


def has_room_for(request: RequestRecord) -> bool:
    """Whether its verifications may have been where the request says: after the prompt and a token,
    one after the other, with the tokens that each has emitted between."""
    contexts = request.per_step_context
    emitted = request.per_step_emitted
    if contexts is None or emitted is None:
        return contexts is None
    if len(contexts) != len(emitted):
        return False
    ends = [start + count for start, count in zip(contexts, emitted, strict=True)]
    last = request.prompt_len + request.output_len
    return all(map(le, [request.prompt_len + 1, *ends], [*contexts, last]))


def conditions(record: PassRecord, metrics: PassMetrics) -> Iterator[tuple[str, bool]]:
    """Of metrics that requests do not give, their names and whether they can have been measured
    beside the requests."""
    spans = [request.finished_ms - request.first_token_ms for request in record.requests]
    if metrics.mean_itl_ms is not None:
        # All gaps of a request are the time from its first token to its last.
        num_gaps = sum(spans) / metrics.mean_itl_ms if metrics.mean_itl_ms > 0 else 0.5
        least = sum(span > 0 for span in spans)
        most = sum(request.output_len - 1 for request in record.requests)
        is_count = math.isclose(num_gaps, round(num_gaps), rel_tol=ROUNDING, abs_tol=ROUNDING_MS)
        yield "mean_itl_ms", is_count and least <= round(num_gaps) <= most
    percentiles = (metrics.p50_itl_ms, metrics.p90_itl_ms, metrics.p99_itl_ms)
    itls = [value for value in percentiles if value is not None]
    yield "p99_itl_ms", itls == sorted(itls) and max(itls, default=0.0) <= 1.001 * max(spans)
    ends = (request.finished_ms for request in record.requests)
    steps_ms = [sum(group.step_ms) for group in record.groups]
    yield "groups.step_ms", sum(steps_ms) <= 1.001 * len(record.groups) * max(ends) + ROUNDING_MS
