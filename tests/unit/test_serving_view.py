"""The live display of serving, the picture of requests over time, and the search for the saturation
rate, on hand-made requests."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep

import pytest

from magicdec.request import Request, SamplingParams
from magicdec.serving.live_view import HEIGHT, WIDTH, Display, History, View
from magicdec.serving.record import RequestRecord
from magicdec.serving.saturation import END, PRECISION, next_rate, saturation_rate
from magicdec.serving.showing import DECODE, PREFILL, WAITING, spans_of


def test_the_history_keeps_its_size() -> None:
    history = History()
    for step in range(WIDTH * 4):
        history.add(step)
    assert len(history.columns) == WIDTH and history.steps_per_column == 4
    assert history.columns == [4 * column + 3 for column in range(WIDTH)]


def finished(number: int, arrived_s: float, finished_s: float | None) -> Request:
    request = Request(number, (1, 2), SamplingParams(4), arrived_s=arrived_s)
    if finished_s is not None:
        request.output_ids, request.finished_s = [7] * 4, finished_s
    return request


def test_a_frame_has_progress_histogram_arrivals_and_ends() -> None:
    view = View("inflight", 4)
    assert view.lines() == [], "no requests are known yet"
    requests = [finished(0, 10, 12.5), finished(1, 11, None), finished(2, 20, None)]
    view.begin(requests, 10.0, lambda: 13.0)
    for in_flight in (1, 2, 4):
        view.step(in_flight)
    lines = view.lines()
    assert lines[0] == "inflight: 1 of 3 requests have ended, 4 of 12 tokens, 3.0 s"
    assert lines[1].count("█") == WIDTH // 3 and len(lines[1]) == WIDTH
    bars = [line.partition("│")[2] for line in lines if "│" in line]
    assert len(bars) == HEIGHT and bars[0] == "  █" and bars[-1] == "███"
    assert [bar[1:2] for bar in bars] == [" "] * 4 + ["█"] * 4, "2 of 4 rows are half the height"
    text = "\n".join(lines)
    assert "arrived: 2" in text and "request 1 at 1.00 s" in text and "request 2" not in text
    assert "ended: 1" in text and "request 0 after 2.50 s" in text


def test_the_last_frame_of_each_pass_is_kept(tmp_path: Path) -> None:
    display = Display(is_shown=False, file=tmp_path / "frames.txt")
    for name in ("static", "inflight"):
        with display.view(name, 2) as view:
            assert view is not None
            view.begin([finished(0, 0, 1.0)], 0.0, lambda: 2.0)
            view.step(1)
    text = (tmp_path / "frames.txt").read_text()
    assert text.count("1 of 1 requests have ended") == 2 and "static: " in text
    with Display(is_shown=False).view("static", 2) as nothing:
        assert nothing is None


def test_frames_are_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    display = Display.of_rank(True, None)
    assert display.is_shown and not Display.of_rank(False, None).is_shown
    with display.view("inflight", 2) as view:
        assert view is not None
        view.begin([finished(0, 0, 1.0)], 0.0, lambda: 2.0)
        until = monotonic() + 30
        while "2.0 s" not in stderr.getvalue() and monotonic() < until:
            sleep(0.02)  # a thread draws
        assert "1 of 1 requests have ended, 4 of 4 tokens, 2.0 s" in stderr.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not Display.of_rank(True, None).is_shown


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
