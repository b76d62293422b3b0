"""The sign of life between hosts, with a store in this process and a clock that the test moves."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from magicdec.distributed import heartbeat
from magicdec.distributed.heartbeat import ENDED, PATIENCE_S, Heartbeat


class Clock:
    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """`time.monotonic` of the heartbeat, which a wait of INTERVAL_S moves on at once."""
    clock = Clock()

    def wait(event: threading.Event, seconds: float) -> bool:
        clock.now += seconds
        return event.is_set()

    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(threading.Event, "wait", wait)
    return clock


class Counting(HashStore):
    """A store in which the other rank, 1, lives for `beats` reads, and then ends as `last` says."""

    def __init__(self, beats: int, last: bytes | None = None) -> None:
        super().__init__()
        self.beats, self.last, self.reads = beats, last, 0

    def get(self, key: str) -> bytes:
        self.reads += 1
        if self.reads > self.beats:
            return self.last or str(self.beats).encode()
        return str(self.reads).encode()

    def check(self, keys: list[str]) -> bool:
        return True


def beat_until_lost(store: HashStore) -> list[str]:
    lost: list[str] = []
    Heartbeat(store, 0, 2, lost.append).run()
    return lost


def test_a_rank_that_is_silent_is_named(clock: Clock) -> None:
    (line,) = beat_until_lost(Counting(beats=5))
    assert line == "rank 1 has not been heard of for 22 s"
    assert clock.now < 5 * heartbeat.INTERVAL_S + 30


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


def test_a_rank_that_has_ended_in_order_is_not_missed(clock: Clock) -> None:
    store = Counting(beats=5, last=ENDED.encode())
    lost: list[str] = []
    beat = Heartbeat(store, 0, 2, lost.append)

    def stop_later(event: threading.Event, seconds: float) -> bool:
        clock.now += seconds
        if clock.now > 5 * PATIENCE_S:
            beat._ending.set()
        return event.is_set()

    beat._ending.wait = lambda seconds: stop_later(beat._ending, seconds)  # type: ignore[method-assign]
    beat.run()
    assert lost == []


def test_a_stopped_heartbeat_says_that_the_rank_has_ended() -> None:
    store = HashStore()
    beat = Heartbeat(store, 0, 1, lambda line: None)
    beat.start()
    while not store.check(["heartbeat/0"]):
        time.sleep(0.01)
    beat.stop()
    assert store.get("heartbeat/0") == ENDED.encode() and not beat.is_alive()
