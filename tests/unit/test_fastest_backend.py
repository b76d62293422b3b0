"""What `--attention auto` becomes on CUDA, tried on the CPU: who is a candidate, who wins, and what
is said of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import TINY

from magicdec.bench import fastest_backend as module
from magicdec.bench.fastest_backend import (
    Measured,
    Shape,
    choose_fastest,
    list_candidates,
    measure,
    measured_shape,
    settle,
)
from magicdec.config import RunConfig
from magicdec.distributed.groups import Group
from magicdec.draft_section import DraftSection
from magicdec.machine import TO_BE_MEASURED, Machine
from magicdec.sections import (
    DecodingSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)

CPU = torch.device("cpu")
MODEL = replace(TINY, head_dim=64)
BFLOAT16 = RunConfig(
    model=ModelSection(dtype="bfloat16"),
    parallel=ParallelSection(device="cuda"),
    decoding=DecodingSection("speculative", "self"),
    workload=WorkloadSection(batch_size=8, prefix_len=1000),
)


@pytest.fixture
def nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing_backends", lambda names: {})


def test_the_fastest_wins_and_the_others_are_named() -> None:
    times = {"sdpa": 3e-3, "grouped": 2e-3, "triton": 0.5e-3, "flashinfer": 1e-3}
    asked = []

    def timer(name: str) -> Measured:
        asked.append(name)
        return Measured(times[name], torch.ones(2, 2))

    name, reason = choose_fastest(["sdpa", "grouped", "triton", "flashinfer"], {"x": "why"}, timer)
    assert name == "triton" and sorted(asked) == sorted(times), "each once"
    assert reason == (
        "auto: triton 0.500 ms, flashinfer 1.000 ms, grouped 2.000 ms, sdpa 3.000 ms; x: why"
    )


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ImportError("no kernel image\nfor this device"), "no kernel image"),
        (AssertionError(), "AssertionError"),
        (Measured(1e-9, torch.ones(2) + 0.5), "its output is 5.0e-01 away from that of sdpa"),
        (Measured(1e-9, torch.full((2,), torch.nan)), "its output is nan away from that of sdpa"),
    ],
    ids=str,
)
def test_who_fails_or_is_wrong_cannot_win(found: object, why: str) -> None:
    def timer(name: str) -> Measured:
        if name == "triton" and isinstance(found, Exception):
            raise found
        return found if name == "triton" else Measured(1.0, torch.ones(2))

    name, reason = choose_fastest(["sdpa", "grouped", "triton"], {}, timer)
    assert name != "triton" and reason.endswith(f"; triton: {why}")


def test_an_error_of_the_reference_is_nobodys_fault_but_the_runs() -> None:
    def timer(name: str) -> Measured:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        choose_fastest(["sdpa", "grouped"], {}, timer)


def test_candidates_are_what_can_serve(
    nothing_missing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = ["sdpa", "grouped", "triton", "varlen", "flash_attn", "flashinfer"]
    assert list_candidates(BFLOAT16, MODEL) == (everything, {})

    float32 = replace(BFLOAT16, model=ModelSection(dtype="float32"))
    candidates, left_out = list_candidates(float32, MODEL)
    assert candidates == ["sdpa", "grouped", "triton"]
    assert left_out["varlen"] == "varlen is for --dtype bfloat16, not float32"

    verified = replace(BFLOAT16, kv=KVSection("verified"))
    candidates, left_out = list_candidates(verified, MODEL)
    assert candidates == ["sdpa", "grouped", "triton"]
    assert set(left_out.values()) == {"it does not tell where the attention goes"}

    alibi = replace(MODEL, num_kv_heads=6, positions="alibi")
    candidates, left_out = list_candidates(BFLOAT16, alibi)
    assert "grouped" not in candidates and "too coarse for ALiBi" in left_out["grouped"]

    candidates, left_out = list_candidates(BFLOAT16, replace(MODEL, sliding_window=1000))
    assert candidates == ["sdpa", "grouped", "triton"]
    assert set(left_out.values()) == {"it does not keep to a sliding window"}
    assert list_candidates(BFLOAT16, replace(MODEL, sliding_window=1 << 20))[0] == everything

    monkeypatch.setattr(module, "missing_backends", lambda names: {"flashinfer": "not installed"})
    candidates, left_out = list_candidates(BFLOAT16, MODEL)
    assert candidates == everything[:-1] and left_out == {"flashinfer": "not installed"}


def test_the_measured_shape_is_the_runs_and_bounded() -> None:
    shape = measured_shape(BFLOAT16, MODEL, num_ranks=3)
    assert shape == Shape(8, 1000, 5, 2, 1, 64, torch.bfloat16)
    long = replace(BFLOAT16, workload=WorkloadSection(batch_size=64, prefix_len=1 << 20))
    shape = measured_shape(long, MODEL, num_ranks=1)
    assert 1 <= shape.rows < 64 and shape.context == 1 << 20


@pytest.mark.parametrize("name", ["grouped", "native", "triton"])
def test_backends_agree_on_what_is_measured(name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    shape = Shape(2, 70, 3, 4, 2, 32, torch.float32)
    device = torch.device("cuda" if torch.cuda.is_available() and name != "native" else "cpu")
    found, reference = measure(name, shape, device), measure("sdpa", shape, device)
    assert found.seconds > 0 and found.output.shape == (2, 3, 4, 32)
    assert (found.output - reference.output).abs().max() < 1e-5
    assert len(set(found.output.flatten().tolist())) > 100, "not all the same number"


def test_the_choice_is_made_once_and_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the target and for the draft, each with its own heads."""
    sizes = {64: "triton", 32: "grouped"}

    def timer(name: str, shape: Shape, device: torch.device) -> Measured:
        return Measured(1.0 if sizes[shape.head_dim] == name else 2.0, torch.ones(2))

    monkeypatch.setattr(module, "measure", timer)
    monkeypatch.setattr(module, "missing_backends", lambda names: {})
    config = replace(
        BFLOAT16, draft=DraftSection(), decoding=DecodingSection("speculative", "model")
    )
    config = config.resolve(Machine(2, has_cuda=True), 64, 32)
    assert config.attention.backend_reason == TO_BE_MEASURED
    draft = replace(MODEL, head_dim=32)
    found = settle(config, MODEL, draft, Group((0,), 0), CPU)
    assert found.draft is not None
    assert (found.attention.backend, found.draft.backend) == ("triton", "grouped")
    assert found.attention.backend_reason.startswith("auto: triton 1000.000 ms, sdpa 2000.000 ms")
    assert capsys.readouterr().err.splitlines() == [
        f"--attention {found.attention.backend_reason}",
        f"--attention {found.draft.backend_reason}",
    ]
    assert settle(found, MODEL, draft, Group((0,), 0), CPU) is found, "nothing left to measure"
