"""`scripts/gpu_suite.sh` with tiny shapes on a CPU: every stage writes its file, stages resume, a
failed cell does not affect others, wrong flags are refused. Also the arithmetic of its stages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_results
import gpu_suite
import pytest
import torch
from conftest import DEV, ROOT
from gpu import (
    attention,
    broken,
    checks,
    latency,
    peers,
    predict,
    quick,
    summary,
    whole_runs,
)
from gpu.plain_loop import PlainLoop
from gpu.results import Results, load_cells
from gpu.scale import FULL, TINY

from magicdec.model.presets.presets import PRESETS
from magicdec.runner.sampling.verification import Judgement

pytestmark = pytest.mark.wide

MADE = {"device": "cpu", "gpu": None, "torch": "2", "triton": "3", "tiny": True}


def suite(out: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment |= variables
    call = [str(ROOT / "scripts" / "gpu_suite.sh"), *arguments]
    return subprocess.run(call, env=environment, capture_output=True, text=True)


def run_stage(out: Path, stage: str) -> int:
    """The exit code of a stage, which runs in this process."""
    arguments = ["gpu_suite.py", stage, "--device", "cpu", "--tiny", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", arguments)
        gpu_suite.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of all stages. The script starts the last one, into an empty folder, with the files
    of the others, which run in this process, because each process takes seconds to import torch."""
    earlier = tmp_path_factory.mktemp("earlier")
    out = tmp_path_factory.mktemp("gpu")
    for stage in gpu_suite.STAGES:
        if stage not in ("tests", "summary"):
            assert run_stage(earlier, stage) == 0, stage
    done = suite(out, "tests", "--device", "cpu", "--tiny", FROM=str(earlier))
    assert done.returncode == 0, done.stderr
    assert "torch" in done.stderr, "the versions are said"
    assert "| goal | wanted | measured | where |" in done.stdout, "the summary is printed"
    return out


@pytest.mark.wide
def test_every_stage_leaves_its_file(tiny: Path) -> None:
    files = {path.name for path in tiny.iterdir()}
    measured = set(gpu_suite.STAGES) - {"summary"}
    assert files == {f"{stage}.json" for stage in measured} | {"summary.md"}
    quick_stages = {part.stage for part in quick.PARTS}
    in_one = measured - quick_stages - set(gpu_suite.BY_NAME) | {"summary"}
    assert len(in_one) + 2 <= 8 and len(quick_stages | {"summary"}) <= 8
    for stage in measured:
        found = json.loads((tiny / f"{stage}.json").read_text())
        assert found["cells"] and not found["failed"] and not found["left"], stage
        assert found["made_with"]["tiny"] and found["made_with"]["device"] == "cpu"


@pytest.mark.wide
def test_what_the_stages_hold(tiny: Path) -> None:
    attention = load_cells(tiny / "attention.json")
    copied = attention.pop("copy_bandwidth")["bytes_per_s"]
    for cell in attention.values():
        for found in cell.values():
            assert found["of_copy"] == pytest.approx(found["bytes_per_s"] / copied)
            num_bytes = found["bytes_per_s"] * found["ms"] / 1e3
            assert num_bytes == pytest.approx(2 * 2 * (128 + 2) * 2 * 64 * 2, rel=0.02)
    (cell,) = load_cells(tiny / "llama31.json").values()
    rows = {(row["phase"], row["T"], row["budget"], row["context"]) for row in cell["rows"]}
    assert ("decode", 1, None, 128) in rows and ("verify", 3, None, 64) in rows
    assert {("draft", 1, budget, 64) for budget in TINY.budgets} <= rows
    (cell,) = load_cells(tiny / "hybrid.json").values()
    assert {row["phase"] for row in cell["rows"]} == {"decode", "verify", "draft"}
    (tests,) = load_cells(tiny / "tests.json").values()
    assert tests["passed"] > 1 and set(tests) == {"passed"}
    first, second = load_cells(tiny / "peers.json").values()
    assert first["tokens"] == second["tokens"], "float32: both decode the same model"
    for record in load_cells(tiny / "demo.json").values():
        assert record["correctness"]["reference"] and record["metrics"]
    page = (tiny / "summary.md").read_text()
    assert "not measured" in page and "predicted, not measured" in page and "transformers" in page
    assert "| attention | 3 | none | 0 |" in page


@pytest.mark.wide
def test_a_stage_called_again_measures_what_is_missing(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny / "peers.json"
    before = path.read_text()
    assert run_stage(tiny, "peers") == 0
    assert path.read_text() == before, "kept, not measured again"
    other = json.loads(before)
    other["made_with"]["torch"] = "another"
    path.write_text(json.dumps(other))
    returncode = run_stage(tiny, "peers")
    path.write_text(before)
    assert returncode == 2 and "choose another directory" in capsys.readouterr().err


def test_a_failed_cell_costs_no_other(tmp_path: Path) -> None:
    def fail() -> Any:
        raise RuntimeError("out of memory\nmore")

    results = Results(tmp_path / "a.json", MADE, 60)
    results.cell("bad", fail)
    results.cell("good", lambda: 1)
    assert not results.is_complete
    again = Results(tmp_path / "a.json", MADE, 60)
    assert again.cells == {"good": 1}
    again.cell("good", fail)
    again.cell("bad", lambda: 2)
    assert again.is_complete and load_cells(tmp_path / "a.json") == {"good": 1, "bad": 2}
    late = Results(tmp_path / "b.json", MADE, 0)
    late.cell("good", lambda: 1)
    assert late.left == ["good"] and not late.is_complete


@pytest.mark.parametrize(
    ("seconds", "problem"), [(60, "pytest ended with 1"), (9, "stopped at the stage's time limit")]
)
def test_what_tests_found_before_they_failed_is_kept(
    seconds: int, problem: str, tmp_path: Path
) -> None:
    file = tmp_path / "test_some.py"
    sleep = 60 if seconds < 60 else 0
    file.write_text(
        "import pytest, time\n"
        "def test_good(): pass\n"
        "@pytest.mark.parametrize('x', ['a b'])\ndef test_bad(x): assert not x\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        f"def test_late(): time.sleep({sleep})\n"
    )
    results = Results(tmp_path / "tests.json", MADE, seconds)
    stage = gpu_suite.Suite(torch.device("cpu"), True, tmp_path, results)
    results.cell("some", lambda: checks.run_pytest(stage, str(file)))
    partial = json.loads((tmp_path / "tests.json").read_text())["partial"]["some"]
    (failure,) = partial.pop("failures")
    assert failure.endswith("test_some.py::test_bad[a b]")
    assert partial == {"passed": 1 if sleep else 2, "failed": 1, "skipped": 1}
    assert results.failed == {"some": f"Incomplete: {problem}: {failure}"}
    file.write_text("def test_good(): pass\n")
    again = Results(tmp_path / "tests.json", MADE, 60)
    stage = gpu_suite.Suite(torch.device("cpu"), True, tmp_path, again)
    again.cell("some", lambda: checks.run_pytest(stage, str(file)))
    assert again.cells == {"some": {"passed": 1}} and not again.partial


def test_an_unknown_folder_of_earlier_files_is_refused(tmp_path: Path) -> None:
    done = suite(tmp_path, "summary", FROM=str(tmp_path / "nothing"))
    assert done.returncode == 2 and "is no folder; give the one with the files" in done.stderr


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    done = suite(tmp_path, "nothing")
    assert done.returncode == 2
    assert "STAGE nothing is not known; choose from attention llama31" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny", "--seconds", "0"], "--seconds 0 is too small; it must be at least 1"),
        ([], "--device cpu is for --tiny shapes"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpu_suite.read_options(["tests", "--device", "cpu", *arguments])


def test_what_cannot_be_recorded_is_measured_without_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[Any]] = []

    def run(command: str, flags: list[Any], seconds: float) -> None:
        calls.append(flags)
        if "off" not in flags:
            raise RuntimeError(failure)

    monkeypatch.setattr(latency, "run_magicdec", run)
    suite = SimpleNamespace(results=SimpleNamespace(seconds_left=9.0), is_quick=False)
    failure = "magicdec latency ended with 1: --cuda_graphs on: not permitted; choose off"
    found = latency.run_recorded("latency", ["--B", 1], suite)  # type: ignore[arg-type]
    assert found == {"without_graphs": failure}
    assert calls == [["--B", 1], ["--B", 1, "--cuda_graphs", "off"]]
    failure = "magicdec latency ended with 1: out of memory"
    with pytest.raises(RuntimeError, match="out of memory"):
        latency.run_recorded("latency", ["--B", 1], suite)  # type: ignore[arg-type]
    assert len(calls) == 3


def test_a_layer_is_read_again_only_after_twice_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    # B=1, S=4096.
    cuda = torch.device("cuda", 0)
    small = 2 * 4101 * 8 * 128 * 2
    layers = attention.num_layers(small, cuda)
    assert (layers - 1) * small <= 120 << 20 < layers * small
    assert attention.num_layers(2 << 30, cuda) == attention.num_layers(1, torch.device("cpu")) == 1


def test_batches_fit_beside_the_weights() -> None:
    """Llama-3.1-8B needs 131072 bytes per token: 32 rows of 32768 do not fit on an H200."""
    config = PRESETS["llama-3.1-8b"].config
    sizes = FULL.batch_sizes
    gib = 1 << 30
    assert latency.fitting_places((2,), [64], config, None) == {2: [64]}
    places = latency.fitting_places(sizes, [4096, 16384, 32768, 65536], config, 139 * gib)
    assert places[1] == [4096, 16384, 32768, 65536] and places[8] == places[1]
    assert 32768 not in places[32] and places[28] == [32768]
    small = latency.fitting_places(sizes, [32768], config, 79 * gib)
    assert small == {1: [32768], 8: [32768], 12: [32768]}
    assert latency.fitting_places(sizes, [4096], config, 10 * gib) == {}


def test_predictions_are_drafts_and_verification_against_decoding() -> None:
    def row(phase: str, T: int, ms: float, budget: int | None = None) -> dict[str, Any]:
        return {"phase": phase, "T": T, "ms_median": ms, "budget": budget, "B": 1, "context": 9}

    rows = [
        row("decode", 1, 10.0),
        row("verify", 2, 11.0),
        row("verify", 3, 20.0),
        row("draft", 1, 2.0, 513),
        row("draft", 1, 1.0, 257),
    ]
    found = predict.predict(rows, 513, 0.8)
    assert found["gamma"] == 1 and found["predicted_speedup"] == pytest.approx(1.8 * 10 / 13)
    by_gamma = found["predicted_speedup_by_gamma"]
    assert by_gamma["2"] == pytest.approx((1 + 0.8 + 0.64) * 10 / 24)


def test_published_rates_have_a_source_and_count_only_nearby() -> None:
    rates = predict.read_table("acceptance_rates.csv")
    assert all(row["source"] and 0 < float(row["acceptance_rate"]) < 1 for row in rates)
    assert all(row["source"] for row in predict.read_table("speedups.csv"))
    assert predict.near(rates, 16384) == next(r for r in rates if r["prefix_len"] == "16000")
    assert predict.near(rates, 12000) is None


def test_goals_are_read_off_or_left_open(tmp_path: Path) -> None:
    made = gpu_suite.made_with("cpu", True)
    stage = gpu_suite.Suite(torch.device("cpu"), True, tmp_path, Results(tmp_path / "s", made, 1))
    assert all(goal["measured"] is None for goal in summary.goals(stage.directory))
    cells = {
        "copy_bandwidth": {"bytes_per_s": 1e9},
        "llama-3.1-8b/B32/S16384/triton": {"1": {"of_copy": 0.8}},
        "llama-3.1-8b/B32/S16384/flash_attn": {"1": {"of_copy": 0.7}},
    }
    (tmp_path / "attention.json").write_text(json.dumps({"made_with": made, "cells": cells}))
    place = {"B": 28, "context": 32768, "budget": None}
    rows = [
        {**place, "phase": "decode", "T": 1, "bytes": 8_000_000, "ms_median": 10.0},
        {**place, "B": 8, "phase": "decode", "T": 1, "bytes": 1, "ms_median": 1.0},
        {**place, "phase": "verify", "T": 5, "bytes": 8_000_000, "ms_median": 11.0},
    ]
    content = {"made_with": made, "cells": {"B28": {"rows": rows}}}
    (tmp_path / "llama31.json").write_text(json.dumps(content))
    runs = {
        f"B{B}/S32768/gamma3": {"emulated_acceptance": {"published": {"speedup": B / 4}}}
        for B in (1, 12)
    }
    (tmp_path / "whole_runs.json").write_text(json.dumps({"made_with": made, "cells": runs}))
    drafted: dict[str, Any] = {"copy_bandwidth": {}, "product/qkv/fp8": {}}
    drafted["step/B28"] = {
        "rows": [
            {"draft_weights": weights, "ms_median": ms}
            for weights, ms in ((None, 1.0), ("fp8", 3.0), ("int4_g128", 2.5))
        ]
    }
    for name, speedup in (("fp8/B24", 2.0), ("int4_g128/B24", 2.5), ("fp8/B8", 9.0)):
        drafted[f"run/{name}/S32768/gamma4"] = {
            "emulated_acceptance": {"published": {"speedup": speedup}}
        }
    (tmp_path / "drafts.json").write_text(json.dumps({"made_with": made, "cells": drafted}))
    attention, _, decode, _, verify, speculation, *drafts = summary.goals(stage.directory)
    assert [(goal["measured"], goal["by"]) for goal in drafts] == [
        (None, None),
        (2.5, "int4_g128"),
        (None, None),
        (2.5, "run/int4_g128/B24/S32768/gamma4"),
        (None, None),
    ]
    assert (speculation["measured"], speculation["by"]) == (3.0, "B12/S32768/gamma3")
    assert (attention["measured"], attention["by"]) == (0.8, "triton")
    assert decode["measured"] == pytest.approx(0.8) and decode["by"] == "B=28, S=32768"
    assert verify["measured"] == pytest.approx(1.1)


def test_the_plain_loop_is_the_model() -> None:
    """Token for token, a chunk first; weights so large that what is attended to, and from where,
    decides."""
    model = peers.make_model(peers.TINY_MODEL, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            p.normal_(std=1.0 if "embed" in name else 2.0 * p.shape[1] ** -0.5, generator=generator)
    ids = torch.randint(97, (3, 30), generator=generator)
    loop = PlainLoop(model, 3, 32)
    with torch.no_grad():
        expected = model(ids).logits.argmax(-1)
        emitted = [loop.forward(ids[:, :11], torch.arange(11))]
        for t in range(11, 30):
            emitted.append(loop.forward(ids[:, t : t + 1], torch.tensor([t])))
    assert torch.equal(torch.cat(emitted, dim=1), expected[:, 10:])


class GpuMachine:
    """Stands in for the processes of parts: each takes as many seconds as `takes` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: dict[str, float]) -> None:
        self.now = 0.0
        self.takes = takes
        self.limits: dict[str, float] = {}
        monkeypatch.setattr(quick, "run_part", self.run_part)
        monkeypatch.setattr(quick.time, "monotonic", lambda: self.now)

    def run_part(self, stage: str, out: Path, options: list[str], seconds: float) -> bool:
        self.limits[stage] = seconds
        self.now += min(seconds, self.takes.get(stage, 0))
        return stage not in self.takes


def test_parts_have_what_those_before_them_did_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails or hangs stops no other, and all of them end in time."""
    machine = GpuMachine(monkeypatch, {"broken": 30, "demo_tokens": 1000, "llama31": 1000})
    names = [part.stage for part in quick.PARTS]
    assert not quick.run_parts(names, tmp_path, [], quick.QUICK_SECONDS)
    assert list(machine.limits) == names
    assert machine.limits == {
        "broken": 70,
        "demo_tokens": 110,
        "drafts": 150,
        "hybrid": 210,
        "llama31": 260,
        "whole_runs": 40,
        "peers": 80,
    }
    assert "| llama31 | 260 | 0 | 0 | 0 |" in (tmp_path / "summary.md").read_text()
    machine = GpuMachine(monkeypatch, {})
    assert quick.run_parts(["peers", "broken"], tmp_path, [], quick.AGAIN_SECONDS)
    assert machine.limits == {"broken": pytest.approx(114.55, abs=0.01), "peers": 180}
    assert sum(part.seconds for part in quick.PARTS) == quick.QUICK_SECONDS


def test_a_part_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "gpu_suite.py"
    script.write_text(
        "import os, sys, time\n"
        "child = os.fork()\n"
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(quick, "__file__", str(tmp_path / "gpu" / "quick.py"))
    monkeypatch.setattr(quick, "GRACE", 1)
    assert not quick.run_part("broken", tmp_path, [], 4)
    started = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    assert len(started) == 2
    wait_until_ended(started)


# Stands in for `gpu_suite.py`: cells whose names say what happens in them.
STUB = """
import os, sys, time
sys.path[:0] = SCRIPTS
from gpu.results import Results
from magicdec.distributed.ranks import end_with_parent
import argparse, pathlib, signal
parser = argparse.ArgumentParser()
parser.add_argument("stage")
for flag in ("--quick", "--keep_failed"):
    parser.add_argument(flag, action="store_true")
parser.add_argument("--out", type=pathlib.Path)
for flag in ("--seconds", "--cell_seconds"):
    parser.add_argument(flag, type=float)
options = parser.parse_args()
end_with_parent(int(os.environ["GPU_SUITE_PARENT"]), signal.SIGKILL)
open(options.out / f"pid {os.getpid()}", "w").close()

class OutOfMemoryError(RuntimeError):
    "As torch's, which takes seconds to import."

def happen(name):
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hang":
        time.sleep(600)
    if name == "no memory":
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if name == "broken device":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return name

results = Results(
    options.out / f"{options.stage}.json", MADE, options.seconds, CELL_SECONDS,
    options.keep_failed,
)
for name in NAMES:
    results.cell(name, lambda: happen(name))
sys.exit(0 if results.is_complete else 1)
"""


def stub(folder: Path, names: list[str], cell_seconds: float | None = None) -> Path:
    """A folder of scripts in which every part has these cells."""
    scripts = folder / "scripts"
    scripts.mkdir(exist_ok=True)
    values = {
        "SCRIPTS": [str(DEV), str(ROOT)],
        "MADE": MADE,
        "NAMES": names,
        "CELL_SECONDS": cell_seconds,
    }
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    (scripts / "gpu_suite.py").write_text("\n".join([*lines, STUB]))
    return scripts / "gpu" / "quick.py"


def pids(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("pid ")) for path in folder.glob("pid *")]


def wait_until_ended(numbers: list[int]) -> None:
    """The signal has been sent; the kernel may take a moment."""
    while any(map(is_running, numbers)):
        time.sleep(0.01)


def test_what_ends_a_process_costs_only_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may hang, crash, or leave a device on which nothing works any more. A cell without
    memory, as other errors, needs no other process."""
    names = ["a", "crash", "b", "no memory", "broken device", "c", "hang", "d"]
    monkeypatch.setattr(quick, "__file__", str(stub(tmp_path, names, 2.0)))
    assert not quick.run_part("broken", tmp_path, [], 100)
    found = json.loads((tmp_path / "broken.json").read_text())
    assert list(found["cells"]) == ["a", "b", "c", "d"] and found["running"] is None
    assert found["failed"] == {
        "crash": "the process ended while it ran",
        "no memory": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "broken device": "RuntimeError: CUDA error: an illegal memory access was encountered",
        "hang": "it was not done after 2 s",
    }
    assert any("time.sleep(600)" in line for line in found["tracebacks"]["hang"])
    assert len(pids(tmp_path)) == 4, "one more for each cell that ended one"
    page = "\n".join(quick.summary_lines(tmp_path, {}, 1.0))
    assert "- broken: hang: it was not done after 2 s" in page
    again = stub(tmp_path, [name.replace("crash", "e") for name in names if name != "hang"])
    monkeypatch.setattr(quick, "__file__", str(again))
    assert not quick.run_part("broken", tmp_path, [], 100)
    found = json.loads((tmp_path / "broken.json").read_text())
    assert set(found["cells"]) == set("abcde") and set(found["failed"]) == set(names[3:5])


COORDINATE = """
import sys
sys.path[:0] = SCRIPTS
from gpu import quick
from pathlib import Path
quick.__file__ = FILE
quick.run_parts(["broken", "peers"], Path(OUT), [], 200)
"""


def test_a_killed_command_keeps_its_cells_and_leaves_no_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL, which nothing can answer, while a cell runs. The next call goes on behind it."""
    file = stub(tmp_path, ["a", "hang", "b"])
    values = {
        "SCRIPTS": [str(DEV), str(ROOT)],
        "FILE": str(file),
        "OUT": str(tmp_path),
    }
    code = "\n".join([*(f"{name} = {value!r}" for name, value in values.items()), COORDINATE])
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    path = tmp_path / "broken.json"
    while not (path.exists() and json.loads(path.read_text())["running"] == "hang"):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_ended(pids(tmp_path))
    page = "\n".join(quick.summary_lines(tmp_path, {}, 1.0))
    assert "- broken: hang: it ran when the part was ended" in page
    stub(tmp_path, ["a", "b"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "__file__", str(file))
        assert quick.run_parts(["broken"], tmp_path, [], 100)
    found = json.loads(path.read_text())
    assert list(found["cells"]) == ["a", "b"] and not found["failed"]
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err and printed.err.count("broken: a") == 1, "it was kept"
    assert "| broken | " in printed.out


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_files_of_another_gpu_stay_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = MADE | {"gpu": "NVIDIA H200"}
    text = json.dumps({"made_with": before, "cells": {"a": 1}})
    (tmp_path / "broken.json").write_text(text)
    assert quick.folder_for(tmp_path, before) == tmp_path
    made = MADE | {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130", "triton": "3.6"}
    folder = quick.folder_for(tmp_path, made)
    name = "NVIDIA-H100-80GB-HBM3-torch-2-11-0-cu130-triton-3-6"
    assert folder == tmp_path / name and folder.is_dir()
    assert quick.folder_for(tmp_path, before | {"driver": "another"}) == tmp_path
    assert (tmp_path / "broken.json").read_text() == text
    assert "holds {'device': 'cpu', 'gpu': 'NVIDIA H200'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["again"], "again needs a PART; choose from broken, demo_tokens"),
        (["quick", "broken"], "PART broken goes with again, not with quick"),
    ],
)
def test_parts_go_with_again(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpu_suite.read_options([*arguments, "--device", "cpu", "--tiny"])
    with pytest.raises(ValueError, match="PART all is not known; choose from broken"):
        quick.run_parts(["all"], Path(), [], 1)


def test_attention_that_is_wrong_fails_its_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that says what is broken must see it."""
    results = Results(tmp_path / "broken.json", MADE, 60)
    stage = gpu_suite.Suite(torch.device("cpu"), True, tmp_path, results)
    heads = TINY.heads["tiny"]
    found = broken.check_attention(stage, "grouped", heads, torch.float32)
    assert 0 < found["difference"] < 1e-5
    right = broken.exact
    monkeypatch.setattr(broken, "exact", lambda cache, q: right(cache, q) + 1e-3)
    with pytest.raises(RuntimeError, match="differs from float64 by 0"):
        broken.check_attention(stage, "grouped", heads, torch.float32)


def test_acceptance_is_drawn_at_its_rate() -> None:
    """The number of accepted drafts is that of drafts of which each is accepted with the rate if
    those before it were."""
    B = 4
    gamma = 3
    rate = 0.8
    ids = torch.zeros(B, gamma + 1, dtype=torch.int64)
    before = whole_runs.steps.judge
    total = 0.0
    with pytest.MonkeyPatch.context() as patch:
        judged = Judgement(torch.full((B,), -1), ids)
        patch.setattr(whole_runs.steps, "judge", lambda *arguments: judged)
        with whole_runs.emulated(rate, gamma, B, torch.device("cpu")):
            for _ in range(2000):
                accepted = whole_runs.steps.judge().accepted
                assert accepted.shape == (B,)
                total += accepted.float().mean().item()
    assert whole_runs.steps.judge is before
    assert total / 2000 == pytest.approx(sum(rate**k for k in range(1, gamma + 1)), abs=0.05)


def test_numbers_of_a_gpu_are_read_off_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README's section has the break-even of each place, and where and when it was
    measured."""
    made = {"device": "cuda", "gpu": "H100", "driver": "580.1", "torch": "2.11", "tiny": False}
    rows = [
        {"phase": "decode", "B": 8, "context": 4096, "T": 1, "bytes": 16e9, "ms_median": 10.0},
        {"phase": "verify", "B": 8, "context": 4096, "T": 5, "bytes": 16e9, "ms_median": 11.0},
        {"phase": "draft", "B": 8, "context": 4096, "T": 1, "budget": 65, "ms_median": 4.0},
        {"phase": "decode", "B": 2, "context": 8192, "T": 1, "bytes": 16e9, "ms_median": 5.0},
        {"phase": "verify", "B": 2, "context": 8192, "T": 5, "bytes": 16e9, "ms_median": 6.0},
        {"phase": "draft", "B": 2, "context": 8192, "T": 1, "budget": 65, "ms_median": 1.0},
        {"phase": "decode", "B": 8, "context": 8192, "T": 1, "bytes": 16e9, "ms_median": 5.0},
    ]
    broken = {"copy_bandwidth": {"bytes_per_s": 3.2e12}}
    dates = {"copy_bandwidth": "2026-12-01"}
    failed = {"imports": "ImportError: x"}
    files = {
        "broken": {"cells": broken, "dates": dates, "failed": failed},
        "llama31": {"cells": {"B8": {"rows": rows}}, "failed": {}},
    }
    for stage, content in files.items():
        (tmp_path / f"{stage}.json").write_text(json.dumps(content | {"made_with": made}))
    readme = tmp_path / "README.md"
    readme.write_text("# a\n\n## GPU\n\nold\n\n## Next\n")
    monkeypatch.setattr(gpu_results, "README", readme)
    monkeypatch.setattr(gpu_results, "RESULTS", tmp_path / "gpu")
    assert gpu_results.main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert "Measured on H100 (driver 580.1, torch 2.11) on 2026-12-01" in words
    assert "2 cells, of which 1 failed" in words
    # (4 x 4 + 11) / 10 and (4 x 1 + 6) / 5; no draft was measured of 8 rows at 8192.
    assert "| requests | 4096 tokens | 8192 tokens |" in text
    assert "| 8 | 2.70 | 2.00 (2) |" in text
    assert "old" in readme.read_text() and not (tmp_path / "gpu").exists()
    assert gpu_results.main([str(tmp_path), "--write"]) == 0
    capsys.readouterr()
    assert readme.read_text() == f"# a\n\n{text.strip()}\n\n## Next\n"
    names = {path.name for path in (tmp_path / "gpu").iterdir()}
    assert names == {"broken.json", "llama31.json", "README.md"}
    page = (tmp_path / "gpu" / "README.md").read_text()
    assert "| 8 x 4096 | 10.00 | 50 % | 11.00 | 4.00 | 2.70 |" in page
    assert "| 8 x 8192 | 5.00 | 100 % |  |  |  |" in page
    other = {"cells": {}, "failed": {}, "made_with": made | {"gpu": "H200"}}
    (tmp_path / "peers.json").write_text(json.dumps(other))
    assert gpu_results.main([str(tmp_path)]) == 2
    assert "holds files of several machines" in capsys.readouterr().err


def test_numbers_of_a_rehearsal_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_results.main([str(tmp_path)]) == 2
    content = {"cells": {}, "failed": {}, "made_with": gpu_suite.made_with("cpu", True)}
    (tmp_path / "broken.json").write_text(json.dumps(content))
    assert gpu_results.main([str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "has no file of scripts/gpu_suite.sh quick" in first
    assert "was not measured on a GPU" in second


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"made_with": 3}'])
def test_what_is_no_file_of_a_stage_is_left_out_and_said(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that was cut off, say. The rest is measured and summed up."""
    (tmp_path / "broken.json").write_text(text)
    assert quick.folder_for(tmp_path, MADE) == tmp_path
    results = Results(tmp_path / "broken.json", MADE, 60)
    assert not results.cells
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path / 'broken.json'} is left out: ")
    results.cell("good", lambda: 1)
    assert load_cells(tmp_path / "broken.json") == {"good": 1}
    (tmp_path / "peers.json").write_text(text)
    assert "| peers |  | 0 | 0 | 0 |" in quick.summary_lines(tmp_path, {}, 1.0)


def test_every_module_is_imported() -> None:
    """The package's folders have no `__init__.py`, without which `pkgutil` does not see them."""
    files = [*(ROOT / "magicdec").rglob("*.py")]
    assert broken.import_all() == {"modules": len(files) - len(broken.ENTRIES)}


def test_an_output_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = suite(tmp_path / "file" / "out", "quick", "--device", "cpu", "--tiny")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "Not a directory" in done.stderr.splitlines()[-1]


def test_backends_that_are_not_there_are_no_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(tmp_path / "broken.json", MADE, 60)
    stage = gpu_suite.Suite(torch.device("cpu"), True, tmp_path, results)
    for name in (
        "check_attention",
        "check_forward",
        "import_all",
        "copy_bandwidth",
        "time_backend",
    ):
        monkeypatch.setattr(broken, name, lambda *arguments: {})
    monkeypatch.setattr(broken, "obstacle_of", lambda name, *others: {"native": "no"}.get(name))
    broken.run(stage)
    assert results.is_complete
    left_out = results.cells["left out"]
    assert left_out["forward/native"] == "no" and len(left_out) == 3
    assert not any("native" in name for name in results.cells)


def test_tokens_of_peers_are_compared_where_both_are_there() -> None:
    cells = {
        "8b/B1/S4/a": {"ms_median": 1.0, "tokens": [[1, 2], [3, 4]]},
        "8b/B1/S4/b": {"ms_median": 2.0, "tokens": [[1, 2], [3, 5]]},
        "8b/B8/S4/b": {"ms_median": 3.0, "tokens": [[1]]},
    }
    assert summary.peer_lines(cells)[3:] == [
        "| 8b/B1/S4 | a | 1.000 | 100 % |",
        "| 8b/B1/S4 | b | 2.000 | 75 % |",
        "| 8b/B8/S4 | b | 3.000 | 100 % |",
    ]


def test_the_driver_is_read_where_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(gpu_suite, "DRIVER", file)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_suite.driver_version() is None
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release\n"
    )
    assert gpu_suite.driver_version() == "580.159.04"
    file.unlink()
    nvml = SimpleNamespace(nvmlInit=lambda: 0, nvmlSystemGetDriverVersion=lambda: "580.159.03")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert gpu_suite.driver_version() == "580.159.03"


def test_whole_runs_have_as_many_rows_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """28 rows of 32768 tokens fit on an H200, 12 on an H100."""
    results = Results(tmp_path / "whole_runs.json", MADE, 60)
    stage = gpu_suite.Suite(torch.device("cuda"), False, tmp_path, results, True)
    for gib, rows in ((139, 28), (79, 12)):
        monkeypatch.setattr(whole_runs, "free_bytes", lambda device, gib=gib: gib << 30)
        assert whole_runs.fitting_rows(stage, 28, 32768) == rows
        assert whole_runs.fitting_rows(stage, 1, 32768) == 1


def test_the_suite_ends_with_its_shell(tmp_path: Path) -> None:
    """Whoever kills the command kills the shell, and perhaps its process group."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        "case $1 in -c) echo magicdec 1; exit;; esac\n"
        f"exec {sys.executable} - <<EOF\n"
        "import os, signal, sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from magicdec.distributed.ranks import end_with_parent\n"
        'end_with_parent(int(os.environ["GPU_SUITE_PARENT"]), signal.SIGKILL)\n'
        f"open({str(tmp_path)!r} + f'/pid {{os.getpid()}}', 'w').close()\n"
        "time.sleep(600)\n"
        "EOF\n"
    )
    python.chmod(0o755)
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": str(python)}
    call = [str(ROOT / "scripts" / "gpu_suite.sh"), "quick"]
    with subprocess.Popen(call, env=environment) as shell:
        while not pids(tmp_path):
            assert shell.poll() is None
            time.sleep(0.01)
        shell.kill()
    wait_until_ended(pids(tmp_path))
