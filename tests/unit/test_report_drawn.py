"""What the figures of a report draw: the places, lengths and colours of their artists, beside the
columns that axes, titles and legends name. Every metric of a row is another number, so that no
column can stand for another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, QuadMesh
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.patches import Rectangle
from synthetic_records import drawn_command, parse_record, with_fields
from test_report import row
from test_report_sections import CLOSED, EVERY
from written_records import Line

from magicdec.bench.report.figures import passes, served
from magicdec.bench.report.figures.panels import Drawn
from magicdec.bench.report.figures.served import draw_served, three_digits
from magicdec.bench.report.frame import FrameRow, frame_of, report_row
from magicdec.output.figures import styled
from magicdec.records.metrics import PassMetrics
from magicdec.systems.details import Details
from magicdec.systems.mdi_llm.details import MDILLMDetails

READ = "environment.read_bandwidth_bytes_per_s"
Value = Callable[[FrameRow], float]


def column(name: str) -> Value:
    return lambda run: run[name]


# What each label of an axis, or title of a panel, names: the column, and for a value that is
# computed its definition.
NAMED: dict[str, tuple[Value, str]] = {
    "one request (tokens/s)": (lambda run: 1e3 / run["request_step_ms"], ""),
    "all rows (tokens/s)": (column("decode_tokens_per_s"), "decode_tokens_per_s"),
    "acceptance rate": (column("draft_acceptance_rate"), "draft_acceptance_rate"),
    "speedup of decode steps (x)": (column("speedup"), "speedup"),
    "KV budget (tokens that a draft reads)": (column("budget"), ""),
    "prompt tokens": (column("prefix_len"), ""),
    "emitted tokens of a step": (column("tokens_per_verification"), "tokens_per_verification"),
    "achieved (GB/s)": (lambda run: run["roofline_fraction"] * run[READ] / 1e9, ""),
    "bytes that a step must read (GB)": (
        lambda run: run["roofline_fraction"] * run[READ] * run["mean_step_ms"] / 1e12,
        "",
    ),
    "p90 TTFT (ms)": (column("p90_ttft_ms"), ""),
    "output (tokens/s)": (column("output_throughput"), ""),
    "goodput (requests/s)": (column("request_goodput"), ""),
    "one user: 1 / median TPOT (tokens/s)": (lambda run: 1e3 / run["p50_tpot_ms"], ""),
    "all users (tokens/s)": (column("output_throughput"), ""),
    "speed of a request, tokens/s": (column("request_tokens_per_s"), ""),
    "mean time to first token, ms": (column("mean_ttft_ms"), ""),
    "mean time between two commits, ms": (column("mean_itl_ms"), ""),
}


def row_of(line: Line) -> FrameRow:
    return report_row(1, "runs.jsonl", parse_record(line), None)


def numbered(made: FrameRow, number: int) -> FrameRow:
    """The row with another number in each metric, and each interval around its metric."""
    group_types = ("list", "dict")
    plain = [
        field.name
        for field in fields(PassMetrics)
        if field.name in made and not any(word in str(field.type) for word in group_types)
    ]
    changed = {
        name: 1 + at / 64 + number / 7 for at, name in enumerate([*plain, "request_step_ms"])
    }
    ends = {name: made[name] for name in made if name.endswith(("_interval_low", "_interval_high"))}
    for name in ends:
        metric = name.rpartition("_interval_")[0]
        if metric in changed:
            ends[name] = changed[metric] * (0.75 if name.endswith("_low") else 1.5)
    return made | {"run": number} | changed | ends


def run(number: int, **changed: Any) -> FrameRow:
    """A run of a policy, whose intervals all have ends."""
    made = numbered(row(), number)
    return made | {READ: 1e9 * (20 + number)} | changed


RUNS = [
    run(1, B=1, budget=33, prefix_len=1024, kv_policy="snapkv", series="self, snapkv"),
    run(2, B=2, budget=65, prefix_len=1024, kv_policy="snapkv", series="self, snapkv"),
    run(3, B=1, budget=33, prefix_len=1024, series="self, streaming_llm"),
    run(4, B=4, budget=65, prefix_len=1024, series="self, streaming_llm"),
]
CONTEXTS = [
    run(at, prefix_len=S, method=f"self-speculation, {policy} 33, gamma 4", kv_policy=policy)
    for at, (policy, S) in enumerate(
        [(policy, S) for policy in ("snapkv", "retrieval") for S in (512, 2048)]
    )
]
PASSES = [numbered(row_of(line), at) for at, line in enumerate(EVERY[:2])]
LOOPS = [numbered(row_of(line), at) for at, line in enumerate(CLOSED)]


def only(outcomes: list[Any], name: str) -> Drawn:
    (found,) = (outcome for outcome in outcomes if outcome.name == name)
    assert isinstance(found, Drawn)
    return found


def draw(make: Callable[[], Any], name: str = "") -> Drawn:
    with styled():
        made = make()
    drawn = only(made, name) if isinstance(made, list) else made
    assert isinstance(drawn, Drawn)
    return drawn


# For each figure of marks or lines: how to make it, its rows, and the column of its series.
MARKED: dict[str, tuple[Callable[[], Any], list[FrameRow], str]] = {
    "pareto_front": (lambda: passes.draw_pareto(frame_of(RUNS)), RUNS, "series"),
    "bandwidth": (lambda: passes.draw_roofline(frame_of(RUNS)), RUNS, "series"),
    "speedup_by_acceptance": (lambda: passes.draw_by_acceptance(frame_of(RUNS)), RUNS, "series"),
    "acceptance_by_budget": (lambda: passes.draw_by_budget(frame_of(RUNS)), RUNS, "kv_policy"),
    "length_by_context": (
        lambda: passes.draw_by_context(frame_of(CONTEXTS)),
        CONTEXTS,
        "kv_policy",
    ),
    "speedup_by_context": (
        lambda: passes.draw_by_context(frame_of(CONTEXTS)),
        CONTEXTS,
        "kv_policy",
    ),
    "serving_throughput": (lambda: draw_served(frame_of(PASSES)), PASSES, "pass"),
    "serving_goodput": (lambda: draw_served(frame_of(PASSES)), PASSES, "pass"),
    "serving_concurrency": (lambda: draw_served(frame_of(LOOPS)), LOOPS, "mode"),
}
Places = dict[str, set[tuple[float, float]]]  # by colour


def rounded(*numbers: Any) -> Any:
    return tuple(round(float(number), 9) for number in numbers)


def points(ax: Axes) -> Places:
    """The marks of a panel: those of scatters, and of lines that have markers."""
    found = Places()
    for collection in ax.collections:
        if isinstance(collection, PathCollection):
            colour = to_hex(collection.get_edgecolor()[0])
            found.setdefault(colour, set()).update(rounded(*at) for at in collection.get_offsets())
    for line in ax.lines:
        if line.get_marker() not in ("None", "", None, "_", "|"):
            at = zip(line.get_xdata(), line.get_ydata(), strict=True)
            found.setdefault(to_hex(line.get_color()), set()).update(
                rounded(*point) for point in at
            )
    return found


def spans(ax: Axes) -> set[tuple[float, float, float]]:
    """The upright lines of intervals: their place, and both ends."""
    groups = [collection for collection in ax.collections if isinstance(collection, LineCollection)]
    segments = [segment for group in groups for segment in group.get_segments()]
    return {rounded(a[0], a[1], b[1]) for a, b in segments}


def colours_of(drawn: Drawn) -> dict[str, str]:
    """The colour of each series, as the legend says it."""
    (legend,) = drawn.figure.legends
    found = {}
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        if isinstance(handle, PathCollection):
            found[text.get_text()] = to_hex(handle.get_edgecolor()[0])
        elif isinstance(handle, Rectangle):
            found[text.get_text()] = to_hex(handle.get_facecolor())
        else:
            found[text.get_text()] = to_hex(plt.getp(handle, "color"))
    return found


@pytest.mark.parametrize("name", MARKED)
def test_marks_are_where_the_axes_say(name: str) -> None:
    """In the colour of their series, with the interval of what the upright axis names."""
    make, rows, series = MARKED[name]
    drawn = draw(make, name)
    ax = drawn.figure.axes[0]
    across, _ = NAMED[ax.get_xlabel()]
    up, metric = NAMED[ax.get_ylabel()]
    found = points(ax)
    colours = colours_of(drawn)
    for value in {point[series] for point in rows}:
        series_rows = [point for point in rows if point[series] == value]
        named = [text for text in colours if value == text] or [t for t in colours if value in t]
        (colour,) = {colours[text] for text in named}
        assert found.pop(colour) == {rounded(across(point), up(point)) for point in series_rows}
    assert found == {}
    ends = [
        (across(r), r[f"{metric}_interval_low"], r[f"{metric}_interval_high"])
        for r in rows
        if metric
    ]
    assert spans(ax) == {rounded(*end) for end in ends}
    table = drawn.table.to_dict("records")
    assert len(table) == len(rows)


@pytest.mark.narrow(4)
@pytest.mark.parametrize("name", [*MARKED, "serving_modes", "mdi_llm_stages"])
def test_a_caption_says_how_many_records_are_of_a_busy_host(name: str) -> None:
    every = [row_of(line) | {"run": at} for at, line in enumerate(EVERY)]
    _, rows, _ = MARKED.get(name, (None, every, ""))
    shown = [row for row in rows if name != "mdi_llm_stages" or row["pass"] == "ring"]
    busy = shown[0]["run"]
    changed = [row | {"is_busy": row["run"] == busy} for row in rows]
    makers: dict[bool, Callable[[Any], Any]] = {True: draw_served, False: passes.draw_by_context}
    alone = {
        "pareto_front": passes.draw_pareto,
        "bandwidth": passes.draw_roofline,
        "speedup_by_acceptance": passes.draw_by_acceptance,
        "acceptance_by_budget": passes.draw_by_budget,
    }
    make = alone.get(name, makers[rows[0]["is_served"]])
    message = "Another load took cores while 1 of the "
    assert message in draw(lambda: make(frame_of(changed)), name).caption
    assert message not in draw(lambda: make(frame_of(rows)), name).caption


def test_a_front_goes_through_its_passes_and_says_their_batch_size() -> None:
    """Of one kind the front is that of what nothing beats; here all but the first and third."""
    speeds = {1: (2.0, 5.0), 2: (2.5, 6.0), 3: (3.0, 1.0), 4: (8.0, 2.0)}
    made = [
        run | {"request_step_ms": 1e3 / x, "decode_tokens_per_s": y, "median_step_ms": 7.0}
        for run in RUNS
        for x, y in [speeds[run["run"]]]
    ]
    ax = draw(lambda: passes.draw_pareto(frame_of(made))).figure.axes[0]
    (line,) = (drawn_line for drawn_line in ax.lines if drawn_line.get_linestyle() == "-")
    assert [*zip(line.get_xdata(), line.get_ydata(), strict=True)] == [(2.5, 6.0), (8.0, 2.0)]
    labels = {text.get_text(): text.xy for text in ax.texts}  # type: ignore[attr-defined]
    assert labels == {"B 2": (2.5, 6.0), "B 4": (8.0, 2.0)}
    busy = [point | {"is_busy": point["run"] == 2} for point in made]
    ax = draw(lambda: passes.draw_pareto(frame_of(busy))).figure.axes[0]
    (line,) = (drawn_line for drawn_line in ax.lines if drawn_line.get_linestyle() == "-")
    assert [*line.get_xdata()] == [2.0, 8.0], "a pass of a busy host is on no front"


def test_the_roof_is_the_measured_bandwidth() -> None:
    ax = draw(lambda: passes.draw_roofline(frame_of(RUNS))).figure.axes[0]
    (roof,) = ax.lines
    (span,) = ax.patches
    assert [*roof.get_ydata()] == [23.0, 23.0], "of 21, 22, 23 and 24 the higher middle one"
    assert (span.get_y(), span.get_y() + span.get_height()) == (21.0, 24.0)  # type: ignore[attr-defined]


def test_a_dotted_line_is_where_its_drafter_pays() -> None:
    """At the emitted tokens over the speedup: the time of a step in steps without drafts."""
    drawn = draw(lambda: passes.draw_by_context(frame_of(CONTEXTS)), "length_by_context")
    lines = drawn.figure.axes[0].lines
    dotted = [line for line in lines if line.get_marker() == "None" and line.get_linewidth() == 1]
    found = {to_hex(line.get_color()): rounded(*line.get_ydata()) for line in dotted}
    for text, colour in colours_of(drawn).items():
        contexts = [context for context in CONTEXTS if context["kv_policy"] in text]
        pays = (context["tokens_per_verification"] / context["speedup"] for context in contexts)
        assert found.pop(colour) == rounded(*pays)
    assert found == {}


def test_repeated_runs_of_a_context_are_those_of_a_quiet_host() -> None:
    again = [context | {"speedup": 99.0, "is_busy": True} for context in CONTEXTS]
    made = [*CONTEXTS, *again]
    drawn = draw(lambda: passes.draw_by_context(frame_of(made)), "speedup_by_context")
    heights = {y for marks in points(drawn.figure.axes[0]).values() for _, y in marks}
    assert heights == {round(context["speedup"], 9) for context in CONTEXTS}


def test_a_position_has_its_own_share_and_interval() -> None:
    shares = [0.875, 0.5, 0.25]
    ends = [[0.75, 0.9375], [0.4375, 0.625], [0.125, 0.375]]
    one = run(
        1,
        acceptance_per_position=shares,
        acceptance_per_position_interval=ends,
        judged_per_position=[8, 7, 4],
    )
    drawn = draw(lambda: passes.draw_by_position(frame_of([one])))
    ax = drawn.figure.axes[0]
    (container,) = ax.containers
    assert isinstance(container, ErrorbarContainer)
    line = container.lines[0]
    assert ax.get_xlabel() == "draft position in its step" and [*line.get_xdata()] == [1, 2, 3]
    assert ax.get_ylabel() == passes.SHARE and [*line.get_ydata()] == shares
    assert spans(ax) == {rounded(at + 1, *span) for at, span in enumerate(ends)}


def test_a_cell_is_at_its_batch_size_and_prefix_length() -> None:
    """Three prefix lengths and two batch sizes, of which one place was not measured."""
    places = {(1, 512): 1.5, (8, 512): 2.0, (1, 2048): 1.25, (8, 2048): 3.0, (1, 4096): 0.5}
    made = [
        run(at, B=B, prefix_len=S)
        | {
            "net_speedup": net,
            "net_speedup_interval_low": 0.99 * net,
            "net_speedup_interval_high": 1.01 * net,
            "speedup": 10 + at,
        }
        for at, ((B, S), net) in enumerate(places.items())
    ]
    ax = draw(lambda: passes.draw_speedup(frame_of(made))).figure.axes[0]
    across = {
        round(float(at), 6): int(text.get_text())
        for at, text in zip(ax.get_xticks(), ax.get_xticklabels(), strict=True)
    }
    up = {
        round(float(at), 6): int(text.get_text().replace(",", ""))
        for at, text in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
    }
    (mesh,) = ax.findobj(QuadMesh)
    assert isinstance(mesh, QuadMesh)
    shades = mesh.get_array()
    assert shades is not None and shades.shape == (3, 2)
    shown = {
        (across[0.5 + x], up[0.5 + y]): float(shades[y, x])
        for y in range(3)
        for x in range(2)
        if not np.ma.getmaskarray(shades)[y, x]
    }
    assert shown == places
    written: dict[tuple[int, int], list[str]] = {}
    for text in ax.texts:
        x, y = text.get_position()
        written.setdefault((across[x], up[round(y - 0.025, 1)]), []).append(text.get_text())
    assert {at: texts[0] for at, texts in written.items()} == {
        at: f"{net:.2f}x" for at, net in places.items()
    }
    assert [texts[1].splitlines()[0] for texts in written.values()] == [
        f"steps {10 + at:.2f}x" for at in (0, 2, 4, 1, 3)
    ]  # in the order of batch sizes
    assert drawn_bar_label(ax) == "net speedup (x)"


def drawn_bar_label(ax: Axes) -> str:
    (bar,) = (other for other in ax.figure.axes if other is not ax)
    return str(bar.get_ylabel())


def test_phases_are_beside_each_other_and_make_up_the_step() -> None:
    """A quarter of the steps draft (30 + 10 ms), the others take 12 ms, and each 1 ms more. The
    step of the baseline is its mean step, which is the column below."""
    plain, drafting = drawn_command()
    plain = with_fields(plain, metrics__mean_step_ms=2.0)
    assert plain.metrics is not None and plain.metrics.median_step_ms != 2.0
    assert report_row(1, "", drafting, plain)["autoregressive_step_ms"] == 2.0
    times = {
        "draft_ms": 30.0,
        "verify_ms": 10.0,
        "decode_ms": 12.0,
        "other_ms": 1.0,
        "mean_step_ms": 20.0,
        "median_step_ms": 5.0,
        "autoregressive_step_ms": 12.5,
        "tokens_per_verification": 3.25,
        "mean_acceptance_length": 4.5,
        "speedup": 2.125,
        "net_speedup": 1.5,
    }
    made = [
        run(1, budget=33, **times),
        run(
            2,
            budget=65,
            **times | {"decode_ms": None, "mean_step_ms": 41.0, "autoregressive_step_ms": 50.0},
        ),
    ]
    ax = draw(lambda: passes.draw_phases(frame_of(made))).figure.axes[0]
    bars = {
        str(name): [
            rounded(bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2)
            for bar in container
        ]
        for name, container in zip(
            ("draft", "verify", "decode", "other"), ax.containers, strict=True
        )
        if isinstance(container, BarContainer)
    }
    assert bars == {
        "draft": [(0.0, 7.5, 0.0), (0.0, 30.0, 1.0)],
        "verify": [(7.5, 2.5, 0.0), (30.0, 10.0, 1.0)],
        "decode": [(10.0, 9.0, 0.0), (40.0, 0.0, 1.0)],
        "other": [(19.0, 1.0, 0.0), (40.0, 1.0, 1.0)],
    }
    assert ax.get_xlabel() == "time of a step (ms)"
    (ticks,) = (
        collection for collection in ax.collections if isinstance(collection, LineCollection)
    )
    assert [rounded(a[0], (a[1] + b[1]) / 2) for a, b in ticks.get_segments()] == [
        (12.5, 0.0),
        (50.0, 1.0),
    ]
    labels = [(text.get_text(), *text.xy) for text in ax.texts]  # type: ignore[attr-defined]
    assert labels == [("3.2 tokens, 2.12x", 20.0, 0), ("3.2 tokens, 2.12x", 50.0, 1)]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["K 33", "K 65"]
    legend = ax.figure.legends[0]  # type: ignore[union-attr]
    assert [text.get_text() for text in legend.get_texts()] == [
        "draft",
        "verify",
        "decode",
        "other",
        "autoregressive step",
    ]


def test_a_line_of_a_closed_loop_says_how_many_are_in_flight() -> None:
    ax = draw(lambda: draw_served(frame_of(LOOPS)), "serving_concurrency").figure.axes[0]
    labels = {(text.get_text(), *rounded(*text.xy)) for text in ax.texts}  # type: ignore[attr-defined]
    x, y = (NAMED[label][0] for label in (ax.get_xlabel(), ax.get_ylabel()))
    assert labels == {(str(loop["concurrency"]), *rounded(x(loop), y(loop))) for loop in LOOPS}


def test_a_bar_is_that_of_its_mode_command_and_metric() -> None:
    """Two commands, of which the second has one of the modes again, and one of its own."""
    other = [PASSES[1], PASSES[0] | {"pass": "ring"}]
    more = [numbered(passed, 5 + at) | {"about": "2: demo"} for at, passed in enumerate(other)]
    rows = [*PASSES, *more]
    drawn = draw(lambda: draw_served(frame_of(rows)), "serving_modes")
    colours = colours_of(drawn)
    assert [text[:2] for text in colours] == ["1:", "2:"]
    first = drawn.figure.axes[0]
    ticks = {
        round(float(at)): text.get_text()
        for at, text in zip(first.get_yticks(), first.get_yticklabels(), strict=True)
    }
    assert [*ticks.values()] == ["static", "inflight", "ring"]
    for ax in drawn.figure.axes:
        value, _ = NAMED[" ".join(ax.get_title(loc="left").split())]
        wanted = {
            (row["pass"], colours_of_command(colours, row in more), round(value(row), 9))
            for row in rows
        }
        bars = [
            bar
            for container in ax.containers
            if isinstance(container, BarContainer)
            for bar in container
        ]
        middles = [(bar, bar.get_y() + bar.get_height() / 2) for bar in bars]
        assert {
            (ticks[round(at)], to_hex(bar.get_facecolor()), round(bar.get_width(), 9))
            for bar, at in middles
        } == wanted
        assert all(abs(at - round(at)) < 0.5 for _, at in middles) and bars[0].get_x() == 0
        labels = {rounded(*text.xy): text.get_text() for text in ax.texts}  # type: ignore[attr-defined]
        ends = {rounded(bar.get_width(), at): three_digits(bar.get_width()) for bar, at in middles}
        assert labels == ends, "each value stands at the end of its bar"


def colours_of_command(colours: dict[str, str], is_second: bool) -> str:
    return [*colours.values()][is_second]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.01234, "0.0123"),
        (0.5, "0.500"),
        (8.16, "8.16"),
        (12.34, "12.3"),
        (678.8, "679"),
        (12345.6, "12,346"),
        (0.0, "0"),
    ],
)
def test_a_label_has_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize("name", ["serving_modes", "step_phases"])
def test_names_beside_bars_do_not_meet(name: str) -> None:
    """Nor values at their ends, for as many modes as there are and two commands."""
    modes = [
        "sequential",
        "static",
        "inflight",
        "inflight+draft",
        "tensor_parallel",
        "ring",
        "pipeinfer",
        "endpoint+draft",
    ]
    rows = [
        numbered(PASSES[0], at) | {"pass": mode, "about": f"{number}: demo, 8 requests, burst"}
        for number in (1, 2)
        for at, mode in enumerate(modes)
    ]
    runs = [
        run(at, budget=8 * at + 1, **dict.fromkeys(("draft_ms", "verify_ms", "other_ms"), 1.0))
        for at in range(1, 9)
    ]
    make = (
        (lambda: draw_served(frame_of(rows)))
        if name == "serving_modes"
        else (lambda: passes.draw_phases(frame_of(runs)))
    )
    drawn = draw(make, name)
    drawn.figure.draw_without_rendering()
    for ax in drawn.figure.axes:
        for texts in (ax.get_yticklabels(), ax.get_xticklabels(), ax.texts):
            boxes = [text.get_window_extent() for text in texts if text.get_text()]
            for at, box in enumerate(boxes):
                others = [other for other in boxes[at + 1 :] if box.overlaps(other)]
                assert not others, (ax.get_title(loc="left"), texts[at].get_text(), box, others)


@pytest.mark.parametrize("kind", served.staged_kinds(), ids=lambda kind: kind.name())
def test_a_strip_is_the_load_of_its_stage(kind: type[Details]) -> None:
    made = [row_of(line) for line in EVERY]
    for passed in made:
        if passed["pass"] == "ring":
            passed["object"] = replace(passed["object"], details=in_parts(passed["object"].details))
    drawn = draw(lambda: draw_served(frame_of(made)), f"{kind.name()}_stages")
    ax = drawn.figure.axes[0]
    labels = {
        round(float(at)): text.get_text()
        for at, text in zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
    }
    found = {}
    for image in ax.images:
        left, right, bottom, top = image.get_extent()
        assert (left, right, image.get_clim()) == (0, 1, (0, 1))
        found[labels[round((bottom + top) / 2)]] = np.asarray(image.get_array()).tolist()
    if kind is MDILLMDetails:
        assert found == {"ring, stage 0: 75%": [[1.0, 0.5]], "ring, stage 1: 25%": [[0.0, 0.5]]}
    about = drawn.table.iloc[0]["about"]
    for strip in drawn.table[drawn.table["about"] == about].to_dict("records"):
        assert found[f"{strip['name']}: {strip['busy']:.0%}"] == [strip["parts"]]
    assert served.stages_of(PASSES[0]["object"], kind) == []


def in_parts(details: MDILLMDetails) -> MDILLMDetails:
    """The details of the ring, with the share of each half of its time."""
    shares = [[1.0, 0.5], [0.0, 0.5]]
    return replace(details, occupancy=shares)
