"""A time ends when the work is done and the host has read its result. On a CPU, and on a device
that computes while the host goes on, as CUDA does; both are imitated under a fake clock. Also
phases, warm-ups of prefill, and traced passes."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import (
    TINY,
    decode,
    make_requests,
    make_runner,
    random_prompts,
    tiny_transformer,
)
from fake_clock import Device, FakeEvent
from torch import Tensor

from magicdec.bench.latency import forwards
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.distributed.groups import Group
from magicdec.engine.engine import Engine
from magicdec.hardware.timing import PhaseTimer
from magicdec.kv.forward_counts import ForwardCounts
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.prefill import TimeStamps
from magicdec.runner.request import Batch
from magicdec.speculation.draft_length import FixedLength
from magicdec.speculation.steps.strategy import Setup
from magicdec.systems.shared_prefill import warm_up_prefill

FORWARD_S = 0.5
READ_S = 0.25
GAMMA = 2
NUM_NEW = 7


@pytest.fixture(params=["cpu", "cuda"], ids=["at_once", "meanwhile"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """Forwards and reads of tensors take time on it."""
    device = Device(request.param)
    compute = ModelRunner._run_layers
    read = Tensor.tolist

    def launched(*args: Any) -> None:
        device.launch(FORWARD_S)
        compute(*args)

    def waited(tensor: Tensor) -> Any:
        device.wait()
        device.clock.advance(READ_S)
        return read(tensor)

    monkeypatch.setattr("time.perf_counter", device.clock)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: device.wait())
    monkeypatch.setattr(ModelRunner, "_run_layers", launched)
    monkeypatch.setattr(Tensor, "tolist", waited)
    return device


class Learned(FixedLength):
    """Keeps the times from which a draft length may be chosen."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.seconds: list[float] = []

    def observe(
        self, batch: Batch, gamma: int, accepted: object, seconds: float, *judged: object
    ) -> None:
        self.seconds.append(seconds)


@pytest.mark.parametrize(
    ("name", "phases_s"),
    [
        ("autoregressive", {"decode": FORWARD_S + READ_S}),
        ("speculative", {"draft": GAMMA * FORWARD_S, "verify": FORWARD_S + READ_S}),
    ],
)
def test_a_step_and_its_phases_end_when_the_tokens_are_read(
    name: str, phases_s: dict[str, float], device: Device
) -> None:
    runner = make_runner(tiny_transformer(), 2, 64)
    timer = PhaseTimer(torch.device(device.kind))
    engine = Engine(runner, 16)
    length = Learned(GAMMA)
    steps_s = list[float]()
    engine.prefill(make_requests(random_prompts([20, 20], TINY.vocab_size), NUM_NEW))
    decoding = DecodingSection("speculative", "self", GAMMA)
    setup = Setup(
        runner, decoding, KVSection("streaming_llm", 18), phase=timer, draft_length=length
    )
    decode(engine, name, setup, lambda ids, output, seconds: steps_s.append(seconds))
    assert steps_s == [sum(phases_s.values())] * len(steps_s) != []
    assert timer.seconds == {phase: [s] * len(steps_s) for phase, s in phases_s.items()}
    assert length.seconds == (steps_s if name == "speculative" else [])


def test_a_first_token_is_there_when_the_device_has_computed_it(device: Device) -> None:
    """Work that was started before the prefill is no part of it."""
    device.launch(3.0)
    stamps = TimeStamps(torch.device(device.kind))
    for seconds in (0.5, 0.25):
        device.launch(seconds)
        stamps.mark()
    assert stamps.seconds() == [1003.5, 1003.75]


def test_a_forward_alone_is_timed_from_its_start_to_its_end(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what was started to prepare it."""
    monkeypatch.setattr(forwards, "synchronize", lambda _: device.wait())
    forward = SimpleNamespace(
        prepare=lambda: device.launch(2.0),
        run=lambda: device.launch(FORWARD_S),
        undo=lambda: device.launch(1.0),
        counts=None,
    )
    runner = SimpleNamespace(device=device, counts=ForwardCounts())
    for _ in range(2):
        found = forwards.time_once(cast(Any, forward), cast(Any, runner), Group((0,), 0))
        assert found == FORWARD_S


def test_phases_on_cuda_lie_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device("cuda")
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(device))
    timer = PhaseTimer(torch.device("cuda"))
    for name in ("draft", "verify", "draft"):
        device.launch(1.0)  # of no phase
        with timer(name):
            device.launch(0.25)
    for _ in "once more":  # read twice, counted once
        assert dict(timer.seconds) == {"draft": [0.25, 0.25], "verify": [0.25]}
    untimed = PhaseTimer(torch.device("cuda"), enabled=False)
    with untimed("draft"):
        pass
    assert not untimed.seconds


def test_phases_are_timed_if_asked() -> None:
    for enabled in (True, False):
        timer = PhaseTimer(torch.device("cpu"), enabled)
        with timer("draft"):
            pass
        assert len(timer.seconds["draft"]) == enabled


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
