"""Serving metrics of hand-made requests, and the bounds of goodput."""

from __future__ import annotations

from dataclasses import fields

import pytest

from magicdec.request import Batch, Request, SamplingParams
from magicdec.scheduling.plan import Part, Plan
from magicdec.serving.counts import Moves, StepCounts
from magicdec.serving.metrics import (
    ServingMetrics,
    gaps_ms,
    parse_goodput,
    serving_metrics,
)
from magicdec.serving.saturation import is_sustained, share_sustained


def finished(number: int, arrived_s: float, token_times_s: list[float]) -> Request:
    request = Request(number, (1, 2, 3), SamplingParams(len(token_times_s)))
    request.output_ids = [7] * len(token_times_s)
    request.token_times_s, request.arrived_s = token_times_s, arrived_s
    request.first_token_s, request.finished_s = token_times_s[0], token_times_s[-1]
    return request


REQUESTS = [
    finished(0, 10.0, [10.5, 10.75, 11.0]),  # TTFT 500, TPOT 250, E2EL 1000 ms
    finished(1, 11.0, [13.0, 13.0, 13.5, 14.0, 14.0]),  # 2000, 250 and 3000 ms
    finished(2, 12.0, [13.0]),  # 1000 and 1000 ms; no TPOT
]
COUNTS = StepCounts(num_steps=8, num_preemptions=2, num_in_flight=20)


def test_metrics_are_those_of_the_time_stamps() -> None:
    found = serving_metrics(REQUESTS, COUNTS, peak_memory_bytes=7, lone_s=1.0)
    assert found.makespan_s == 4.0 and found.peak_memory_bytes == 7  # from 10 to 14
    assert found.request_throughput == 3 / 4 and found.output_throughput == 9 / 4
    assert (found.arrival_rate, found.served_rate) == (2 / 2, 2 / 3)  # in 2 s, in 4 - 1 s
    assert share_sustained(found) == pytest.approx(2 / 3) and not is_sustained(found)
    assert share_sustained(serving_metrics(REQUESTS, COUNTS, {"ttft": 1000.0})) == 2 / 3
    assert (found.mean_in_flight, found.num_steps, found.num_preemptions) == (2.5, 8, 2)
    ttft = found.mean_ttft_ms, found.p50_ttft_ms, found.p90_ttft_ms, found.p99_ttft_ms
    assert ttft == pytest.approx((3500 / 3, 1000, 1800, 1980))
    assert (found.mean_tpot_ms, found.p99_tpot_ms) == (250, 250)
    e2el = found.mean_e2el_ms, found.p50_e2el_ms, found.p90_e2el_ms
    assert e2el == pytest.approx((5000 / 3, 1000, 2600))
    assert found.request_goodput is None, "no bound was given"


def test_tokens_of_one_step_have_no_gap() -> None:
    """Request 1 emits two tokens in its first and in its last step."""
    assert gaps_ms(REQUESTS[1]) == [500, 500] and gaps_ms(REQUESTS[2]) == []
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


def test_a_single_token_has_no_time_per_token() -> None:
    found = serving_metrics([REQUESTS[2]], COUNTS)
    missing = {f.name for f in fields(ServingMetrics) if getattr(found, f.name) is None}
    names = {f"{s}_{of}_ms" for s in ("mean", "p50", "p90", "p99") for of in ("tpot", "itl")}
    rates = {"arrival_rate", "served_rate"}
    assert missing == {*names, *rates, "request_goodput", "peak_memory_bytes"}


def test_a_step_counts_what_it_prefills_and_decodes() -> None:
    counts = StepCounts(iter((4.0, 5.0, 6.0)).__next__)
    one, two, three = REQUESTS
    for request, row in zip(REQUESTS, range(3), strict=True):
        request.row = row
    counts.watch(Plan(Batch((one, two)), admitted=((three, 2),), parts=(Part(three, 2, 0, 3),)))
    counts.watch(Plan(Batch((one,)), preempted=((two, 1), (three, 2))))
    counts.watch(Plan(admitted=((two, 1),), parts=(Part(two, 1, 0, 2),)))
    moves = {2: Moves([4.0], [5.0]), 1: Moves([6.0], [5.0])}
    assert (counts.num_steps, counts.num_preemptions, counts.num_in_flight) == (3, 2, 5)
    assert counts.in_flight == 1 and counts.moves == moves


def test_goodput_is_a_list_of_bounds() -> None:
    assert parse_goodput([]) == {}
    assert parse_goodput(["ttft:200", "tpot:12.5"]) == {"ttft": 200.0, "tpot": 12.5}
    for words, message in (
        (["itl:3"], "--goodput itl:3 is not known; choose from ttft:MS, tpot:MS, e2el:MS"),
        (["ttft"], "--goodput ttft: '' is no time in ms larger than 0"),
        (["ttft:0"], "'0' is no time"),
        (["ttft:nan"], "'nan' is no time"),
        (["ttft:5", "ttft:6"], "--goodput names ttft twice"),
    ):
        with pytest.raises(ValueError) as refused:
            parse_goodput(words)
        assert message in str(refused.value)
