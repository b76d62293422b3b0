"""Stages that sleep and links that deliver late, under a fake clock or without any delay."""

from pathlib import Path

import pytest
import torch
from conftest import TINY, make_requests, make_runner
from fake_clock import FakeClock
from serving_command import prepare_as
from test_recurrent_order import CHUNK, LIMITS

from magicdec.distributed.channels import connect
from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import (
    ChannelSender,
    Ends,
    Kind,
    Loopback,
    Message,
    MessageForm,
)
from magicdec.distributed.groups import Group, Launch
from magicdec.distributed.tensor_parallel import Shard
from magicdec.output.console import make_progress
from magicdec.runner.forward_batch import ForwardBatch
from magicdec.systems.mdi_llm.recurrent import RecurrentPipeline
from magicdec.systems.mdi_llm.ring_stage import Stage
from magicdec.systems.pipeinfer.drawn_drafts import draw_right
from magicdec.systems.pipeinfer.path_drafter import DraftRequest
from magicdec.systems.pipeinfer.scripted_drafter import ScriptedPathDrafter
from magicdec.systems.stages.emulation import (
    DueReceiver,
    EmulatedTime,
    LateConnector,
    LateSender,
    SleepingModel,
    SleepingModels,
)
from magicdec.systems.stages.staged import StagedSystem

CPU = torch.device("cpu")
LATE_S = 0.125
STAGE_S = 0.5
LINK_S = 2.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Sleeping takes no time but on this clock, and every sleep ends LATE_S late."""
    clock = FakeClock()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr("time.sleep", lambda seconds: clock.advance(seconds + LATE_S))
    return clock


def sleeping(
    seconds: float, layers: range | None = None, emulated: EmulatedTime | None = None
) -> SleepingModel:
    has_ends = None if layers is None else False
    time = emulated or EmulatedTime()
    return SleepingModel(TINY, Shard(), layers, has_ends, seconds, torch.zeros(1), time)


def test_the_lateness_of_sleeps_does_not_add_up(clock: FakeClock) -> None:
    """A forward sleeps for each of two layers, and every message comes LATE_S late. The second
    message was due while the first was emulated, and the third after that."""
    emulated = EmulatedTime()
    runner = make_runner(sleeping(STAGE_S, range(2), emulated), 1, 60)
    runner.allocate(0)
    begin_s = clock.now
    answers_s = list[float]()
    for due_s in (begin_s, begin_s + 0.25, begin_s + 2.0):
        clock.now = max(clock.now, due_s) + LATE_S
        emulated.reach(due_s)
        runner.forward(ForwardBatch(torch.zeros(1, 1, TINY.hidden_size), [0]))
        answers_s.append(emulated.now_s - begin_s)
        assert clock.now == emulated.now_s + LATE_S, "it sleeps, whatever it says"
    assert answers_s == [STAGE_S, 2 * STAGE_S, 2.0 + STAGE_S]


def test_work_after_a_pause_counts_from_now(clock: FakeClock) -> None:
    """So does that of a host without time: what is later than the work itself takes stays late."""
    emulated = EmulatedTime()
    emulated.reach(clock.now)
    clock.advance(STAGE_S + LATE_S)
    begin_s = clock.now
    emulated.begin(STAGE_S)
    emulated.sleep(STAGE_S)
    assert emulated.now_s == begin_s + STAGE_S


class TimedLoopback(Loopback):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock
        self.came_s = list[float]()

    def send(self, message: Message) -> None:
        self.came_s.append(self.clock.now)
        super().send(message)


def test_a_late_link_delivers_each_message_later(clock: FakeClock) -> None:
    """The second is sent when the first has come, and closing waits for both."""
    loop = TimedLoopback(clock)
    link = LateSender(loop, LINK_S)
    begin_s = clock.now
    for kind in (Kind.NUMBERS, Kind.END):
        link.send(Message(kind))
        link.close()
    assert [came_s - begin_s for came_s in loop.came_s] == [LINK_S + LATE_S, 2 * (LINK_S + LATE_S)]


def test_an_emulated_link_counts_from_when_a_message_was_due(clock: FakeClock) -> None:
    """The second message is due while the first is on the link. The receiver's work counts from
    when they are due, and on another host from when they come."""
    loop = TimedLoopback(clock)
    sending = EmulatedTime()
    link = LateSender(loop, LINK_S, sending)
    begin_s = clock.now
    for due_s in (0.25, 0.5, 0.5):
        sending.reach(begin_s + due_s)
        link.send(Message(Kind.NUMBERS, words=(7, 8)))
    link.close()
    for shares_clock, expected_s in ((True, 2.25), (True, 2.5), (False, clock.now - begin_s)):
        receiving = EmulatedTime()
        message = DueReceiver(loop, receiving, shares_clock).receive()
        assert receiving.now_s - begin_s == pytest.approx(expected_s, abs=1e-8)
        assert message.words == (7, 8)
    assert loop.came_s[0] - begin_s == pytest.approx(LINK_S + 0.25 + LATE_S)


def test_a_late_link_keeps_the_order() -> None:
    loop = Loopback()
    link = LateSender(loop, 0.001)
    sent = [Message(Kind.HIDDEN, n, payload=torch.ones(1, n, 48)) for n in (1, 30, 2)]
    for message in [*sent, Message(Kind.END)]:
        link.send(message)
    link.close()
    assert [loop.receive() for _ in range(3)] == sent and loop.receive().kind is Kind.END


def test_a_late_link_passes_errors_on() -> None:
    class Broken(Loopback):
        def send(self, message: Message) -> None:
            raise RuntimeError("rank 1 has ended")

    link = LateSender(Broken(), 0.001)
    link.send(Message(Kind.END))
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        link.close()


class NoCarrier:
    """In place of one that needs a second rank."""

    num_bytes = 0

    def __init__(self, *place: object) -> None:
        """It carries nothing."""


@pytest.mark.parametrize("headers", ["shared_memory", "gloo"])
def test_only_messages_between_ranks_are_late(
    headers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also cancellations, which therefore go as messages and not through an array of all ranks."""
    monkeypatch.setattr(connect, "processes_of", lambda launch: None)
    monkeypatch.setattr(connect.dist, "new_group", lambda *ranks, **more: None)
    monkeypatch.setattr(connect, "SharedRing", NoCarrier)
    monkeypatch.setattr(connect, "PacketCarrier", NoCarrier)
    form = MessageForm(1, torch.float32, 0)
    place = Launch(0, 2, 0, 2), headers, form, CPU
    late = LateConnector(LINK_S, None, *place)
    usual = Connector(*place)
    sender, _ = late.edge(0, 1, form)
    assert isinstance(sender, LateSender) and sender.delay_s == LINK_S
    assert isinstance(sender.sender, ChannelSender)
    assert isinstance(usual.edge(0, 1, form)[0], ChannelSender)
    assert late.edge(1, 0, form)[0] is None, "it receives"
    assert isinstance(late.edge(0, 0, form)[0], Loopback)
    sleeping = LateConnector(0.0, EmulatedTime(), *place)
    sender, _ = sleeping.edge(0, 1, form)
    assert isinstance(sender, LateSender) and sender.delay_s == 0.0
    assert isinstance(sender.sender, ChannelSender) and sender.sender.form.num_words == 1
    assert isinstance(sleeping.edge(1, 0, form)[1], DueReceiver)
    sender, receiver = late.edge(0, 0, form)
    assert sender is receiver
    assert sleeping.shares_memory == usual.shares_memory
    assert not late.shares_memory and usual.shares_memory == (headers == "shared_memory")


def test_a_whole_model_may_sleep() -> None:
    stage = Stage(make_runner(sleeping(0.0), 2, 60), is_last=True)
    loop = Loopback()
    requests = make_requests([(5,) * 20] * 3, 4)
    RecurrentPipeline(stage, Ends(loop, loop), 2, 1, LIMITS, CHUNK).serve(requests)
    assert all(request.output_ids == [20, 21, 22, 23] for request in requests)


def test_a_drafter_of_stages_that_sleep_is_as_slow_and_as_often_right_as_asked_for(
    clock: FakeClock,
) -> None:
    """The first request has the tokens 6, 7, ... behind its prompt of 6 tokens."""
    drafter = ScriptedPathDrafter.for_emulated_stages(
        0.5, [6, 4], [40, 20], 1000, 7, STAGE_S, EmulatedTime()
    )
    begin_s = clock.now
    proposed = list[bool]()
    for known in range(40):
        text = [*[9] * 6, *range(6, 6 + known)]
        candidate = drafter.propose(DraftRequest(0, 0, 0, (), ()), text)
        assert candidate is not None
        proposed.append(candidate[0] == 6 + known)
    assert proposed == draw_right(0.5, 40, 7) and sum(proposed) in (20, 21)
    assert clock.now - begin_s == 40 * STAGE_S + LATE_S


def test_systems_of_stages_plug_in_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that sleep hold no weights, read none, and write past any end token."""
    monkeypatch.setattr(connect, "processes_of", lambda launch: None)
    words = ("--modes", "ring", "pipeline", "--num_requests", "2", "--layer_split", "2,4")
    emulated = ("--emulate_stage_ms", "500", "--emulate_link_ms", "2000")
    for more in (emulated, ()):
        is_emulated = bool(more)
        prepared = prepare_as("serve", tmp_path, *words, *more, world_size=2)
        for system in prepared.systems:
            assert isinstance(system, StagedSystem)
            (serving_pass,) = system.passes
            config = system.run.config
            assert config.decoding.ignore_eos == is_emulated
            assert (system.plan(serving_pass, [0, 1]).weights == 0) == is_emulated
            assert system.plan(serving_pass, [0, 1]).total > 0
            models = system.make_models(CPU, make_progress(False))
            assert isinstance(models, SleepingModels) == is_emulated
            connector = system.connector(MessageForm(1, torch.float32, 0), CPU)
            assert isinstance(connector, LateConnector) == is_emulated
            if is_emulated:
                assert config.to_dict()["model"]["native_steps"] == "off"
                (plan, *_) = system.model_plans(serving_pass, 0)
                model = models.get(system.run.source, Group((0,), 0), plan.kinds, plan.part)
                assert isinstance(model, SleepingModel) and model.seconds == STAGE_S
                assert isinstance(connector, LateConnector) and connector.delay_s == LINK_S
