"""`magicdec report` over the records of several machines: a row for each with its best run, and
what it does with records that somebody has edited or that are a stranger's."""

import html
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Command
from synthetic_records import parse_record
from test_report import EVIL, RAW, rows, variant
from written_records import Line, run_lines, write

from magicdec.bench.report import page as page_module
from magicdec.bench.report.frame import machine_of, report_row


def on(machine: str, record: Line, *instructions: str, **more: Any) -> Line:
    return record | {
        "environment": record["environment"]
        | {"cpu": machine, "gpu": None, "instructions": list(instructions)}
        | more
    }


def test_each_machine_has_a_row_with_its_best_run(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of a quiet host whose interval begins highest, not the largest of many noisy
    numbers."""
    monkeypatch.setattr(page_module, "contradiction_in", lambda *_: "")
    amx = ("AVX512BF16", "AMX_BF16")
    noisy = variant(net_speedup=9.0, net_speedup_interval=[0.5, 20.0])
    best = variant(B=3, net_speedup=2.0, net_speedup_interval=[1.8, 2.2])
    busy = variant(net_speedup=4.0, net_speedup_interval=[3.9, 4.1], cores_taken=0.5)
    alone = variant(net_speedup=None, net_speedup_interval=None)
    records = [
        *(on("AMD EPYC 9R14 Processor", record, *amx, threads=2) for record in (noisy, best, busy)),
        on("Intel(R) Xeon(R) CPU", alone, "AVX512BF16", threads=2),
        on("none", busy, gpu="NVIDIA H100", threads=2),
    ]
    out = tmp_path / "out"
    code, _, _ = command("report", write(tmp_path / "a.jsonl", records), "--out", out)
    assert code == 0
    found = [
        tuple(row[key] for key in ("machine", "ranks x threads", "passes", "B", "run"))
        for row in rows(out / "machines.csv")
    ]
    assert found == [
        ("AMD EPYC 9R14, AMX_BF16", "1 x 2", "3", "3", "2"),
        ("Intel Xeon, AVX512BF16", "1 x 2", "1", "", ""),
        ("NVIDIA H100", "1 x 2", "1", str(busy["config"]["workload"]["batch_size"]), "5"),
    ]
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count('<section id="machines">') == 1 and "2.00x [1.80, 2.20]" in page
    code, _, _ = command("report", write(tmp_path / "b.jsonl", records[:3]), "--out", out)
    assert '<section id="machines">' not in (out / "index.html").read_text(encoding="utf-8")


def changed(record: Line, *path: str, value: Any) -> Line:
    copy: Line = json.loads(json.dumps(record))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copy


NO_RECORD = "its config or its requests are not those of a record ("
PLAIN, DRAFTING = run_lines()
LEFT_OUT = {
    "its decode_tokens_per_s does not follow from its requests": changed(
        variant(), "metrics", "decode_tokens_per_s", value=9.0
    ),
    "its roofline_fraction does not follow from its requests": changed(
        variant(), "metrics", "roofline_fraction", value=0.99
    ),
    f"{NO_RECORD}AttributeError": changed(variant(), "config", "decoding", "drafter", value=7),
    f"{NO_RECORD}ValueError: invalid": changed(variant(), "config", "kv", "budget", value="<i>"),
    f"{NO_RECORD}ValueError: it has metrics without the requests": variant()
    | {"requests": [], "groups": []},
}


@pytest.mark.narrow(2)
@pytest.mark.parametrize("reason", LEFT_OUT)
def test_a_record_that_contradicts_itself_is_left_out_by_name(
    reason: str, tmp_path: Path, command: Command
) -> None:
    """Alone it is refused in one line."""
    evil = changed(LEFT_OUT[reason], "environment", "time_utc", value=EVIL[-1])
    path = write(tmp_path / "a.jsonl", [variant(), evil, *RAW[:2]])
    code, out, err = command("report", path, "--out", tmp_path / "out", "--no_figure_files")
    assert code == 0 and "figures of 3 runs" in out
    assert f"left out: {path}, the pass static+draft of {EVIL[-1]}: {reason}" in err
    assert len(rows(tmp_path / "out" / "passes.csv")) == 3
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert html.escape(reason, quote=False) in page.replace("&#39;", "'").replace("&#34;", '"')
    assert "<script>alert" not in page and "<i>" not in page
    alone = write(tmp_path / "b.jsonl", [evil])
    code, _, err = command("report", alone, "--out", tmp_path / "none")
    assert code == 2 and err.count("\n") == 1 and reason in err
    assert not (tmp_path / "none").exists()


def test_a_pass_is_left_out_with_its_reference(tmp_path: Path, command: Command) -> None:
    """A speedup says nothing beside a baseline that somebody has edited, and an edited speedup is
    found beside its baseline."""
    edited = changed(PLAIN, "metrics", "mean_step_ms", value=9.0)
    path = write(tmp_path / "a.jsonl", [edited, DRAFTING, *RAW[:1]])
    code, out, err = command("report", path, "--out", tmp_path / "out", "--no_figure_files")
    assert code == 0 and "figures of 1 runs" in out
    start = DRAFTING["environment"]["time_utc"]
    first, second = [line for line in err.splitlines() if line.startswith(f"left out: {path}")]
    assert first.endswith("its mean_step_ms does not follow from its requests")
    assert second.endswith(f"{start}: it was compared with static, which is left out")
    faster = changed(DRAFTING, "metrics", "speedup", value=9.0)
    path = write(tmp_path / "b.jsonl", [PLAIN, faster])
    code, out, err = command("report", path, "--out", tmp_path / "out", "--no_figure_files")
    assert code == 0 and "its speedup does not follow from its requests" in err
    assert [row["pass"] for row in rows(tmp_path / "out" / "passes.csv")] == ["static"]
    path = write(tmp_path / "c.jsonl", [PLAIN, DRAFTING])
    code, out, err = command("report", path, "--out", tmp_path / "out", "--no_figure_files")
    assert code == 0 and f"left out: {path}" not in err
    assert {row["run"] for row in rows(tmp_path / "out" / "passes.csv")} == {"1"}


def test_a_machine_is_named_by_what_decides_its_speed() -> None:
    for environment, name in (
        ({"cpu": "Intel(R) Xeon(R) Gold CPU", "cpu_capability": "AVX2"}, "Intel Xeon Gold, AVX2"),
        ({"cpu": "", "instructions": ["AVX512BF16"]}, "unknown CPU, AVX512BF16"),
        ({"gpu": "NVIDIA H200", "instructions": ["AMX_BF16"]}, "NVIDIA H200"),
    ):
        raw = on("AMD EPYC", variant(), **{"cpu_capability": "AVX512"} | environment)
        record = parse_record(raw)
        assert machine_of(record.environment) == name
        assert report_row(1, "a", record, None)["machine"] == name
