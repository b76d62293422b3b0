"""Parts of `scripts/gpu_suite.sh quick` on a GPU that is not there (`pretend_cuda.py`), with steps
replayed by `recorder.py`. So the code that only a GPU takes is run: what it chooses, records,
measures and writes. Times mean nothing. Triton's kernels are interpreted where the part looks at
what they compute, and elsewhere not run at all: what they would write is 0."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_suite
import launches
import pytest
import torch
from gpu import attention, broken, drafts, latency, scale, whole_runs
from gpu.results import Results
from gpu.scale import TINY, Suite
from pretend_cuda import DEVICE, waits
from recorder import StandInRecorder
from test_replay import all_launches, interprets

from magicdec.attention import triton
from magicdec.hardware import timing
from magicdec.model.linear import triton as linear
from magicdec.model.linear.choices import TileChoices
from magicdec.speculation.steps.recorder import CudaGraphs

__all__ = ["all_launches", "waits"]  # fixtures
pytestmark = [interprets, pytest.mark.wide]

GIB = 1 << 30
CARD = SimpleNamespace(
    L2_cache_size=1 << 12,
    multi_processor_count=2,
    shared_memory_per_multiprocessor=1 << 18,
    uuid="0",
)


@pytest.fixture
def card(
    waits: Counter[str], all_launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """A GPU for whole commands. Returns the names of the kernels that were run."""
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "No GPU",
        "get_device_capability": (9, 0),
        "mem_get_info": (78 * GIB, 80 * GIB),
        "get_device_properties": CARD,
        "max_memory_allocated": 0,
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, _answer=answer: _answer)
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda first, last: 1.0)
    monkeypatch.setattr(CudaGraphs, "__init__", lambda self, device: None)
    monkeypatch.setattr(CudaGraphs, "record", lambda self, work: StandInRecorder().record(work))
    monkeypatch.setattr(triton, "count_resident", lambda *kernel: 4)  # nothing is compiled
    # As bfloat16 is interpreted.
    tile = triton.choose_tile
    exact = {"IN_FLOAT32": True}
    monkeypatch.setattr(triton, "choose_tile", lambda *sizes: tile(*sizes) | exact)
    monkeypatch.setattr(timing, "GPU_BANDWIDTH_BYTES", 1 << 16)
    make = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": make())
    return all_launches


@pytest.fixture
def unrun(card: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched, but not run."""
    names = list[str]()
    monkeypatch.setattr(launches.Launches, "start", lambda self, name, *call: names.append(name))
    zeros = torch.zeros
    new_zeros = torch.Tensor.new_zeros
    monkeypatch.setattr(torch, "empty", zeros)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_zeros)
    return names


def run(stage: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The cells of a stage, in sizes that an interpreter computes in seconds."""
    heads = {"tiny": replace(TINY.heads["tiny"], D=16)}
    small = replace(
        TINY,
        backends=("triton", "flash_attn"),
        heads=heads,
        contexts=(64,),
        budgets=(17,),
        copied_bytes=1 << 12,
        places=((2, 40),),
        attention_tokens=(1,),
    )
    monkeypatch.setattr(scale, "TINY", small)
    results = Results(folder / f"{name}.json", gpu_suite.made_with("cuda", True), 600)
    stage.run(Suite(DEVICE, True, folder, results, True))
    assert results.made_with["gpu"] == "No GPU"
    assert not results.left
    failed = {cell: lines[-1] for cell, lines in results.tracebacks.items()}
    assert set(failed) <= {"tiny/B2/S40/flash_attn"}, failed  # which says that it is missing
    return results.cells


@pytest.mark.wide
def test_what_is_broken(card: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and replayed attention is right, and so is a forward."""
    monkeypatch.setattr(broken, "LENGTH", 18)
    monkeypatch.setattr(broken, "import_all", dict)
    cells = run(broken, "broken", tmp_path, monkeypatch)
    for dtype in ("bfloat16", "float32"):
        assert cells[f"attention/triton/{dtype}/4:2x16"]["replayed_difference"] == 0
    assert cells["forward/triton"]["difference"] < broken.LOGITS
    # What it says depends on whether another test of this process has imported a stand-in.
    assert "pip install flash-attn" in cells["left out"]["forward/flash_attn"]
    assert cells["tiny/B2/S40/triton"]["1"]["from_graph"]
    assert {"attend", "describe_rows", "norm_rows", "rotate_heads", "gate_rows"} <= set(card)


@pytest.mark.parametrize(
    ("stage", "name"),
    [(attention, "attention"), (latency, "llama31"), (whole_runs, "whole_runs")],
)
def test_what_is_timed(
    stage: Any, name: str, unrun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are captured, and attention is by Triton, or by what was faster in the measurement."""
    monkeypatch.setattr(whole_runs, "WARM_UP", 1)
    monkeypatch.setattr(whole_runs, "STEPS", 2)
    cells = run(stage, name, tmp_path, monkeypatch)
    assert "attend" in unrun
    if name == "llama31":
        (cell,) = cells.values()
        assert {row["phase"] for row in cell["rows"]} == {"decode", "verify", "draft"}
        assert cell["config"]["decoding"]["cuda_graphs"] == "on"
    if name == "whole_runs":
        (cell,) = cells.values()
        assert cell["cuda_graphs"] == "on" and set(cell["emulated_acceptance"]) >= {"0.7", "0.9"}


def test_drafts_in_few_bits(
    unrun: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles are measured before steps are captured, and FP8 is multiplied by torch's operator."""
    monkeypatch.setattr(whole_runs, "WARM_UP", 1)
    monkeypatch.setattr(whole_runs, "STEPS", 2)
    monkeypatch.setattr(drafts, "PRODUCTS", {})  # nothing is multiplied here
    choices = TileChoices(tmp_path / "tiles.json")
    monkeypatch.setattr(linear, "choices_on", lambda device: choices)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cells = run(drafts, "drafts", tmp_path, monkeypatch)
    copied, steps, *runs = cells.values()
    assert copied["bytes_per_s"] > 0
    weights = {row["draft_weights"] for row in steps["rows"] if row["phase"] == "draft"}
    assert weights == {None, *drafts.WEIGHTS}
    assert len(runs) == len(drafts.WEIGHTS)
    for cell in runs:
        assert cell["cuda_graphs"] == "on" and set(cell["emulated_acceptance"]) == {"0.8"}
    assert {"multiply_groups", "round_rows", "attend"} <= set(unrun)
    kinds = json.loads(choices.path.read_text())
    assert "2048x256, 4 bits, 8 rows" in kinds
