"""scripts/dev/traces_study.py: parts of traces, and a page with the numbers of its records."""

import json
import re
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
from conftest import ROOT
from synthetic_records import PLAIN, TURNS, served, with_fields
from trace_files import assistant, call, mooncake, user, weka, write_lines
from trace_study.arms import ARMS
from trace_study.cells import Study, cells_of
from trace_study.page import PARTS, page_of, write_page
from trace_study.pieces import MLPERF, MOONCAKE, TRACES, WEKA, Trace

from magicdec.records.pass_record import PassRecord
from magicdec.records.reading import load_passes
from magicdec.records.record import append_together
from magicdec.workload.traces.sessions import parse_scale, read_sessions

FOLDER = ROOT / "results" / "traces"


def test_a_part_has_the_calls_that_it_names(tmp_path: Path) -> None:
    trace = weka(call(0, 8), call(1, 16), call(2, 24))
    write_lines(tmp_path / "w.json", [trace])
    rows = [
        row | {"conversation_id": name}
        for name in ("a", "b")
        for row in (user(1, f"{name}?"), assistant(2, "yes"), user(3, "why?"), assistant(4, "so"))
    ]
    lines = [json.dumps({"conversation_id": row.pop("conversation_id")} | row) for row in rows]
    broken = '{"conversation_id": "c", "turn": 1, "role": "user", "content": "\\u\u2028"}'
    (tmp_path / "m.jsonl").write_text("\n".join([broken, *lines, ""]))
    write_lines(tmp_path / "k.jsonl", [mooncake(n, 600, [n, 0]) for n in range(5)])
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = (
        Trace("one", WEKA, "w.json", calls=2),
        Trace("two", MLPERF, "m.jsonl", calls=1, sessions=("b",)),
        Trace("three", MOONCAKE, "k.jsonl", "1/4", lines=(2, 4)),
    )
    for part in parts:
        part.write(folder, tmp_path)
    assert json.loads((folder / "one.json").read_text()) == trace | {
        "requests": trace["requests"][:2]
    }
    assert (folder / "two.jsonl").read_text().splitlines() == lines[4:6]
    kept = [json.loads(line)["timestamp"] for line in (folder / "three.jsonl").open()]
    assert kept == [1, 2, 3]
    with pytest.raises(ValueError, match=r"it has no q\.json"):
        Trace("four", WEKA, "q.json").write(folder, tmp_path)
    with pytest.raises(ValueError, match=r"m\.jsonl has not all calls of `z`"):
        Trace("five", MLPERF, "m.jsonl", sessions=("z",)).write(folder, tmp_path)
    for part in parts:
        sessions = read_sessions("--arrival", part.form, folder / part.file_name)
        assert all(session.scaled(parse_scale(part.scale)) for session in sessions)


def pass_of(record: PassRecord, trace: Trace, name: str, rate: float, second: int) -> PassRecord:
    """A pass of a command that began in this second, with 5 more steps of its first request, which
    drafted nothing."""
    record = with_fields(
        record,
        config__workload__arrival=trace.arrival,
        metrics__sessions_per_hour=rate,
        requests__0__output_len=record.requests[0].output_len + 5,
        environment__time_utc=f"2026-11-30T00:00:{second:02}+00:00",
    )
    return replace(record, name=name)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Of two traces of agents, drafts that are 2 and 8 times as fast."""
    found = list[PassRecord]()
    for second, (trace, rate) in enumerate(((TRACES[0], 20.0), (TRACES[4], 80.0))):
        plain = served(PLAIN)
        found += [pass_of(plain, trace, "inflight", 10.0, second)]
        found += [pass_of(served(TURNS, second, plain), trace, "inflight+draft", rate, second)]
    path = tmp_path / "records.jsonl"
    append_together(path, found)
    return path


def test_the_page_has_the_numbers_of_its_records(records: Path, tmp_path: Path) -> None:
    study = Study(cells_of(records))
    drafting = [record for record in load_passes(records) if record.is_drafting]
    (name,) = {arm for _, arm in study.cells}
    assert [cell.ratio for cell in study.cells.values()] == [2.0, 8.0]
    first = [request for request in drafting[1].requests if request.turn == 1]
    emitted = [request.per_step_emitted or [] for request in first]
    later = sum(request.output_len - 1 for request in first)
    alone = later - sum(map(sum, emitted))  # steps without drafts emit a token
    assert alone >= 5
    assert study.by_turn(name, MLPERF)["1"] == pytest.approx(
        later / (alone + sum(map(len, emitted)))
    )
    page = tmp_path / "README.md"
    page.write_text((FOLDER / "README.md").read_text())
    write_page(records, page, tmp_path / "figure.svg")
    text = page.read_text()
    label = next(arm.label for arm in ARMS if arm.name == name)
    assert f"| {label} | 2 | {sqrt(2 * 8):.2f} | 2.00 | 8.00 | - |" in text
    assert page_of(text, study) == text
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_the_committed_page_is_that_of_its_records() -> None:
    text = (FOLDER / "README.md").read_text()
    assert page_of(text, Study(cells_of(FOLDER / "records.jsonl.gz"))) == text
    assert all(re.search(f"<!-- {name}: .*-->\n\n.+", text) for name in PARTS)
