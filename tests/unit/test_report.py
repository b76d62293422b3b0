"""`magicdec report`: which numbers its figures show, what it leaves out and why, that the page
needs nothing else, and what it refuses."""

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, Command
from matplotlib.text import Text
from synthetic_records import parse_record
from written_records import Line, failed, line_of, write

from magicdec.bench.report import page as page_module
from magicdec.bench.report.figures.panels import (
    Drawn,
    choose,
    make_axes,
    put_title,
    several,
    summarize,
)
from magicdec.bench.report.figures.passes import drafting_share, draw_by_budget, pareto
from magicdec.bench.report.frame import FrameRow, frame_of, report_row
from magicdec.bench.report.listing import command_of
from magicdec.bench.report.tables import ranges
from magicdec.cli.records import report as report_command
from magicdec.names import BASELINE, WITHOUT_BUDGET
from magicdec.output.figures import styled
from magicdec.records.reading import load_passes

BASELINES = ROOT / "results" / "baselines" / "acceptance.jsonl"
RAW = [line_of(record) for record in load_passes(BASELINES) if record.shares_prefill]
for raw in RAW:  # as `run` writes them, without what the gate has logged and sealed
    raw["seal"] = None
    raw["environment"]["cores_taken"] = 0.0  # as on a quiet host, which a gate does not need
    for request in raw["requests"]:
        request["draft_hashes"] = request["num_draft_kv_read"] = None
FIGURES = (
    "speedup_map",
    "pareto_front",
    "speedup_by_acceptance",
    "acceptance_by_budget",
    "length_by_context",
    "speedup_by_context",
    "acceptance_by_position",
    "step_phases",
    "bandwidth",
)


@pytest.fixture(scope="module", autouse=True)
def numbers_by_hand() -> Iterator[None]:
    """Records of these tests have numbers that no requests give."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_module, "contradiction_in", lambda *_: "")
        yield


def variant(number: int = 0, **changed: Any) -> Line:
    """A committed pass with other settings or metrics, under the names of this function."""
    raw: Line = json.loads(json.dumps(RAW[number]))
    places = {
        "B": ("config", "workload", "batch_size"),
        "prefix_len": ("config", "workload", "prefix_len"),
        "gamma": ("config", "decoding", "gamma"),
        "budget": ("config", "kv", "budget"),
        "threads": ("environment", "threads"),
        "argv": ("environment", "argv"),
        "cores_taken": ("environment", "cores_taken"),
        "time_utc": ("environment", "time_utc"),
        "speedup": ("metrics", "speedup"),
        "net_speedup": ("metrics", "net_speedup"),
        "net_speedup_interval": ("metrics", "net_speedup_interval"),
    }
    for name, value in changed.items():
        *parents, last = places[name]
        inner = raw
        for key in parents:
            inner = inner[key]
        inner[last] = value
    raw["workload"]["prefix_len"] = raw["config"]["workload"]["prefix_len"]
    return raw


def row(**changed: Any) -> FrameRow:
    """The row of the pass of a run that drafts."""
    return report_row(1, "runs.jsonl", parse_record(variant(**changed)), None)


Report = Callable[..., tuple[Path, str]]
EVIL = ["selfspec_benchmark.py", "--model", "</td><script>alert(1)</script>"]


def write_report(directory: Path, records: list[Line], *words: object) -> tuple[Path, str]:
    """The directory of a report of records, and what was said on stderr."""
    write(directory / "runs.jsonl", records)
    out = directory / "out"
    printed = StringIO()
    argv = ["magicdec report", directory / "runs.jsonl", "--out", out, *words]
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(printed):
        patch.setattr(sys, "argv", list(map(str, argv)))
        with pytest.raises(SystemExit) as ended:
            report_command()
    assert not ended.value.code
    return out, printed.getvalue()


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return partial(write_report, tmp_path)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A report that has every figure; its directory is read only."""
    directory = tmp_path_factory.mktemp("everything")
    records = [*RAW, *study(), variant(argv=EVIL), failed()]
    return write_report(directory, records)


@pytest.fixture(scope="module")
def study_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(tmp_path_factory.mktemp("study"), study())[0]


def study() -> list[Line]:
    """Two batch sizes and two prefix lengths, with two budgets at one place of the map."""
    cells = [(1, 1024, 0.8), (8, 1024, 1.1), (1, 4096, 1.3), (8, 4096, 1.9)]
    found = [
        variant(B=B, prefix_len=S, speedup=speedup, net_speedup=speedup - 0.1)
        for B, S, speedup in cells
    ]
    found.append(variant(B=8, prefix_len=4096, budget=65, speedup=1.5, net_speedup=1.45))
    return found


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_figure_is_drawn_or_left_out_with_a_reason(
    everything: tuple[Path, str], report: Report
) -> None:
    out, printed = everything
    assert printed == ""
    page = (out / "index.html").read_text(encoding="utf-8")
    for name in FIGURES:
        assert f'<figure id="{name}"' in page and rows(out / f"{name}.csv")
        assert (out / f"{name}.png").stat().st_size > 5000
        assert (out / f"{name}.svg").read_text(encoding="utf-8").startswith("<?xml")
    out, printed = report([variant(), failed()])
    for name in ("speedup_map", "acceptance_by_budget"):
        assert f'<figure id="{name}"' not in (out / "index.html").read_text(encoding="utf-8")
    assert "no method was measured at two batch sizes or two prefix lengths" in printed
    page = (out / "index.html").read_text(encoding="utf-8")
    for line in printed.splitlines():
        assert line.rpartition(": ")[2] in page


def test_a_report_of_failed_passes_says_why_they_failed(report: Report) -> None:
    out, printed = report([failed(), failed()])
    assert len(printed.splitlines()) == len(FIGURES)
    (first, _) = rows(out / "passes.csv")
    assert first["status"] == "failed" and first["error"] == failed()["error"]
    assert "[enforce fail]" in (out / "index.html").read_text(encoding="utf-8")


def links(page: str) -> list[str]:
    """The files that a page names, but for its own rerun.sh, which it names in its text."""
    return re.findall(r'(?:src|href)="(?!data:image/png;)([^"#][^"]*)"', page)


@pytest.mark.wide
def test_each_model_has_its_figures_of_contexts(report: Report) -> None:
    """With a panel for each kind of draft, and the names of drafts without the gamma of all."""
    others = study()
    for other in others:
        other["config"]["model"]["model"] = "a/Other.gguf"
    lookups = [variant(prefix_len=S, speedup=1.2) for S in (1024, 4096)]
    for lookup in lookups:
        lookup["config"]["decoding"]["drafter"] = "ngram"
    out, _ = report([*study(), *lookups, *others])
    for metric in ("length", "speedup"):
        assert {path.stem for path in out.glob(f"{metric}_by_context*.csv")} == {
            f"{metric}_by_context_demo",
            f"{metric}_by_context_a_other_gguf",
        }
    drawn = rows(out / "speedup_by_context_demo.csv")
    assert {row["model"] for row in drawn} == {"demo"}
    by_kind = {kind: {r["series"] for r in drawn if r["kind_of_draft"] == kind} for kind in KINDS}
    assert all(by_kind.values()) and not by_kind["lookups"] & by_kind["the model itself"]
    assert not any("gamma" in row["series"] for row in drawn)
    assert {row["model"] for row in rows(out / "speedup_by_context_a_other_gguf.csv")} == {
        "a/Other.gguf"
    }


KINDS = "the model itself", "lookups"


@pytest.mark.wide
def test_a_page_without_figure_files_does_not_link_to_them(
    report: Report, study_report: Path
) -> None:
    whole = (study_report / "index.html").read_text(encoding="utf-8")
    out, _ = report(study(), "--no_figure_files")
    page = (out / "index.html").read_text(encoding="utf-8")
    assert {path.suffix for path in out.iterdir()} == {".html", ".csv", ".sh"}
    assert sorted(links(page)) == sorted(path.name for path in out.glob("*.csv"))
    drawn = re.compile("<svg.*?</svg>", re.DOTALL)
    assert drawn.findall(page) == drawn.findall(whole) != []


@pytest.mark.parametrize("study", ["cpu", "contexts"])
def test_a_committed_report_links_to_what_is_there(study: str) -> None:
    folder = ROOT / "results" / study / "report"
    page = (folder / "index.html").read_text(encoding="utf-8")
    named = [*links(page), "rerun.sh"]
    assert [name for name in named if not (folder / name).exists()] == []


def test_the_committed_report_tells_baselines_and_commands_once() -> None:
    page = (ROOT / "results" / "cpu" / "report" / "index.html").read_text(encoding="utf-8")
    table = page[page.index('<section id="passes">') : page.index('<section id="environments">')]
    passes = rows(ROOT / "results" / "cpu" / "report" / "passes.csv")
    baselines = sum(row["drafter"] == "" for row in passes)
    assert baselines == 74 and len(re.findall(f">{BASELINE}</td>", table)) == baselines
    assert page.count('<td class="command"') == len({row["command"] for row in passes}) == 1
    assert len(passes) == 140 and {*re.findall(r'id="run-(\d+)"', page)} == {
        row["run"] for row in passes
    }


def test_a_caption_says_what_bars_are_only_where_there_are_any() -> None:
    every = [row(budget=budget) | {"run": budget} for budget in (33, 65)]
    without = [one | {"draft_acceptance_rate_interval_low": None} for one in every]
    for runs, is_said in ((every, True), (without, False)):
        drawn = draw_by_budget(frame_of(runs))
        assert isinstance(drawn, Drawn) and ("95 % intervals" in drawn.caption) == is_said


def test_a_picture_says_which_model_prefix_and_gamma_it_is_about() -> None:
    runs = [row(budget=b, gamma=2, prefix_len=4096) | {"run": b} for b in (33, 65)]
    drawn = draw_by_budget(frame_of(runs))
    assert isinstance(drawn, Drawn)
    assert drawn.figure.get_suptitle() == f"{drawn.title}\ndemo, prefix 4096 tokens, gamma 2"
    assert several([1, 8, 2]) == "1/2/8" and several([*range(9), "auto"]) == "0 to 8/auto"


def test_a_row_is_on_the_front_of_its_own_kind() -> None:
    """An autoregressive pass is not on a front because the drafts of the same run are."""
    groups: dict[tuple[str, bool], list[dict[str, str]]] = {}
    for row in rows(ROOT / "results" / "cpu" / "report" / "pareto_front.csv"):
        groups.setdefault((row["prefix_len"], row["series"] == BASELINE), []).append(row)
    assert len(groups) == 6
    for group in groups.values():
        at = [(float(r["request_tokens_per_s"]), float(r["decode_tokens_per_s"])) for r in group]
        for row, place in zip(group, at, strict=True):
            beaten = any(other != place and min(map(float.__ge__, other, place)) for other in at)
            assert (row["on_front"] == "True") != beaten


def test_the_page_needs_nothing_else(everything: tuple[Path, str]) -> None:
    out, _ = everything
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)" in page
    loaded = links(page)
    assert loaded and all((out / name).exists() for name in loaded)
    assert not re.search(r"url\((?!#)|@import|<link|<iframe", page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:xlink:href="#|url\(#|href="#)([^")]*)', page)
    assert used and set(used) <= set(ids)


def test_the_map_shows_the_best_of_each_place(study_report: Path) -> None:
    found = {(r["B"], r["prefix_len"]): r for r in rows(study_report / "speedup_map.csv")}
    assert found["8", "4096"]["speedup"] == "1.9" and found["8", "4096"]["runs"] == "2"
    assert found["8", "4096"]["budget"] == str(RAW[0]["config"]["kv"]["budget"])
    assert found["1", "1024"]["net_speedup"] == "0.7000000000000001"


def speeds(net: float, low: float, high: float, taken: float | None) -> Line:
    """A run whose steps are the faster, the less it gains net."""
    return variant(
        speedup=9 / net, net_speedup=net, net_speedup_interval=[low, high], cores_taken=taken
    )


def test_headlines_are_of_quiet_hosts_and_say_why(report: Report) -> None:
    """The second run is the fastest of a quiet host, the first one surely fast."""
    made = [speeds(*numbers) for numbers in ((1.5, 1.4, 1.6, None), (2.0, 0.5, 8.0, 0.09))]
    busy = speeds(3.0, 2.9, 3.1, 0.48)
    out, _ = report([*made, busy])
    first, printed, net, steps, *_ = re.findall("<p>(.*?)</p>", (out / "index.html").read_text())
    assert first == "3 runs with 3 passes (3 verified) of demo."
    assert printed.startswith(
        "1 of 3 passes: another load took 48% of the cores meanwhile, so times"
    )
    assert "(net): 1.50x to 2.00x, in the passes on a quiet host" in net
    assert "interval that begins highest is that of run 1, 1.50x [1.40, 1.60]:" in net
    assert "decode steps: 4.50x to 6.00x, in the passes on a quiet host" in steps
    assert column(out, "busy") == ["", "", "48%"]
    assert [row["cores_taken"] for row in rows(out / "passes.csv")] == ["", "0.09", "0.48"]
    out, _ = report([busy])
    page = (out / "index.html").read_text()
    assert "<p>another load took 48% of the cores" in page and "3.00x to 3.00x. The" in page
    out, _ = report(made)
    assert "another load" not in (out / "index.html").read_text() and column(out, "busy") == []


def column(out: Path, label: str) -> list[str]:
    """The cells of a column of the table of passes on the page."""
    page = (out / "index.html").read_text(encoding="utf-8")
    table = page[page.index('<section id="passes">') :]
    table = table[: table.index("</section>")]
    labels = re.findall('<button type="button">(.*?)</button>', table)
    cells = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*)</tr>", table)]
    return [row[labels.index(label)] for row in cells if row] if label in labels else []


def test_results_stand_before_settings(study_report: Path) -> None:
    page = (study_report / "index.html").read_text(encoding="utf-8")
    table = page[page.index('<section id="passes">') :]
    labels = re.findall('<button type="button">(.*?)</button>', table[: table.index("</thead>")])
    assert labels[:7] == ["run", "pass", "way", "B", "prefix", "net speedup", "speedup"]
    assert labels[labels.index("status") :] == ["status", "budget"]


def test_the_files_hold_every_run_and_its_command(everything: tuple[Path, str]) -> None:
    out, _ = everything
    runs = rows(out / "passes.csv")
    commands = rows(out / "commands.csv")
    assert [r["run"] for r in runs] == [r["run"] for r in commands]
    assert len(runs) == len(RAW) + len(study()) + 2 and runs[-1]["status"] == "failed"
    for row, raw in zip(runs, RAW, strict=False):
        assert float(row["speedup"]) == raw["metrics"]["speedup"]
        reads_all = row["kv_policy"] in ("", *WITHOUT_BUDGET)
        assert row["budget"] == ("" if reads_all else str(raw["config"]["kv"]["budget"]))
    script = (out / "rerun.sh").read_text(encoding="utf-8").splitlines()
    assert set(script) >= {row["command"] for row in commands}


@pytest.mark.parametrize(
    ("argv", "ranks", "command"),
    [
        (["selfspec_benchmark.py", "--B", "2"], 1, "python tests/selfspec_benchmark.py --B 2"),
        (
            ["selfspec_benchmark.py", "--model", "a b"],
            2,
            "torchrun --standalone --nproc_per_node=2 tests/selfspec_benchmark.py --model 'a b'",
        ),
        (
            ["magicdec selfspec"],
            4,
            "torchrun --standalone --nproc_per_node=4 --no-python magicdec selfspec",
        ),
        (["magicdec run", "--nproc", "2"], 2, "magicdec run --nproc 2"),
    ],
)
def test_a_command_can_be_copied(argv: list[str], ranks: int, command: str) -> None:
    environment: Any = SimpleNamespace(argv=argv, world_size=ranks)
    assert command_of(environment) == command


def test_the_front_is_what_nothing_beats() -> None:
    places = [(1, 5), (2, 4), (2, 6), (3, 5), (3, 4), (0.5, 1)]
    front = pareto(frame_of({"x": x, "y": y} for x, y in places), "x", "y")
    assert [*front.itertuples(index=False, name=None)] == [(3, 5), (2, 6)]


def test_the_phases_of_a_step_make_up_the_step() -> None:
    """Steps that draft (30 + 10 ms) and steps that do not (12 ms), a quarter of the former."""
    m: Any = SimpleNamespace(
        draft_ms=30.0, verify_ms=10.0, decode_ms=12.0, other_ms=1.0, mean_step_ms=20.0
    )
    assert drafting_share(m) == pytest.approx(0.25)
    always: Any = SimpleNamespace(
        draft_ms=3.0, verify_ms=1.0, decode_ms=None, other_ms=0.0, mean_step_ms=4.0
    )
    assert drafting_share(always) == 1.0


@pytest.mark.parametrize("columns", [1, 2])
def test_the_title_of_a_panel_is_not_cut_off(columns: int) -> None:
    text = "draft demo-draft, dataset books.jsonl, B 128, prefix 131072 tokens, ranks 4, threads 2"
    with styled():
        figure, axes = make_axes(columns)
        for ax in axes:
            put_title(ax, text)
        figure.canvas.draw()
        found = [t for ax in axes for t in ax.findobj(Text) if t.get_text().startswith("draft")]
        ends = [shown.get_window_extent().x1 for shown in found]
    assert [" ".join(shown.get_text().split()) for shown in found] == [text] * columns
    limits = [*(ax.get_window_extent().x0 for ax in axes[1:]), figure.bbox.x1]
    assert all(end <= limit for end, limit in zip(ends, limits, strict=True))


def test_no_panel_is_left_without_a_series() -> None:
    assert choose([["a", "b", "c"], ["a"], ["z"]], 3) == ["a", "z", "b"]


def test_repeated_runs_show_their_range_and_one_run_its_interval() -> None:
    runs = frame_of(
        {"x": x, "x_interval_low": low, "x_interval_high": high}
        for x, low, high in [(3.0, 0.0, 9.0), (2.0, None, None), (7.0, None, None)]
    )
    one = summarize(runs[:1], "x")
    all_of_them = summarize(runs, "x")
    assert one == {"x": 3.0, "low": 0.0, "high": 9.0, "runs": 1}
    assert all_of_them == {"x": 3.0, "low": 2.0, "high": 7.0, "runs": 3}


@pytest.mark.parametrize("key", ["draft_weights", "target_dtype", "pa"])
def test_runs_with_other_weights_are_not_repeated_runs(key: str) -> None:
    records = [record for record in load_passes(BASELINES) if record.shares_prefill]
    every = [report_row(n, "", record, None) for n, record in enumerate(records)]
    every = [row for row in every if row["drafter"] == "self" and row["gamma"] == 4]
    every = [row for row in every if row["draft_weights"] is None and row["pa"] is None]
    drawn = draw_by_budget(frame_of([*every, *(row | {key: "other"} for row in every)]))
    assert isinstance(drawn, Drawn) and set(drawn.table["runs"]) == {1}


def test_numbers_of_runs_are_short() -> None:
    assert ranges([3, 1, 2, 7, 9, 8]) == "1-3, 7-9" and ranges([4]) == "4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "file"], "is not a directory"),
        (["--out", "file/below"], "Not a directory"),
        (["--out", "out", "empty.jsonl"], "there are no records"),
        (["--out", "out", "."], "Is a directory"),
        (["--out", "out", "torn.jsonl", "--strict"], "torn.jsonl:2: not a JSON record"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("file", "empty.jsonl"):
        (tmp_path / name).touch()
    write(tmp_path / "runs.jsonl", [variant()])
    (tmp_path / "torn.jsonl").write_text((tmp_path / "runs.jsonl").read_text() + '{"cut')
    has_file = len(words) > 2 and words[2] in (".", "empty.jsonl", "torn.jsonl")
    code, _, err = command("report", *([] if has_file else ["runs.jsonl"]), *words)
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
