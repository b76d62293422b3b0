"""Stage: this rank's layers of a model, and the loop in which it serves the messages of a ring.

Owns the order of a stage's work: a message is computed when it arrives and passed on, and rows are
freed when a message says so.

A HIDDEN message holds the hidden states of new tokens of some rows, which its `words` name. Its
status says what is wanted of the last stage. WANTED: the hidden state of the last of these tokens.
VERIFY: those of all these tokens, which are a row's newest token and drafts. Otherwise the last
stage sends VOID home. The words of a VERIFY message also say how many tokens each row keeps of
those that it holds so far, so that every stage forgets the drafts that were rejected last.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.channels.connect import RingEnds
from magicdec.distributed.channels.message import Kind, Message
from magicdec.distributed.groups import Group
from magicdec.hardware.environment import wait_for_stream
from magicdec.model.checkpoint.source import ModelSource
from magicdec.runner import ModelRunner
from magicdec.setup.loading import LoadedModels, StagePart, kinds_of, make_backend, make_executor

WANTED, VERIFY = 1, 2


@dataclass
class Occupancy:
    """What a rank did with its time. It waits for messages in `waiting_s` of
    `total_s`."""

    total_s: float = 0.0
    waiting_s: float = 0.0
    decodes_s: array[float] = field(default_factory=lambda: array("d"))
    """The time of each message of rows that decode."""

    @property
    def decode_s(self) -> float:
        """The median of these times, which a message that was held up does not move."""
        return statistics.median(self.decodes_s) if self.decodes_s else 0.0


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
        """What is sent on, from token ids [B,T] or hidden states [B,T,hidden]; None if nobody
        needs it. After the last layer this is of the last token alone, unless status is VERIFY.
        Returns when it is computed, so that times are right and a message is there when it says
        so."""
        for row in rows:
            if not self.runner.cache.blocks[row]:
                self.runner.allocate(row)
        out = self.compute(x, rows, last_only=status != VERIFY)
        wait_for_stream(out.device)
        return out if status or not self.is_last else None

    def compute(self, x: Tensor, rows: Sequence[int], last_only: bool) -> Tensor:
        return self.runner.forward(x, rows, last_only=last_only)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits [B,T,V] of hidden states [B,T,hidden] that came home."""
        return self.runner.model.logits(hidden)

    def keep(self, rows: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Forget the tokens of each row after its first `num_tokens`."""
        self.runner.truncate(rows, num_tokens)

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.runner.cache.release(row)

    def serve(self, ends: RingEnds) -> None:
        """Serve messages until END. Not for the first stage, which begins the messages."""
        first_s, occupancy = None, self.occupancy
        while True:
            begin_s = time.perf_counter()
            message = ends.inbound.receive()
            arrived = time.perf_counter()
            if first_s is None:
                first_s = arrived
            else:
                occupancy.waiting_s += arrived - begin_s
            if message.kind is Kind.END:
                occupancy.total_s += arrived - first_s
                ends.outbound.send(message)
                ends.outbound.close()
                return
            self._answer(message, ends)
            if is_decode(message):
                occupancy.decodes_s.append(time.perf_counter() - arrived)

    def _answer(self, message: Message, ends: RingEnds) -> None:
        if message.kind is Kind.FREE:
            self.free(message.words)
            if not self.is_last:
                ends.outbound.send(message)
            return
        if message.kind is Kind.HIDDEN and message.payload is not None:
            rows: Sequence[int] = message.words
            if message.status == VERIFY:
                rows, lengths = split_words(message.words)
                self.keep(rows, lengths)
            out = self.forward(message.payload, rows, message.status)
            kind = Kind.VOID if out is None else Kind.HIDDEN
            message = replace(message, kind=kind, payload=out)
        ends.outbound.send(message)


def load_part(
    config: ResolvedConfig,
    source: ModelSource,
    group: Group,
    models: LoadedModels,
    part: StagePart,
    num_rows: int,
    max_tokens: int,
) -> ModelRunner:
    """A runner of a part of the target, whose layers `group` shares."""
    kinds = kinds_of(config.model, config.model.target_dtype)
    model, backend = models.get(source, group, kinds, part), make_backend(config.attention.backend)
    executor = make_executor(kinds, model, group)
    return ModelRunner(model, backend, group, num_rows, max_tokens, executor=executor)


def split_words(words: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The rows of a VERIFY message, and the number of tokens that each of them keeps."""
    count = len(words) // 2
    return words[:count], words[count:]


def is_decode(message: Message) -> bool:
    """Whether a message came from which tokens follow: of one token a row, or of drafts."""
    if message.kind is not Kind.HIDDEN or message.payload is None:
        return False
    is_newest = message.status == WANTED and message.payload.shape[1] == 1
    return is_newest or message.status == VERIFY
