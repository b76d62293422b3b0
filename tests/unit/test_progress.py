"""Progress: on stderr alone, from the leader alone, and rarely."""

import re
import sys
from types import SimpleNamespace

import pytest

from magicdec.bench.study.progress import StudyProgress
from magicdec.output import console as progress
from magicdec.output.console import (
    LINE_EVERY_S,
    Lines,
    ProgressBar,
    Silent,
    labelled,
    make_progress,
)


class ProgressClock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ProgressClock:
    clock = ProgressClock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def make_terminal(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """What tells `make_progress` where stderr goes; output itself goes to pytest's capture."""
    stderr = SimpleNamespace(isatty=lambda: is_terminal)
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_the_leader_speaks(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    make_terminal(monkeypatch, is_terminal)
    assert isinstance(make_progress(False), Silent)
    assert isinstance(make_progress(True), ProgressBar if is_terminal else Lines)


def test_others_are_silent(capfd: pytest.CaptureFixture[str], clock: ProgressClock) -> None:
    with make_progress(False).task("decode", 100) as advance:
        clock.now += 100 * LINE_EVERY_S
        advance(50)
        advance()
    assert capfd.readouterr() == ("", "")


def test_a_line_each_interval_and_none_before(
    capfd: pytest.CaptureFixture[str], clock: ProgressClock
) -> None:
    with Lines().task("decode", 100) as advance:
        for seconds, expected in (
            (0.9 * LINE_EVERY_S, ""),
            (0.2 * LINE_EVERY_S, "decode: 20/100 (11 s)\n"),
            (0.9 * LINE_EVERY_S, ""),
            (0.2 * LINE_EVERY_S, "decode: 40/100 (22 s)\n"),
            (5 * LINE_EVERY_S, "decode: 50/100 (72 s)\n"),
        ):
            clock.now += seconds
            advance(10)
            assert capfd.readouterr() == ("", expected)
        advance()
    assert capfd.readouterr() == ("", "")


def test_a_narrow_terminal_keeps_the_count_and_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a study: `task` puts them before what runs, of which the end is cut."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    study = StudyProgress(ProgressBar(), SimpleNamespace(order=[None] * 24, todo=[None] * 24))
    study.left.seconds = [300.0, 30.0]
    study.label = f"12/24{study.left}; "
    study.rest = "; demo, " + "self-speculation, " * 5
    with study.task("prefill, batch 1 of 3", 10) as advance:
        advance(5)
    lines = re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", capsys.readouterr().err))
    shown = next(line for line in lines if line.startswith("12/24"))
    assert shown.startswith("12/24, about 12 min left; prefill, batch 1") and len(shown) <= 80
    assert re.search(r"… ━{20}\s+\d+% \S*\d:\S+|… ━{20}\s+0% -:--:--", shown), shown


def test_the_bar_is_drawn_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressBar().task("decode", 2) as advance:
        advance()
        advance()
    out, err = capsys.readouterr()
    assert out == "" and "decode" in err


def test_a_label_has_its_text_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the text, on a terminal; in a file a line stays whole. What has no room is not cut."""
    text = "18.0 GB of the 24.0 GB that are free: weights/without-a-space-that-is-long.gguf 1.0"
    assert labelled("memory", text, 7) == f"memory {text}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    assert labelled("memory", text, 7).splitlines() == [
        "memory 18.0 GB of the 24.0 GB",
        "       that are free:",
        "       weights/without-a-space-that-is-long.gguf",
        "       1.0",
    ]
