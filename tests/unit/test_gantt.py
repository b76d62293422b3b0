"""What `--plot` draws: each bar at the ms of its span, in the row and look of what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from magicdec.bench.timeline import (
    DECODE,
    LOOKS,
    PREFILL,
    WAITING,
    ServedGroup,
    draw_timeline,
)
from magicdec.output import gantt
from magicdec.output.gantt import BarStyle, GanttBar, Panel
from magicdec.records.pass_record import RequestRecord

THIN = BarStyle("#123456", height=0.5, hatch="///")
FULL = BarStyle("#abcdef")
Bar = tuple[float, float, float, float, str]  # left, right, top and bottom, and its colour


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written."""
    figures: list[Figure] = []

    def keep(figure: Figure, path: Any, **more: Any) -> None:
        figures.append(figure)
        Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def bars(ax: Axes) -> set[Bar]:
    found = set[Bar]()
    for collection in ax.collections:
        for path in collection.get_paths():
            x, y = path.vertices.T  # type: ignore[union-attr]
            box = (round(float(end), 6) for end in (x.min(), x.max(), y.min(), y.max()))
            found.add((*box, to_hex(collection.get_facecolor()[0])))  # type: ignore[arg-type]
    return found


def test_a_bar_is_at_the_ms_of_its_span(tmp_path: Path, drawn: list[Figure]) -> None:
    """In its row, as high as its look; a mark is an upright line, and text stands on its bar."""
    panel = Panel(
        "two stages",
        ["stage 0", "stage 1"],
        [
            GanttBar(0, 0.1, 0.4, FULL, "7"),
            GanttBar(1, 0.2, 0.3, THIN),
            GanttBar(1, 0.5, 0.75, FULL, "a text that is longer than its bar"),
            GanttBar(0, 2.0, 3.0, FULL),  # after the end
        ],
        end_s=1.0,
        marks_s=[0.25, 5.0],
    )
    gantt.draw("--plot", tmp_path / "a.png", [panel], {"full": FULL, "thin": THIN})
    (figure,) = drawn
    (ax,) = figure.axes
    assert bars(ax) == {
        (100.0, 400.0, -0.42, 0.42, FULL.colour),
        (200.0, 300.0, 0.75, 1.25, THIN.colour),
        (500.0, 750.0, 0.58, 1.42, FULL.colour),
    }
    assert [collection.get_hatch() for collection in ax.collections] == ["", "///", ""]
    assert [(text.get_text(), *text.get_position()) for text in ax.texts] == [("7", 250.0, 0)]
    assert [line.get_xdata()[0] for line in ax.lines] == [250.0]  # type: ignore[index]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["stage 0", "stage 1"]
    assert ax.get_xlabel() == "time, ms" and ax.get_xlim() == (0.0, 1000.0)
    assert ax.get_ylim() == (1.5, -0.5), "the first row is on top"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["full", "thin"]


def request(joined: list[float], preempted: list[float], prefilled: list[float]) -> RequestRecord:
    return RequestRecord(
        arrival_ms=100.0,
        joined_ms=joined,
        preempted_ms=preempted,
        prefilled_ms=prefilled,
        first_token_ms=prefilled[0],
        finished_ms=2000.0,
        prompt_len=1,
        output_len=2,
        output_hash="0",
    )


def test_a_request_waits_is_prefilled_and_decodes(tmp_path: Path, drawn: list[Figure]) -> None:
    """After a preemption again, and one that ends during its second prefill."""
    plain = request([300.0], [], [700.0])
    again = request([300.0, 1200.0], [900.0], [700.0, 1500.0])
    first = ServedGroup("inflight, repeat 1", 0, [plain, again])
    second = replace(first, name="inflight, repeat 2", repeat=1, requests=[plain])
    draw_timeline([first, second], tmp_path / "a.png")
    (ax,) = drawn[0].axes
    spans = {
        0: [(WAITING, 100, 300), (PREFILL, 300, 700), (DECODE, 700, 2000)],
        1: [
            (WAITING, 100, 300),
            (PREFILL, 300, 700),
            (DECODE, 700, 900),
            (WAITING, 900, 1200),
            (PREFILL, 1200, 1500),
            (DECODE, 1500, 2000),
        ],
    }
    assert bars(ax) == {
        (begin, end, round(row - 0.42, 6), round(row + 0.42, 6), LOOKS[kind].colour.lower())
        for row, row_spans in spans.items()
        for kind, begin, end in row_spans
    }
    assert ax.get_title(loc="left") == "inflight, repeat 1: 2.00 s"
    assert [text.get_text() for text in ax.get_yticklabels()] == ["request 0", "request 1"]
    (legend,) = drawn[0].legends
    handles = zip(legend.get_texts(), legend.get_patches(), strict=True)
    assert {text.get_text(): to_hex(patch.get_facecolor()) for text, patch in handles} == {
        kind: look.colour.lower() for kind, look in LOOKS.items()
    }
