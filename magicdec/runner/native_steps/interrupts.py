"""Keeps Ctrl-C until a native call returns. Python would raise KeyboardInterrupt in a called-back
function, which no exception can leave, so that Ctrl-C would be lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """A guard that delays Ctrl-C until `kept` ends. It does nothing under other handlers or
    outside the main thread."""

    def __init__(self) -> None:
        self.is_kept = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        ):
            yield
            return
        signal.signal(signal.SIGINT, self._keep)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.is_kept:
            self.is_kept = False
            raise KeyboardInterrupt

    def _keep(self, number: int, frame: Any) -> None:
        self.is_kept = True
