"""Plan: what one step does, and the limits within which it is decided.

Owns the numbers that a plan is sent as, so that every rank does the same. Imports no torch.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magicdec.request import Batch, Request

NONE = -1  # in place of the id of a request
NUMBERS_PER_ROW = 7


@dataclass(frozen=True)
class Limits:
    """What a running batch may take. The defaults limit nothing: every request is prefilled whole,
    and its row has room for it.

    With `num_blocks`, rows take blocks of `block_size` tokens as they grow, `num_blocks` in all.
    """

    max_tokens: int | None = None  # cached tokens of a row at most
    block_size: int = 1
    num_blocks: int | None = None
    step_tokens: int = 1  # tokens that a decode step appends to a row at most, drafts included
    prefill_tokens: int | None = None  # tokens that a step prefills at most
    max_waiting: int | None = None  # requests that may wait for a row

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check(self, request: Request) -> None:
        """Raise ValueError if the request can never be served, however long it waits."""
        prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
        # The newest token is never cached. Before the last step it is the last but one.
        num_tokens = prompt + max(new, 2) - 2 + self.step_tokens
        text = (
            f"request {request.request_id} needs {num_tokens} tokens of KV cache ({prompt} of its "
            f"prompt, {new} new ones, and room for a step of {self.step_tokens})"
        )
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise ValueError(f"{text}; a row holds at most {self.max_tokens}")
        if self.num_blocks is not None and self.num_blocks_of(num_tokens) > self.num_blocks:
            size = self.block_size
            raise ValueError(f"{text}; the cache holds {self.num_blocks} blocks of {size}")


@dataclass(frozen=True)
class Part:
    """The tokens `start` to `stop` - 1 of a request's text, which a step prefills."""

    request: Request
    row: int
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.num_cached

    @classmethod
    def whole(cls, requests: Sequence[Request]) -> tuple[Part, ...]:
        """All tokens of each request that are to be cached."""
        rows = Batch(tuple(requests)).rows
        pairs = zip(requests, rows, strict=True)
        return tuple(cls(request, row, 0, request.num_cached) for request, row in pairs)


@dataclass(frozen=True)
class Plan:
    """One step, in this order: rows are freed and given, blocks are reserved, parts of texts are
    prefilled, and the requests that were complete before decode. All sequences are in row order."""

    decoding: Batch | None = None
    preempted: tuple[tuple[Request, int], ...] = ()  # with the row that it leaves
    cancelled: tuple[tuple[Request, int], ...] = ()  # with the row that it leaves
    admitted: tuple[tuple[Request, int], ...] = ()  # with its new row
    reserved: tuple[tuple[int, int], ...] = ()  # (row, tokens that it must have room for)
    parts: tuple[Part, ...] = ()

    def to_numbers(self, num_rows: int, digest: int) -> list[int]:
        """The plan in a fixed number of integers: a hash of all others, the `digest` of the state
        that it was made from, and for each row the requests that leave it (preempted, cancelled)
        and get it, the tokens to prefill, whether it decodes, and the tokens to reserve."""
        table = [[NONE, NONE, NONE, 0, 0, 0, 0] for _ in range(num_rows)]
        for column, pairs in enumerate((self.preempted, self.cancelled, self.admitted)):
            for request, row in pairs:
                table[row][column] = request.request_id
        for part in self.parts:
            table[part.row][3:5] = part.start, part.stop
        for row in () if self.decoding is None else self.decoding.rows:
            table[row][5] = 1
        for row, num_tokens in self.reserved:
            table[row][6] = num_tokens
        numbers = [digest, *(number for of_row in table for number in of_row)]
        return [hash_of(numbers), *numbers]

    @classmethod
    def from_numbers(
        cls,
        numbers: Sequence[int],
        digest: int,
        find: Callable[[int], Request],
        in_rows: Sequence[Request | None],
    ) -> Plan:
        """The plan that another rank has sent. `find` gives a request by its id; `in_rows` are the
        requests that have the rows so far. Raises RuntimeError if this rank's state is another."""
        checksum, theirs, *table = numbers
        if checksum != hash_of(numbers[1:]) or theirs != digest:
            raise RuntimeError(
                f"the ranks disagree about the running batch: the plan of a step was made from "
                f"state {theirs:x}, and this rank is in state {digest:x}"
            )
        moves: tuple[list[tuple[Request, int]], ...] = ([], [], [])
        reserved, parts, decoding = [], [], []
        for row, request in enumerate(in_rows):
            first = row * NUMBERS_PER_ROW
            *ids, start, stop, decodes, num_tokens = table[first : first + NUMBERS_PER_ROW]
            for request_id, pairs in zip(ids, moves, strict=True):
                if request_id != NONE:
                    pairs.append((find(request_id), row))
            request = request if ids[2] == NONE else find(ids[2])
            if num_tokens:
                reserved.append((row, num_tokens))
            if stop and request is not None:
                parts.append(Part(request, row, start, stop))
            if decodes and request is not None:
                decoding.append(request)
        preempted, cancelled, admitted = map(tuple, moves)
        batch = Batch(tuple(decoding)) if decoding else None
        return cls(batch, preempted, cancelled, admitted, tuple(reserved), tuple(parts))


def hash_of(numbers: Sequence[int]) -> int:
    return zlib.crc32(array("q", numbers).tobytes())
