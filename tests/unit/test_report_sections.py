"""`magicdec report` and `magicdec export` of every kind of record: the sections of the page, the
numbers of their figures, and the rows of the export."""

from __future__ import annotations

import re
from pathlib import Path

import pandas
import pytest
from conftest import Command
from test_report import links, numbers_by_hand, rows, variant
from written_records import mismatch, run_lines, served, write

from magicdec.cli import records
from magicdec.systems.stages.spans import Span, SpanKind

__all__ = ["numbers_by_hand"]  # a fixture of all tests here

EVERY = [
    served("static", 2.0, goodput={"ttft": 1500.0}),
    served("inflight", 1.0, goodput={"ttft": 1500.0}),
    served("inflight", 3.0, start="rate 3", arrival="poisson:5"),
    served("sequential", 2.0, start="second", draft="none"),
    served("ring", 1.0, start="second", draft="none"),
    served("pipeline", 1.0, start="third"),
    served("pipeinfer", 1.0, start="third"),
]
NUM_COMMANDS = 4
CLOSED = [
    served(f"{mode}, {count} at once", seconds, start="fourth", concurrency=count)
    for mode, seconds in (("inflight", 2.0), ("inflight+draft", 1.0))
    for count in (1, 4)
]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two passes of runs and of every kind that was served, which no test changes."""
    folder = tmp_path_factory.mktemp("report")
    write(folder / "all.jsonl", [variant(), variant(B=1), *EVERY])
    words = [str(folder / "all.jsonl"), "--out", str(folder / "out")]
    records.write_page(records.report.build_parser().read(words))
    return folder / "out"


def test_passes_of_loops_have_figures_of_their_own(out: Path) -> None:
    page = (out / "index.html").read_text(encoding="utf-8")
    titles = ["Passes", "Requests that were served"]
    assert [t for t in re.findall("<h2>(.*)</h2>", page) if t in titles] == titles
    figures = re.findall('<figure id="([^"]*)"', page)
    for name in (
        "serving_throughput",
        "serving_goodput",
        "serving_modes",
        "mdi_llm_stages",
        "pipeinfer_stages",
    ):
        assert name in figures and rows(out / f"{name}.csv"), name
    assert "against the draft's kv budget" in page.lower().replace("&#39;", "'"), (
        "what is left out is named"
    )
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert [name for name in links(page) if not (out / name).exists()] == []
    assert len(rows(out / "commands.csv")) == 2 + NUM_COMMANDS
    assert len(rows(out / "passes.csv")) == 2 + len(EVERY), "a pass is a row"


def test_a_batching_is_at_its_own_throughput_and_p90_ttft(out: Path) -> None:
    """Three tokens in 6 s after a first one in 2 s, and in 3 s after 1 s. A bound of 1.5 s is kept
    by the second."""
    found = {(r["pass"], r["arrival"]): r for r in rows(out / "serving_throughput.csv")}
    slow = found["static", "burst"]
    fast = found["inflight", "burst"]
    assert [float(r["p90_ttft_ms"]) for r in (slow, fast)] == pytest.approx([2000, 1000])
    assert [float(r["output_throughput"]) for r in (slow, fast)] == pytest.approx([0.5, 1.0])
    goodputs = rows(out / "serving_goodput.csv")
    good = {(r["pass"], r["arrival"]): float(r["request_goodput"]) for r in goodputs}
    assert good["static", "burst"] == 0 and good["inflight", "burst"] == pytest.approx(1 / 3)
    speeds = [r for r in rows(out / "serving_modes.csv") if r["metric"].startswith("speed")]
    assert len(speeds) == len(EVERY), "every pass has a bar"


def test_a_mode_of_a_closed_loop_is_a_line_of_its_own(tmp_path: Path, command: Command) -> None:
    """Three tokens in 6 s and in 3 s: 0.5 and 1 tokens/s of a user, and of all, who are one."""
    write(tmp_path / "closed.jsonl", CLOSED)
    command("report", tmp_path / "closed.jsonl", "--out", tmp_path / "out")
    found = rows(tmp_path / "out" / "serving_concurrency.csv")
    assert [
        (r["mode"], r["concurrency"], float(r["user_tokens_per_s"]), float(r["output_throughput"]))
        for r in found
    ] == [
        ("inflight", "1", 0.5, 0.5),
        ("inflight", "4", 0.5, 0.5),
        ("inflight+draft", "1", 1.0, 1.0),
        ("inflight+draft", "4", 1.0, 1.0),
    ]
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert 'id="serving_concurrency"' in page and "closed loop" in page
    headings = re.findall("<h3>(Run 1: .*)</h3>", page)
    assert headings[0].startswith("Run 1: demo"), "the summary first"
    assert headings[1:] == ["Run 1: inflight", "Run 1: inflight+draft"]
    assert len(headings) == 3 and "<tr></tr>" not in page, "every row can be sorted"
    for name in ("serving_throughput", "serving_modes"):  # of an open loop
        assert not (tmp_path / "out" / f"{name}.csv").exists()


def test_passes_of_a_busy_host_are_named(tmp_path: Path, command: Command) -> None:
    """On top of the page, above the tables of their command, and by `magicdec table`."""
    shares = (0.48, 0.02)
    made = [served(name, 1.0) for name in ("static", "inflight")]
    for raw, taken in zip(made, shares, strict=True):
        raw["environment"] = raw["environment"] | {"cores_taken": taken}
    write(tmp_path / "passes.jsonl", made)
    command("report", tmp_path / "passes.jsonl", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    load = "another load took 48% of the cores meanwhile, so times and speedups may be off"
    assert f"<p>1 of 2 passes: {load}" in page
    assert f"<li>1 of 2 passes (static 48%): {load}" in page
    out = command("table", tmp_path / "passes.jsonl").out
    assert out.startswith(f"1 of 2 passes (static 48%): {load}")


@pytest.mark.parametrize("part", ["mdi_llm", "pipeinfer"])
def test_stages_are_shown_over_time(out: Path, part: str) -> None:
    """In the parts of the time that the record has, or as one where it has none."""
    found = {
        r["stage"]: (r["pass"], r["busy"], r["parts"]) for r in rows(out / f"{part}_stages.csv")
    }
    assert all(parts == f"[{busy}]" for _, busy, parts in found.values())
    if part == "ring":
        assert found["0"][:2] == ("ring", "0.75") and found["1"][:2] == ("ring", "0.25")


def test_occupancy_is_the_share_of_each_part_of_the_time() -> None:
    """Ten seconds in 100 parts: spans that overlap count once, and moments do not count."""
    first = [Span(SpanKind.STAGE, 0, 0.0, 2.0), Span(SpanKind.DRAFT, 0, 1.0, 3.05)]
    second = [Span(SpanKind.HEAD, 0, 9.0, 10.0), Span(SpanKind.RESULT, 0, 5.0, 6.0)]
    from magicdec.systems.stages.details import occupancy_of

    found = occupancy_of([first, second, []])
    assert found[0] == [1.0] * 30 + [0.5] + [0.0] * 69
    assert found[1] == [0.0] * 90 + [1.0] * 10 and found[2] == [0.0] * 100


def test_the_front_is_over_runs_and_requests_in_every_mode(out: Path) -> None:
    modes = {f"served: {raw['name']}" for raw in EVERY}
    found = rows(out / "pareto_front.csv")
    assert {r["series"] for r in found} == {"self, streaming_llm"} | modes


def test_a_pass_whose_tokens_are_wrong_has_no_figure(tmp_path: Path, command: Command) -> None:
    write(tmp_path / "passes.jsonl", [mismatch(served("static", 1.0))])
    command("report", tmp_path / "passes.jsonl", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "<h2>Passes</h2>" in page and "<h2>Requests that were served</h2>" in page
    assert "<figure" not in page and "mismatch" in page


def test_the_passes_of_a_run_alone_served_no_requests(tmp_path: Path, command: Command) -> None:
    write(tmp_path / "passes.jsonl", run_lines())
    command("report", tmp_path / "passes.jsonl", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "<h2>Passes</h2>" in page and "<h2>Requests that were served</h2>" not in page
    assert [row["series"] for row in rows(tmp_path / "out" / "pareto_front.csv")] == [
        "autoregressive",
        "self, streaming_llm",
    ]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_export_has_a_row_for_each_pass_of_every_kind(
    tmp_path: Path, command: Command, suffix: str
) -> None:
    write(tmp_path / "all.jsonl", [variant(), *EVERY])
    out = tmp_path / f"all.{suffix}"
    command("export", tmp_path / "all.jsonl", "--out", out)
    frame = getattr(pandas, f"read_{suffix}")(out)
    assert set(frame["kind"]) == {"pass"}
    assert frame["pass"].tolist() == ["static+draft", *(raw["name"] for raw in EVERY)]
    by_pass = {row["pass"]: row for row in frame.to_dict("records")}
    assert by_pass["static"]["output_throughput"] == pytest.approx(0.5)
    assert by_pass["static"]["workload.goodput"] == "ttft:1500.0"
    assert by_pass["ring"]["details.busy"] == "0.75 0.25"
    assert by_pass["pipeinfer"]["details.most_in_flight"] == 2
    assert by_pass["pipeinfer"]["workload.draft"] == "ngram"
    assert frame["model.model"].notna().all() and frame["environment.torch"].notna().all()
