"""A stage of pipelined speculation: its part of the target, and how it answers the runs that the
head launches.

Owns when a stage looks for cancellations: before a run and between its layers. A run that is
cancelled, or that an earlier stage has skipped, goes on as a void header.

On CUDA the host looks between launching one layer and the next. What it has launched by then is
computed; a run that is skipped afterwards costs that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from magicdec.config.sections import SamplingSection
from magicdec.distributed.channels.message import Kind, Message, words_of
from magicdec.executor.executor import Cancellation, Cancelled
from magicdec.hardware.environment import wait_for_stream
from magicdec.kv.cache import upload
from magicdec.kv.tree import DraftTree
from magicdec.pipelined_run.channels import CancelBoard, RunCancellation
from magicdec.pipelined_speculation.messages import Launch, Ranges, to_ranges
from magicdec.runner import ModelRunner
from magicdec.sampling.coupled import CoupledSampling


@dataclass(frozen=True)
class Predictions:
    """The next token after each row that asked for one, and by how much its logit exceeds the
    second largest. Sampled tokens have logits with noise; see `CoupledSampling`."""

    tokens: Sequence[int]
    margins: Sequence[float]


class RunPart(Protocol):
    """Some layers of the target."""

    @property
    def num_layers(self) -> int: ...

    def prepare(self, launch: Launch) -> None:
        """What a run does to the cache beside its rows, even if it is skipped."""

    def compute(
        self, launch: Launch, message: Message, cancellation: Cancellation
    ) -> Tensor | Predictions | None:
        """Hidden states [1, rows, hidden], None if they are emulated; of the last stage the
        predictions. Raises Cancelled if the cancellation is set before a layer."""


@dataclass(frozen=True)
class CancellableStage:
    """The part of a stage, which skips the runs that `board` names. The answer to a run is its
    words with hidden states, or without any (VOID) if it was skipped. The last stage answers with
    the predicted tokens, and as many margins (`floats_of`)."""

    part: RunPart
    board: CancelBoard

    def answer(self, message: Message) -> tuple[Message, int]:
        run, launch = message.run, Launch.from_words(message.words)
        self.part.prepare(launch)
        try:
            if message.kind is Kind.VOID:
                raise Cancelled(0)
            out = self.part.compute(launch, message, RunCancellation(self.board, run))
            if isinstance(out, Tensor):
                wait_for_stream(out.device)
        except Cancelled as cancelled:
            return Message(Kind.VOID, run, words=message.words), cancelled.num_layers
        if isinstance(out, Predictions):
            words = (*out.tokens, *words_of(out.margins))
            return Message(Kind.NUMBERS, run, words=words), self.part.num_layers
        answer = Message(Kind.HIDDEN, run, words=message.words, payload=out)
        return answer, self.part.num_layers


@dataclass(frozen=True)
class ContextCells:
    """What the rows of a launch read before them, as a `Visible` rule of one row."""

    cells: Ranges

    def ranges(self, committed: Tensor) -> Tensor:
        return torch.tensor([self.cells], dtype=torch.int64, device=committed.device).view(1, -1, 2)

    def num_visible(self, committed: int) -> int:
        return sum(end - first for first, end in self.cells)

    def most_visible(self, committed: int) -> int:
        return self.num_visible(committed)


class ModelPart:
    """`runner` has the stage's layers and a row of its cache for each lane, with cell c of the lane
    in place c. A run that continues the cells from 0 on is appended to its row, which is cut at the
    run's first position before; any other run is a `DraftTree` with cells of its own. The last
    stage chooses tokens as `sampling` says."""

    def __init__(
        self, runner: ModelRunner, sampling: CoupledSampling = CoupledSampling(SamplingSection())
    ) -> None:
        self.runner, self.sampling = runner, sampling
        for row in range(runner.num_rows):
            runner.allocate(row)

    @property
    def num_layers(self) -> int:
        return len(self.runner.model.layers)

    def prepare(self, launch: Launch) -> None:
        if launch.moves:
            cache, device = self.runner.cache, self.runner.device
            row, moves = upload([launch.lane], device), upload(launch.moves, device)
            sources, targets = moves.T.unsqueeze(1)  # [1, moves] each
            cache.copy_within(cache.slots(row, sources), cache.slots(row, targets))

    def compute(
        self, launch: Launch, message: Message, cancellation: Cancellation
    ) -> Tensor | Predictions:
        model, num_rows = self.runner.model, launch.num_rows
        self._cut(launch.lane, launch.positions[0])
        if model.has_embedding:
            x = upload([launch.tokens], self.runner.device)
        else:
            assert message.payload is not None, "the stage before has computed"
            x = message.payload
        rows, run = [launch.lane], self.runner.forward
        if is_appended(launch):
            last_only = launch.num_outputs < num_rows
            out = run(x, rows, last_only=last_only, cancellation=cancellation)
        else:
            context, tree = ContextCells(launch.context), tree_of(launch, self.runner.device)
            out = run(x, rows, context, tree=tree, cancellation=cancellation)
        if not model.has_head:
            return out
        first = -launch.num_outputs or num_rows  # the first row that asked for a prediction
        following = [position + 1 for position in launch.positions[first:]]
        return predict(self.sampling.perturbed(out[0, first:], launch.request, following))

    def _cut(self, lane: int, length: int) -> None:
        """Let the row hold `length` tokens. If it held fewer, a run before this one was skipped;
        then this one is cancelled too, and nobody reads what it computes."""
        cache = self.runner.cache
        if cache.lengths[lane] > length:
            cache.truncate([lane], [length])
        elif cache.lengths[lane] < length:
            cache.advance([lane], length - cache.lengths[lane])


def is_appended(launch: Launch) -> bool:
    """Whether the rows are a chain that continues the cells 0, 1, ... of its lane."""
    first, num_rows = launch.positions[0], launch.num_rows
    is_chain = launch.parents == tuple(range(-1, num_rows - 1))
    at_home = launch.cells == tuple(range(first, first + num_rows))
    return is_chain and at_home and launch.context == to_ranges(first, ())


def tree_of(launch: Launch, device: torch.device) -> DraftTree:
    first, parents = upload([launch.positions[0]], device), upload([launch.parents], device)
    return DraftTree(first, parents, upload([launch.cells], device))


def predict(logits: Tensor) -> Predictions:
    """The predictions by logits [rows, V], with noise or without."""
    best = logits.argmax(dim=-1)
    largest = logits.double().topk(2, dim=-1).values
    # A token is exact in float64, so that one copy to the host brings both.
    both = torch.stack([best.double(), largest[:, 0] - largest[:, 1]]).cpu()
    return Predictions(both[0].long().tolist(), both[1].tolist())
