"""Keeps Ctrl-C until a native call has returned.

A library that calls back into Python cannot be left by an exception. Python raises
KeyboardInterrupt at the entry of the function that is called back, where that function cannot catch
it, so that Ctrl-C would be lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Ctrl-C `is_kept` from its arrival inside `kept` until that ends by raising KeyboardInterrupt.
    Where another handler is set, or in another thread than the main one, nothing is kept."""

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
