"""The picture of requests over time, on hand-made requests."""

from __future__ import annotations

from dataclasses import replace

from magicdec.serving.record import RequestRecord
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
