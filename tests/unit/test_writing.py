"""What a run leaves behind reaches the disk, or the user is told: before the run if possible."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from conftest import HANG, ROOT, Command, Launch
from matplotlib.figure import Figure
from test_record import RECORDS

from magicdec.bench.measure import Outcome
from magicdec.cli import report
from magicdec.config.sections import OutputSection
from magicdec.output import gantt
from magicdec.output.gantt import BarStyle, GanttBar, Panel
from magicdec.output.writing import (
    append_line,
    check_record_file,
    check_writable,
    write_text,
)
from magicdec.records.reading import load_passes
from magicdec.setup.prepare import Prepared

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
FEW = ("--prefix_len", 100, "--B", 1, "--gen_len", 4, "--num_batches", 1, "--warmup_batches", 0)


def test_what_cannot_be_written_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "runs.jsonl", "Not a directory"),
        (Path(), "Is a directory"),
        *(((FULL, "No space left on device"),) if FULL.exists() else ()),
    ):
        with pytest.raises(ValueError, match=f"--out .*: {reason}; name a file"):
            check_writable("--out", path)
    check_writable("--out", tmp_path / "new" / "runs.jsonl")
    check_writable("--out", tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("serve",),
        ("inflight",),
        ("latency",),
        ("plan", "--bandwidth", 9, "--flops", 1, "--conditional_acceptance", 0.8),
        ("simulate",),
        ("gate", "--quick"),
        ("sweep", "run", "--gamma", 1, 2),
        ("reproduce", "magicdec_speedups_a100", "--demo"),
    ],
    ids=lambda words: words[0],
)
def test_a_file_of_something_else_is_no_file_for_records(
    words: tuple[object, ...], command: Command, tmp_path: Path
) -> None:
    """Refused before anything runs, and left as it is."""
    path = tmp_path / "books.jsonl"
    path.write_text(content := '{"text": "of a data set"}\n')
    tables = ("--tables", tmp_path / "tables") if words[0] == "reproduce" else ()
    code, out, err = command(*words, *tables, "--out", path)
    assert (code, out) == (2, "")
    assert f"--out {path} exists and has no records, to which these could be appended" in err
    assert path.read_text() == content


def test_records_may_follow_others_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for content in ("", '{"torn"\n{"schema_version": 3}\n', '\n{"schema_version": 2}\ntext\n'):
        path.write_text(content)
        check_record_file("--out", path)
    for content in ("text\n", "\x1f\x8b", "[1]\n2\n", "null"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"--out .*runs.jsonl exists and has no records"):
            check_record_file("--out", path)


def test_a_directory_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(ValueError, match="no file can be made in"):
        check_writable("--out", tmp_path / "runs.jsonl")


def test_a_name_that_is_not_utf8_is_in_a_record_that_can_be_read(tmp_path: Path) -> None:
    record = RECORDS["drafting"]()
    assert record.workload is not None
    workload = dataclasses.replace(record.workload, dataset="caf\udce9 😀 \\ud83d")
    record = dataclasses.replace(record, workload=workload)
    path = tmp_path / "runs.jsonl"
    append_line(path, record.to_json())
    (again,) = load_passes(path)
    assert again.workload is not None
    assert again.workload.dataset == r"caf\udce9 😀 \ud83d"


def test_a_line_that_is_written_in_parts_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:3]))
    append_line(tmp_path / "runs.jsonl", '{"a": 12345}')
    assert (tmp_path / "runs.jsonl").read_text() == '{"a": 12345}\n'


APPENDING = """
import os, sys, time
from pathlib import Path
from magicdec.output.writing import append_line

def write_part(file, data, write=os.write):
    time.sleep(0.002)  # the other program gets in between
    return write(file, data[:10])

os.write = write_part
for number in range(50):
    append_line(Path(sys.argv[1]), f"{sys.argv[2]}{number:02}" * 20)
"""


@pytest.mark.wide
def test_two_programs_append_to_one_file_and_lose_nothing(tmp_path: Path) -> None:
    """Even where the system takes a line in many parts."""
    path = tmp_path / "runs.jsonl"
    programs = [
        subprocess.Popen([sys.executable, "-c", APPENDING, path, name], cwd=ROOT) for name in "ab"
    ]
    assert [program.wait(HANG) for program in programs] == [0, 0]
    lines = path.read_text().splitlines()
    assert sorted(lines) == [f"{name}{number:02}" * 20 for name in "ab" for number in range(50)]


@needs_full
def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        append_line(FULL, "{}")


def test_a_file_that_could_not_be_written_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, text: str, **options: object) -> None:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match=r"--save_tokens .*t.jsonl: No space left"):
        write_text("--save_tokens", tmp_path / "t.jsonl", "{}")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_could_not_be_drawn_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old picture stays. A format that is not known is no reason either."""

    def full(self: Figure, path: Path, **options: object) -> None:
        path.write_bytes(b"half of a picture")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    panel = Panel("ring", ["stage 0"], [GanttBar(0, 0.0, 1.0, BarStyle("#000000"))], 1.0)
    (tmp_path / "old.png").write_text("old")
    for name in ("new.png", "old.png"):
        with pytest.raises(ValueError, match=rf"--gantt .*/{name}: No space left"):
            gantt.draw("--gantt", tmp_path / name, [panel], {})
    assert [path.name for path in tmp_path.iterdir()] == ["old.png"]
    assert (tmp_path / "old.png").read_text() == "old"


@needs_full
@pytest.mark.parametrize("flag", ["--out", "--save_tokens"])
def test_a_run_whose_files_cannot_be_written_does_not_start(flag: str, command: Command) -> None:
    code, out, err = command("baseline", *FEW, flag, FULL)
    assert (code, out) == (2, "")
    expected = f"{flag} /dev/full: No space left on device; name a file to write to\n"
    assert err == f"magicdec baseline: {expected}"


def publish(folder: Path) -> bool:
    """Publish a run that saves its tokens, in this folder."""
    output = OutputSection(save_tokens=str(folder / "t.jsonl"))
    prepared = SimpleNamespace(config=SimpleNamespace(output=output))
    outcome = Outcome([RECORDS["plain"](), RECORDS["drafting"]()])
    return report.publish(cast("Prepared", prepared), outcome, folder / "runs.jsonl")


def test_a_reader_that_ends_early_costs_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `magicdec selfspec | head -1`: the table is not printed, the files are there."""

    def closed(tables: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(report, "print_tables", closed)
    with pytest.raises(BrokenPipeError):
        publish(tmp_path)
    assert len(load_passes(tmp_path / "runs.jsonl")) == 2 and (tmp_path / "t.jsonl").exists()


def test_a_lost_record_costs_no_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: object, records: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "append_together", full)
    assert not publish(tmp_path) and (tmp_path / "t.jsonl").exists()
    out, err = capsys.readouterr()
    assert "decode, tokens/s" in out and err.endswith("the records are lost\n")


def test_a_disk_that_fills_up_during_the_run_loses_no_table(launch: Launch, tmp_path: Path) -> None:
    """The run may write its tokens but not its record."""
    done = launch("unwritable_results.py", *FEW, "--out", tmp_path / "runs.jsonl")
    assert done.returncode == 1 and "decode, tokens/s" in done.stdout
    assert "runs.jsonl: No space left on device; the record is lost" in done.stderr
    assert "Traceback" not in done.stderr and "record appended" not in done.stderr
