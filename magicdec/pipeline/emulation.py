"""What stands in for slower machines: stages that sleep after computing (`PaddedStage`), and links
with a delay and a bandwidth. Models that sleep in place of computing are `model/emulated.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Queue
from threading import Thread

from torch import Tensor

from magicdec.distributed.channels.message import Message, MessageForm, Sender, Traffic
from magicdec.hardware.environment import wait_for_stream
from magicdec.model.emulated import sleep_until
from magicdec.pipeline.stage import Stage
from magicdec.runner import ModelRunner


@dataclass
class PaddedStage(Stage):
    """Computes, and takes at least `seconds` for a message."""

    seconds: float = 0.0

    def compute(self, x: Tensor, rows: Sequence[int], last_only: bool) -> Tensor:
        due_s = time.perf_counter() + self.seconds
        out = super().compute(x, rows, last_only)
        wait_for_stream(out.device)
        sleep_until(due_s)
        return out


def padded(runner: ModelRunner, pad_ms: float | None) -> Stage:
    """The stage of `runner`, which sleeps as `--pad_stage_ms` says."""
    is_last = runner.model.is_last
    if pad_ms is None:
        return Stage(runner, is_last)
    return PaddedStage(runner, is_last, seconds=pad_ms / 1e3)


@dataclass(frozen=True)
class Link:
    """A message occupies the link for its bytes over `bytes_per_s`, and arrives `delay_s` after
    that. None: without limit."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None

    def seconds(self, num_bytes: int) -> float:
        """How long a message of that size occupies the link."""
        return 0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s


class DelayedSender:
    """Sends through `sender`, which only its thread uses, as if over `link`."""

    def __init__(self, sender: Sender, link: Link, form: MessageForm) -> None:
        self.sender, self.link, self.form = sender, link, form
        self._free_at, self._error = 0.0, list[RuntimeError]()
        self._queue: Queue[tuple[float, Message]] = Queue()
        Thread(target=self._run, name="emulated link", daemon=True).start()

    @property
    def traffic(self) -> Traffic:
        return self.sender.traffic

    def send(self, message: Message) -> None:
        self._raise()
        payload = message.payload
        num_tokens = 0 if payload is None else payload.shape[0] * payload.shape[1]
        num_bytes = self.form.num_bytes(num_tokens, len(message.words))
        begin = max(time.perf_counter(), self._free_at)
        self._free_at = begin + self.link.seconds(num_bytes)
        self._queue.put((self._free_at + self.link.delay_s, message.on_host()))

    def close(self) -> None:
        self._queue.join()
        self._raise()
        self.sender.close()

    def _run(self) -> None:
        while True:
            due_s, message = self._queue.get()
            sleep_until(due_s)
            try:
                if not self._error:
                    self.sender.send(message)
            except RuntimeError as error:
                self._error.append(error)
            self._queue.task_done()

    def _raise(self) -> None:
        if self._error:
            raise self._error[0]
