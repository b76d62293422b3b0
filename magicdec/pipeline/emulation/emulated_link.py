"""DelayedSender: a link with a delay and a bandwidth, emulated where messages are sent.

Owns when a message goes out. Must not know what it holds.
"""

from __future__ import annotations

import time
from queue import Queue
from threading import Thread

from magicdec.distributed.channels.message import Message, MessageForm, Sender
from magicdec.pipeline.emulation.link import Link


class DelayedSender:
    """Sends through `sender`, which only its thread uses, as if over `link`."""

    def __init__(self, sender: Sender, link: Link, form: MessageForm) -> None:
        self.sender, self.link, self.form = sender, link, form
        self._free_at, self._error = 0.0, list[RuntimeError]()
        self._queue: Queue[tuple[float, Message]] = Queue()
        Thread(target=self._run, name="emulated link", daemon=True).start()

    @property
    def num_bytes(self) -> int:
        return self.sender.num_bytes

    def send(self, message: Message) -> None:
        self._raise()
        num_tokens = 0 if message.payload is None else message.payload[..., 0].numel()
        begin = max(time.perf_counter(), self._free_at)
        self._free_at = begin + self.link.seconds(self.form.num_bytes(num_tokens))
        self._queue.put((self._free_at + self.link.delay_s, message))

    def close(self) -> None:
        self._queue.join()
        self._raise()
        self.sender.close()

    def _run(self) -> None:
        while True:
            due, message = self._queue.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            try:
                if not self._error:
                    self.sender.send(message)
            except RuntimeError as error:
                self._error.append(error)
            self._queue.task_done()

    def _raise(self) -> None:
        if self._error:
            raise self._error[0]
