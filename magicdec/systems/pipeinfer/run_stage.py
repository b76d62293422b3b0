"""RunStage: a stage of pipelined speculation; and the board of cancelled runs.

A HIDDEN message has the words of a `RunLaunch` and the hidden states of its rows. A cancelled or
skipped run goes on as VOID. The last stage answers with NUMBERS: the next token of each row that
asked for one, and its margin (largest logit minus second, `floats_of`; NaN if not finite). For a
head that drafts from them, the answer has the hidden states of all rows after the last layer too.

Stages of the head's host map one board of cancelled runs in shared memory; a thread fills the board
of another stage from a channel.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Thread
from typing import ClassVar

import torch
from torch import Tensor

from magicdec.config.sections import SamplingSection
from magicdec.distributed.channels.message import (
    Kind,
    Message,
    Receiver,
    Sender,
    wait_for_stream,
    words_of,
)
from magicdec.runner.forward_batch import (
    Cancellation,
    Cancelled,
    EnqueuedForward,
    ForwardBatch,
    ForwardObserver,
    Tokens,
)
from magicdec.runner.model_runner import ModelRunner, gather_vocab, sums_of
from magicdec.runner.sampling.coupled import CoupledSampling
from magicdec.systems.pipeinfer.messages import RunLaunch
from magicdec.systems.stages.spans import SpanKind

SLOTS = 1 << 12  # more runs than are ever in flight; a slot that is taken twice only costs work
BOARD_BYTES = SLOTS * 8


@dataclass(frozen=True)
class RunCancellation:
    board: CancelBoard
    run: int

    @property
    def address(self) -> int:
        return self.board.address + self.run % SLOTS * 8

    @property
    def value(self) -> int:
        return self.run + 1

    def is_set(self) -> bool:
        return self.board.is_cancelled(self.run)


class CancelBoard:
    """The board of cancelled runs. Slot r modulo SLOTS has r + 1 once run r is cancelled."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = memory or bytearray(BOARD_BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def cancel(self, run: int) -> None:
        self._numbers[run % SLOTS] = run + 1

    def is_cancelled(self, run: int) -> bool:
        return self._numbers[run % SLOTS] == run + 1

    def void_if_cancelled(self, message: Message) -> Message:
        """The message for all ranks of a stage, which must skip the same runs."""
        if message.kind is Kind.HIDDEN and self.is_cancelled(message.run):
            return replace(message, kind=Kind.VOID, payload=None)
        return message


class Canceller:
    """The head's sender of cancellations: to the stages that read `board`, and through `channels`
    to stages of other hosts."""

    def __init__(self, board: CancelBoard, channels: Sequence[Sender] = ()) -> None:
        self.board = board
        self.channels = channels

    def cancel(self, runs: Sequence[int]) -> None:
        """Cancel runs. Returns before the stages know it."""
        for channel in self.channels:
            channel.send(Message(Kind.NUMBERS, words=tuple(runs)))
        for run in runs:
            self.board.cancel(run)

    def close(self) -> None:
        for channel in self.channels:
            channel.send(Message(Kind.END))
            channel.close()


def listen(channel: Receiver, board: CancelBoard) -> Thread:
    """A thread that writes cancellations from `channel` into `board`. A broken channel ends it: the
    stage notices that itself, and a run that is not skipped does no harm."""

    def copy() -> None:
        try:
            while (message := channel.receive()).kind is not Kind.END:
                for run in message.words:
                    board.cancel(run)
        except RuntimeError:
            return

    thread = Thread(target=copy, name="cancellations", daemon=True)
    thread.start()
    return thread


class LaneText:
    """The tokens in a lane, for the text before each row on the last stage. It must get every run,
    also skipped ones."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompt: set[int] = set()  # the first `num_prompt` tokens
        self.num_prompt = 0

    def take(self, launch: RunLaunch, is_of_prompt: bool) -> None:
        """Write the tokens of a run."""
        if launch.first == 0:
            self.prompt = set()
        self.tokens[launch.first :] = launch.tokens
        if is_of_prompt:
            self.prompt.update(launch.tokens)
            self.num_prompt = len(self.tokens)

    def outputs(self, launch: RunLaunch) -> list[list[int]]:
        """The output tokens up to and including each row of a run."""
        return [self.tokens[self.num_prompt : place + 1] for place in launch.positions]


class LastStates(ForwardObserver):
    """The hidden states [1, T, hidden] of a run's rows after the last of `num_layers` layers."""

    def __init__(self, num_layers: int) -> None:
        self.state_layers = (num_layers,)
        self.newest: Tensor | None = None

    def wants(self, forward: EnqueuedForward) -> bool:
        return True

    def on_states(self, forward: EnqueuedForward, states: Tensor) -> None:
        self.newest = states[0]


class RunStage:
    """A stage of pipelined speculation, with a cache row per lane, cut at a run's first position
    before the run is appended. The last stage chooses tokens by `sampling`.

    It skips the runs that `board` names. Ranks that share layers have no board: the first rank
    decides, and all skip what arrives as VOID.
    """

    what: ClassVar[SpanKind] = SpanKind.STAGE
    states: LastStates | None = None  # if answers have them

    def __init__(
        self,
        runner: ModelRunner,
        sampling: CoupledSampling = CoupledSampling(SamplingSection()),
        board: CancelBoard | None = None,
    ) -> None:
        self.runner = runner
        self.sampling = sampling
        self.board = board
        self.num_layers = len(runner.model.layers)
        self.awaits_prompt = [True] * runner.num_rows  # by lane: the next run is of a prompt
        self.texts: list[LaneText] | None = None  # if the tokens depend on them
        if runner.model.has_head and sampling.has_penalties:
            self.texts = [LaneText() for _ in range(runner.num_rows)]
        for row in range(runner.num_rows):
            runner.allocate(row)

    def send_states(self, is_wanted: bool) -> None:
        """Let answers have hidden states from now on, or no longer, if this is the last stage."""
        model = self.runner.model
        is_shown = is_wanted and model.has_head
        self.states = LastStates(model.config.num_layers) if is_shown else None
        self.runner.set_observer(LastStates, self.states)

    def answer(self, message: Message) -> tuple[Message, int]:
        run = message.run
        launch = RunLaunch.from_words(message.words)
        is_of_prompt = self._takes_prompt(launch)
        if self.texts is not None:
            self.texts[launch.lane].take(launch, is_of_prompt)
        try:
            if message.kind is Kind.VOID:
                raise Cancelled(0)
            cancellation = None if self.board is None else RunCancellation(self.board, run)
            out = self.compute(launch, message, cancellation, is_of_prompt)
            if isinstance(out, Tensor):
                wait_for_stream(out.device)
        except Cancelled as cancelled:
            return Message(Kind.VOID, run, words=message.words), cancelled.num_layers
        if isinstance(out, tuple):
            payload = None if self.states is None else self.states.newest
            return Message(Kind.NUMBERS, run, words=out, payload=payload), self.num_layers
        return Message(message.kind, run, words=message.words, payload=out), self.num_layers

    def _takes_prompt(self, launch: RunLaunch) -> bool:
        """Whether a run is of a prompt, which ends with the run that predicts its first token. It
        must be asked of every run once."""
        is_of_prompt = launch.first == 0 or self.awaits_prompt[launch.lane]
        self.awaits_prompt[launch.lane] = is_of_prompt and launch.num_outputs == 0
        return is_of_prompt

    def compute(
        self,
        launch: RunLaunch,
        message: Message,
        cancellation: Cancellation | None,
        is_of_prompt: bool,
    ) -> Tensor | tuple[int, ...] | None:
        """Hidden states [1, rows, hidden], None if nothing computes them, or the words of the last
        stage's answer. Raises Cancelled if the cancellation is set before a layer."""
        model = self.runner.model
        num_rows = launch.num_rows
        self._cut(launch.lane, launch.first)
        x: Tokens = [launch.tokens]
        if not model.has_embedding:
            assert message.payload is not None, "the stage before has computed"
            x = message.payload
        out = self.runner.forward(
            ForwardBatch(
                x,
                [launch.lane],
                num_outputs=launch.num_outputs,
                committed=[launch.num_committed],
                cancellation=cancellation,
                is_of_prompt=is_of_prompt,
            )
        )
        if not model.has_head:
            return out
        first = -launch.num_outputs or num_rows  # the first row that asked for a prediction
        following = [place + 1 for place in launch.positions[first:]]
        logits = gather_vocab(out[:, first:], self.runner.vocab_places, self.runner.group)[0]
        sums = sums_of(logits)
        if self.texts is not None and following:
            text = self.texts[launch.lane]
            outputs = text.outputs(launch)[first:]
            logits = self.sampling.penalised(logits, [*text.prompt], outputs)
        return predict(self.sampling.perturbed(logits, launch.request, following), sums)

    def _cut(self, lane: int, length: int) -> None:
        """Let the row hold `length` tokens. If it held fewer, an earlier run was skipped, so that
        this run is cancelled too, and nobody reads its result."""
        cache = self.runner.cache
        if cache.lengths[lane] > length:
            cache.truncate([lane], [length])
        elif cache.lengths[lane] < length:
            cache.advance([lane], length - cache.lengths[lane])


def predict(logits: Tensor, sums: Tensor) -> tuple[int, ...]:
    """Tokens and margins by logits [rows, V], with noise or without. A margin is NaN where one of
    `sums` [rows] of the model's own logits is not finite."""
    best = logits.argmax(dim=-1)
    largest = logits.double().topk(2, dim=-1).values
    margins = largest[:, 0] - largest[:, 1] + (sums - sums)
    # A token is exact in float64, so that one copy to the host brings both.
    both = torch.stack([best.double(), margins]).cpu()
    return (*both[0].long().tolist(), *words_of(both[1].tolist()))
