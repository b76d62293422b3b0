"""Whether the metrics of a pass, of its turns and of its groups follow from its requests, as those
of every record do that was not edited by hand.

It computes each metric once more, from the definitions of docs/record.md, and shares nothing with
`metrics.py`, whose faults it would have otherwise. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from magicdec.bench.serving.metrics import ServingMetrics
from magicdec.bench.serving.record import RequestRecord, ServingRecord
from magicdec.records.intervals import interval
from magicdec.records.stalls import FACTOR

PERCENTS = (50, 90, 99)
FIRST_GROUP = 2048  # tokens of the longest prompts of the first group by context
# Times of a record are differences of a clock of nanoseconds, which may stand at weeks.
ROUNDING = 1e-5
ROUNDING_MS = 1e-6
OF_SUMS = ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
MOST_DRAFTS = 4096  # of a verification; a record may be a stranger's, and is read to its end
MetricValues = dict[str, Any]


class Between(NamedTuple):
    """What requests say of a metric that they do not give."""

    low: float
    high: float


def unfounded_metric(record: ServingRecord) -> str | None:
    """The name of the first metric that is not what the requests of the record give, or that
    nothing can have measured beside them; None if there is none. Raises ValueError without
    requests."""
    metrics = record.metrics
    if metrics is None:
        return None
    if not record.requests:
        raise ValueError("it has metrics without the requests that they follow from")
    for number, request in enumerate(record.requests):
        if (name := contradiction_in(request)) is not None:
            return f"requests[{number}].{name}"
    expected = metrics_of(record)
    for name, stated in asdict(metrics).items():
        if name in expected and not follows(stated, expected[name]):
            return name
    groups = {
        "times_by_turn": (record.times_by_turn, turns_of(record.requests)),
        "acceptance_by_context": (record.acceptance_by_context, contexts_of(record)),
    }
    for name, (parts, of_requests) in groups.items():
        if not follows(None if parts is None else [asdict(each) for each in parts], of_requests):
            return name
    return next((name for name, holds in conditions(record, metrics) if not holds), None)


def follows(stated: Any, expected: Any) -> bool:
    """Whether a stated value is the expected one. A record of an earlier version may lack it."""
    if stated is None:
        return True
    if isinstance(expected, Between):
        low, high = expected
        return low - ROUNDING <= stated <= high + ROUNDING
    if isinstance(stated, dict) and isinstance(expected, dict):
        return all(follows(value, expected.get(key)) for key, value in stated.items())
    if isinstance(stated, list) and isinstance(expected, list):
        return len(stated) == len(expected) and all(map(follows, stated, expected))
    if isinstance(stated, dict | list) or expected is None or isinstance(expected, dict | list):
        return False
    return is_near(stated, expected)


def is_near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=ROUNDING_MS)


def contradiction_in(request: RequestRecord) -> str | None:
    """The name of what a request says of itself that cannot be: times that go back, or sums that
    are not those of its verifications."""
    lengths = {"prompt_len": request.prompt_len, "output_len": request.output_len}
    drafted = request.per_step_drafted or []
    accepted = request.per_step_accepted or []
    histogram = request.acceptance_histogram
    sums = dict(zip(OF_SUMS, (sum(drafted), sum(accepted), len(drafted)), strict=True))
    has_steps = request.per_step_drafted is not None
    holds = {
        "first_token_ms": request.arrival_ms <= request.first_token_ms + ROUNDING_MS,
        "finished_ms": request.first_token_ms <= request.finished_ms + ROUNDING_MS,
        **{name: length > 0 for name, length in lengths.items()},
        "per_step_drafted": max(drafted, default=0) < MOST_DRAFTS,
        "per_step_accepted": len(drafted) == len(accepted)
        and all(a <= d for d, a in zip(drafted, accepted, strict=True)),
        **{
            name: not has_steps or getattr(request, name) in (None, count)
            for name, count in sums.items()
        },
        "acceptance_histogram": histogram is None
        or (
            len(histogram) <= MOST_DRAFTS
            and (not has_steps or histogram == [accepted.count(n) for n in range(len(histogram))])
        ),
    }
    return next((name for name, is_right in holds.items() if not is_right), None)


def metrics_of(record: ServingRecord) -> MetricValues:
    """The metrics of a pass that its requests give, by their names. None: it has no such metric."""
    requests = record.requests
    metrics = record.metrics
    assert metrics is not None, "it has passed"
    arrivals = [each.arrival_ms for each in requests]
    makespan_s = (max(each.finished_ms for each in requests) - min(arrivals)) / 1e3
    num_tokens = sum(each.output_len for each in requests)
    tpots = known(map(tpot_ms, requests))
    good = [keeps(each, record.config["workload"].get("goodput") or {}) for each in requests]
    has_bounds = bool(record.config["workload"].get("goodput"))
    span_s = (max(arrivals) - min(arrivals)) / 1e3
    found: MetricValues = {
        "makespan_s": makespan_s,
        "request_throughput": len(requests) / makespan_s,
        "output_throughput": num_tokens / makespan_s,
        "request_goodput": sum(good) / makespan_s if has_bounds else None,
        "arrival_rate": (len(requests) - 1) / span_s if span_s > 0 else None,
        **summary("ttft", map(ttft_ms, requests)),
        **summary("tpot", tpots),
        **summary("e2el", (each.finished_ms - each.arrival_ms for each in requests)),
        "request_tokens_per_s": mean([1e3 / each for each in tpots if each > 0]),
        "prefill_tokens_per_s": fmean(map(prefill_speed, requests)),
        "steady_output_throughput": None,
        "num_preemptions": None,
        "prefix_hit_rate": hit_rate(requests),
        **acceptance(record),
        "acceptance_by_category": acceptance_by_category(record),
    }
    if metrics.stalled_ms is not None and metrics.stalled_ms < 1e3 * makespan_s:
        found["steady_output_throughput"] = num_tokens / (makespan_s - metrics.stalled_ms / 1e3)
    if metrics.num_steps is not None:  # no server says how often it preempts
        found["num_preemptions"] = sum(len(each.preempted_ms) for each in requests)
    return found


def conditions(record: ServingRecord, metrics: ServingMetrics) -> Iterator[tuple[str, bool]]:
    """Of metrics that requests do not give, their names and whether they can have been measured
    beside the requests."""
    requests = record.requests
    spans = [each.finished_ms - each.first_token_ms for each in requests]
    makespan_ms = 1e3 * metrics.makespan_s
    if metrics.mean_itl_ms is not None:
        # All gaps of a request are the time from its first token to its last.
        num_gaps = sum(spans) / metrics.mean_itl_ms if metrics.mean_itl_ms > 0 else 0.5
        least = sum(span > 0 for span in spans)
        most = sum(each.output_len - 1 for each in requests)
        is_count = is_near(num_gaps, round(num_gaps))
        yield "mean_itl_ms", is_count and least <= round(num_gaps) <= most
    itls = known(getattr(metrics, f"p{percent}_itl_ms") for percent in PERCENTS)
    yield "p99_itl_ms", itls == sorted(itls) and max(itls, default=0.0) <= 1.001 * max(spans)
    if metrics.mean_in_flight is not None and metrics.num_steps is not None:
        in_flight = metrics.mean_in_flight * metrics.num_steps
        is_count = is_near(in_flight, round(in_flight))
        yield "mean_in_flight", is_count and metrics.mean_in_flight <= len(requests)
    if metrics.num_decode_steps is not None and metrics.median_step_ms is not None:
        # Half of them took at least as long as the median.
        half_ms = metrics.num_decode_steps // 2 * metrics.median_step_ms
        yield "median_step_ms", 0 <= half_ms <= 1.001 * makespan_ms
        yield "num_decode_steps", metrics.num_decode_steps <= (metrics.num_steps or math.inf)
    yield from stall_conditions(metrics, makespan_ms)
    if metrics.peak_memory_bytes is not None:
        yield "peak_memory_bytes", metrics.peak_memory_bytes > 0


def stall_conditions(metrics: ServingMetrics, makespan_ms: float) -> Iterator[tuple[str, bool]]:
    lost_ms = metrics.stalled_ms
    count = metrics.stalled_steps
    if lost_ms is None or count is None:
        return
    longest_ms = metrics.longest_stall_ms
    median_ms = metrics.longest_stall_median_ms
    yield "stalled_steps", 0 <= count <= (metrics.num_decode_steps or 0)
    yield "stalled_ms", 0 <= lost_ms <= makespan_ms and (lost_ms > 0) == (count > 0)
    yield "longest_stall_ms", (longest_ms is not None) == (median_ms is not None) == (count > 0)
    if longest_ms is not None and median_ms is not None:
        most_ms = longest_ms - median_ms
        yield "longest_stall_ms", longest_ms > FACTOR * median_ms
        yield "longest_stall_ms", most_ms <= lost_ms * (1 + ROUNDING)
        yield "stalled_ms", lost_ms <= count * most_ms * (1 + ROUNDING)


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


def hit_rate(requests: Sequence[RequestRecord]) -> Between | None:
    """One number, unless a request was preempted: it joins again with its prompt and with as much
    of its output as it had then."""
    asking = [each for each in requests if each.num_prefix_tokens is not None]
    if not asking:
        return None
    num_found = sum(each.num_prefix_tokens or 0 for each in asking)
    least = sum(each.prompt_len * len(each.joined_ms) for each in asking)
    more = sum((each.output_len - 1) * len(each.preempted_ms) for each in asking)
    return Between(num_found / (least + more), num_found / least)


def turns_of(requests: Sequence[RequestRecord]) -> list[MetricValues] | None:
    """The times of each turn of conversations; None without them."""
    numbers = sorted(set(known(each.turn for each in requests)))
    return [turn_of(turn, [r for r in requests if r.turn == turn]) for turn in numbers] or None


def turn_of(turn: int, members: Sequence[RequestRecord]) -> MetricValues:
    return {
        "turn": turn,
        "num_requests": len(members),
        "mean_prompt_len": fmean(each.prompt_len for each in members),
        **summary("ttft", map(ttft_ms, members)),
        "prefix_hit_rate": hit_rate(members),
    }


def contexts_of(record: ServingRecord) -> list[MetricValues] | None:
    """The acceptance of the requests whose prompts have at most 2048 tokens, at most twice as many,
    and so on; None if nothing was drafted for any, as far as it is known by request."""
    members: dict[int, list[int]] = {}
    for number, request in enumerate(record.requests):
        doublings = math.ceil(math.log2(max(1.0, request.prompt_len / FIRST_GROUP)))
        members.setdefault(FIRST_GROUP << doublings, []).append(number)
    groups = [
        {"most_context": most, "num_requests": len(of), **acceptance_of(record, of)}
        for most, of in sorted(members.items())
    ]
    has_drafts = any(each.get("num_draft_tokens") or each.get("num_spec_steps") for each in groups)
    return groups if has_drafts else None


def acceptance_by_category(record: ServingRecord) -> dict[str, MetricValues] | None:
    categories = record.workload.categories
    if categories is None or not acceptance_of(record, range(len(record.requests))):
        return None
    prompts = [
        number if each.conversation is None else each.conversation
        for number, each in enumerate(record.requests)
    ]
    groups = {
        name: [number for number, prompt in enumerate(prompts) if categories[prompt] == name]
        for name in sorted(set(known(categories)))
    }
    nothing = dict.fromkeys(OF_SUMS, 0)
    found = {
        name: {"num_prompts": len(of), **(acceptance_of(record, of) or nothing)}
        for name, of in groups.items()
    }
    return found or None


def acceptance(record: ServingRecord) -> MetricValues:
    """The acceptance of the whole pass. What a server's counters say of it in place of what
    requests do not say follows from their sums alone."""
    by_request = acceptance_of(record, range(len(record.requests)))
    metrics = record.metrics
    server = record.server
    if metrics is None or server is None or "counters" not in (server.source or ""):
        return {name: by_request.get(name) for name in ACCEPTANCE}
    num_later = sum(each.output_len - 1 for each in record.requests)
    of_pass = RequestDrafts.of_sums(metrics, num_later)
    found = dict.fromkeys(ACCEPTANCE) | (total([of_pass]) if of_pass.has_drafts else {})
    return found | {name: value for name, value in by_request.items() if value is not None}


ACCEPTANCE = (
    *OF_SUMS,
    "draft_acceptance_rate",
    "draft_acceptance_rate_interval",
    "mean_acceptance_length",
    "mean_acceptance_length_interval",
    "mean_emitted_tokens",
    "mean_emitted_tokens_interval",
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
    def of_request(cls, request: RequestRecord, is_external: bool) -> RequestDrafts:
        drafted = request.per_step_drafted
        accepted = request.per_step_accepted
        emitted = None if request.per_step_emitted is None else sum(request.per_step_emitted)
        if is_external:  # a program of which every step verifies
            emitted = request.output_len - 1
        if drafted is None or accepted is None:
            return cls.of_sums(request, emitted)
        steps = [AlikeSteps(*each, 1) for each in zip(drafted, accepted, strict=True)]
        sums = sum(drafted), sum(accepted), len(drafted)
        return cls(*sums, emitted, steps, max(drafted, default=0))

    @classmethod
    def of_sums(cls, said: RequestRecord | ServingMetrics, emitted: int | None) -> RequestDrafts:
        """Of sums and a histogram. If they fit, every verification drafted a token for each place
        of it."""
        drafted = said.num_draft_tokens
        verified = said.num_spec_steps
        histogram = said.acceptance_histogram
        most = max(0, len(histogram or ()) - 1)
        is_even = verified is not None and drafted == verified * most
        steps = None
        if histogram is not None:
            of_each = most if is_even else math.nan
            steps = [AlikeSteps(of_each, *each) for each in enumerate(histogram)]
        return cls(drafted, said.num_accepted_draft_tokens, verified, emitted, steps, most)

    @property
    def has_drafts(self) -> bool:
        counts = known((self.drafted, self.verified))
        return bool(counts) and 0 not in counts

    def judged(self, position: int) -> float:
        """Verifications that drafted a token there and accepted all before it."""
        if self.steps is None or any(math.isnan(each.drafted) for each in self.steps):
            return math.nan
        return sum(e.number for e in self.steps if position < e.drafted and position <= e.accepted)

    def survived(self, position: int) -> float:
        """Verifications that accepted the token there."""
        if self.steps is None:
            return math.nan
        return sum(each.number for each in self.steps if position < each.accepted)


def acceptance_of(record: ServingRecord, numbers: Iterable[int]) -> MetricValues:
    """The acceptance of some requests as far as it is known by request; empty if nothing was
    drafted for them."""
    requests = [record.requests[number] for number in numbers]
    is_external = record.server is not None
    drafts = [RequestDrafts.of_request(each, is_external) for each in requests]
    found = total([each for each in drafts if each.has_drafts])
    cancelled = known(each.num_cancelled_draft_tokens for each in requests)
    if found or sum(cancelled):
        found["num_cancelled_draft_tokens"] = sum(cancelled) if cancelled else None
    return found


def total(drafts: Sequence[RequestDrafts]) -> MetricValues:
    """The acceptance over all of these, each of which has drafts."""
    if not drafts:
        return {}
    num_positions = max(each.num_positions for each in drafts)
    rows = np.array(
        [
            [each.drafted, each.accepted, each.verified, each.emitted]
            + [each.judged(k) for k in range(num_positions)]
            + [each.survived(k) for k in range(num_positions)]
            for each in drafts
        ],
        float,  # None is NaN
    )
    sums = rows.sum(axis=0)
    drafted, accepted, verified, emitted = range(4)
    judged = sums[4 : 4 + num_positions]
    survived = [sums[verified], *sums[4 + num_positions :], 0.0]
    is_whole = num_positions > 0 and not np.isnan(survived).any()
    has_positions = is_whole and not np.isnan(judged).any()

    def rate(of: Any) -> float:
        return float(of[accepted] / of[drafted])

    def length(of: Any) -> float:
        return float(1 + of[accepted] / of[verified])

    def emits(of: Any) -> float:
        return float(of[emitted] / of[verified])

    def survival(position: int, of: Any) -> float:
        """The product, up to the position, of the shares that accepted what they judged."""
        counts = zip(of[4:], of[4 + num_positions :], strict=False)
        shares = (accepted / judged if judged else 0.0 for judged, accepted in counts)
        return math.prod(islice(shares, position + 1))

    def between(value: Callable[[Any], float], low: float, high: float) -> list[float] | None:
        with np.errstate(divide="ignore", invalid="ignore"):
            each = [value(sums), *(value(sums - row) for row in rows)]
        return interval(np.array(each), low, high)

    most = 1 + num_positions
    at_each = [partial(survival, position) for position in range(num_positions)]
    ends = [between(each, 0, 1) or [] for each in at_each]
    return {
        "num_draft_tokens": whole(sums[drafted]),
        "num_accepted_draft_tokens": whole(sums[accepted]),
        "num_spec_steps": whole(sums[verified]),
        "draft_acceptance_rate": finite(rate(sums)),
        "draft_acceptance_rate_interval": between(rate, 0, 1),
        "mean_acceptance_length": finite(length(sums)),
        "mean_acceptance_length_interval": between(length, 1, most),
        "mean_emitted_tokens": finite(emits(sums)),
        "mean_emitted_tokens_interval": between(emits, 1, most),
        "acceptance_per_position": [each(sums) for each in at_each] if has_positions else None,
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
