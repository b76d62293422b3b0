"""The sign of life between hosts, with a store in this process and a clock that the test moves."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import HashStore

from magicdec.distributed.watching import watch
from magicdec.distributed.watching.watch import INTERVAL_S, Heartbeat, lost_key


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """`time.monotonic` of the heartbeat, which a wait of INTERVAL_S moves on at once."""
    clock = Clock()

    def wait(event: threading.Event, seconds: float) -> bool:
        clock.now += seconds
        return event.is_set()

    monkeypatch.setattr(watch.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(threading.Event, "wait", wait)
    return clock


class Counting(HashStore):
    """A store in which the other rank, 1, lives for `beats` reads."""

    def __init__(self, beats: int) -> None:
        super().__init__()
        self.beats, self.reads = beats, 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        return str(min(self.reads, self.beats)).encode()

    def check(self, keys: list[str]) -> bool:
        return keys != [lost_key()]


def beat_until_lost(store: HashStore) -> list[str]:
    lost: list[str] = []
    Heartbeat(store, 0, 2, lost.append).run()
    return lost


def test_a_rank_that_is_silent_is_named(clock: Clock) -> None:
    (line,) = beat_until_lost(Counting(beats=5))
    assert line == "rank 1 has not been heard of for 22 s"
    assert clock.now < 5 * INTERVAL_S + 30


def test_a_rank_that_never_came_is_named(clock: Clock) -> None:
    class Empty(HashStore):
        def check(self, keys: list[str]) -> bool:
            return False

    assert beat_until_lost(Empty()) == ["rank 1 has not been heard of for 22 s"]


def test_a_store_that_does_not_answer_is_the_host_of_rank_0(clock: Clock) -> None:
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("Broken pipe")

    assert beat_until_lost(Gone()) == ["the host of rank 0 has not answered for 22 s"]


def test_the_word_of_the_rank_that_noticed_first_is_repeated(clock: Clock) -> None:
    """A rank whose neighbour ended because a third was lost names the third."""
    store = HashStore()
    store.compare_set(lost_key(), "", "rank 3 has ended")
    store.compare_set(lost_key(), "", "rank 2 has ended")
    assert beat_until_lost(store) == ["rank 3 has ended"]
    assert clock.now < INTERVAL_S
