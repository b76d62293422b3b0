"""Typed messages from one rank to another, in order, and what both ends of a channel promise.

Owns the form of a message: a header of int64 numbers, then the hidden states in their own dtype.
Nothing is pickled. Must not know what a message is for (`pipeline` gives the kinds their meaning),
nor how it travels.

A rank that waits for a peer which has ended raises `PeerLost`, and so does one that waits for
longer than PATIENCE_S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Protocol

import torch
from torch import Tensor

PATIENCE_S = 600.0  # the longest wait for a message, or for room to send one
FIELDS = 5  # of a header, before its words


class Kind(IntEnum):
    HIDDEN = 1  # hidden states, which the receiver computes further
    VOID = 2  # in place of hidden states that nobody needs
    FREE = 3  # rows whose memory is free again
    PROBE = 4  # hidden states that are only passed on, to time the links
    END = 5  # no message follows
    NUMBERS = 6  # a payload of int64 numbers


@dataclass(frozen=True)
class Message:
    """`run` is the id of the run or lane that it belongs to. `words` are numbers whose meaning the
    kind gives. `payload` [rows, tokens, hidden] is None if there are no tokens. `tensor` is what
    came apart from the message; channels do not send it."""

    kind: Kind
    run: int = 0
    status: int = 0
    words: tuple[int, ...] = ()
    payload: Tensor | None = None
    tensor: Tensor | None = None


@dataclass(frozen=True)
class MessageForm:
    """What both ends of a channel must agree on: the hidden size, the dtype, and the most words of
    a message."""

    width: int
    dtype: torch.dtype
    max_words: int

    def header(self, message: Message) -> Tensor:
        """int64 [FIELDS + 1 + max_words]: kind, run, rows, tokens, status, the number of words, and
        the words."""
        assert len(message.words) <= self.max_words, "a message has room for its words"
        rows, tokens = (0, 0) if message.payload is None else message.payload.shape[:2]
        numbers = [message.kind, message.run, rows, tokens, message.status, len(message.words)]
        numbers += [*message.words, *[0] * (self.max_words - len(message.words))]
        return torch.tensor(numbers, dtype=torch.int64)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a message with the hidden states of so many tokens, of all rows together."""
        return 8 * (FIELDS + 1 + self.max_words) + num_tokens * self.width * self.dtype.itemsize

    def empty_header(self) -> Tensor:
        return torch.empty(FIELDS + 1 + self.max_words, dtype=torch.int64)

    def empty_payload(self, header: Sequence[int]) -> Tensor | None:
        shape = header[2], header[3], self.width
        return torch.empty(shape, dtype=self.dtype) if prod(shape) else None

    def message(self, header: Sequence[int], payload: Tensor | None) -> Message:
        kind, run, _, _, status, num_words, *words = header
        return Message(Kind(kind), run, status, tuple(words[:num_words]), payload)


class Sender(Protocol):
    @property
    def num_bytes(self) -> int:
        """Bytes that were sent so far, headers included."""
        ...

    def send(self, message: Message) -> None:
        """Returns before the receiver has the message, unless too many are under way."""
        ...

    def close(self) -> None:
        """Wait until everything is sent."""
        ...


class Receiver(Protocol):
    def receive(self) -> Message:
        """The next message. Waits for it."""
        ...
