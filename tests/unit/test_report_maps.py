"""The maps of a report: which runs share one, and which cells have a colour."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.collections import QuadMesh
from matplotlib.patches import Rectangle
from test_report import row

from magicdec.bench.report.figures.panels import Drawn, Form
from magicdec.bench.report.figures.passes import (
    BUSY,
    CLAIM,
    DOUBTFUL,
    HOLDS,
    UNKNOWN,
    best_by_place,
    claim_of,
    draw_by_acceptance,
    draw_phases,
    draw_roofline,
    draw_speedup,
)
from magicdec.bench.report.frame import FrameRow, frame_of
from magicdec.output.figures import styled

# What two runs of one panel must have in common, written out here so that no entry of the figures'
# own lists can be lost.
MACHINE = ["device", "ranks", "threads"]
WEIGHTS = ["model", "target_dtype", "draft_model", "draft_weights"]
MAP_FIELDS = [
    *WEIGHTS,
    "drafter",
    "kv_policy",
    "dtype",
    "dataset",
    "gen_len",
    "temperature",
    *MACHINE,
    "reselect_every",
    "draft_kv_dtype",
]
HELD = {
    draw_speedup: MAP_FIELDS,
    draw_by_acceptance: ["model", "target_dtype", "dtype", "dataset", "gen_len", *MACHINE],
    draw_roofline: ["model", "dtype", "target_dtype", *MACHINE],
    draw_phases: ["model", "draft_model", "target_dtype", "dtype", "dataset", *MACHINE],
}
OTHER = {"threads": 7}


def cells(*intervals: tuple[float, float | None, float | None], **changed: Any) -> list[FrameRow]:
    """A run at each of so many batch sizes, with its net speedup and the ends of its interval. The
    steps of a run are the faster, the smaller its net speedup."""
    names = ("net_speedup", "net_speedup_interval_low", "net_speedup_interval_high")
    step_speedups = ("speedup_interval_low", "speedup", "speedup_interval_high")
    return [
        row(B=2**i)
        | dict(zip(names, interval, strict=True))
        | dict(
            zip(step_speedups, (8 / interval[0], 9 / interval[0], 10 / interval[0]), strict=True)
        )
        | changed
        for i, interval in enumerate(intervals)
    ]


@pytest.mark.parametrize("draw", HELD)
def test_a_panel_never_pools_machines_or_dtypes(draw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = list[str]()
    monkeypatch.setattr(Form, "of", lambda form, runs: held.extend(form.held))
    draw(frame_of(cells((2.0, None, None), (2.0, None, None))))
    assert {*HELD[draw]} <= {*held}


@pytest.mark.parametrize("key", ["threads", "dtype"])
def test_runs_on_other_machines_or_in_other_dtypes_have_a_map_of_their_own(key: str) -> None:
    one = cells((2.0, None, None), (2.0, None, None))
    other = [run | {key: OTHER.get(key, "other")} for run in one]
    with styled():
        drawn = draw_speedup(frame_of([*one, *other]))
    assert isinstance(drawn, Drawn)
    assert set(drawn.table[key]) == {one[0][key], other[0][key]}
    assert len(drawn.table) == 4 and set(drawn.table["runs"]) == {1}


@pytest.mark.parametrize(
    ("speedup", "low", "high", "claim"),
    [
        (1.78, 1.2, 2.6, DOUBTFUL),  # the interval excludes 1, but spans more than 1.78x
        (1.78, 1.5, 2.1, HOLDS),
        (1.02, 1.015, 1.025, HOLDS),
        (1.02, 0.99, 1.05, DOUBTFUL),
        (0.5, 0.45, 0.55, HOLDS),
        (0.9, 0.6, 1.3, DOUBTFUL),
        (1.3, 0.999, 1.1, DOUBTFUL),  # the median of batches may lie outside
        (1.78, None, None, UNKNOWN),
    ],
)
def test_a_colour_claims_no_more_than_its_interval(
    speedup: float, low: float | None, high: float | None, claim: str
) -> None:
    assert claim_of(False, speedup, low, high) == claim
    assert claim_of(True, speedup, low, high) == BUSY


def test_a_map_shows_no_colour_that_its_interval_does_not_bear() -> None:
    runs = cells((1.78, 0.9, 3.0), (2.0, 1.8, 2.2), (1.5, None, None), (2.5, 2.4, 2.6))
    runs[3]["is_busy"] = True
    with styled():
        drawn = draw_speedup(frame_of(runs))
    assert isinstance(drawn, Drawn)
    assert drawn.table[CLAIM].tolist() == [DOUBTFUL, HOLDS, UNKNOWN, BUSY]
    ax = drawn.figure.axes[0]
    (mesh,) = ax.findobj(QuadMesh)
    assert isinstance(mesh, QuadMesh)
    shades = mesh.get_array()
    assert shades is not None and shades.mask.tolist() == [[True, False, False, True]]
    assert shades.compressed().tolist() == [2.0, 1.5], "the colour is the net speedup"
    marks = {int(patch.get_x()): patch for patch in ax.patches if isinstance(patch, Rectangle)}
    assert {x: (patch.get_hatch(), patch.get_linewidth() > 0) for x, patch in marks.items()} == {
        0: ("////", False),
        2: (None, True),
        3: ("....", False),
    }
    texts = [text.get_text() for text in ax.texts]
    assert "0.90 to\n3.00x" in texts and "1.78x" not in texts and "2.00x" in texts
    assert any(text.startswith("steps 4.50x\n") for text in texts), "the second number"
    assert "2.40 to\n2.60x" in texts and "2.50x" not in texts
    (legend,) = drawn.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [DOUBTFUL, UNKNOWN, BUSY]


def test_the_best_run_of_a_place_is_the_one_that_is_surely_fast() -> None:
    """Not one that a disturbance made fast, nor one without an interval, nor one of a busy host,
    nor one whose steps alone are fast."""
    sure = (2.0, 1.8, 2.2)
    disturbed = (2.5, 1.1, 5.0)
    short = (3.0, None, None)
    slow = (0.5, 0.4, 0.6)
    busy = [run | {"is_busy": True} for run in cells((4.0, 3.9, 4.1))]
    runs = frame_of(run | {"B": 1} for run in [*cells(disturbed, sure, short, slow), *busy])
    best = best_by_place(runs)
    assert best["net_speedup"].tolist() == [2.0] and best["runs"].tolist() == [5]
    runs = frame_of(run | {"B": 1} for run in cells((1.0, None, None), short))
    assert best_by_place(runs)["net_speedup"].tolist() == [3.0]
    assert best_by_place(frame_of(busy))["net_speedup"].tolist() == [4.0], "there is no other"
