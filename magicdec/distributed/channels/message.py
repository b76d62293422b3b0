"""Messages from one rank to another, in order: numbers, and a tensor of hidden states. Nothing is
pickled. A wait for an ended peer, or beyond PATIENCE_S, raises `PeerLost`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
    END = 4  # no message follows
    NUMBERS = 5  # results, drafts, or what is asked for


@dataclass(frozen=True)
class Message:
    """A message of the run or draft step `run`: `words` with a meaning by kind, and a `payload` of
    hidden states [rows, tokens, hidden] or None."""

    kind: Kind
    run: int = 0
    status: int = 0
    words: tuple[int, ...] = ()
    payload: Tensor | None = None


def words_of(values: Iterable[float]) -> tuple[int, ...]:
    """The bits of float64 numbers as words."""
    return tuple(array("q", array("d", values).tobytes()))


def floats_of(words: Sequence[int]) -> list[float]:
    """The float64 numbers of the bits of words."""
    return array("d", array("q", words).tobytes()).tolist()


@dataclass(frozen=True)
class MessageForm:
    """The format of a channel: a header, int64 [6 + num_words], a tensor of further words, and the
    payload, of `width` and `dtype`."""

    width: int
    dtype: torch.dtype
    num_words: int

    def numbers(self, message: Message) -> list[Tensor]:
        """The header (kind, run, status, rows, tokens, number of words, first words), and further
        words."""
        count = self.num_words
        words = message.words
        rows, tokens = (0, 0) if message.payload is None else message.payload.shape[:2]
        fields = (message.kind, message.run, message.status, rows, tokens, len(words))
        header = (*fields, *words[:count], *[0] * (count - len(words)))
        tensors = [torch.tensor(header, dtype=torch.int64)]
        if len(words) > count:
            tensors.append(torch.tensor(words[count:], dtype=torch.int64))
        return tensors

    def num_bytes(self, num_tokens: int, num_words: int = 0) -> int:
        """Bytes of a message with `num_tokens` hidden states."""
        header_bytes = WORD_BYTES * (NUM_FIELDS + max(self.num_words, num_words))
        return header_bytes + num_tokens * self.width * self.dtype.itemsize


class Traffic(NamedTuple):
    num_messages: int = 0
    num_bytes: int = 0

    def since(self, earlier: Traffic) -> Traffic:
        return Traffic(*(now - before for now, before in zip(self, earlier, strict=True)))


class Sender:
    """The sending end of a channel. By default it does nothing."""

    @property
    def traffic(self) -> Traffic:
        return Traffic()

    def send(self, message: Message) -> None:
        """Send the message. Waits only if too many are under way."""

    def close(self) -> None:
        """Wait until everything is sent."""


class Receiver(Protocol):
    def receive(self) -> Message:
        """The next message, once it has come."""

    def has_arrived(self, seconds: float) -> bool:
        """False if the next message, under way, has not come after so many seconds. A channel that
        cannot tell returns True at once."""


@dataclass(frozen=True)
class Ends:
    """This rank's ends of the channels from the previous rank and to the next."""

    inbound: Receiver
    outbound: Sender


class Carrier(Protocol):
    """One end of a carrier of tensors between two ranks."""

    num_bytes: int  # that were sent

    def send(self, tensor: Tensor) -> None:
        """Send the tensor. Waits only if too many are under way."""

    def fill(self, tensor: Tensor) -> None:
        """Receive into `tensor`, and wait until it is in this rank's memory."""

    def has_arrived(self, seconds: float) -> bool:
        """As `Receiver.has_arrived`."""

    def close(self) -> None:
        """Wait until everything is sent."""


class ChannelSender(Sender):
    """A sender that copies GPU payloads through host memory, unless `payloads` carries them."""

    def __init__(self, form: MessageForm, writer: Carrier, payloads: Carrier | None = None) -> None:
        self.form = form
        self.writer = writer
        self.payloads = payloads
        self.carriers = [carrier for carrier in (writer, payloads) if carrier is not None]
        self._num_messages = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._num_messages, sum(carrier.num_bytes for carrier in self.carriers))

    def send(self, message: Message) -> None:
        for tensor in self.form.numbers(message):
            self.writer.send(tensor)
        if message.payload is not None and self.payloads is not None:
            self.payloads.send(message.payload.contiguous())
        elif message.payload is not None:
            self.writer.send(to_host(message.payload).contiguous())
        self._num_messages += 1

    def close(self) -> None:
        for carrier in self.carriers:
            carrier.close()


@dataclass(frozen=True)
class ChannelReceiver:
    """A receiver of payloads on `device`, by `payloads` if they go apart."""

    form: MessageForm
    reader: Carrier
    device: torch.device
    payloads: Carrier | None = None

    def receive(self) -> Message:
        header = torch.empty(NUM_FIELDS + self.form.num_words, dtype=torch.int64)
        self.reader.fill(header)
        kind, run, status, rows, tokens, num_words, *words = header.tolist()
        if num_words > self.form.num_words:
            others = torch.empty(num_words - self.form.num_words, dtype=torch.int64)
            self.reader.fill(others)
            words += others.tolist()
        payload = self._payload((rows, tokens, self.form.width)) if rows * tokens else None
        return Message(Kind(kind), run, status, tuple(words[:num_words]), payload)

    def has_arrived(self, seconds: float) -> bool:
        return self.reader.has_arrived(seconds)

    def _payload(self, shape: tuple[int, ...]) -> Tensor:
        if self.payloads is not None:
            payload = torch.empty(shape, dtype=self.form.dtype, device=self.device)
            self.payloads.fill(payload)
            return payload
        payload = torch.empty(shape, dtype=self.form.dtype)
        self.reader.fill(payload)
        return to_device(payload, self.device)


@dataclass(frozen=True)
class SharedReceiver:
    """The receiver of the first of ranks that compute together; `others` get its messages after
    `change`."""

    receiver: Receiver
    others: Sequence[Sender]
    change: Callable[[Message], Message] = lambda message: message

    def receive(self) -> Message:
        message = self.change(self.receiver.receive())
        for other in self.others:
            other.send(message)
            if message.kind is Kind.END:
                other.close()
        return message

    def has_arrived(self, seconds: float) -> bool:
        return self.receiver.has_arrived(seconds)


class Nowhere(Sender):
    """The outbound end of a rank whose answers its stage's first rank sends."""


class Loopback(Sender):
    """Both ends of a channel within a rank, without a copy."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._num_messages = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(self._num_messages)

    def send(self, message: Message) -> None:
        self._messages.put(message)
        self._num_messages += 1

    def receive(self) -> Message:
        return self._messages.get()

    def has_arrived(self, seconds: float) -> bool:
        return True  # what is under way has come


def to_host(tensor: Tensor) -> Tensor:
    """A complete copy in pinned host memory, or the tensor itself on the host."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    wait_for_stream(tensor.device)
    return host


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device` for later work on its stream, or the tensor itself there."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def wait_for_stream(device: torch.device) -> None:
    """Wait for this thread's work on the device, but not for messages of other streams, whose
    receiver may be waiting for this rank."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
