"""RankWatch: who is named, when, and that no rank ends before the others have stopped to watch it;
and the sign of life between hosts, with a store in this process and a clock that the test moves."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from magicdec.cli import flags
from magicdec.distributed.groups import Launch, check_commands
from magicdec.distributed.ranks import LAUNCHER
from magicdec.distributed.watching import watch
from magicdec.distributed.watching import watch as watch_module
from magicdec.distributed.watching.processes import PeerLost, Processes
from magicdec.distributed.watching.watch import (
    INTERVAL_S,
    Heartbeat,
    LauncherWatch,
    RankWatch,
    end_process,
    end_stopped,
    first_word,
    leave_ranks,
    lost_key,
    meet,
    name_lost,
    naming_lost,
    stop_watching,
    watch_ranks,
)

LAUNCH = Launch(0, 2, 0, 2)
RESET = "[/gloo/transport/tcp/pair.cc:534] Connection closed by peer"


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """The process of rank 1."""
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def lost(other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What rank 0, which watches, says was lost, in place of ending this process."""
    lines: list[str] = []
    processes = Processes((os.getpid(), other.pid))
    monkeypatch.setattr(watch_module, "meet", lambda launch, place, patience=None: None)
    monkeypatch.setattr(watch_module, "processes_of", lambda launch: processes)
    monkeypatch.setattr(watch_module, "end_process", lambda launch, line: lines.append(line))
    watch_ranks(LAUNCH)
    yield lines
    stop_watching()


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, RankWatch)]


def test_a_rank_that_ends_is_named(lost: list[str], other: subprocess.Popen[bytes]) -> None:
    (thread,) = watches()
    watch_ranks(LAUNCH)
    assert watches() == [thread], "it watches already"
    time.sleep(2 * watch_module.LOOK_S)
    assert thread.is_alive() and not lost
    other.kill()
    thread.join()
    assert lost == ["rank 1 has ended"]


def test_a_rank_that_has_left_may_end(lost: list[str], other: subprocess.Popen[bytes]) -> None:
    leave_ranks()
    assert not watches()
    other.kill()
    leave_ranks()
    assert not lost


def test_a_failure_names_the_rank_that_has_ended(
    lost: list[str], other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all ranks run, or while none is watched, it stays what it is."""
    monkeypatch.setattr(watch_module, "CLOSING_S", 0.1)
    with pytest.raises(RuntimeError, match="closed by peer"), naming_lost(LAUNCH):
        raise RuntimeError(RESET)
    other.kill()
    with pytest.raises(PeerLost, match=r"^rank 1 has ended$"):
        name_lost(RuntimeError(RESET))
    with pytest.raises(ValueError, match="--B"), naming_lost(LAUNCH):
        raise ValueError("--B 0")
    stop_watching()
    lost.clear()
    with pytest.raises(RuntimeError, match="closed by peer"), naming_lost(LAUNCH):
        raise RuntimeError(RESET)
    with naming_lost(LAUNCH):
        raise PeerLost("rank 3 has ended")
    assert lost == ["rank 3 has ended"]


def test_a_rank_whose_connections_end_before_it_is_named(
    lost: list[str], other: subprocess.Popen[bytes]
) -> None:
    """As one does that Ctrl-C has interrupted."""
    closing = threading.Timer(0.4, other.kill)
    closing.start()
    with pytest.raises(PeerLost, match=r"^rank 1 has ended$"):
        name_lost(RuntimeError(RESET))
    closing.join()


def test_a_rank_that_is_stopped_for_long_is_named_and_ended(
    lost: list[str], other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM would reach it when it is continued."""
    stop_watching()
    monkeypatch.setattr(watch_module, "LOOK_S", 0.01)
    monkeypatch.setattr(watch_module, "PATIENCE_S", 0.045)
    watch_ranks(LAUNCH)
    (thread,) = watches()
    other.send_signal(signal.SIGSTOP)
    thread.join()
    assert lost == ["rank 1 has been stopped by a signal for 0 s"]
    monkeypatch.setattr(watch_module, "find_watch", lambda: thread)
    end_stopped()
    assert other.wait() == -signal.SIGKILL


def test_looks_are_counted_until_a_rank_is_lost(other: subprocess.Popen[bytes]) -> None:
    """Not seconds: when all ranks were stopped and are continued, the first of them sees the others
    stopped once, however long it was. A rank that is continued is counted anew."""
    processes = Processes((None, other.pid))
    watching = RankWatch(LAUNCH, processes, lambda line: None)

    def change(number: signal.Signals, stopped: list[int]) -> None:
        other.send_signal(number)
        while processes.stopped() != stopped:
            time.sleep(0.001)

    for _ in range(2):
        change(signal.SIGSTOP, [1])
        assert [watching._find_stopped() for _ in range(40)] == [""] * 40
        change(signal.SIGCONT, [])
        assert watching._find_stopped() == ""
    change(signal.SIGSTOP, [1])
    lines = [watching._find_stopped() for _ in range(41)]
    assert lines == [*[""] * 40, "rank 1 has been stopped by a signal for 20 s"]


def test_the_launcher_ends_a_rank_that_is_stopped_when_others_have_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then no rank watches it any more. While all run, it is theirs to name."""
    monkeypatch.setattr(watch_module, "LOOK_S", 0.01)
    monkeypatch.setattr(watch_module, "MOST_S", 0.045)
    ranks = [
        subprocess.Popen(["sleep", "60"], env=os.environ | {"RANK": str(rank)}) for rank in range(3)
    ]
    watching = LauncherWatch(3)
    watching.start()
    try:
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        assert [rank.poll() for rank in ranks] == [None] * 3
        ranks[2].terminate()
        assert ranks[1].wait(60) == -signal.SIGKILL
        assert ranks[0].poll() is None
        line = "rank 1 has been stopped by a signal for 0 s"
        assert {*capsys.readouterr().err.splitlines()} == {line}
    finally:
        watching.stop()
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_ranks_meet_as_often_as_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank goes on when both have come for the same time."""
    store = HashStore()
    monkeypatch.setattr(watch_module, "rendezvous_store", lambda launch: store)
    passed: list[int] = []

    def rank(number: int) -> None:
        for turn in range(3):
            meet(Launch(number, 2, number, 2), "here")
            passed.append(turn)

    first = threading.Thread(target=rank, args=(0,))
    first.start()
    for turn in range(3):
        time.sleep(0.05)
        assert passed.count(turn) == 0
        meet(Launch(1, 2, 1, 2), "here")
    first.join()
    assert passed == [0, 1, 2]


@pytest.mark.parametrize("other", ["magicdec run", "magicdec latency"])
def test_ranks_with_another_command_are_refused(other: str) -> None:
    """On every rank, where each would wait for what the other never says."""
    store = HashStore()
    messages = dict[int, str]()

    def rank(number: int, command: str) -> None:
        try:
            check_commands(Launch(number, 2, 0, 1), store, command)
        except ValueError as error:
            messages[number] = str(error)

    first = threading.Thread(target=rank, args=(0, "magicdec run"))
    first.start()
    rank(1, other)
    first.join()
    line = f"rank 0 runs magicdec run, rank 1 runs {other}; start one command on all"
    assert messages == ({} if other == "magicdec run" else {0: line, 1: line})


def test_between_hosts_the_first_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 sees that rank 2 ends, which has lost rank 1. Of another attempt nothing is said."""
    served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(served.port))
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert first_word("the connection with rank 1 is lost") == "the connection with rank 1 is lost"
    assert first_word("the connection with rank 2 is lost") == "the connection with rank 1 is lost"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert first_word("the connection with rank 2 is lost") == "the connection with rank 2 is lost"
    monkeypatch.setattr(watch_module, "timedelta", lambda seconds: timedelta(seconds=0.5))
    monkeypatch.setenv("MASTER_PORT", "1")  # nobody answers
    assert first_word("rank 4 has ended") == "rank 4 has ended"


@pytest.mark.parametrize(
    ("launch", "is_awaited"),
    [
        (Launch(0, 4, 0, 2), True),
        (Launch(1, 4, 1, 2), True),
        (Launch(2, 4, 0, 2), False),
        (Launch(0, 2, 0, 2), False),
    ],
    ids=["first host", "its other rank", "second host", "one host"],
)
def test_the_host_of_the_store_ends_when_the_others_have_read_what_was_lost(
    launch: Launch, is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks read the store every INTERVAL_S; it ends with the first rank's host."""
    events: list[object] = []

    def leave(code: int) -> None:
        events.append(("exit", code))
        raise SystemExit(code)

    monkeypatch.setattr(watch_module, "first_word", lambda line: "rank 3 has ended")
    monkeypatch.setattr(watch_module, "report_error", events.append)
    monkeypatch.setattr(watch_module.time, "sleep", events.append)
    monkeypatch.setattr(watch_module.os, "_exit", leave)
    with pytest.raises(SystemExit):
        end_process(launch, "rank 1 has ended")
    is_one_host = launch.local_world_size == launch.world_size
    line = f"rank {launch.rank}: rank {1 if is_one_host else 3} has ended"
    waits = [event for event in events if isinstance(event, float)]
    assert events == [line, *waits, ("exit", watch_module.LOST)]
    assert bool(waits) == is_awaited and sum(waits) >= 2 * INTERVAL_S * is_awaited


class WatchClock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WatchClock:
    """`time.monotonic` of the heartbeat, which a wait of INTERVAL_S moves on at once."""
    clock = WatchClock()

    def wait(event: threading.Event, seconds: float) -> bool:
        clock.now += seconds
        return event.is_set()

    monkeypatch.setattr(watch.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(threading.Event, "wait", wait)
    return clock


class CountingStore(HashStore):
    """A store in which the other rank, 1, lives for `beats` reads."""

    def __init__(self, beats: int) -> None:
        super().__init__()
        self.beats = beats
        self.reads = 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return str(min(self.reads, self.beats)).encode()

    def check(self, keys: list[str]) -> bool:
        return keys != [lost_key()]


def beat_until_lost(store: HashStore) -> list[str]:
    lost: list[str] = []
    Heartbeat(store, 0, 2, lost.append).run()
    return lost


def test_a_rank_that_is_silent_is_named(clock: WatchClock) -> None:
    (line,) = beat_until_lost(CountingStore(beats=5))
    assert line == "rank 1 has not been heard of for 22 s"
    assert clock.now < 5 * INTERVAL_S + 30


def test_a_rank_that_never_came_is_named(clock: WatchClock) -> None:
    class Empty(HashStore):
        def check(self, keys: list[str]) -> bool:
            return False

    assert beat_until_lost(Empty()) == ["rank 1 has not been heard of for 22 s"]


def test_a_store_that_does_not_answer_is_the_host_of_rank_0(clock: WatchClock) -> None:
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    assert beat_until_lost(Gone()) == ["the host of rank 0 has not answered for 22 s"]


def test_the_word_of_the_rank_that_noticed_first_is_repeated(clock: WatchClock) -> None:
    """A rank whose neighbour ended because a third was lost names the third."""
    store = HashStore()
    store.compare_set(lost_key(), "", "rank 3 has ended")
    store.compare_set(lost_key(), "", "rank 2 has ended")
    assert beat_until_lost(store) == ["rank 3 has ended"]
    assert clock.now < INTERVAL_S


def test_ctrl_c_stops_the_threads_that_watch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is in torch's store when Python ends would abort the process."""
    stopped: list[bool] = []
    monkeypatch.setattr(flags, "stop_watching", lambda: stopped.append(True))

    def interrupted(words: object, launch: object) -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        flags.run_ranks(interrupted)
    assert ended.value.code == 130 and stopped
    assert capsys.readouterr().err == "interrupted; no record was written\n"


def test_ctrl_c_says_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once: of ranks that `--nproc` has started, their launcher says it."""
    monkeypatch.setattr(flags, "start_ranks", lambda nproc, words: 130)
    monkeypatch.setattr(sys, "argv", ["magicdec run"])
    with pytest.raises(SystemExit):
        flags.run_on_ranks(2, [], Launch(), kept="two records are in FILE")
    monkeypatch.setenv(LAUNCHER, "1")
    assert flags.say_interrupted(Launch(), "its rank says it too") == 130
    assert flags.say_interrupted(Launch(1, 2, 1, 2), "another rank") == 130
    assert capsys.readouterr().err == "interrupted; two records are in FILE\n"


def test_ctrl_c_within_an_import_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries swallow the exception, and go on without a part of themselves."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.getsignal(signal.SIGINT)
    with flags.ended_at_once(Launch()), suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert ended == [130] and signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().err == "interrupted; no record was written\n"
