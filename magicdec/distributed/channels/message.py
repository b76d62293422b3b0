"""Typed messages from one rank to another, in order, and what both ends of a channel promise.

Owns the form of a message: a header of int64 numbers, then the tensor that it carries. Nothing is
pickled. `pipeline` and `pipelined_run` give the kinds their meaning.

A rank that waits for a peer which has ended raises `PeerLost`, and so does one that waits for
longer than PATIENCE_S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Protocol

import torch
from torch import Tensor

PATIENCE_S = 600.0  # the longest wait for a message, or for room to send one
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of a PackedForm
WORD_BYTES = 8


class Kind(IntEnum):
    HIDDEN = 1  # hidden states, which the receiver computes further
    VOID = 2  # in place of hidden states that nobody needs
    FREE = 3  # rows whose memory is free again
    PROBE = 4  # hidden states that are only passed on, to time the links
    END = 5  # no message follows
    NUMBERS = 6  # results, drafts, or what is asked for


@dataclass(frozen=True)
class Message:
    """`run` is the id of the run or lane that it belongs to. `words` are numbers whose meaning the
    kind gives. `payload` is None if there is nothing behind them; hidden states are [rows, tokens,
    hidden]."""

    kind: Kind
    run: int = 0
    status: int = 0
    words: tuple[int, ...] = ()
    payload: Tensor | None = None


Fill = Callable[[Tensor], None]
"""Fills a tensor with what comes next through a channel."""


class Form(Protocol):
    """What both ends of a channel must agree on: which tensors a message travels as."""

    def tensors(self, message: Message) -> list[Tensor]:
        """The header, and what follows it."""

    def receive(self, fill: Fill) -> Message: ...


@dataclass(frozen=True)
class MessageForm:
    """Hidden states of `width` and `dtype`, and at most `max_words` words: a header of fixed size,
    int64 [6 + max_words], and the payload as it is."""

    width: int
    dtype: torch.dtype
    max_words: int

    def tensors(self, message: Message) -> list[Tensor]:
        """The header has kind, run, rows, tokens, status, the number of words, and the words."""
        rest = self.max_words - len(message.words)
        assert rest >= 0, "a message has room for its words"
        rows, tokens = (0, 0) if message.payload is None else message.payload.shape[:2]
        numbers = (message.kind, message.run, rows, tokens, message.status, len(message.words))
        header = torch.tensor([*numbers, *message.words, *[0] * rest], dtype=torch.int64)
        return [header] if message.payload is None else [header, message.payload.contiguous()]

    def receive(self, fill: Fill) -> Message:
        header = torch.empty(6 + self.max_words, dtype=torch.int64)
        fill(header)
        kind, run, rows, tokens, status, num_words, *words = header.tolist()
        payload = None
        if rows * tokens:
            payload = torch.empty(rows, tokens, self.width, dtype=self.dtype)
            fill(payload)
        return Message(Kind(kind), run, status, tuple(words[:num_words]), payload)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a message with the hidden states of so many tokens, of all rows together."""
        header_bytes = WORD_BYTES * (6 + self.max_words)
        return header_bytes + num_tokens * self.width * self.dtype.itemsize


class PackedForm:
    """Any number of words, and a payload of at most three dimensions and one of DTYPES: a header,
    int64 [9], and the words and the bytes of the payload as one tensor of int64. A payload arrives
    with three dimensions; an empty one does not."""

    def tensors(self, message: Message) -> list[Tensor]:
        """The header has kind, run, status, the number of words, the length of what follows, and
        the dtype and the shape of the payload."""
        body, dtype, shape = torch.tensor(message.words, dtype=torch.int64), 0, [0, 0, 0]
        if (payload := message.payload) is not None and payload.numel():
            data = payload.contiguous().view(-1).view(torch.uint8)
            data = torch.nn.functional.pad(data, (0, -len(data) % WORD_BYTES))
            body = torch.cat([body, data.view(torch.int64)])
            dtype, shape = DTYPES.index(payload.dtype), [1] * (3 - payload.dim()) + [*payload.shape]
        numbers = (message.kind, message.run, message.status, len(message.words), len(body), dtype)
        header = torch.tensor([*numbers, *shape], dtype=torch.int64)
        return [header, body] if len(body) else [header]

    def receive(self, fill: Fill) -> Message:
        header = torch.empty(9, dtype=torch.int64)
        fill(header)
        kind, run, status, num_words, length, dtype, *shape = header.tolist()
        body, payload = torch.empty(length, dtype=torch.int64), None
        if length:
            fill(body)
        if prod(shape):
            payload = body[num_words:].view(DTYPES[dtype])[: prod(shape)].view(shape)
        return Message(Kind(kind), run, status, tuple(body[:num_words].tolist()), payload)


class Sender(Protocol):
    @property
    def num_bytes(self) -> int:
        """Bytes that were sent so far, headers included."""

    def send(self, message: Message) -> None:
        """Returns before the receiver has the message, unless too many are under way."""

    def close(self) -> None:
        """Wait until everything is sent."""


class Receiver(Protocol):
    def receive(self) -> Message:
        """The next message. Waits for it."""


class TensorWriter(Protocol):
    """What carries tensors to the peer."""

    num_bytes: int

    def send(self, tensor: Tensor) -> None:
        """Returns before the peer has it, unless too many are under way."""

    def close(self) -> None:
        """Wait until everything is sent."""


class FormSender:
    """Sends messages as the tensors of `form`."""

    def __init__(self, form: Form, writer: TensorWriter) -> None:
        self.form, self.writer, self.close = form, writer, writer.close

    @property
    def num_bytes(self) -> int:
        return self.writer.num_bytes

    def send(self, message: Message) -> None:
        for tensor in self.form.tensors(message):
            self.writer.send(tensor)


@dataclass(frozen=True)
class FormReceiver:
    form: Form
    fill: Fill

    def receive(self) -> Message:
        return self.form.receive(self.fill)
