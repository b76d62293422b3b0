"""The metrics of a pass, computed from the requests and the groups of its record alone, and from
those of the pass that it is compared with. A metric that does not apply is None, never 0.

It is the only place that reads them: what a record says is checked by computing it once more
(`recomputing.py`), and tests hold a second definition. Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from magicdec.records.acceptance import (
    GroupAcceptance,
    ReportedCounts,
    Verifications,
    acceptance_by,
    acceptance_metrics,
    acceptance_of_group,
)
from magicdec.records.intervals import ratio_interval, speed_interval
from magicdec.records.metrics import (
    FIRST_CONTEXT,
    FIRST_GROWN,
    ContextAcceptance,
    PassMetrics,
    TurnTimes,
    without_chance,
)
from magicdec.records.pass_record import (
    AFTER_HIT,
    COLD,
    GroupRecord,
    RequestRecord,
    verifications_of,
)
from magicdec.records.stalls import PassSteps

PERCENTS = (50, 90, 99)


class Measured(Protocol):
    """What metrics are computed from: a record, or what becomes one."""

    @property
    def requests(self) -> Sequence[RequestRecord]: ...
    @property
    def groups(self) -> Sequence[GroupRecord]: ...


@dataclass(frozen=True)
class Beside:
    """What metrics need beside the requests and the groups of a pass.

    `bandwidth`: the read bandwidth of all ranks in bytes/s; `goodput`: the most ms for some of
    ttft, tpot and e2el; `categories`: those of the prompts; `gaps_ms`: the times between steps that
    emitted tokens of the same request; `reported_total`: what a server reports of the whole pass;
    `reference`: the pass of the same requests that it is compared with."""

    is_drafting: bool
    is_random: bool = False  # target or draft has random weights
    bandwidth: float | None = None
    goodput: Mapping[str, float] = field(default_factory=dict)
    categories: Sequence[str | None] | None = None
    gaps_ms: Sequence[float] = ()
    reported_total: ReportedCounts | None = None
    warmup_calibration_ms: float | None = None
    reference: Measured | None = None


def pass_metrics(measured: Measured, beside: Beside) -> PassMetrics:
    """The metrics of a pass whose requests have ended."""
    requests = measured.requests
    groups = measured.groups
    by_group = requests_by_group(measured)
    durations_s = [duration_ms(group_requests) / 1e3 for group_requests in by_group]
    duration_s = sum(durations_s)
    tokens = [sum(request.output_len for request in group_requests) for group_requests in by_group]
    tpots = [tpot for request in requests if (tpot := request.tpot_ms) is not None]
    verifications = verifications_of(requests)
    verifications.reported_total = beside.reported_total
    step_parts = step_metrics(measured, beside)
    stalled_s = step_parts.get("stalled_ms", 0.0) / 1e3
    steady_s = duration_s - stalled_s
    sessions_ms = [ms for group_requests in by_group for ms in session_times(group_requests)]
    good = [keeps(request, beside.goodput) for request in requests]
    metrics = PassMetrics(
        duration_s=duration_s,
        request_throughput=len(requests) / duration_s,
        output_throughput=sum(tokens) / duration_s,
        output_throughput_interval=speed_interval(tokens, [1e3 * s for s in durations_s]),
        steady_output_throughput=sum(tokens) / steady_s if step_parts and steady_s > 0 else None,
        sessions_per_hour=3600 * len(sessions_ms) / duration_s if sessions_ms else None,
        request_goodput=sum(good) / duration_s if beside.goodput else None,
        arrival_rate=arrival_rate(by_group),
        request_tokens_per_s=mean([1e3 / tpot for tpot in tpots if tpot]),
        request_prefill_tokens_per_s=statistics.fmean(map(prefill_speed, requests)),
        mean_in_flight=mean_in_flight(groups),
        num_steps=sum_known(group.num_steps for group in groups) or None,
        num_preemptions=num_preemptions(measured),
        prefix_hit_rate=hit_rate(requests),
        theoretical_hit_rate=theoretical_hit_rate(requests),
        host_hit_rate=host_hit_rate(requests),
        peak_memory_bytes=peak_memory(groups),
        answer_score=mean([r.answer_score for r in requests if r.answer_score is not None]),
        **summary("ttft", [request.first_token_ms - request.arrival_ms for request in requests]),
        **summary("tpot", tpots),
        **summary("itl", beside.gaps_ms),
        **summary("e2el", [request.finished_ms - request.arrival_ms for request in requests]),
        **summary("session", sessions_ms),
        **prefill_metrics(measured),
        **step_parts,
        **ratios(measured, beside.reference),
        **acceptance_metrics(verifications, len(requests), categories_of(measured, beside)),
    )
    is_by_chance = beside.is_random and beside.is_drafting
    return without_chance(metrics) if is_by_chance else metrics


def requests_by_group(measured: Measured) -> list[Sequence[RequestRecord]]:
    found = []
    first = 0
    for group in measured.groups:
        found.append(measured.requests[first : first + group.num_requests])
        first += group.num_requests
    return found


def duration_ms(requests: Sequence[RequestRecord]) -> float:
    """From the first arrival of a group to the end of its last request."""
    begin_ms = min(request.arrival_ms for request in requests)
    return max(request.finished_ms for request in requests) - begin_ms


def session_times(requests: Sequence[RequestRecord]) -> list[float]:
    """The time of each conversation of a group, from its first arrival to the end of its last
    request; empty without conversations."""
    sessions = dict[int, list[RequestRecord]]()
    for request in requests:
        if request.conversation is not None:
            sessions.setdefault(request.conversation, []).append(request)
    return [duration_ms(members) for members in sessions.values()]


def keeps(request: RequestRecord, bounds: Mapping[str, float]) -> bool:
    """Whether a request keeps every bound; one without TPOT keeps any of it."""
    times = {
        "ttft": request.first_token_ms - request.arrival_ms,
        "tpot": request.tpot_ms or 0.0,
        "e2el": request.finished_ms - request.arrival_ms,
    }
    return all(times[name] <= most for name, most in bounds.items())


def arrival_rate(by_group: Sequence[Sequence[RequestRecord]]) -> float | None:
    """Requests a second after the first of each group; None if all arrive at once."""
    spans = [
        max(r.arrival_ms for r in requests) - min(r.arrival_ms for r in requests)
        for requests in by_group
    ]
    later = sum(len(requests) - 1 for requests in by_group)
    return 1e3 * later / sum(spans) if sum(spans) else None


def prefill_speed(request: RequestRecord) -> float:
    """The prompt tokens of a request that were computed, divided by the seconds from when it first
    got a row to its first token."""
    num_computed = request.prompt_len - sum((request.joined_prefix_tokens or [])[:1])
    return 1e3 * num_computed / max(request.first_token_ms - request.joined_ms[0], 1e-6)


def mean_in_flight(groups: Sequence[GroupRecord]) -> float | None:
    num_in_flight = sum_known(group.num_in_flight for group in groups)
    num_steps = sum_known(group.num_steps for group in groups)
    return num_in_flight / num_steps if num_in_flight and num_steps else None


def num_preemptions(measured: Measured) -> int | None:
    if not any(group.num_steps for group in measured.groups):
        return None
    return sum(len(request.preempted_ms) for request in measured.requests)


def hit_rate(requests: Iterable[RequestRecord]) -> float | None:
    """The share of looked-up tokens that a prefix cache had; None if none were looked up."""
    known = [request for request in requests if request.num_looked_up_tokens]
    num_looked_up = sum(request.num_looked_up_tokens or 0 for request in known)
    num_found = sum(sum(request.joined_prefix_tokens or ()) for request in known)
    return num_found / num_looked_up if num_looked_up else None


def theoretical_hit_rate(requests: Iterable[RequestRecord]) -> float | None:
    """The share of the tokens of prompts that a cache without limits would have had; None where no
    trace says it."""
    known = [request for request in requests if request.num_known_tokens is not None]
    num_tokens = sum(request.prompt_len for request in known)
    num_known = sum(request.num_known_tokens or 0 for request in known)
    return num_known / num_tokens if num_tokens else None


def host_hit_rate(requests: Sequence[RequestRecord]) -> float | None:
    """The share of looked-up tokens that were in host memory; None if none were."""
    num_found = sum(sum(request.joined_host_tokens or ()) for request in requests)
    num_looked_up = sum(request.num_looked_up_tokens or 0 for request in requests)
    return num_found / num_looked_up if num_found else None


def peak_memory(groups: Sequence[GroupRecord]) -> int | None:
    peaks = [sum(group.peak_memory_bytes) for group in groups if group.peak_memory_bytes]
    return max(peaks, default=0) or None


def prefill_metrics(measured: Measured) -> dict[str, Any]:
    """Of prefills that passes share."""
    pairs = zip(measured.groups, requests_by_group(measured), strict=True)
    shared = [
        (group.prefill_ms, requests) for group, requests in pairs if group.prefill_ms is not None
    ]
    times_ms = [ms for ms, _ in shared]
    tokens = [sum(request.prompt_len for request in requests) for _, requests in shared]
    total_s = sum(times_ms) / 1e3
    return {
        "prefill_tokens_per_s": sum(tokens) / total_s if total_s else None,
        "prefill_tokens_per_s_interval": speed_interval(tokens, times_ms),
    }


def step_metrics(measured: Measured, beside: Beside) -> dict[str, Any]:
    """Of the steps that decode; empty where no step was timed."""
    groups = measured.groups
    steps = PassSteps.of(groups)
    times_ms = list(chain.from_iterable(steps.step_ms))
    before = {
        "begin_ms": mean(known(group.begin_ms for group in groups)),
        "draft_prefill_ms": mean(known(group.draft_prefill_ms for group in groups)),
        "calibration_ms": calibration_ms(groups, beside.warmup_calibration_ms),
        "warmup_calibration_ms": beside.warmup_calibration_ms,
        "bytes_read": bytes_read(groups),
        "kv_tokens_read": kv_tokens_read(groups),
    }
    if not times_ms:
        return {name: value for name, value in before.items() if value is not None}
    by_group = requests_by_group(measured)
    tokens = [sum(request.output_len - 1 for request in requests) for requests in by_group]
    decode_s = sum(times_ms) / 1e3
    phases_ms = sum(sum(g.draft_ms) + sum(g.verify_ms) + sum(g.decode_ms) for g in groups)
    num_steps = len(times_ms)
    gammas = [gamma for group in groups for gamma in group.step_max_gamma or ()]
    read = bytes_read(groups)
    roofline_s = None
    if read is not None and beside.bandwidth is not None:
        roofline_s = read / beside.bandwidth
    return {
        **before,
        **stall_metrics(steps),
        "decode_tokens_per_s": sum(tokens) / decode_s if decode_s else None,
        "decode_tokens_per_s_interval": speed_interval(tokens, list(map(sum, steps.step_ms))),
        "num_decode_steps": num_steps,
        "mean_step_ms": 1e3 * decode_s / num_steps,
        "draft_ms": mean([ms for group in groups for ms in group.draft_ms]),
        "verify_ms": mean([ms for group in groups for ms in group.verify_ms]),
        "decode_ms": mean([ms for group in groups for ms in group.decode_ms]),
        "other_ms": (1e3 * decode_s - phases_ms) / num_steps if phases_ms else None,
        "mean_draft_tokens": sum(gammas) / num_steps if beside.is_drafting and gammas else None,
        "roofline_fraction": roofline_s / decode_s if roofline_s is not None and decode_s else None,
    }


def calibration_ms(groups: Sequence[GroupRecord], warmup_ms: float | None) -> float | None:
    times_ms = known(group.calibration_ms for group in groups)
    return sum(times_ms) + (warmup_ms or 0.0) if times_ms else None


def bytes_read(groups: Sequence[GroupRecord]) -> int | None:
    by_group = known(group.bytes_read for group in groups)
    return sum(map(sum, by_group)) if by_group else None


def kv_tokens_read(groups: Sequence[GroupRecord]) -> float | None:
    num_rows = sum_known(group.draft_rows for group in groups)
    num_tokens = sum_known(group.draft_kv_tokens for group in groups)
    return num_tokens / num_rows if num_rows else None


def stall_metrics(steps: PassSteps) -> dict[str, Any]:
    """The median of the steps, and their stalls."""
    stalls = steps.stalls
    worst = max(stalls, key=lambda stall: stall.lost_ms, default=None)
    return {
        "median_step_ms": statistics.median(chain.from_iterable(steps.step_ms)),
        "stalled_steps": len(stalls),
        "stalled_ms": math.fsum(stall.lost_ms for stall in stalls),
        "longest_stall_ms": None if worst is None else worst.ms,
        "longest_stall_median_ms": None if worst is None else worst.median_ms,
    }


def ratios(ours: Measured, reference: Measured | None) -> dict[str, Any]:
    """The fields of `Ratios`, over the groups in which both passes emitted tokens after the first;
    those of steps only where both began from one prefill."""
    if reference is None:
        return {}
    found = {"throughput_ratio": ratios_of(ours, reference, durations_ms, with_first=True)}
    groups = (*ours.groups, *reference.groups)
    if all(group.prefill_ms is not None for group in groups):
        found |= {
            "speedup": ratios_of(ours, reference, steady_ms),
            "total_speedup": ratios_of(ours, reference, steps_ms),
            "net_speedup": ratios_of(ours, reference, net_ms),
        }
    fields: dict[str, Any] = {}
    for name, group_ratios in found.items():
        if group_ratios:
            fields[name] = statistics.median(group_ratios)
            fields[f"{name}_interval"] = ratio_interval(group_ratios)
            fields[f"{name}_per_group"] = group_ratios
    if "net_speedup" in fields:
        fields["break_even_gen_len"] = break_even_gen_len(ours, reference)
    return fields


TimesOf = Callable[[Measured], Sequence[float]]


def ratios_of(
    ours: Measured, reference: Measured, times: TimesOf, with_first: bool = False
) -> list[float]:
    """Ratios of tokens per time, by group. `with_first`: of all tokens, not of those after the
    first. A group that one of them has not served, since the command has ended, has none."""
    columns = zip(
        num_tokens(ours, with_first),
        times(ours),
        num_tokens(reference, with_first),
        times(reference),
        strict=False,
    )
    return [
        (count / ms) / (their_count / their_ms)
        for count, ms, their_count, their_ms in columns
        if count and their_count and ms and their_ms
    ]


def num_tokens(measured: Measured, with_first: bool) -> list[int]:
    first = 0 if with_first else 1
    return [sum(r.output_len - first for r in requests) for requests in requests_by_group(measured)]


def durations_ms(measured: Measured) -> list[float]:
    return list(map(duration_ms, requests_by_group(measured)))


def steady_ms(measured: Measured) -> list[float]:
    return PassSteps.of(measured.groups).steady_ms


def steps_ms(measured: Measured) -> list[float]:
    return [sum(group.step_ms) for group in measured.groups]


def net_ms(measured: Measured) -> list[float]:
    """From the end of the shared prefill to the last token, by group."""
    ends = [max(r.finished_ms for r in requests) for requests in requests_by_group(measured)]
    pairs = zip(measured.groups, ends, strict=True)
    return [end - prefill_end_ms(group) for group, end in pairs]


def prefill_end_ms(group: GroupRecord) -> float:
    assert group.prefill_ms is not None, "passes share the prefill"
    return group.prefill_ms


def added_ms(measured: Measured) -> list[float]:
    """What comes before the first step of each group."""
    return [(group.begin_ms or 0.0) + (group.calibration_ms or 0.0) for group in measured.groups]


def break_even_gen_len(ours: Measured, reference: Measured) -> int | None:
    """The smallest output length, in tokens a request, with a net speedup above 1, if later tokens
    take the average time: the upper median over groups, or None."""
    lengths = [
        [
            statistics.fmean(r.output_len - 1 for r in requests)
            for requests in requests_by_group(measured)
        ]
        for measured in (ours, reference)
    ]
    columns = zip(
        added_ms(ours),
        added_ms(reference),
        net_ms(ours),
        net_ms(reference),
        *lengths,
        strict=True,
    )
    found = [
        _break_even(added, their_added, (ms - added) / n, (their_ms - their_added) / their_n)
        for added, their_added, ms, their_ms, n, their_n in columns
        if n and their_n
    ]
    middle = statistics.median_high(found) if found else math.inf
    return None if math.isinf(middle) else int(middle)


def _break_even(
    added: float, their_added: float, per_token: float, their_per_token: float
) -> float:
    """The smallest number of tokens, the first of which prefill emits, that take less time than the
    reference's."""
    if per_token >= their_per_token:
        return math.inf
    return max(0, math.floor((added - their_added) / (their_per_token - per_token))) + 2


def categories_of(measured: Measured, beside: Beside) -> list[str | None] | None:
    """The category of each request: that of its prompt, or of the first of its conversation. The
    prompts of a later group are the next ones, or, of `--repeats`, the same again."""
    if beside.categories is None:
        return None
    requests = measured.requests
    places = [n if r.conversation is None else r.conversation for n, r in enumerate(requests)]
    count = len(beside.categories)
    return [beside.categories[place % count] for place in places]


def times_by_turn(requests: Sequence[RequestRecord]) -> list[TurnTimes] | None:
    """The times of requests by their turns; None where they are no conversations."""
    turns = dict[int, list[RequestRecord]]()
    for request in requests:
        if request.turn is not None:
            turns.setdefault(request.turn, []).append(request)
    return [
        TurnTimes(
            turn=turn,
            num_requests=len(members),
            mean_prompt_len=statistics.fmean(request.prompt_len for request in members),
            prefix_hit_rate=hit_rate(members),
            **summary("ttft", [r.first_token_ms - r.arrival_ms for r in members]),
            **summary("tpot", known([r.tpot_ms for r in members])),
        )
        for turn, members in sorted(turns.items())
    ] or None


def acceptance_by_turn(
    requests: Sequence[RequestRecord], verifications: Verifications
) -> dict[str, GroupAcceptance] | None:
    """The acceptance of requests by their turns; None without conversations, and where it is not
    known by request."""
    return _acceptance_by([turns_with(request.turn) for request in requests], verifications)


def turns_with(turn: int | None) -> str | None:
    """The group of a turn: 1, 2, and then twice as many turns in each."""
    if turn is None or turn <= 2:
        return None if turn is None else str(turn)
    last = 1 << (turn - 1).bit_length()
    return f"{last // 2 + 1} to {last}"


def acceptance_by_hit(
    requests: Sequence[RequestRecord], verifications: Verifications
) -> dict[str, GroupAcceptance] | None:
    """The acceptance of requests of which a prefix cache had something when they first joined, and
    of the others; None without such a cache, and where acceptance is not known by request."""
    names = [
        None
        if request.joined_prefix_tokens is None
        else (AFTER_HIT if any(request.joined_prefix_tokens[:1]) else COLD)
        for request in requests
    ]
    return _acceptance_by(names, verifications)


def acceptances_by_group(requests: Sequence[RequestRecord]) -> dict[str, Any]:
    """The parts of a record that have the acceptance of groups of its requests, by name."""
    verifications = verifications_of(requests)
    return {
        "acceptance_by_context": acceptance_by_context(requests, verifications),
        "acceptance_by_turn": acceptance_by_turn(requests, verifications),
        "acceptance_by_hit": acceptance_by_hit(requests, verifications),
        "acceptance_by_grown_context": acceptance_by_grown_context(verifications),
    }


def _acceptance_by(
    names: Sequence[str | None], verifications: Verifications
) -> dict[str, GroupAcceptance] | None:
    """As `acceptance_by`, in the order in which the groups come first; None if nothing was drafted
    for any."""
    by_name = acceptance_by(names, verifications)
    found = {name: by_name[name] for name in dict.fromkeys(names) if name is not None}
    has_drafts = any(group.num_draft_tokens or group.num_spec_steps for group in found.values())
    return found if has_drafts else None


def acceptance_by_context(
    requests: Sequence[RequestRecord], verifications: Verifications
) -> list[ContextAcceptance] | None:
    """The acceptance of requests by the length of their prompts; None where it is not known by
    request."""
    places = dict[int, list[int]]()
    for number, request in enumerate(requests):
        most = FIRST_CONTEXT
        while most < request.prompt_len:
            most *= 2
        places.setdefault(most, []).append(number)
    groups = [
        ContextAcceptance(
            most_context=most,
            num_requests=len(members),
            **acceptance_metrics(verifications.subset(members), len(members)),
        )
        for most, members in sorted(places.items())
    ]
    return (
        groups if any(group.num_draft_tokens or group.num_spec_steps for group in groups) else None
    )


def acceptance_by_grown_context(
    verifications: Verifications,
) -> dict[str, GroupAcceptance] | None:
    """The acceptance by the length that the text had before the drafts, so that one request is in
    several groups; None where it is not known of every verification."""
    groups = dict[int, Verifications]()
    for request, steps in verifications.by_request.items():
        for step in steps:
            if step.num_before is None:
                return None
            most = longest_with(step.num_before)
            groups.setdefault(most, Verifications()).by_request[request].append(step)
    return {
        texts_up_to(most): acceptance_of_group(
            group.subset([*group.by_request]), len(group.by_request)
        )
        for most, group in sorted(groups.items())
    } or None


def longest_with(context: int) -> int:
    """The length of the longest texts that are in one group with a text of this length."""
    return max(FIRST_GROWN, 1 << (context - 1).bit_length())


def texts_up_to(most: int) -> str:
    """The name of the group whose longest texts have this length."""
    return f"up to {most}" if most == FIRST_GROWN else f"{most // 2 + 1} to {most}"


def summary(name: str, values: Sequence[float]) -> dict[str, Any]:
    """The mean and the percentiles of times in ms, by the names of their fields."""
    found = {f"p{percent}_{name}_ms": percentile(values, percent) for percent in PERCENTS}
    return {f"mean_{name}_ms": mean(values), **found}


def percentile(values: Sequence[float], percent: float) -> float | None:
    if not values:
        return None
    import numpy as np

    return float(np.percentile(values, percent))


def mean(values: Sequence[float] | None) -> float | None:
    return statistics.fmean(values) if values else None


def known(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def sum_known(values: Iterable[int | None]) -> int:
    return sum(value for value in values if value is not None)
