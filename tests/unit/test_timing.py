"""Phases timed by the clock and by CUDA events, and traced passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from conftest import TINY, Launch, make_runner, random_prompts, tiny_transformer

from magicdec.engine import Engine
from magicdec.hardware.timing import PhaseTimer
from magicdec.run.resident import warm_up_prefill


class Event:
    """Imitates torch.cuda.Event on a device whose time advances with every record."""

    now_ms = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing, "else it has no time"
        self.ms: float | None = None
        self.waited = False

    def record(self) -> None:
        Event.now_ms += 5.0
        self.ms = Event.now_ms

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        assert end.waited and self.ms is not None and end.ms is not None
        return end.ms - self.ms


def test_phases_on_cuda_lie_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = PhaseTimer(torch.device("cuda"))
    for name in ("draft", "verify", "draft"):
        with timer(name):
            Event.now_ms += 20.0  # of work
    for _ in "once more":  # read twice, counted once
        assert dict(timer.seconds) == {"draft": [0.025, 0.025], "verify": [0.025]}
    untimed = PhaseTimer(torch.device("cuda"), enabled=False)
    with untimed("draft"):
        pass
    assert not untimed.seconds


def test_phases_are_marked_whether_timed_or_not() -> None:
    marked: list[str] = []

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        yield
        marked.append(name)

    for enabled in (True, False):
        timer = PhaseTimer(torch.device("cpu"), enabled, mark)
        with timer("draft"):
            pass
        assert len(timer.seconds["draft"] if enabled else ["none"]) == 1
    assert marked == ["draft", "draft"]


@pytest.mark.parametrize(("length", "chunks"), [(50, [16, 2]), (48, [16]), (9, [9]), (17, [16, 1])])
def test_prefill_is_warmed_up_by_a_chunk_of_each_length(length: int, chunks: list[int]) -> None:
    runner = make_runner(tiny_transformer(), 2, 64)
    prompt = random_prompts([length], TINY.vocab_size)[0]
    seen: list[int] = []
    plan = runner.backend.plan

    def watch(view: object) -> None:
        seen.append(view.num_new)
        plan(view)

    runner.backend.plan = watch
    engine = Engine(runner, 16)
    warm_up_prefill(engine, prompt, 16)
    assert seen == chunks and engine.scheduler.schedule() is None, "nothing is left to decode"


def test_profile_writes_a_trace_a_strategy_and_rank(
    launch: Launch, tiny_checkpoint: Path, text_file: Path, tmp_path: Path
) -> None:
    """The traces are readable and contain the phases; the record's times come from other passes."""
    few = "--device cpu --dtype float32 --B 1 --prefix_len 20 --gen_len 6 --num_batches 1 --gamma 2"
    place = ("--model", tiny_checkpoint, "--dataset", text_file, "--profile", "traces")
    budget = ("--draft_budget", 18, "--warmup_batches", 0, "--out", "runs.jsonl")
    done = launch("selfspec_benchmark.py", *few.split(), *place, *budget, num_ranks=2)
    assert done.returncode == 0, done.stderr
    phases = {"autoregressive": {"decode"}, "speculative": {"draft", "verify"}}
    for name, expected in phases.items():
        for rank in (0, 1):
            trace = json.loads((tmp_path / "traces" / f"{name}.rank{rank}.json").read_text())
            assert expected <= {event.get("name") for event in trace["traceEvents"]}
    record = json.loads((tmp_path / "runs.jsonl").read_text())
    assert record["config"]["output"]["profile"] == "traces"
    assert record["samples"]["autoregressive"]["num_tokens"] == [5], "one pass was measured"
