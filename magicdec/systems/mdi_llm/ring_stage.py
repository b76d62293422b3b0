"""Stage: a stage of a ring.

A HIDDEN message has the hidden states of new tokens of the rows in its `words`. With status WANTED,
or ENDS_PROMPT of the last part of a prompt, the last stage sends home the last token's hidden
state, with VERIFY those of all tokens (newest and drafts), and VOID for the other parts of a
prompt. The words of VERIFY also say how many tokens each row keeps. For a head that drafts on the
first stage from hidden states, the last stage sends home those of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from magicdec.distributed.channels.message import (
    Kind,
    Message,
    wait_for_stream,
)
from magicdec.runner.forward_batch import ForwardBatch, Tokens
from magicdec.runner.model_runner import ModelRunner
from magicdec.systems.stages.spans import SpanKind

IN_PROMPT = 0
WANTED = 1
VERIFY = 2
ENDS_PROMPT = 3


@dataclass
class Stage:
    """A stage of a ring. A row has room for `runner.max_tokens` tokens from its first message until
    it is freed."""

    what: ClassVar[SpanKind] = SpanKind.STAGE

    runner: ModelRunner
    is_last: bool
    sends_states: bool = False  # of all tokens, also of those whose logits nobody needs

    @property
    def num_layers(self) -> int:
        return len(self.runner.model.layers)

    @property
    def is_whole(self) -> bool:
        model = self.runner.model
        return model.has_head and model.is_last

    def forward(self, x: Tokens, rows: Sequence[int], status: int) -> Tensor | None:
        """Hidden states to send on, complete, from token ids [B, T] or hidden states [B, T,
        hidden]; None if nobody needs them. The last stage gives the last token's alone, unless
        status is VERIFY or it `sends_states`."""
        for row in rows:
            if not self.runner.cache.blocks[row]:
                self.runner.allocate(row)
        gives_all = status == VERIFY or self.sends_states
        num_outputs = None if gives_all else min(status, 1)
        out = self.compute(x, rows, num_outputs, status in (IN_PROMPT, ENDS_PROMPT))
        wait_for_stream(out.device)
        return out if status or self.sends_states or not self.is_last else None

    def compute(
        self, x: Tokens, rows: Sequence[int], num_outputs: int | None, is_of_prompt: bool
    ) -> Tensor:
        return self.runner.forward(
            ForwardBatch(x, rows, num_outputs=num_outputs, is_of_prompt=is_of_prompt)
        )

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """This rank's logits [B, T, V] of hidden states [B, T, hidden] that came home."""
        return self.runner.model.logits(hidden)

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.runner.release(row)

    def answer(self, message: Message) -> tuple[Message | None, int | None]:
        if message.kind is Kind.FREE:
            self.free(message.words)
            return None if self.is_last else message, None
        if message.payload is None:
            return message, 0
        rows: Sequence[int] = message.words
        if message.status == VERIFY:
            count = len(message.words) // 2
            rows = message.words[:count]
            self.runner.truncate(rows, message.words[count:])
        out = self.forward(message.payload, rows, message.status)
        kind = Kind.VOID if out is None else Kind.HIDDEN
        return Message(kind, message.run, message.status, message.words, out), self.num_layers
