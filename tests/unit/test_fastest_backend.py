"""What `--attention auto` becomes on CUDA, tried on the CPU: what is measured, who is a candidate,
who wins, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import TINY
from torch import Tensor

from magicdec import autotune as module
from magicdec.attention.sdpa import SDPABackend
from magicdec.autotune import (
    Measured,
    Step,
    choose_fastest,
    list_candidates,
    measure,
    settle,
    target_step,
)
from magicdec.config.choices.choice import How
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DecodingSection,
    DraftSection,
    KVSection,
    ModelSection,
    ParallelSection,
    WorkloadSection,
)
from magicdec.decoding.recorder import Eager
from magicdec.distributed.groups import Group
from magicdec.kv.view import KVView

CPU = torch.device("cpu")
MODEL = replace(TINY, head_dim=64)
GPU = Machine(2, has_cuda=True)
ASKED = RunConfig(
    model=ModelSection(dtype="bfloat16"),
    parallel=ParallelSection(rank_group=(0,), device="cuda"),
    decoding=DecodingSection("speculative", "self", cuda_graphs="off"),
    workload=WorkloadSection(batch_size=8, prefix_len=1000),
)
ASKED_STANDALONE = replace(
    ASKED,
    draft=DraftSection(rank_group=(0, 2)),
    decoding=DecodingSection("speculative", "model", cuda_graphs="off"),
)
BFLOAT16 = resolve(ASKED, GPU)
BASELINE = resolve(replace(ASKED, decoding=DecodingSection(cuda_graphs="off")), GPU)
STANDALONE = resolve(ASKED_STANDALONE, GPU)
ONES = (torch.ones(2, 2),)


@pytest.fixture
def nothing_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "missing_backends", lambda names: {})


def test_the_fastest_wins_and_the_others_are_named() -> None:
    times = {"sdpa": 3e-3, "grouped": 2e-3, "triton": 0.5e-3, "flashinfer": 1e-3}
    asked = []

    def timer(name: str) -> Measured:
        asked.append(name)
        return Measured(times[name], ONES)

    choice = choose_fastest(list(times), {"x": "why"}, "a step", timer)
    assert (choice.name, choice.how) == ("triton", How.MEASURED)
    assert sorted(asked) == sorted(times), "each once"
    assert choice.why == (
        "auto: triton 0.500 ms, flashinfer 1.000 ms, grouped 2.000 ms, sdpa 3.000 ms a layer, "
        "for a step; x: why"
    )


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ImportError("no kernel image\nfor this device"), "no kernel image"),
        (AssertionError(), "AssertionError"),
        (Measured(1e-9, (*ONES, ONES[0] + 0.5)), "its output is 5.0e-01 away from that of sdpa"),
        (Measured(1e-9, (ONES[0] * torch.nan, *ONES)), "its output is nan away from that of sdpa"),
    ],
    ids=str,
)
def test_who_fails_or_is_wrong_cannot_win(found: object, why: str) -> None:
    def timer(name: str) -> Measured:
        if name == "triton" and isinstance(found, Exception):
            raise found
        return found if name == "triton" else Measured(1.0, ONES * 2)

    choice = choose_fastest(["sdpa", "grouped", "triton"], {}, "a step", timer)
    assert choice.name != "triton" and choice.why.endswith(f"; triton: {why}")


def test_rounding_of_large_outputs_is_no_disagreement() -> None:
    """Above 4 the neighbours in bfloat16 are further apart than what outputs below 1 may differ."""
    outputs = {"sdpa": (4.0, 0.5), "grouped": (4.0 + 2**-5, 0.5), "triton": (4.0, 0.5 + 2**-4)}

    def timer(name: str) -> Measured:
        found = tuple(torch.tensor([x], dtype=torch.bfloat16) for x in outputs[name])
        return Measured({"sdpa": 3.0, "grouped": 2.0, "triton": 1.0}[name], found)

    choice = choose_fastest(list(outputs), {}, "a step", timer)
    assert choice.name == "grouped" and "; triton: its output is 6.2e-02 away" in choice.why


def test_an_error_of_the_reference_is_nobodys_fault_but_the_runs() -> None:
    def timer(name: str) -> Measured:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        choose_fastest(["sdpa", "grouped"], {}, "a step", timer)


def test_candidates_are_what_can_serve(
    nothing_missing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = ["sdpa", "grouped", "triton", "varlen", "flash_attn", "flashinfer"]
    assert list_candidates(BFLOAT16, MODEL) == (everything, {})

    float32 = replace(BFLOAT16, model=replace(BFLOAT16.model, dtype="float32"))
    candidates, left_out = list_candidates(float32, MODEL)
    assert candidates == ["sdpa", "grouped", "triton"]
    assert left_out["varlen"] == "varlen is for --dtype bfloat16, not float32"

    verified = replace(BFLOAT16, kv=KVSection("verified"))
    candidates, left_out = list_candidates(verified, MODEL)
    assert candidates == ["sdpa", "grouped", "triton"]
    assert set(left_out.values()) == {"it does not return attention weights"}

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


class Slow(SDPABackend):
    """By its own clock a layer takes `on_full` seconds or `on_others`; telling the mass, 1 more."""

    def __init__(self, clock: list[float], on_full: float, on_others: float) -> None:
        super().__init__()
        self.clock, self.on_full, self.on_others = clock, on_full, on_others

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView) -> Tensor:
        self.clock[0] += self.on_full if view.is_full else self.on_others
        return super().run(layer, q, k, v, view)

    def run_with_weights(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, view: KVView
    ) -> tuple[Tensor, Tensor]:
        self.clock[0] += 1.0
        return super().run_with_weights(layer, q, k, v, view)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_attn` is fast on full views and slow on others, `triton` in between on all."""
    clock = [0.0]
    speeds = {"sdpa": (50.0, 50.0), "flash_attn": (1.0, 3.0), "triton": (2.0, 2.0)}
    monkeypatch.setattr(module, "make_backend", lambda name: Slow(clock, *speeds[name]))
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])


@pytest.mark.parametrize(
    ("kv", "gamma", "flash_attn", "triton"),
    [
        (None, 4, 1, 2),
        (KVSection("full"), 4, 5, 10),
        (KVSection("streaming_llm", 18), 4, 4 * 3 + 1, 5 * 2),
        (KVSection("streaming_llm", 18), 2, 2 * 3 + 1, 3 * 2),
        (KVSection("streaming_llm", 41), 4, 5, 10),  # the budget leaves nothing out
        (KVSection("snapkv", 18, window_size=8), 4, 5, 10),
        (KVSection("verified", 32, 4), 4, 4 * 3 + 1 + 1, 5 * 2 + 1),
    ],
    ids=str,
)
def test_slow_on_what_the_drafts_read_loses_only_where_they_read_it(
    stand_ins: None, kv: KVSection | None, gamma: int, flash_attn: int, triton: int
) -> None:
    drafting = replace(BFLOAT16.decoding, num_draft_tokens=gamma)
    decoding = drafting if kv else BASELINE.decoding
    config = replace(
        BFLOAT16,
        model=replace(BFLOAT16.model, dtype="float32"),
        decoding=decoding,
        kv=(kv or KVSection()).resolve(),
        workload=replace(BFLOAT16.workload, batch_size=2, prefix_len=40),
    )
    step = target_step(config, MODEL)
    choice = choose_fastest(
        ["sdpa", "flash_attn", "triton"], {}, step.name, lambda name: measure(name, step, CPU)
    )
    assert choice.name == ("flash_attn" if flash_attn < triton else "triton")
    for backend, seconds in (("flash_attn", flash_attn), ("triton", triton)):
        assert f"{backend} {seconds}000.000 ms" in choice.why
    assert choice.why.endswith(f" a layer, for {step.name}")


def test_the_choice_is_made_once_and_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the target and for the draft, each with its own heads."""
    sizes = {64: "triton", 32: "varlen"}

    def timer(name: str, step: Step, device: torch.device, recorder: None) -> Measured:
        return Measured(1.0 if sizes[step.head_dim] == name else 2.0, ONES)

    monkeypatch.setattr(module, "measure", timer)
    monkeypatch.setattr(module, "missing_backends", lambda names: {})
    config = resolve(replace(ASKED_STANDALONE, draft=DraftSection()), GPU, 64, 32)
    assert config.attention.backend_choice.is_to_be_measured
    draft = replace(MODEL, head_dim=32)
    found = settle(config, MODEL, draft, Group((0,), 0), CPU)
    assert found.draft is not None
    assert (found.attention.backend, found.draft.backend) == ("triton", "varlen")
    target, drafts = found.attention.backend_choice.why, found.draft.backend_choice.why
    assert target.startswith("auto: triton 1000.000 ms, sdpa 2000.000 ms")
    assert target.endswith(" a layer, for a verification of 5 tokens")
    assert " a layer, for 4 drafts (streaming_llm, budget 257); " in drafts
    assert capsys.readouterr().err.splitlines() == [
        f"--attention {target}",
        f"--attention {drafts}",
    ]
    assert settle(found, MODEL, draft, Group((0,), 0), CPU) == found, "nothing left to measure"


@pytest.mark.parametrize("graphs", ["auto", "on", "off"])
def test_recorded_steps_are_measured_recorded(
    graphs: str, nothing_missing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what no graph can hold is left out then, in the order of the names."""
    given = set()

    def timer(name: str, step: Step, device: torch.device, recorder: object) -> Measured:
        given.add(recorder)
        return Measured(1.0, ONES)

    monkeypatch.setattr(module, "measure", timer)
    monkeypatch.setattr(module, "CudaGraphs", lambda device: f"graphs of {device}")
    asked = replace(ASKED, decoding=replace(ASKED.decoding, cuda_graphs=graphs))
    found = settle(resolve(asked, GPU), MODEL, None, Group((0,), 0), CPU)
    reason = found.attention.backend_choice.why
    assert given == ({Eager()} if graphs == "off" else {"graphs of cpu"})
    why = "it needs lengths on the host, and no CUDA graph could hold it"
    left_out = f"; grouped: {why}; flashinfer: {why}"
    assert reason.endswith(left_out) == (graphs != "off")
