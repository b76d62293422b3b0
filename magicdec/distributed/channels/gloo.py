"""A channel through gloo.

Owns how many messages are under way. Must not know what a message is for.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

from magicdec.distributed.channels.message import PATIENCE_S, Message, MessageForm
from magicdec.distributed.watching.processes import Processes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GlooSender:
    """At most `depth` messages are under way."""

    def __init__(
        self, handle: ProcessGroup, peer: int, form: MessageForm, depth: int, processes: Processes
    ) -> None:
        self.handle, self.peer, self.form = handle, peer, form
        self.depth, self.processes, self.num_bytes = depth, processes, 0
        self._under_way: deque[list[tuple[Any, Tensor]]] = deque()  # sends, with what they read

    def send(self, message: Message) -> None:
        import torch.distributed as dist

        while len(self._under_way) >= self.depth:
            self._wait()
        tensors = [self.form.header(message)]
        if message.payload is not None:
            tensors.append(message.payload.contiguous())
        try:
            works = [(dist.isend(t, self.peer, group=self.handle), t) for t in tensors]
        except RuntimeError as error:
            raise self.processes.lost(self.peer, error) from None
        self._under_way.append(works)
        self.num_bytes += sum(t.numel() * t.element_size() for t in tensors)

    def close(self) -> None:
        while self._under_way:
            self._wait()

    def _wait(self) -> None:
        for work, _ in self._under_way.popleft():
            wait_for(work, self.peer, self.processes)


class GlooReceiver:
    def __init__(
        self, handle: ProcessGroup, peer: int, form: MessageForm, processes: Processes
    ) -> None:
        self.handle, self.peer, self.form, self.processes = handle, peer, form, processes

    def receive(self) -> Message:
        header = self.form.empty_header()
        self._fill(header)
        numbers = header.tolist()
        payload = self.form.empty_payload(numbers)
        if payload is not None:
            self._fill(payload)
        return self.form.message(numbers, payload)

    def _fill(self, tensor: Tensor) -> None:
        import torch.distributed as dist

        try:
            work = dist.irecv(tensor, self.peer, group=self.handle)
        except RuntimeError as error:
            raise self.processes.lost(self.peer, error) from None
        wait_for(work, self.peer, self.processes)


def wait_for(work: Any, peer: int, processes: Processes) -> None:
    """Raises PeerLost if the peer has ended, or for a wait that is too long."""
    try:
        work.wait(timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        raise processes.lost(peer, error) from None
