"""Serving metrics of hand-made requests, and the bounds of goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import pytest

from magicdec.bench.recording import MeasuredParts, describe_requests
from magicdec.bench.timeline import DECODE, PREFILL, WAITING, spans_of
from magicdec.engine.scheduler import StepCounts
from magicdec.records.computing import Beside, pass_metrics
from magicdec.records.metrics import PassMetrics, RequestTimes, Throughput
from magicdec.records.pass_record import GroupRecord, RequestRecord
from magicdec.runner.request import Batch, Moves, Request, SamplingParams
from magicdec.runner.step_plan import PrefillChunk, StepPlan
from magicdec.systems.options import GOODPUT_OF, parse_goodput


def finished(number: int, arrived_s: float, token_times_s: list[float]) -> Request:
    request = Request(number, (1, 2, 3), SamplingParams(len(token_times_s)))
    request.output_ids = [7] * len(token_times_s)
    request.token_times_s = token_times_s
    request.arrived_s = arrived_s
    request.first_token_s = token_times_s[0]
    request.finished_s = token_times_s[-1]
    return request


REQUESTS = [
    finished(0, 10.0, [10.5, 10.75, 11.0]),  # TTFT 500, TPOT 250, E2EL 1000 ms
    finished(1, 11.0, [13.0, 13.0, 13.5, 14.0, 14.0]),  # 2000, 250 and 3000 ms
    finished(2, 12.0, [13.0]),  # 1000 and 1000 ms; no TPOT
]
MOVES = {0: Moves([10.25]), 1: Moves([11.5, 13.25], [13.125]), 2: Moves([12.5])}
AT_ONCE = StepCounts(num_steps=8, moves={n: Moves([0.0]) for n in range(10)})
COUNTS = StepCounts(num_steps=8, num_preemptions=2, num_in_flight=20, moves=MOVES)


def serving_metrics(
    requests: Sequence[Request],
    counts: StepCounts,
    goodput: Mapping[str, float] | None = None,
    peak_memory_bytes: int | None = None,
) -> PassMetrics:
    """Of a pass whose steps were not timed."""
    group = GroupRecord(
        num_requests=len(requests),
        num_steps=counts.num_steps,
        num_in_flight=counts.num_in_flight,
        step_ms=[],
        draft_ms=[],
        verify_ms=[],
        decode_ms=[],
        peak_memory_bytes=None if peak_memory_bytes is None else [peak_memory_bytes],
        threads=[1],
    )
    described = describe_requests(requests, counts.moves, requests[0].arrived_s)
    gaps_ms = [gap for request in requests for gap in request.gaps_ms()]
    beside = Beside(is_drafting=False, goodput=goodput or {}, gaps_ms=gaps_ms)
    return pass_metrics(MeasuredParts(described, [group]), beside)


def test_metrics_are_those_of_the_time_stamps() -> None:
    found = serving_metrics(REQUESTS, COUNTS, peak_memory_bytes=7)
    assert found.duration_s == 4.0 and found.peak_memory_bytes == 7  # from 10 to 14
    assert found.request_throughput == 3 / 4 and found.output_throughput == 9 / 4
    assert found.arrival_rate == 2 / 2
    assert (found.mean_in_flight, found.num_steps, found.num_preemptions) == (2.5, 8, 1)
    ttft = found.mean_ttft_ms, found.p50_ttft_ms, found.p90_ttft_ms, found.p99_ttft_ms
    assert ttft == pytest.approx((3500 / 3, 1000, 1800, 1980))
    assert (found.mean_tpot_ms, found.p99_tpot_ms) == (250, 250)
    assert found.request_tokens_per_s == 4  # of the two requests that have a TPOT
    speeds = 3 / 0.25, 3 / 1.5, 3 / 0.5  # prompts of 3 tokens, from when they got a row
    assert found.request_prefill_tokens_per_s == pytest.approx(sum(speeds) / 3)
    e2el = found.mean_e2el_ms, found.p50_e2el_ms, found.p90_e2el_ms
    assert e2el == pytest.approx((5000 / 3, 1000, 2600))
    assert found.request_goodput is None, "no bound was given"


def test_tokens_that_were_found_are_not_prefilled() -> None:
    """Two of the three prompt tokens of request 1 are found when it joins; when it joins again,
    four of its text, which were not computed before its first token."""
    moves = {0: Moves([10.25]), 1: Moves([11.5, 13.25], [13.125], 9, [2, 4]), 2: Moves([12.5])}
    found = serving_metrics(REQUESTS, replace(COUNTS, moves=moves))
    speeds = 3 / 0.25, 1 / 1.5, 3 / 0.5
    assert found.request_prefill_tokens_per_s == pytest.approx(sum(speeds) / 3)
    _, looked_up, _ = describe_requests(REQUESTS, moves, 10.0)
    assert (looked_up.num_looked_up_tokens, looked_up.joined_prefix_tokens) == (9, [2, 4])


def test_tokens_of_one_step_have_no_gap() -> None:
    """Request 1 emits two tokens in its first and in its last step."""
    assert REQUESTS[1].gaps_ms() == [500, 500] and REQUESTS[2].gaps_ms() == []
    found = serving_metrics(REQUESTS, COUNTS)
    itl = found.mean_itl_ms, found.p50_itl_ms, found.p90_itl_ms
    assert itl == pytest.approx((375, 375, 500))


def test_goodput_counts_the_requests_that_keep_every_bound() -> None:
    for bounds, good in (
        ({"ttft": 1000.0}, 2),
        ({"ttft": 999.0}, 1),
        ({"tpot": 249.0}, 1),  # the request with one token keeps it
        ({"ttft": 5000.0, "tpot": 250.0}, 3),
        ({"ttft": 1000.0, "e2el": 999.0}, 0),
    ):
        assert serving_metrics(REQUESTS, COUNTS, bounds).request_goodput == good / 4, bounds


@pytest.mark.parametrize("bound", GOODPUT_OF)
def test_goodput_is_of_each_request_and_not_of_their_mean(bound: str) -> None:
    """With a bound of 400 ms, which the mean keeps and one request does not, or the reverse."""
    for times_s, good in (([0.125, 0.125, 0.75], 2), ([0.125, 0.75, 0.75], 1)):
        stamps = {
            "ttft": [[s, s + 0.01] for s in times_s],
            "tpot": [[0.01, 0.01 + s] for s in times_s],
            "e2el": [[s / 2, s] for s in times_s],
        }
        requests = [finished(i, 0.0, token_s) for i, token_s in enumerate(stamps[bound])]
        found = serving_metrics(requests, AT_ONCE, {bound: 400.0})
        assert found.request_goodput == good / found.duration_s
        assert (getattr(found, f"mean_{bound}_ms") < 400) == (good == 2)


def test_the_time_stamps_of_a_record_count_from_the_first_arrival() -> None:
    """The second request gives its row back after its first two tokens, and gets another."""
    first, second, third = describe_requests(REQUESTS, MOVES, 10.0)
    assert second == RequestRecord(
        arrival_ms=1000,
        joined_ms=[1500, 3250],
        preempted_ms=[3125],
        prefilled_ms=[3000, 3500],
        first_token_ms=3000,
        finished_ms=4000,
        prompt_len=3,
        output_len=5,
        output_hash=second.output_hash,
    )
    assert (first.first_token_ms, third.finished_ms) == (500, 3000)


def test_a_single_token_has_no_time_per_token() -> None:
    found = serving_metrics([REQUESTS[2]], COUNTS)
    kinds = (Throughput, RequestTimes)
    missing = {f.name for kind in kinds for f in fields(kind) if getattr(found, f.name) is None}
    names = {f"{s}_{time}_ms" for s in ("mean", "p50", "p90", "p99") for time in ("tpot", "itl")}
    rates = {"arrival_rate", "request_tokens_per_s", "request_goodput"}
    intervals = {"output_throughput_interval"}
    sessions = {f"{s}_session_ms" for s in ("mean", "p50", "p90", "p99")} | {"sessions_per_hour"}
    assert missing == {*names, *rates, *intervals, *sessions, "steady_output_throughput"}


def test_a_step_counts_what_it_prefills_and_decodes() -> None:
    counts = StepCounts(iter((4.0, 5.0, 6.0)).__next__)
    one, two, three = REQUESTS
    for request, row in zip(REQUESTS, range(3), strict=True):
        request.row = row
    counts.watch(
        StepPlan(Batch((one, two)), admitted=((three, 2),), parts=(PrefillChunk(three, 2, 0, 3),))
    )
    counts.watch(StepPlan(Batch((one,)), preempted=((two, 1), (three, 2))))
    counts.watch(StepPlan(admitted=((two, 1),), parts=(PrefillChunk(two, 1, 0, 2),)))
    moves = {2: Moves([4.0], [5.0]), 1: Moves([6.0], [5.0])}
    assert (counts.num_steps, counts.num_preemptions, counts.num_in_flight) == (3, 2, 5)
    assert counts.moves == moves


def test_goodput_is_a_list_of_bounds() -> None:
    assert parse_goodput([]) == {}
    assert parse_goodput(["ttft:200", "tpot:12.5"]) == {"ttft": 200.0, "tpot": 12.5}
    for words, message in (
        (["itl:3"], "itl:3 is not known; choose from ttft:MS, tpot:MS, e2el:MS"),
        (["ttft"], "ttft: '' is no time in ms larger than 0"),
        (["ttft:0"], "'0' is no time"),
        (["ttft:nan"], "'nan' is no time"),
        (["ttft:5", "ttft:6"], "names ttft twice"),
    ):
        with pytest.raises(ValueError) as refused:
            parse_goodput(words)
        assert message in str(refused.value)


REQUEST = RequestRecord(
    arrival_ms=1000,
    joined_ms=[2000, 6000],
    preempted_ms=[5000],
    prefilled_ms=[3000, 6500],
    first_token_ms=3000,
    finished_ms=9000,
    prompt_len=5,
    output_len=9,
    output_hash="0",
)


def test_spans_cover_a_request_from_its_arrival_to_its_end() -> None:
    assert spans_of(REQUEST) == [
        (WAITING, 1, 1),
        (PREFILL, 2, 1),
        (DECODE, 3, 2),
        (WAITING, 5, 1),
        (PREFILL, 6, 0.5),
        (DECODE, 6.5, 2.5),
    ]
    # Preempted before its text was prefilled again: the next token comes after the second start.
    early = replace(REQUEST, prefilled_ms=[6500, 6500])
    assert spans_of(early)[:3] == [(WAITING, 1, 1), (PREFILL, 2, 3), (WAITING, 5, 1)]
    at_once = replace(REQUEST, joined_ms=[1000], preempted_ms=[], prefilled_ms=[9000])
    assert spans_of(at_once) == [(PREFILL, 1, 8)]
