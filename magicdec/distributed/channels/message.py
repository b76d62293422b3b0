"""Messages from one rank to another, in order: numbers, and a tensor of hidden states behind them.

Owns the form of a message and both ends of a channel. Nothing is pickled. `pipeline` and
`pipelined_run` give the kinds their meaning.

A rank that waits for a peer which has ended raises `PeerLost`, and so does one that waits for
longer than PATIENCE_S.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

PATIENCE_S = 600.0  # the longest wait for a message, or for room to send one
WORD_BYTES = 8
NUM_FIELDS = 6  # of a header, before its words


class Kind(IntEnum):
    HIDDEN = 1  # hidden states, which the receiver computes further
    VOID = 2  # in place of hidden states that nobody needs
    FREE = 3  # rows whose memory is free again
    PROBE = 4  # hidden states that are only passed on, to time the links
    END = 5  # no message follows
    NUMBERS = 6  # results, drafts, or what is asked for


COMPUTED = (Kind.HIDDEN, Kind.VOID)  # of runs, which every stage computes or skips


@dataclass(frozen=True)
class Message:
    """`run` is the number of the run, or of the draft step, that it belongs to. `words` are numbers
    whose meaning the kind gives. `payload` are hidden states [rows, tokens, hidden], None if there
    are none."""

    kind: Kind
    run: int = 0
    status: int = 0
    words: tuple[int, ...] = ()
    payload: Tensor | None = None

    def on_host(self) -> Message:
        """The same with its payload in the memory of the host."""
        return self if self.payload is None else replace(self, payload=to_host(self.payload))


def words_of(values: Iterable[float]) -> tuple[int, ...]:
    """Words with the bits of float64 numbers."""
    return tuple(array("q", array("d", values).tobytes()))


def floats_of(words: Sequence[int]) -> list[float]:
    """The numbers whose bits the words have."""
    return array("d", array("q", words).tobytes()).tolist()


@dataclass(frozen=True)
class MessageForm:
    """What both ends of a channel must agree on. A message is a header, int64 [6 + num_words]; the
    words that do not fit there, as a tensor of their own; and the payload as it is, of `width` and
    `dtype`."""

    width: int
    dtype: torch.dtype
    num_words: int

    def numbers(self, message: Message) -> list[Tensor]:
        """All but the payload. The header has kind, run, status, rows, tokens, the number of words,
        and the first words."""
        count, words = self.num_words, message.words
        rows, tokens = (0, 0) if message.payload is None else message.payload.shape[:2]
        fields = (message.kind, message.run, message.status, rows, tokens, len(words))
        header = (*fields, *words[:count], *[0] * (count - len(words)))
        tensors = [torch.tensor(header, dtype=torch.int64)]
        if len(words) > count:
            tensors.append(torch.tensor(words[count:], dtype=torch.int64))
        return tensors

    def num_bytes(self, num_tokens: int, num_words: int = 0) -> int:
        """Bytes of a message with the hidden states of so many tokens, of all rows together."""
        header_bytes = WORD_BYTES * (NUM_FIELDS + max(self.num_words, num_words))
        return header_bytes + num_tokens * self.width * self.dtype.itemsize


class Traffic(NamedTuple):
    """What was sent through a channel so far, headers included."""

    num_messages: int = 0
    num_bytes: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(*(now - before for now, before in zip(self, earlier, strict=True)))


class Sender(Protocol):
    @property
    def traffic(self) -> Traffic: ...

    def send(self, message: Message) -> None:
        """Returns before the receiver has the message, unless too many are under way."""

    def close(self) -> None:
        """Wait until everything is sent."""


class Receiver(Protocol):
    def receive(self) -> Message:
        """The next message. Waits for it."""


@dataclass(frozen=True)
class Ends:
    """This rank's ends of two channels: from the rank before it, and to the next."""

    inbound: Receiver
    outbound: Sender


class TensorWriter(Protocol):
    """What carries tensors to the peer."""

    num_bytes: int

    def send(self, tensor: Tensor) -> None:
        """Returns before the peer has it, unless too many are under way."""

    def close(self) -> None:
        """Wait until everything is sent."""


Fill = Callable[[Tensor], None]
"""Fills a tensor with what comes next through a channel."""


class ChannelSender:
    """Payloads that are on a GPU are copied through the memory of the host, unless `payloads`
    carries them from device to device, apart from their headers."""

    def __init__(
        self, form: MessageForm, writer: TensorWriter, payloads: TensorWriter | None = None
    ) -> None:
        self.form, self.writer, self.payloads = form, writer, payloads
        self._num_messages = 0

    @property
    def traffic(self) -> Traffic:
        apart = 0 if self.payloads is None else self.payloads.num_bytes
        return Traffic(self._num_messages, self.writer.num_bytes + apart)

    def send(self, message: Message) -> None:
        for tensor in self.form.numbers(message):
            self.writer.send(tensor)
        if message.payload is not None and self.payloads is not None:
            self.payloads.send(message.payload.contiguous())
        elif message.payload is not None:
            self.writer.send(to_host(message.payload).contiguous())
        self._num_messages += 1

    def close(self) -> None:
        self.writer.close()
        if self.payloads is not None:
            self.payloads.close()


@dataclass(frozen=True)
class ChannelReceiver:
    """Payloads arrive on `device`: by `payloads` if they go apart from their headers."""

    form: MessageForm
    fill: Fill
    device: torch.device
    payloads: Fill | None = None

    def receive(self) -> Message:
        header = torch.empty(NUM_FIELDS + self.form.num_words, dtype=torch.int64)
        self.fill(header)
        kind, run, status, rows, tokens, num_words, *words = header.tolist()
        if num_words > self.form.num_words:
            others = torch.empty(num_words - self.form.num_words, dtype=torch.int64)
            self.fill(others)
            words += others.tolist()
        payload = self._payload((rows, tokens, self.form.width)) if rows * tokens else None
        return Message(Kind(kind), run, status, tuple(words[:num_words]), payload)

    def _payload(self, shape: tuple[int, ...]) -> Tensor:
        if self.payloads is not None:
            payload = torch.empty(shape, dtype=self.form.dtype, device=self.device)
            self.payloads(payload)
            return payload
        payload = torch.empty(shape, dtype=self.form.dtype)
        self.fill(payload)
        return to_device(payload, self.device)


class Loopback:
    """Both ends of a channel from a rank to itself: of a ring of one stage, or between two of its
    threads. Nothing is copied."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self.traffic = Traffic()

    def send(self, message: Message) -> None:
        self._messages.put(message)
        self.traffic = Traffic(self.traffic.num_messages + 1)

    def receive(self) -> Message:
        return self._messages.get()

    def close(self) -> None:
        """There is nothing to wait for."""


def to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory of the host; a tensor that is there is returned as it is. Waits for
    the work on the tensor's stream."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, which is complete for all later work on its stream; a tensor that is on
    such a device is returned as it is."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
