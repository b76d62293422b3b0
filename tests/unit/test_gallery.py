"""`magicdec report --gallery`: which records it ranks and which it does not, that its numbers are
those of the records, what it does with the records of strangers, and the committed page."""

from __future__ import annotations

import gzip
import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Command
from test_compare import diverged, failed, with_ties, write
from test_report import BASELINES, EVIL, RAW, variant
from test_report_page import CHROMIUM, browse

from magicdec.bench.report import gallery
from magicdec.bench.report.gallery import make_gallery, render_gallery
from magicdec.bench.report.gallery_rows import (
    RUN_COLUMNS,
    GalleryRow,
    GalleryTable,
    gallery_tables,
    reach_of,
    text_cell,
)
from magicdec.bench.serving.record import ServingRecord
from magicdec.records.reading import parse_line

Record = dict[str, Any]
SETS = ("results/cpu", "results/contexts")  # that are committed, before those of others
PAGE = "results/gallery/index.html"
RANKED = [
    raw
    for raw in RAW
    if raw["correctness"]["reference"] is not None
    and (raw["environment"]["cores_taken"] or 0.0) < 0.1
]


def tables_of(path: Path) -> dict[str, GalleryTable]:
    return {table.name: table for table in make_gallery([path], True).tables}


def column(table: GalleryTable, label: str) -> list[str]:
    number = [each.label for each in table.columns].index(label)
    return [row[number].text for row in table.rows]


def passes() -> list[Record]:
    """The committed records of served requests, without the seals of the gate."""
    return [raw | {"seal": None} for raw in baselines() if raw["kind"] == "serving"]


def baselines() -> list[Record]:
    """The committed records of the gate, as if measured on a quiet host, which they need not be."""
    found = [json.loads(line) for line in BASELINES.read_text().splitlines()]
    return [raw | {"environment": raw["environment"] | {"cores_taken": 0.0}} for raw in found]


def changed(record: Record, *path: str, value: Any) -> Record:
    copy: Record = json.loads(json.dumps(record))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


def uncompared(**sampling: float) -> Record:
    found = changed(variant(), "correctness", "reference", value=None)
    for name, value in sampling.items():
        found = changed(found, "config", "sampling", name, value=value)
    return found


def test_what_is_in_doubt_is_apart_with_its_reason(tmp_path: Path) -> None:
    doubted = {
        "failed: RuntimeError: [enforce fail] in [/x] :fire:": failed(),
        "DIVERGED: its tokens are not those of autoregressive decoding": diverged(),
        "not compared: it has no baseline": uncompared(),
        "not compared: its tokens were sampled": uncompared(temperature=0.8),
        "emulated: --emulate_acceptance": changed(
            variant(), "config", "decoding", "emulate_acceptance", value=[0.9]
        ),
        "busy host: another load took 12% of its cores": changed(
            variant(), "environment", "cores_taken", value=0.12
        ),
        "CONTRADICTION: its speedup does not follow from its samples": variant(speedup=9.0),
        "CONTRADICTION: its roofline_fraction does not follow from its samples": changed(
            variant(), "metrics", "roofline_fraction", value=0.99
        ),
    }
    tables = tables_of(write(tmp_path / "a.jsonl", [*RANKED, *doubted.values()]))
    assert sorted(column(tables["doubted_runs"], "why")) == sorted(doubted)
    assert len(tables["runs"].rows) == len(RANKED)
    assert {*column(tables["runs"], "verdict")} == {"identical"}
    assert "9.00x" not in "".join(column(tables["runs"], "speedup"))


def test_the_numbers_are_those_of_the_records(tmp_path: Path) -> None:
    tables = tables_of(write(tmp_path / "a.jsonl", RANKED))
    runs = tables["runs"]
    assert len(runs.rows) == len(RANKED)
    for row in runs.rows:
        cells = dict(zip([each.label for each in runs.columns], row, strict=True))
        source = cells["record"].source
        assert source is not None and cells["record"].text == f"a.jsonl:{source.line}"
        raw = RANKED[source.line - 1]
        ends = raw["metrics"]["speedup_interval"]
        interval = ",\N{NO-BREAK SPACE}".join(f"{end:.2f}" for end in ends or ())
        shown = f"{raw['metrics']['speedup']:.2f}x [{interval}]".removesuffix(" []")
        assert cells["speedup"].text == shown
        own = raw["baseline_metrics"]["decode_tokens_per_s"]
        assert cells["autoregressive, tokens/s"].text == f"{own:,.1f}"
        assert float(cells["autoregressive, tokens/s"].order) == pytest.approx(own, rel=1e-4)
        assert cells["B"].text == str(raw["config"]["workload"]["batch_size"])
        assert cells["date"].text == raw["environment"]["time_utc"][:10]
    machines = tables["machines"]
    assert sum(map(int, column(machines, "records"))) == len(RANKED)
    bests = {*column(machines, "largest net speedup")}
    assert bests == {""}, "the gate's cases have too few batches"


def test_a_rank_is_one_and_those_that_are_better_beyond_doubt() -> None:
    """Among rows of one place of one group. Equal ranks cannot be told apart, and what has no
    interval has no rank."""

    def row(way: str, reach: list[float] | None, B: int = 1, **changed: Any) -> GalleryRow:
        made = GalleryRow(True, "", ("m", "1 x 1", "demo"), ("demo", 9, B), None, reach, [])
        cells = [way, *[""] * len(RUN_COLUMNS)]
        return replace(made, cells=list(map(text_cell, cells)), **changed)

    rows = [
        row("fourth", [0.9, 1.1]), row("none", None), row("second", [1.5, 2.6]),
        row("third", [1.2, 1.9]), row("first", [2.0, 2.5]), row("alone", [0.1, 0.2], B=4),
        row("doubted", [7.0, 8.0], doubt="busy host"),
        row("elsewhere", [5.0, 6.0], group=("other", "1 x 1", "demo")),
        row("pass", [99.0, 99.0], is_run=False), row("faster", [100.0, 100.0], is_run=False),
    ]  # fmt: skip
    tables = {table.name: table for table in gallery_tables(rows)}
    assert [(cells[0].text, cells[1].text) for cells in tables["runs"].rows] == [
        *(("1", "first"), ("1", "second"), ("2", "third"), ("4", "fourth"), ("", "none")),
        *(("1", "alone"), ("1", "elsewhere")),
    ]
    assert column(tables["passes"], "rank") == ["1", "2"]
    assert [cells[1].text for cells in tables["passes"].rows] == ["faster", "pass"]
    assert tables["doubted_runs"].columns[0].label == "way", "what is in doubt has no rank"


def check_ranks(runs: GalleryTable) -> None:
    """Each rank follows from the numbers that are shown of the net speedup, by what they are of."""
    places: dict[tuple[str, ...], list[tuple[str, float, float]]] = {}
    for row in runs.rows:
        cells = dict(zip((each.label for each in runs.columns), row, strict=True))
        names = ("machine", "ranks x threads", "model", "text", "prefix", "B")
        ends = re.findall(r"[\d.]+", cells["net speedup"].text)[1:] or ["nan", "nan"]
        of = places.setdefault(tuple(cells[name].text for name in names), [])
        of.append((cells["rank"].text, float(ends[0]), float(ends[1])))
    assert len(places) > 20
    for of in places.values():
        for rank, _, high in of:
            better = sum(low > high + 0.01 for _, low, _ in of)
            as_good = sum(low >= high - 0.01 for _, low, _ in of)
            assert rank == "" or 1 + better <= int(rank) <= 1 + as_good


def test_a_tie_is_said_and_a_pass_has_a_table_of_its_own(tmp_path: Path) -> None:
    tie = changed(variant(), "correctness", value=with_ties()["correctness"])
    served = passes()
    records = [tie | {"status": "ok_with_ties"}, *served]
    tables = tables_of(write(tmp_path / "a.jsonl", records))
    assert column(tables["runs"], "verdict") == ["2 ties that rounding explains"]
    right = [raw for raw in served if raw["status"] == "ok"]
    assert sorted(column(tables["passes"], "output tokens/s")) == sorted(
        f"{raw['metrics']['output_throughput']:,.1f}" for raw in right
    )
    assert len(tables["doubted_passes"].rows) == len(served) - len(right)
    assert {*column(tables["doubted_passes"], "why")} == {"not compared with another mode"}


def test_a_pass_is_ranked_by_its_output_tokens() -> None:
    for raw in passes():
        metrics = parse_line(json.dumps(raw), ServingRecord).metrics
        assert reach_of(metrics) == [raw["metrics"]["output_throughput"]] * 2
    assert reach_of(None) is None


def test_emulated_stages_and_wrong_tokens_are_not_ranked(tmp_path: Path) -> None:
    raw = next(each for each in passes() if each["status"] == "ok")
    slept = changed(raw, "config", "workload", "emulate_stage_ms", value=3.0)
    wrong = raw | {"status": "diverged", "metrics": None, "num_differing": 2}
    tables = tables_of(write(tmp_path / "a.jsonl", [slept, wrong]))
    assert "passes" not in tables and sorted(column(tables["doubted_passes"], "why")) == [
        f"DIVERGED: its tokens are not those of {raw['reference']}",
        "emulated: --emulate_stage_ms",
    ]


def test_records_of_strangers_are_text(tmp_path: Path) -> None:
    """Markup in a field or in the name of a file is shown, and no name is a link to a script."""
    folder = tmp_path / "javascript:alert(2)"
    folder.mkdir()
    evil = changed(variant(argv=EVIL), "config", "model", "model", value=EVIL[-1])
    evil = changed(evil, "environment", "cpu", value='"><img src=x onerror=alert(3)>\u202e\x1b[2J')
    evil = changed(evil, "environment", "torch", value="9" * 9999)
    write(folder / "<b>.jsonl", [evil, failed() | {"error": "<script>alert(4)</script>"}])
    page = render_gallery(make_gallery([folder], True), [folder], folder)
    assert "&lt;script&gt;alert(1)" in page and "&lt;img src=x" in page
    assert not re.search(r"<script>alert|<img|<b>\.|\u202e|\x1b", page)
    assert "9" * 100 in page and "9" * 200 not in page
    (one, two) = re.findall(r'href="([^#"][^"]*)"', page)
    assert one.partition("#")[0] == two.partition("#")[0] == "%3Cb%3E.jsonl"
    page = render_gallery(make_gallery([folder], True), [folder], tmp_path)
    assert set(re.findall(r'href="([a-z]+)[:/%]', page)) == {"javascript"}
    assert 'href="javascript%3Aalert%282%29/' in page


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("torn", "a.jsonl:2: not a JSON record"),
        ("version", "a.jsonl:2: schema_version is 9"),
        ("number", "config or its samples are not those of a record (AttributeError"),
        ("budget", "config or its samples are not those of a record (ValueError"),
        ("samples", "a.jsonl:2: its config or its samples are not those of a record (ValueError"),
        ("many", "a.jsonl:4: a page has at most 3 records"),
        ("large", "a.jsonl: it has 0 MB, and a file of a gallery at most 0 MB"),
        ("twice", "is the same file; leave one of them out"),
        ("empty", "no file of records in it, .jsonl or .jsonl.gz"),
        ("kinds", "there is no record of a run or of served requests"),
        ("figures", "--no_figure_files does nothing with --gallery"),
        ("missing", "nowhere"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line(
    damage: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    second = variant()
    words: list[object] = ["--strict"]
    if damage == "number":
        second["config"]["decoding"]["drafter"] = 7
    elif damage == "budget":
        second["config"]["kv"]["budget"] = "<b>"
    elif damage == "version":
        second["schema_version"] = 9
    elif damage == "samples":
        second["samples"] = None
    elif damage == "many":
        monkeypatch.setattr(gallery, "MOST_RECORDS", 3)
    elif damage == "large":
        monkeypatch.setattr(gallery, "MOST_FILE_BYTES", 9)
    elif damage == "figures":
        words.append("--no_figure_files")
    folder = tmp_path / "set"
    folder.mkdir()
    path = folder / "a.jsonl"
    write(path, [variant(), second, second, second])
    if damage == "torn":
        path.write_text(path.read_text().splitlines()[0] + '\n{"cut')
    places: list[Path] = [folder]
    if damage == "twice":
        places.append(path)
    elif damage == "empty":
        path.rename(folder / "a.json")
    elif damage == "kinds":
        path.write_text(BASELINES.read_text())  # the gate's
    elif damage == "missing":
        places.append(tmp_path / "nowhere")
    code, _, err = command("report", "--gallery", *places, *words, "--out", tmp_path / "out")
    assert code == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_logs_and_damaged_lines_of_a_folder_are_said_and_left_out(
    tmp_path: Path, command: Command
) -> None:
    below = tmp_path / "set" / "below"
    below.mkdir(parents=True)
    line = json.dumps(variant()) + "\n"
    (below / "log.jsonl").write_text('{"loss": 1.0}\n')
    (below / "torn.jsonl").write_text(f'{line}{{"cut')
    (below / "packed.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (below / "link.jsonl").symlink_to(below / "torn.jsonl")
    code, out, err = command("report", "--gallery", tmp_path / "set", "--out", tmp_path / "out")
    assert code == 0 and "2 records, 0 of them not ranked" in out
    assert "log.jsonl:1: not a record" in err and "this file is left out" in err
    assert "torn.jsonl:2: not a JSON record" in err and err.count("\n") == 2
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert 'href="../set/below/packed.jsonl.gz"' in page
    assert 'href="../set/below/torn.jsonl#L1"' in page


def test_a_file_of_noise_is_refused_in_one_line(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "noise.jsonl"
    path.write_text(json.dumps(variant()) + "\n" + "noise\n" * 1001)
    code, _, err = command("report", "--gallery", path, "--out", tmp_path / "out")
    assert code == 2 and "noise.jsonl:2: not a JSON record" in err and err.count("\n") == 1


def test_the_committed_page_has_all_committed_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written again by the command on it, which a folder of new records must be added to."""
    monkeypatch.chdir(ROOT)
    others = sorted(str(path) for path in Path("results", "machines").glob("*"))
    places = [Path(name) for name in (*SETS, *others)]
    committed = Path(PAGE).read_text(encoding="utf-8")
    found = make_gallery(places, False)
    again = render_gallery(found, places, Path(PAGE).parent)
    lines = gzip.decompress(Path(SETS[0], "records.jsonl.gz").read_bytes()).splitlines()
    metrics = [
        raw["metrics"] for raw in map(json.loads, lines) if raw["metrics"]["net_speedup_interval"]
    ]
    best = max(metrics, key=lambda each: each["net_speedup_interval"][0])
    check_ranks(found.tables[1])
    shown = [text.partition(" ")[0] for text in column(found.tables[0], "largest net speedup")]
    assert f"{best['net_speedup']:.2f}x" in shown
    wanted = "magicdec report --gallery " + " ".join([*SETS, *others]) + " --out results/gallery"
    assert wanted in html.unescape(committed)
    assert committed == again, f"write it again: {wanted}"
    assert len(committed) < 400_000
    for name in set(re.findall(r'href="([^#"][^"#]*)', committed)):
        assert Path(PAGE).parent.joinpath(name).exists()
    assert not re.search(r"url\(|@import|<link|<iframe|src=", committed)


# Selects a prefix and a word, and sorts what is left by its speedup. It is put at the page's end.
QUESTION = """<script>
const section = document.querySelector("#runs");
const labels = [...section.querySelectorAll("label")];
function choose(name, value) {
  const control = labels.find((label) => label.textContent.startsWith(name)).lastElementChild;
  control.value = value;
  control.dispatchEvent(new Event("input"));
}
choose("prefix", "4096");
choose("word", "SNAPKV");
const headings = [...section.querySelectorAll("th")];
const place = (label) => headings.findIndex((heading) => heading.textContent === label);
const speedup = place("speedup");
const prefix = place("prefix");
headings[speedup].querySelector("button").click();
const shown = [...section.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
document.body.dataset.answer = JSON.stringify({
  ways: shown.map((row) => row.cells[place("way")].textContent),
  prefixes: shown.map((row) => row.cells[prefix].textContent),
  hidden: shown.every((row) => row.cells[prefix].hidden) && headings[prefix].hidden,
  speedups: shown.map((row) => Number(row.cells[speedup].dataset.order)),
  said: section.querySelector("output").textContent,
  width: document.documentElement.scrollWidth,
});
</script></body>"""


@pytest.mark.wide
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [500, 1440])
def test_rows_are_selected_and_sorted_in_a_browser(width: int, tmp_path: Path) -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", QUESTION), encoding="utf-8")
    dom, said = browse(page, "--dump-dom", f"--window-size={width},2000")
    found = re.search(r'data-answer="([^"]*)"', dom)
    assert said == [] and found is not None
    answer: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert len(answer["ways"]) > 5 and all("snapkv" in way for way in answer["ways"])
    assert {*answer["prefixes"]} == {"4096"} and answer["hidden"]
    assert answer["speedups"] == sorted(answer["speedups"])
    assert answer["said"].startswith(f"{len(answer['ways'])} of ")
    assert answer["width"] <= width
