"""Stage: this rank's layers of a model, and the loop in which it serves the messages of a ring.

Owns the order of a stage's work: a message is computed when it arrives and passed on, and rows are
freed when a message says so. Must not know of requests, nor why a row is computed.

A HIDDEN message holds the hidden states of new tokens of some rows, one row after the other in its
`words`. Its status is WANTED if logits of the last of these tokens are wanted; otherwise the last
stage sends VOID home.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from magicdec.distributed.channel import Kind, Message, RingEnds
from magicdec.runner import ModelRunner

WANTED = 1


@dataclass
class Occupancy:
    """What a rank did with its time. The rest of `total_s` is spent waiting for messages."""

    total_s: float = 0.0
    waiting_s: float = 0.0
    decode_s: float = 0.0  # for messages of rows that decode
    num_decodes: int = 0  # such messages

    def count_decode(self, seconds: float) -> None:
        self.decode_s += seconds
        self.num_decodes += 1


@dataclass
class Stage:
    """`runner` has the layers of one stage. Every row has room for `runner.max_tokens` tokens from
    its first message on, until it is freed."""

    runner: ModelRunner
    is_last: bool
    occupancy: Occupancy = field(default_factory=Occupancy)

    @property
    def is_whole(self) -> bool:
        """Whether there is no other stage."""
        model = self.runner.model
        return model.has_head and model.is_last

    def forward(self, x: Tensor, rows: Sequence[int], status: int) -> Tensor | None:
        """From token ids [B,T] or hidden states [B,T,hidden] to what is sent on; None if nobody
        needs it. After the last layer this is of the last token alone."""
        for row in rows:
            if not self.runner.cache.blocks[row]:
                self.runner.allocate(row)
        out = self.compute(x, rows)
        return None if self.is_last and status != WANTED else out

    def compute(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return self.runner.forward(x, rows, last_only=True)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits [B,1,V] of hidden states [B,1,hidden] that came home."""
        return self.runner.model.logits(hidden)

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.runner.cache.release(row)

    def serve(self, ends: RingEnds) -> None:
        """Serve messages until END. Not for the first stage, which begins the messages."""
        started, spent = None, self.occupancy
        while True:
            asked = time.perf_counter()
            message = ends.inbound.receive()
            arrived = time.perf_counter()
            if started is None:
                started = arrived
            else:
                spent.waiting_s += arrived - asked
            if message.kind is Kind.END:
                spent.total_s += arrived - started
                ends.outbound.send(message)
                ends.outbound.close()
                return
            self._answer(message, ends)
            if is_decode(message):
                spent.count_decode(time.perf_counter() - arrived)

    def _answer(self, message: Message, ends: RingEnds) -> None:
        if message.kind is Kind.FREE:
            self.free(message.words)
            if not self.is_last:
                ends.outbound.send(message)
            return
        if message.kind is Kind.HIDDEN and message.payload is not None:
            out = self.forward(message.payload, message.words, message.status)
            kind = Kind.VOID if out is None else Kind.HIDDEN
            message = replace(message, kind=kind, payload=out)
        ends.outbound.send(message)


def is_decode(message: Message) -> bool:
    """Whether a message of one token a row came, from which tokens follow."""
    is_hidden = message.kind is Kind.HIDDEN and message.status == WANTED
    return is_hidden and message.payload is not None and message.payload.shape[1] == 1
