"""Ctrl-C while a library computes that calls back into Python: it is neither lost nor raised
inside, and whoever set a handler of their own keeps it."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from magicdec.distributed.ranks import interrupting_no_child
from magicdec.runner.native_steps.interrupts import Interrupts


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_raised_when_the_library_has_returned() -> None:
    interrupts = Interrupts()
    answers = list[int]()
    may_wait = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: int(not interrupts.is_kept))
    with pytest.raises(KeyboardInterrupt), interrupts.kept():
        answers.append(may_wait())
        signal.raise_signal(signal.SIGINT)
        answers.append(may_wait())
    assert answers == [1, 0]
    with interrupts.kept():
        assert may_wait() == 1, "it was raised once"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    with Interrupts().kept():
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT]


def test_another_thread_keeps_nothing() -> None:
    """Signals are handled in the main thread."""
    passed: list[bool] = []

    def compute() -> None:
        with Interrupts().kept():
            passed.append(signal.getsignal(signal.SIGINT) is signal.default_int_handler)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert passed == [True]


def test_ctrl_c_reaches_no_child_and_waits_until_all_are_started() -> None:
    """Also where another thread takes the signal, such as that of a progress bar."""
    goes_on = threading.Event()
    started = list[subprocess.Popen[bytes]]()
    thread = threading.Thread(target=goes_on.wait)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt), interrupting_no_child():
            os.kill(os.getpid(), signal.SIGINT)
            child = [sys.executable, "-c", "print(end='ready', flush=True); input()"]
            started.append(subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        process = started[0]
        assert process.stdout is not None and process.stdout.read(5) == b"ready"
        process.send_signal(signal.SIGINT)
        process.communicate(b"go on\n")
        assert process.returncode == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        goes_on.set()
        thread.join()
