"""The metrics of a pass, of its turns and of its groups once more, from the definitions of
docs/record.md: plain code that shares nothing with `computing.py`, whose faults it would have
otherwise, but the finding of stalls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise
from statistics import fmean, median, median_high
from typing import Any, NamedTuple

import numpy as np

from magicdec.records.intervals import interval
from magicdec.records.metrics import PassMetrics
from magicdec.records.pass_record import GroupRecord, PassRecord, RequestRecord
from magicdec.records.stalls import PassSteps

PERCENTS = (50, 90, 99)
FIRST_GROUP = 2048  # tokens of the longest prompts of the first group by context
FIRST_GROWN = 512  # tokens of the longest texts of the first group by grown context
FEWEST_GROUPS = 3  # that have an interval
SUMMED_COUNTS = ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
# What a record does not say of the tokens of a request: when each of them came.
ITL = ("mean_itl_ms", "p50_itl_ms", "p90_itl_ms", "p99_itl_ms")
MetricValues = dict[str, Any]
Batch = tuple[GroupRecord, list[RequestRecord]]
"""A group and its requests."""


def metrics_of(record: PassRecord, reference: PassRecord | None = None) -> MetricValues:
    """The metrics of a pass by their names, without `ITL`. None: it has no such metric."""
    requests = record.requests
    batches = list(record.groups_of_requests)
    tpots = known(map(tpot_ms, requests))
    sessions = session_times_ms(batches)
    bounds = record.config["workload"].get("goodput") or {}
    duration_s = sum(by_group(span_ms, batches)) / 1e3
    num_tokens = sum(request.output_len for request in requests)
    arriving = [arrivals_ms(group_requests) for _, group_requests in batches]
    arriving_s = sum(max(times) - min(times) for times in arriving) / 1e3
    num_later = len(requests) - len(batches)
    stalled = PassSteps.of(record.groups).stalls
    stalled_s = sum(stall.ms - stall.median_ms for stall in stalled) / 1e3
    is_timed = any(group.step_ms for group in record.groups)
    num_steps = sum(known(group.num_steps for group in record.groups))
    found: MetricValues = {
        "duration_s": duration_s,
        "request_throughput": len(requests) / duration_s,
        "output_throughput": num_tokens / duration_s,
        "output_throughput_interval": speed_between(
            [
                sum(request.output_len for request in group_requests)
                for _, group_requests in batches
            ],
            by_group(span_ms, batches),
        ),
        "steady_output_throughput": num_tokens / (duration_s - stalled_s)
        if is_timed and duration_s > stalled_s
        else None,
        "request_goodput": sum(keeps(request, bounds) for request in requests) / duration_s
        if bounds
        else None,
        "arrival_rate": num_later / arriving_s if arriving_s > 0 else None,
        **summary("ttft", map(ttft_ms, requests)),
        **summary("tpot", tpots),
        **summary("e2el", (request.finished_ms - request.arrival_ms for request in requests)),
        "request_tokens_per_s": mean([1e3 / tpot for tpot in tpots if tpot > 0]),
        "request_prefill_tokens_per_s": fmean(map(prefill_speed, requests)),
        "num_steps": num_steps or None,
        # No server says how often it preempts.
        "num_preemptions": sum(len(request.preempted_ms) for request in requests)
        if num_steps
        else None,
        "mean_in_flight": in_flight(record.groups),
        "prefix_hit_rate": hit_rate(requests),
        "theoretical_hit_rate": unlimited_hit_rate(requests),
        "sessions_per_hour": len(sessions) / (duration_s / 3600) if sessions else None,
        **summary("session", sessions),
        "host_hit_rate": host_hit_rate(requests),
        "peak_memory_bytes": max(map(sum, known(g.peak_memory_bytes for g in record.groups)))
        if any(group.peak_memory_bytes for group in record.groups)
        else None,
        "answer_score": mean(known(request.answer_score for request in requests)),
        **prefill_metrics(batches),
        **step_metrics(record, batches),
        **begin_metrics(record),
        **acceptance(record),
        "acceptance_by_category": acceptance_by_category(record),
        **ratio_metrics(batches, None if reference is None else list(reference.groups_of_requests)),
    }
    return found


def by_group(number: Callable[[GroupRecord, list[RequestRecord]], float], batches: Any) -> Any:
    return [number(group, requests) for group, requests in batches]


def arrivals_ms(requests: Sequence[RequestRecord]) -> list[float]:
    return [request.arrival_ms for request in requests]


def span_ms(group: GroupRecord, requests: Sequence[RequestRecord]) -> float:
    """From the first arrival to the last token."""
    return max(request.finished_ms for request in requests) - min(arrivals_ms(requests))


def in_flight(groups: Sequence[GroupRecord]) -> float | None:
    num_in_flight = sum(known(group.num_in_flight for group in groups))
    num_steps = sum(known(group.num_steps for group in groups))
    return num_in_flight / num_steps if num_in_flight else None


def prefill_metrics(batches: Sequence[Batch]) -> MetricValues:
    """Of prefills that passes share."""
    shared = [(group, requests) for group, requests in batches if group.prefill_ms is not None]
    tokens = [sum(request.prompt_len for request in requests) for _, requests in shared]
    times_ms = [group.prefill_ms or 0.0 for group, _ in shared]
    return {
        "prefill_tokens_per_s": 1e3 * sum(tokens) / sum(times_ms) if sum(times_ms) else None,
        "prefill_tokens_per_s_interval": speed_between(tokens, times_ms),
    }


def begin_metrics(record: PassRecord) -> MetricValues:
    """Of what comes before the first step, and of what was read."""
    groups = record.groups
    assert record.metrics is not None, "it has passed"
    warm_up_ms = record.metrics.warmup_calibration_ms  # which stands nowhere else
    calibrations = known(group.calibration_ms for group in groups)
    reads = known(group.bytes_read for group in groups)
    rows = sum(known(group.draft_rows for group in groups))
    return {
        "begin_ms": mean(known(group.begin_ms for group in groups)),
        "draft_prefill_ms": mean(known(group.draft_prefill_ms for group in groups)),
        "calibration_ms": sum(calibrations) + (warm_up_ms or 0.0) if calibrations else None,
        "warmup_calibration_ms": warm_up_ms,
        "bytes_read": sum(map(sum, reads)) if reads else None,
        "kv_tokens_read": sum(known(group.draft_kv_tokens for group in groups)) / rows
        if rows
        else None,
    }


STEP_METRICS = (
    "decode_tokens_per_s",
    "decode_tokens_per_s_interval",
    "num_decode_steps",
    "mean_step_ms",
    "median_step_ms",
    "stalled_steps",
    "stalled_ms",
    "longest_stall_ms",
    "longest_stall_median_ms",
    "draft_ms",
    "verify_ms",
    "decode_ms",
    "other_ms",
    "mean_draft_tokens",
    "roofline_fraction",
)


def step_metrics(record: PassRecord, batches: Sequence[Batch]) -> MetricValues:
    """Of the steps that decode."""
    groups = record.groups
    steps_ms = list(chain(*(group.step_ms for group in groups)))
    if not steps_ms:
        return dict.fromkeys(STEP_METRICS)
    stalls = PassSteps.of(groups).stalls
    lost_ms = [stall.ms - stall.median_ms for stall in stalls]
    worst = stalls[lost_ms.index(max(lost_ms))] if stalls else None
    phases = {
        name: list(chain(*(getattr(group, name) for group in groups)))
        for name in ("draft_ms", "verify_ms", "decode_ms")
    }
    num_phases = sum(map(len, phases.values()))
    gammas = list(chain(*(group.step_max_gamma or () for group in groups)))
    reads = known(group.bytes_read for group in groups)
    bandwidth = record.environment.read_bandwidth_bytes_per_s
    tokens = [sum(request.output_len - 1 for request in requests) for _, requests in batches]
    return {
        "decode_tokens_per_s": 1e3 * sum(tokens) / sum(steps_ms),
        "decode_tokens_per_s_interval": speed_between(tokens, [sum(g.step_ms) for g in groups]),
        "num_decode_steps": len(steps_ms),
        "mean_step_ms": fmean(steps_ms),
        "median_step_ms": median(steps_ms),
        "stalled_steps": len(stalls),
        "stalled_ms": sum(lost_ms),
        "longest_stall_ms": None if worst is None else worst.ms,
        "longest_stall_median_ms": None if worst is None else worst.median_ms,
        **{name: mean(times) for name, times in phases.items()},
        "other_ms": fmean(steps_ms) - sum(chain(*phases.values())) / len(steps_ms)
        if num_phases
        else None,
        "mean_draft_tokens": fmean(gammas) if record.is_drafting and gammas else None,
        "roofline_fraction": 1e3 * sum(map(sum, reads)) / bandwidth / sum(steps_ms)
        if reads and bandwidth
        else None,
    }


RATIOS = ("throughput_ratio", "speedup", "total_speedup", "net_speedup")


def ratio_metrics(ours: Sequence[Batch], theirs: Sequence[Batch] | None) -> MetricValues:
    """Of the ratios to the reference: their median over groups, interval and each."""
    found: MetricValues = dict.fromkeys(
        f"{name}{suffix}" for name in RATIOS for suffix in ("", "_interval", "_per_group")
    )
    found["break_even_gen_len"] = None
    if theirs is None:
        return found
    is_shared = all(group.prefill_ms is not None for group, _ in (*ours, *theirs))
    for name in RATIOS if is_shared else RATIOS[:1]:
        pairs = zip(speeds(name, ours), speeds(name, theirs), strict=False)
        ratios = [mine / other for mine, other in pairs if mine and other]
        if ratios:
            found[name] = median(ratios)
            found[f"{name}_interval"] = ratio_between(ratios)
            found[f"{name}_per_group"] = ratios
    if found["net_speedup"] is not None:
        found["break_even_gen_len"] = break_even(ours, theirs)
    return found


def speeds(name: str, batches: Sequence[Batch]) -> list[float]:
    """Tokens for each ms, by group: 0 without a token or without time."""
    steady = PassSteps.of([group for group, _ in batches]).steady_ms
    found = []
    for (group, requests), steady_ms in zip(batches, steady, strict=True):
        first = 0 if name == "throughput_ratio" else 1
        tokens = sum(request.output_len - first for request in requests)
        ms = {
            "throughput_ratio": span_ms(group, requests),
            "speedup": steady_ms,
            "total_speedup": sum(group.step_ms),
            "net_speedup": max(request.finished_ms for request in requests)
            - (group.prefill_ms or 0.0),
        }[name]
        found.append(tokens / ms if ms else 0.0)
    return found


def break_even(ours: Sequence[Batch], theirs: Sequence[Batch]) -> int | None:
    """By trying one length after the other, up to more than any test has."""
    lengths = []
    for mine, other in zip(ours, theirs, strict=True):
        lines = [line_of(mine), line_of(other)]
        if None in lines:
            continue
        (added, ms), (their_added, their_ms) = lines  # type: ignore[misc]
        if ms >= their_ms:
            lengths.append(math.inf)
            continue
        later = next(n for n in range(1, 10**6) if added + n * ms < their_added + n * their_ms)
        lengths.append(1 + later)
    middle = median_high(lengths) if lengths else math.inf
    return None if math.isinf(middle) else int(middle)


def line_of(batch: Batch) -> tuple[float, float] | None:
    """Milliseconds before the first step, and of each token of a request after its first."""
    group, requests = batch
    num_later = fmean(request.output_len - 1 for request in requests)
    added = (group.begin_ms or 0.0) + (group.calibration_ms or 0.0)
    net = max(request.finished_ms for request in requests) - (group.prefill_ms or 0.0)
    return (added, (net - added) / num_later) if num_later else None


def t_quantile(freedom: int) -> float:
    from scipy import stats

    return float(stats.t.ppf(0.975, freedom))


def ratio_between(ratios: Sequence[float]) -> list[float] | None:
    """The interval of their geometric mean by Student's t, widened to their median."""
    logs = np.log(ratios)
    if len(ratios) < FEWEST_GROUPS or logs.std() < 1e-12:
        return None
    reach = t_quantile(len(logs) - 1) * logs.std(ddof=1) / math.sqrt(len(logs))
    ends = [math.exp(logs.mean() - reach), math.exp(logs.mean() + reach)]
    return [min(ends[0], median(ratios)), max(ends[1], median(ratios))]


def speed_between(tokens: Sequence[int], times_ms: Sequence[float]) -> list[float] | None:
    """The interval of all tokens divided by all times, by leaving out each group with steps."""
    pairs = [(count, ms) for count, ms in zip(tokens, times_ms, strict=True) if ms]
    if len(pairs) < FEWEST_GROUPS:
        return None
    sums = np.array(pairs, float).sum(axis=0)
    without = np.array([(sums[0] - count) / (sums[1] - ms) for count, ms in pairs])
    speed = sums[0] / sums[1]
    error = math.sqrt((len(pairs) - 1) * without.var())
    if error <= 1e-12 * speed:
        return None
    reach = t_quantile(len(pairs) - 1) * error / speed
    return [1e3 * speed * math.exp(-reach), 1e3 * speed * math.exp(reach)]


def ttft_ms(request: RequestRecord) -> float:
    return request.first_token_ms - request.arrival_ms


def tpot_ms(request: RequestRecord) -> float | None:
    num_later = request.output_len - 1
    return (request.finished_ms - request.first_token_ms) / num_later if num_later else None


def prefill_speed(request: RequestRecord) -> float:
    """Of the tokens that the prefix cache did not have when the request first joined."""
    num_computed = request.prompt_len - (request.joined_prefix_tokens or [0])[0]
    return num_computed / max((request.first_token_ms - request.joined_ms[0]) / 1e3, 1e-9)


def keeps(request: RequestRecord, bounds: Mapping[str, float]) -> bool:
    """Whether a request keeps every bound; one without TPOT keeps any of it."""
    times = {
        "ttft": ttft_ms(request),
        "tpot": tpot_ms(request) or 0.0,
        "e2el": request.finished_ms - request.arrival_ms,
    }
    return all(times[name] <= most for name, most in bounds.items())


def hit_rate(requests: Sequence[RequestRecord]) -> float | None:
    asking = [request for request in requests if request.num_looked_up_tokens]
    if not asking:
        return None
    found = sum(sum(request.joined_prefix_tokens or ()) for request in asking)
    return found / sum(request.num_looked_up_tokens or 0 for request in asking)


def unlimited_hit_rate(requests: Sequence[RequestRecord]) -> float | None:
    known_tokens = known(request.num_known_tokens for request in requests)
    lengths = [r.prompt_len for r in requests if r.num_known_tokens is not None]
    return sum(known_tokens) / sum(lengths) if lengths else None


def session_times_ms(batches: Sequence[Batch]) -> list[float]:
    """Of each conversation of each group, from its first arrival to its last end."""
    found = []
    for _, requests in batches:
        for number in sorted(set(known(request.conversation for request in requests))):
            members = [request for request in requests if request.conversation == number]
            ends = [request.finished_ms for request in members]
            found.append(max(ends) - min(request.arrival_ms for request in members))
    return found


def host_hit_rate(requests: Sequence[RequestRecord]) -> float | None:
    came_back = [count for r in requests for count in r.joined_host_tokens or ()]
    if not any(came_back):
        return None
    return sum(came_back) / sum(request.num_looked_up_tokens or 0 for request in requests)


def turns_of(requests: Sequence[RequestRecord]) -> list[MetricValues] | None:
    """The times of each turn of conversations; None without them."""
    numbers = sorted(set(known(request.turn for request in requests)))
    return [turn_of(turn, [r for r in requests if r.turn == turn]) for turn in numbers] or None


def turn_of(turn: int, members: Sequence[RequestRecord]) -> MetricValues:
    return {
        "turn": turn,
        "num_requests": len(members),
        "mean_prompt_len": fmean(member.prompt_len for member in members),
        **summary("ttft", map(ttft_ms, members)),
        **summary("tpot", known(map(tpot_ms, members))),
        "prefix_hit_rate": hit_rate(members),
    }


def contexts_of(record: PassRecord) -> list[MetricValues] | None:
    """The acceptance of the requests whose prompts have at most 2048 tokens, at most twice as many,
    and so on; None if nothing was drafted for any, as far as it is known by request."""
    members: dict[int, list[int]] = {}
    for number, request in enumerate(record.requests):
        doublings = math.ceil(math.log2(max(1.0, request.prompt_len / FIRST_GROUP)))
        members.setdefault(FIRST_GROUP << doublings, []).append(number)
    groups = [
        {"most_context": most, "num_requests": len(requests), **acceptance_of(record, requests)}
        for most, requests in sorted(members.items())
    ]
    has_drafts = any(
        group.get("num_draft_tokens") or group.get("num_spec_steps") for group in groups
    )
    return groups if has_drafts else None


def grown_of(record: PassRecord) -> dict[str, MetricValues] | None:
    """The acceptance of the verifications before whose drafts the text had at most 512 tokens, at
    most twice as many, and so on; None if nothing was drafted, or of a server."""
    found: dict[str, list[RequestDrafts]] = {}
    low, high = 0, FIRST_GROWN
    longest = max(request.prompt_len + request.output_len for request in record.requests)
    while low < longest:
        name = f"{low + 1} to {high}" if low else f"up to {high}"
        for request in record.requests:
            places = request.per_step_position or request.per_step_context or []
            within = [place for place, length in enumerate(places) if low < length <= high]
            if within:
                part = partial(chosen, within)
                cut = replace(
                    request,
                    per_step_drafted=part(request.per_step_drafted),
                    per_step_accepted=part(request.per_step_accepted),
                    per_step_emitted=part(request.per_step_emitted),
                )
                found.setdefault(name, []).append(RequestDrafts.from_request(cut, False))
        low, high = high, 2 * high
    groups = {name: {"num_prompts": len(group), **total(group)} for name, group in found.items()}
    return groups or None


def chosen(places: Sequence[int], values: Sequence[int] | None) -> list[int]:
    assert values is not None, "its verifications are known"
    return [values[place] for place in places]


def acceptance_by_category(record: PassRecord) -> dict[str, MetricValues] | None:
    assert record.workload is not None, "it has passed"
    categories = record.workload.categories
    if categories is None or not acceptance_of(record, range(len(record.requests))):
        return None
    prompts = [
        (number if request.conversation is None else request.conversation) % len(categories)
        for number, request in enumerate(record.requests)
    ]
    groups = {
        name: [number for number, prompt in enumerate(prompts) if categories[prompt] == name]
        for name in sorted(set(known(categories)))
    }
    nothing = dict.fromkeys(SUMMED_COUNTS, 0)
    found = {
        name: {"num_prompts": len(requests), **(acceptance_of(record, requests) or nothing)}
        for name, requests in groups.items()
    }
    return found or None


def acceptance(record: PassRecord) -> MetricValues:
    """The acceptance of the whole pass. What a server's counters say of it in place of what
    requests do not say follows from their sums alone."""
    by_request = acceptance_of(record, range(len(record.requests)))
    metrics = record.metrics
    source = getattr(record.details, "source", None)
    if metrics is None or "counters" not in (source or ""):
        return {name: by_request.get(name) for name in ACCEPTANCE}
    emitted = None  # counters need not say in which steps nothing was drafted
    if "tokens_per_verification" not in getattr(record.details, "missing", ()):
        emitted = sum(request.output_len - 1 for request in record.requests)
    pass_drafts = RequestDrafts.from_reported(metrics, emitted)
    found = dict.fromkeys(ACCEPTANCE) | (total([pass_drafts]) if pass_drafts.has_drafts else {})
    return found | {name: value for name, value in by_request.items() if value is not None}


ACCEPTANCE = (
    *SUMMED_COUNTS,
    "draft_acceptance_rate",
    "draft_acceptance_rate_interval",
    "mean_acceptance_length",
    "mean_acceptance_length_interval",
    "tokens_per_verification",
    "tokens_per_verification_interval",
    "acceptance_per_position",
    "acceptance_per_position_interval",
    "judged_per_position",
    "acceptance_histogram",
    "num_cancelled_draft_tokens",
)


class AlikeSteps(NamedTuple):
    """Verifications with as many draft tokens and accepted ones."""

    drafted: float  # NaN where it is not known
    accepted: int
    number: int


@dataclass(frozen=True)
class RequestDrafts:
    """What is known of the drafts of a request, or of a pass; None: it is not."""

    drafted: int | None
    accepted: int | None
    verified: int | None
    emitted: int | None  # tokens of the verifications
    steps: list[AlikeSteps] | None
    num_positions: int

    @classmethod
    def from_request(cls, request: RequestRecord, is_external: bool) -> RequestDrafts:
        drafted = request.per_step_drafted
        accepted = request.per_step_accepted
        emitted = None if request.per_step_emitted is None else sum(request.per_step_emitted)
        if is_external:  # a program of which every step verifies
            emitted = request.output_len - 1
        if drafted is None or accepted is None:
            return cls.from_reported(request, emitted)
        steps = [AlikeSteps(*pair, 1) for pair in zip(drafted, accepted, strict=True)]
        sums = sum(drafted), sum(accepted), len(drafted)
        return cls(*sums, emitted, steps, max(drafted, default=0))

    @classmethod
    def from_reported(
        cls, reported: RequestRecord | PassMetrics, emitted: int | None
    ) -> RequestDrafts:
        """Of sums and a histogram. If they fit, every verification drafted a token for each place
        of it."""
        drafted = reported.num_draft_tokens
        verified = reported.num_spec_steps
        histogram = reported.acceptance_histogram
        most = max(0, len(histogram or ()) - 1)
        is_even = verified is not None and drafted == verified * most
        steps = None
        if histogram is not None:
            draft_length = most if is_even else math.nan
            steps = [AlikeSteps(draft_length, *pair) for pair in enumerate(histogram)]
        return cls(drafted, reported.num_accepted_draft_tokens, verified, emitted, steps, most)

    @property
    def has_drafts(self) -> bool:
        counts = known((self.drafted, self.verified))
        return bool(counts) and 0 not in counts

    def judged(self, position: int) -> float:
        """Verifications that drafted a token there and accepted all before it."""
        if self.steps is None or any(math.isnan(step.drafted) for step in self.steps):
            return math.nan
        return sum(e.number for e in self.steps if position < e.drafted and position <= e.accepted)

    def survived(self, position: int) -> float:
        """Verifications that accepted the token there."""
        if self.steps is None:
            return math.nan
        return sum(step.number for step in self.steps if position < step.accepted)


def acceptance_of(record: PassRecord, numbers: Iterable[int]) -> MetricValues:
    """The acceptance of some requests as far as it is known by request; empty if nothing was
    drafted for them."""
    requests = [record.requests[number] for number in numbers]
    is_external = getattr(record.details, "program", None) is not None
    drafts = [RequestDrafts.from_request(request, is_external) for request in requests]
    found = total([draft for draft in drafts if draft.has_drafts])
    cancelled = known(request.num_cancelled_draft_tokens for request in requests)
    if found or sum(cancelled):
        found["num_cancelled_draft_tokens"] = sum(cancelled) if cancelled else None
    return found


def total(drafts: Sequence[RequestDrafts]) -> MetricValues:
    """The acceptance over all of these, each of which has drafts."""
    if not drafts:
        return {}
    num_positions = max(draft.num_positions for draft in drafts)
    rows = np.array(
        [
            [draft.drafted, draft.accepted, draft.verified, draft.emitted]
            + [draft.judged(k) for k in range(num_positions)]
            + [draft.survived(k) for k in range(num_positions)]
            for draft in drafts
        ],
        float,  # None is NaN
    )
    sums = rows.sum(axis=0)
    drafted, accepted, verified, emitted = range(4)
    judged = sums[4 : 4 + num_positions]
    survived = [sums[verified], *sums[4 + num_positions :], 0.0]
    is_whole = num_positions > 0 and not np.isnan(survived).any()
    has_positions = is_whole and not np.isnan(judged).any()

    def rate(totals: Any) -> float:
        return float(totals[accepted] / totals[drafted])

    def length(totals: Any) -> float:
        return float(1 + totals[accepted] / totals[verified])

    def emits(totals: Any) -> float:
        return float(totals[emitted] / totals[verified])

    def survival(position: int, totals: Any) -> float:
        """The product, up to the position, of the shares that accepted what they judged."""
        counts = zip(totals[4:], totals[4 + num_positions :], strict=False)
        shares = (accepted / judged if judged else 0.0 for judged, accepted in counts)
        return math.prod(islice(shares, position + 1))

    def between(value: Callable[[Any], float], low: float, high: float) -> list[float] | None:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = [value(sums), *(value(sums - row) for row in rows)]
        return interval(np.array(values), low, high)

    most = 1 + num_positions
    at_each = [partial(survival, position) for position in range(num_positions)]
    ends = [between(rate_at, 0, 1) or [] for rate_at in at_each]
    return {
        "num_draft_tokens": whole(sums[drafted]),
        "num_accepted_draft_tokens": whole(sums[accepted]),
        "num_spec_steps": whole(sums[verified]),
        "draft_acceptance_rate": finite(rate(sums)),
        "draft_acceptance_rate_interval": between(rate, 0, 1),
        "mean_acceptance_length": finite(length(sums)),
        "mean_acceptance_length_interval": between(length, 1, most),
        "tokens_per_verification": finite(emits(sums)),
        "tokens_per_verification_interval": between(emits, 1, most),
        "acceptance_per_position": [rate_at(sums) for rate_at in at_each]
        if has_positions
        else None,
        "acceptance_per_position_interval": ends if any(ends) else None,
        "judged_per_position": [int(count) for count in judged] if has_positions else None,
        "acceptance_histogram": [int(more - less) for more, less in pairwise(survived)]
        if is_whole
        else None,
    }


def summary(name: str, values: Iterable[float]) -> MetricValues:
    """The mean and the percentiles of times, which are interpolated linearly."""
    times = sorted(values)
    found: MetricValues = {f"mean_{name}_ms": mean(times)}
    for percent in PERCENTS:
        found[f"p{percent}_{name}_ms"] = None
        if times:
            below, share = divmod(percent / 100 * (len(times) - 1), 1)
            lower = times[int(below)]
            upper = times[min(int(below) + 1, len(times) - 1)]
            found[f"p{percent}_{name}_ms"] = lower + share * (upper - lower)
    return found


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def known(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def whole(value: float) -> int | None:
    return int(value) if math.isfinite(value) else None
