"""The loop in which a stage serves messages: each is answered when it arrives, and the answer goes
on. What a message says is a matter of the part of the model that answers. `Stage` is the part of a
ring, which computes rows and frees them.

A HIDDEN message of a ring holds the hidden states of new tokens of some rows, which its `words`
name. Its status says what is wanted of the last stage. WANTED: the hidden state of the last of
these tokens. VERIFY: those of all these tokens, which are a row's newest token and drafts.
Otherwise the last stage sends VOID home. The words of a VERIFY message also say how many tokens
each row keeps of those that it holds so far, so that every stage forgets the drafts that were
rejected last.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.channels.message import COMPUTED, Ends, Kind, Message
from magicdec.distributed.groups import Group
from magicdec.hardware.environment import wait_for_stream
from magicdec.model.checkpoint.source import ModelSource
from magicdec.pipeline.tracing import Spans, What
from magicdec.runner import ModelRunner
from magicdec.setup.loading import LoadedModels, StagePart, kinds_of, make_backend, make_executor

WANTED, VERIFY = 1, 2


class Part(Protocol):
    """What answers the messages of a stage."""

    def answer(self, message: Message) -> tuple[Message | None, int]:
        """What is sent on, if anything, and the number of layers that were computed for it."""


@dataclass(frozen=True)
class StageLoop:
    """`spans` get a span for each run, from its arrival until its answer is sent."""

    part: Part
    ends: Ends
    spans: Spans

    def serve(self) -> None:
        """Serve messages until END. Not for the first stage of a ring, which begins the runs."""
        inbound, outbound = self.ends.inbound, self.ends.outbound
        while (message := inbound.receive()).kind is not Kind.END:
            begin_s = time.perf_counter()
            answer, num_layers = self.part.answer(message)
            if message.kind in COMPUTED:
                # Before sending: the receiver may have the answer before this rank goes on.
                self.spans.add(What.STAGE, message.run, begin_s, num_layers)
            if answer is not None:
                outbound.send(answer)
        outbound.send(message)
        outbound.close()


@dataclass
class Stage:
    """`runner` has the layers of one stage. Every row has room for `runner.max_tokens` tokens from
    its first message on, until it is freed."""

    runner: ModelRunner
    is_last: bool

    @property
    def num_layers(self) -> int:
        return len(self.runner.model.layers)

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

    def answer(self, message: Message) -> tuple[Message | None, int]:
        if message.kind is Kind.FREE:
            self.free(message.words)
            return None if self.is_last else message, 0
        if message.kind is not Kind.HIDDEN or message.payload is None:
            return message, 0
        rows: Sequence[int] = message.words
        if message.status == VERIFY:
            rows, lengths = split_words(message.words)
            self.keep(rows, lengths)
        out = self.forward(message.payload, rows, message.status)
        kind = Kind.VOID if out is None else Kind.HIDDEN
        return replace(message, kind=kind, payload=out), self.num_layers


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
