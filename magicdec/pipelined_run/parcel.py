"""What ranks of pipelined speculation send each other: numbers, and sometimes a tensor behind them,
as one message of int64; between two threads of one rank (`LocalChannel`) they stay as they are.

A launch is the words of `Launch` and the hidden states of its rows. Its result is the next token of
each row that asked for one, and by how much the largest logit exceeds the second: 16 bytes a row.
Must not know who sends what when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from queue import SimpleQueue

import torch
from torch import Tensor

from magicdec.distributed.channels.message import Kind, Message, MessageForm
from magicdec.pipelined_speculation.messages import Candidates

WORD_BYTES = 8
FORM = MessageForm(width=1, dtype=torch.int64, max_words=0)


def pack(kind: Kind, run: int, numbers: Sequence[int], tensor: Tensor | None = None) -> Message:
    """A message of `numbers`, whose count is its status, and the bytes of `tensor`."""
    words = torch.tensor(numbers, dtype=torch.int64)
    if tensor is not None:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        rest = -len(data) % WORD_BYTES
        data = torch.cat([data, data.new_zeros(rest)]) if rest else data
        words = torch.cat([words, data.view(torch.int64)])
    payload = words.view(1, -1, 1) if len(words) else None
    return Message(kind, run, len(numbers), payload=payload)


def numbers_of(message: Message) -> list[int]:
    if message.payload is None:
        return []
    found: list[int] = message.payload.view(-1)[: message.status].tolist()
    return found


def margins_of(message: Message) -> list[float]:
    """Of the result of a run, whose numbers are tokens: how certain each of them is."""
    found: list[float] = tensor_of(message, [message.status], torch.float64).tolist()
    return found


def tensor_of(message: Message, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor behind the numbers, or apart from them, which has this shape."""
    if message.tensor is not None:
        return message.tensor
    if message.payload is None:
        return torch.empty(*shape, dtype=dtype)
    return message.payload.view(-1)[message.status :].view(dtype)[: prod(shape)].view(*shape)


@dataclass(frozen=True)
class DraftRequest:
    """The text of `request`, whose first `kept` tokens the drafter has, goes on with `new`. `paths`
    are the continuations after which candidates are asked for; without any there is no answer."""

    request: int
    lane: int
    kept: int
    new: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...] = ()

    def to_message(self, draft: int) -> Message:
        lengths = [len(path) for path in self.paths]
        header = [self.request, self.lane, self.kept, len(self.new), len(self.paths), *lengths]
        tokens = [token for path in self.paths for token in path]
        return pack(Kind.NUMBERS, draft, [*header, *self.new, *tokens])

    @classmethod
    def from_message(cls, message: Message) -> DraftRequest:
        numbers = iter(numbers_of(message))
        request, lane, kept, num_new, num_paths = islice(numbers, 5)
        lengths = list(islice(numbers, num_paths))
        new = tuple(islice(numbers, num_new))
        return cls(request, lane, kept, new, tuple(tuple(islice(numbers, n)) for n in lengths))


def pack_candidates(draft: int, candidates: Sequence[Candidates]) -> Message:
    """The answer to a DraftRequest: the candidates of each path in order."""
    counts = [len(each) for each in candidates]
    pairs = [pair for each in candidates for pair in each]
    numbers = [len(counts), *counts, *(token for token, _ in pairs)]
    probabilities = torch.tensor([p for _, p in pairs], dtype=torch.float64)
    return pack(Kind.NUMBERS, draft, numbers, probabilities)


def candidates_of(message: Message) -> list[Candidates]:
    numbers = iter(numbers_of(message))
    counts = list(islice(numbers, next(numbers)))
    tokens = list(numbers)
    probabilities = tensor_of(message, [len(tokens)], torch.float64).tolist()
    pairs = iter(zip(tokens, probabilities, strict=True))
    return [tuple(islice(pairs, count)) for count in counts]


class LocalChannel:
    """Both ends of a channel between two threads of a rank, which may be the head, the first stage
    and the drafter at once."""

    num_bytes = 0  # nothing is copied

    def __init__(self) -> None:
        self._messages: SimpleQueue[Message] = SimpleQueue()

    def send(self, message: Message) -> None:
        self._messages.put(message)

    def receive(self) -> Message:
        return self._messages.get()

    def close(self) -> None:
        """There is nothing to wait for."""
