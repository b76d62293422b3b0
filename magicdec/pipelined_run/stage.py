"""A stage of pipelined speculation: its part of the target, and the loop in which it serves runs in
the order in which they were launched.

Owns when a stage looks for cancellations: before a run and between its layers. A run that is
cancelled, or that an earlier stage has skipped, goes on as a void header. Must not know of
requests, nor why a run is launched or cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magicdec.distributed.channels.message import Kind, Message, Receiver, Sender
from magicdec.executor.cancellation import Cancellation, Cancelled, check
from magicdec.kv.tree import DraftTree
from magicdec.pipelined_run.board import CancelBoard, RunCancellation
from magicdec.pipelined_run.parcel import numbers_of, pack, tensor_of
from magicdec.pipelined_run.spans import Spans, What
from magicdec.pipelined_speculation.cells import to_ranges
from magicdec.pipelined_speculation.messages import Launch, Ranges
from magicdec.runner import ModelRunner


@dataclass(frozen=True)
class Predictions:
    """The next token after each row that asked for one, and by how much its logit exceeds the
    second largest."""

    tokens: Sequence[int]
    margins: Tensor  # float64 [rows]


class Part(Protocol):
    """Some layers of the target."""

    @property
    def num_layers(self) -> int: ...

    def prepare(self, launch: Launch) -> None:
        """What a run does to the cache beside its rows, even if it is skipped."""
        ...

    def compute(
        self, launch: Launch, message: Message, cancellation: Cancellation
    ) -> Tensor | Predictions:
        """Hidden states [1, rows, hidden]; of the last stage the predictions. Raises Cancelled if
        the cancellation is set before a layer."""
        ...


class StageLoop:
    def __init__(
        self, part: Part, inbound: Receiver, outbound: Sender, board: CancelBoard, spans: Spans
    ) -> None:
        self.part, self.inbound, self.outbound = part, inbound, outbound
        self.board, self.spans = board, spans

    def serve(self) -> None:
        """Serve runs until the head has no more."""
        while (message := self.inbound.receive()).kind is not Kind.END:
            self.outbound.send(self._answer(message))
        self.outbound.send(message)
        self.outbound.close()

    def _answer(self, message: Message) -> Message:
        begin_s = time.perf_counter()
        numbers = numbers_of(message)
        launch = Launch.from_words(numbers)
        self.part.prepare(launch)
        try:
            if message.kind is Kind.VOID:
                raise Cancelled(0)
            cancellation = RunCancellation(self.board, message.run)
            out = self.part.compute(launch, message, cancellation)
        except Cancelled as cancelled:
            self.spans.add(What.STAGE, message.run, begin_s, cancelled.num_layers)
            return pack(Kind.VOID, message.run, numbers)
        self.spans.add(What.STAGE, message.run, begin_s, self.part.num_layers)
        if isinstance(out, Predictions):
            return pack(Kind.NUMBERS, message.run, out.tokens, out.margins)
        return pack(Kind.HIDDEN, message.run, numbers, out)


@dataclass(frozen=True)
class ContextCells:
    """What the rows of a launch read before them, as a `Visible` rule of one row."""

    cells: Ranges

    def ranges(self, committed: Tensor) -> Tensor:
        return torch.tensor([self.cells], dtype=torch.int64).view(1, -1, 2)

    def num_visible(self, committed: int) -> int:
        return sum(end - first for first, end in self.cells)

    def most_visible(self, committed: int) -> int:
        return self.num_visible(committed)


class ModelPart:
    """`runner` has the stage's layers and a row of its cache for each lane, with cell c of the lane
    in place c. A run that continues the cells from 0 on is appended to its row, which is cut at the
    run's first position before; any other run is a `DraftTree` with cells of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        for row in range(runner.num_rows):
            runner.allocate(row)

    @property
    def num_layers(self) -> int:
        return len(self.runner.model.layers)

    def prepare(self, launch: Launch) -> None:
        if launch.moves:
            cache, row = self.runner.cache, torch.tensor([launch.lane])
            sources, targets = torch.tensor(launch.moves).T.unsqueeze(1)  # [1, moves] each
            cache.copy_within(cache.slots(row, sources), cache.slots(row, targets))

    def compute(
        self, launch: Launch, message: Message, cancellation: Cancellation
    ) -> Tensor | Predictions:
        model, num_rows = self.runner.model, launch.num_rows
        self._cut(launch.lane, launch.positions[0])
        if model.has_embedding:
            x = torch.tensor([launch.tokens])
        else:
            shape, dtype = (1, num_rows, model.config.hidden_size), self._dtype
            x = tensor_of(message, shape, dtype)
        rows, run = [launch.lane], self.runner.forward
        if is_appended(launch):
            last_only = launch.num_outputs < num_rows
            out = run(x, rows, last_only=last_only, cancellation=cancellation)
        else:
            context = ContextCells(launch.context)
            out = run(x, rows, context, tree=tree_of(launch), cancellation=cancellation)
        return predict(out[0, -launch.num_outputs or num_rows :]) if model.has_head else out

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.runner.model.parameters()).dtype

    def _cut(self, lane: int, length: int) -> None:
        """Let the row hold `length` tokens. If it held fewer, a run before this one was skipped;
        then this one is cancelled too, and nobody reads what it computes."""
        cache = self.runner.cache
        held = cache.lengths[lane]
        if held > length:
            cache.truncate([lane], [length])
        elif held < length:
            cache.advance([lane], length - held)


def is_appended(launch: Launch) -> bool:
    """Whether the rows are a chain that continues the cells 0, 1, ... of its lane."""
    first, num_rows = launch.positions[0], launch.num_rows
    is_chain = launch.parents == tuple(range(-1, num_rows - 1))
    at_home = launch.cells == tuple(range(first, first + num_rows))
    return is_chain and at_home and launch.context == to_ranges(first, ())


def tree_of(launch: Launch) -> DraftTree:
    return DraftTree(
        torch.tensor([launch.positions[0]]),
        torch.tensor([launch.parents]),
        torch.tensor([launch.cells]),
    )


def predict(logits: Tensor) -> Predictions:
    """From logits [rows, V]."""
    best = logits.argmax(dim=-1)
    largest = logits.double().topk(2, dim=-1).values
    return Predictions(best.tolist(), largest[:, 0] - largest[:, 1])


class EmulatedPart:
    """Takes `seconds` for a run of any size, in equal shares for each layer. If it is the last
    stage, it predicts token p + 1 after position p."""

    def __init__(self, num_layers: int, seconds: float, is_last: bool) -> None:
        self.num_layers, self.seconds, self.is_last = num_layers, seconds, is_last

    def prepare(self, launch: Launch) -> None:
        """There is no cache."""

    def compute(
        self, launch: Launch, message: Message, cancellation: Cancellation
    ) -> Tensor | Predictions:
        begin_s = time.perf_counter()
        for layer in range(self.num_layers):
            check(cancellation, layer)
            due_s = begin_s + self.seconds * (layer + 1) / self.num_layers
            time.sleep(max(0.0, due_s - time.perf_counter()))
        shown = launch.positions[launch.num_rows - launch.num_outputs :]
        if not self.is_last:
            return torch.zeros(0)
        margins = torch.full((len(shown),), torch.inf, dtype=torch.float64)
        return Predictions([p + 1 for p in shown], margins)
