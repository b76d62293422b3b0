"""The picture of requests over time, and the search for the saturation rate, on hand-made
requests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from magicdec.serving.record import RequestRecord
from magicdec.serving.saturation import END, PRECISION, next_rate, saturation_rate
from magicdec.serving.showing import DECODE, PREFILL, WAITING, spans_of

REQUEST = RequestRecord(
    arrival_ms=1000, joined_ms=[2000, 6000], preempted_ms=[5000], prefilled_ms=[3000, 6500],
    first_token_ms=3000, finished_ms=9000, prompt_len=5, output_len=9,
)  # fmt: skip


def test_spans_cover_a_request_from_its_arrival_to_its_end() -> None:
    assert spans_of(REQUEST) == [
        (WAITING, 1, 1), (PREFILL, 2, 1), (DECODE, 3, 2),
        (WAITING, 5, 1), (PREFILL, 6, 0.5), (DECODE, 6.5, 2.5),
    ]  # fmt: skip
    # Preempted before its text was prefilled again: the next token comes after the second start.
    early = replace(REQUEST, prefilled_ms=[6500, 6500])
    assert spans_of(early)[:3] == [(WAITING, 1, 1), (PREFILL, 2, 3), (WAITING, 5, 1)]
    at_once = replace(REQUEST, joined_ms=[1000], preempted_ms=[], prefilled_ms=[9000])
    assert spans_of(at_once) == [(PREFILL, 1, 8)]


@pytest.mark.parametrize("capacity", [0.03, 0.9, 1.0, 5.3, 700.0])
def test_the_search_finds_the_largest_sustained_rate(capacity: float) -> None:
    measured = list[tuple[float, bool]]()
    while rate := next_rate(measured, start=1.0):
        measured.append((rate, rate <= capacity))
    found = saturation_rate(measured)
    assert found is not None and found <= capacity < found * PRECISION
    assert len(measured) < 18


def test_the_search_ends_if_every_or_no_rate_is_sustained() -> None:
    for is_good in (True, False):
        measured = list[tuple[float, bool]]()
        while rate := next_rate(measured, start=1.0):
            measured.append((rate, is_good))
        assert len(measured) == 24 and (saturation_rate(measured) is not None) == is_good
    # A slower rate that failed by chance does not end the search.
    assert next_rate([(1.0, False), (2.0, True)], 1.0) == 4.0
    assert next_rate([(2.0, True), (2.1, False)], 1.0) == END
