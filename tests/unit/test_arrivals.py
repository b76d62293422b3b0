"""The requests of a serving workload: arrival processes, output lengths and traces, and what is
refused of them."""

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from magicdec.names import ARRIVALS
from magicdec.workload.request_shapes import (
    Arrival,
    RequestShape,
    make_shapes,
    parse_arrival,
    parse_lengths,
    read_trace,
)

LINES = [
    {"arrival_ms": 700.5, "prompt_len": 5, "output_len": 2},
    {"arrival_ms": 200, "prompt_len": 900, "output_len": 1},
    {"arrival_ms": 200, "prompt_len": 30, "output_len": 64, "user": "x", "place": 7},
]


def times(arrival: str, count: int, seed: int = 0) -> list[float]:
    return parse_arrival(arrival).times_ms(count, Random(seed))


def write_trace(path: Path, lines: list[object]) -> Path:
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n")
    return path


def test_constant_and_burst_arrivals_are_known() -> None:
    assert times("constant:2.5", 4) == [0.0, 2.5, 5.0, 7.5]
    assert times("burst", 3) == [0.0] * 3


@pytest.mark.parametrize("process", ["uniform", "poisson"])
def test_random_arrivals_have_the_mean_of_the_flag_and_a_seed(process: str) -> None:
    found = times(f"{process}:20", 20_001)
    gaps = [b - a for a, b in pairwise(found)]
    assert found[0] == 0 and min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(20, rel=0.03)
    assert found == times(f"{process}:20", 20_001) != times(f"{process}:20", 20_001, seed=1)
    # The share of gaps below a quarter of the mean tells the two distributions apart.
    share = sum(gap < 5 for gap in gaps) / len(gaps)
    assert share == pytest.approx(0.125 if process == "uniform" else 0.221, abs=0.01)


def test_every_process_has_one_time_a_request() -> None:
    for name in ARRIVALS:
        for count in (1, 2, 7):
            found = Arrival(name, 3.0).times_ms(count, Random(0))
            assert len(found) == count and found[0] == 0.0 and found == sorted(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("often", "--arrival often is not known; choose from burst, constant:MS, uniform:MS, "),
        ("burst:3", "--arrival burst:3 is not known"),
        ("trace:", "--arrival trace: is not known; choose from burst"),
        ("poisson", "--arrival poisson is not known; choose from burst"),
        ("poisson:fast", "mooncake:FILE, mlperf:FILE, aiperf:FILE, with a time MS larger"),
        ("constant:0", "--arrival constant:0 is not known"),
        ("uniform:nan", "--arrival uniform:nan is not known"),
    ],
)
def test_unknown_arrivals_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_arrival(text)
    assert message in str(refused.value)


def test_lengths_are_fixed_or_uniform() -> None:
    assert parse_lengths("--gen_len", "64") == (64, 64)
    shapes = make_shapes(parse_arrival("burst"), 400, "9", "uniform:3:6", seed=5)
    assert {shape.output_len for shape in shapes} == {3, 4, 5, 6}
    assert {shape.prompt_len for shape in shapes} == {9}
    again = make_shapes(parse_arrival("poisson:4"), 400, "uniform:7:8", "uniform:3:6", seed=5)
    assert [s.output_len for s in again] == [s.output_len for s in shapes]
    assert {shape.prompt_len for shape in again} == {7, 8}
    for text in ("", "many", "uniform:3", "poisson:3:4", "0", "uniform:0:3", "uniform:4:3"):
        with pytest.raises(ValueError, match=r"--prefix_len .* is not known; choose a whole numbe"):
            parse_lengths("--prefix_len", text)


def test_a_trace_is_read_in_the_order_of_arrival_and_begins_at_0(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [*LINES, ""])
    lines = [f"--arrival trace: {path}, line {number}" for number in (1, 2, 3)]
    assert read_trace("--arrival trace", path) == [
        RequestShape(200.0, 900, 1, lines[1]),
        RequestShape(200.0, 30, 64, lines[2]),
        RequestShape(700.5, 5, 2, lines[0]),
    ]
    arrival = parse_arrival(f"trace:{path}")
    shapes = make_shapes(arrival, None, "4096", None, seed=0)
    assert [asdict(s)["arrival_ms"] for s in shapes] == [0.0, 0.0, 500.5]
    assert make_shapes(arrival, 2, "4096", None, seed=0) == shapes[:2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: it is "),
        ("[1, 2, 3]", "line 2: it is [1, 2, 3]; it must be an object"),
        ({"arrival_ms": 0, "prompt_len": 5}, "line 2: output_len is missing"),
        ({**LINES[0], "arrival_ms": -1}, "line 2: arrival_ms is -1; it must be greater than or"),
        ('{"arrival_ms": NaN, "prompt_len": 5, "output_len": 2}', "line 2: arrival_ms is NaN; it"),
        ({**LINES[0], "prompt_len": 0}, "line 2: prompt_len is 0; it must be greater than or"),
        ({**LINES[0], "output_len": 2.5}, "line 2: output_len is 2.5; it must be a valid integer"),
    ],
)
def test_a_malformed_trace_names_file_line_and_key(
    line: object, message: str, tmp_path: Path
) -> None:
    path = write_trace(tmp_path / "t.jsonl", [LINES[0], line, LINES[1]])
    with pytest.raises(ValueError) as refused:
        read_trace("--arrival trace", path)
    assert str(refused.value).startswith(f"--arrival trace: {path}")
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_trace_that_cannot_be_served_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_trace("--arrival trace", tmp_path / "no.jsonl")
    with pytest.raises(ValueError, match="has no requests"):
        read_trace("--arrival trace", write_trace(tmp_path / "empty.jsonl", [""]))
    arrival = parse_arrival(f"trace:{write_trace(tmp_path / 't.jsonl', list(LINES))}")
    with pytest.raises(ValueError, match=r"--num_requests 4: .* has 3; choose fewer"):
        make_shapes(arrival, 4, "4096", None, seed=0)
