"""What ranks of pipelined speculation send each other, the channels that join them, and how stages
learn that a run is cancelled.

A launch is the words of `Launch` and the hidden states of its rows. Its result is the next token of
each row that asked for one, and by how much the largest logit exceeds the second: 16 bytes a row.

Stages of the head's host map one board of cancelled runs in shared memory, into which the head
writes, so that a stage can look without a system call. A stage that shares no memory with the head
has a board of its own, and a thread that writes into it what comes through a channel.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from threading import Thread

import torch

from magicdec.distributed.channels.connect import connect_edge
from magicdec.distributed.channels.message import (
    Kind,
    Loopback,
    Message,
    MessageForm,
    Receiver,
    Sender,
    floats_of,
    words_of,
)
from magicdec.distributed.channels.shared_ring import map_segment
from magicdec.distributed.groups import Launch
from magicdec.distributed.watching.processes import processes_of
from magicdec.pipeline.emulation import DelayedSender, Link
from magicdec.pipelined_run.layout import Layout
from magicdec.pipelined_speculation.messages import Candidates

DEPTH = 64  # messages that are under way on an edge through gloo
CAPACITY = 1 << 22  # bytes of an edge in shared memory
RUN_WORDS = 15  # of the header of a launch: a run of one row has so many words
NUMBER_WORDS = 3  # of the header of other messages, which have no payload
SLOTS = 1 << 12  # more runs than are ever in flight; a slot that is taken twice only costs work
BOARD_BYTES = SLOTS * 2 * 8


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
        return Message(Kind.NUMBERS, draft, words=(*header, *self.new, *tokens))

    @classmethod
    def from_message(cls, message: Message) -> DraftRequest:
        numbers = iter(message.words)
        request, lane, kept, num_new, num_paths = islice(numbers, 5)
        lengths = list(islice(numbers, num_paths))
        new = tuple(islice(numbers, num_new))
        return cls(request, lane, kept, new, tuple(tuple(islice(numbers, n)) for n in lengths))


def pack_candidates(draft: int, candidates: Sequence[Candidates]) -> Message:
    """The answer to a DraftRequest: the candidates of each path in order."""
    pairs = [pair for each in candidates for pair in each]
    probabilities = words_of(p for _, p in pairs)
    counts = (len(candidates), *map(len, candidates))
    return Message(
        Kind.NUMBERS, draft, words=(*counts, *(token for token, _ in pairs), *probabilities)
    )


def candidates_of(message: Message) -> list[Candidates]:
    numbers = iter(message.words)
    counts = list(islice(numbers, next(numbers)))
    tokens = list(islice(numbers, sum(counts)))
    pairs = iter(zip(tokens, floats_of(list(numbers)), strict=True))
    return [tuple(islice(pairs, count)) for count in counts]


@dataclass(frozen=True)
class RunCancellation:
    """Whether one run is cancelled; `Cancellation` explains the address."""

    board: CancelBoard
    run: int

    @property
    def address(self) -> int:
        return self.board.address + self.run % SLOTS * 16

    @property
    def value(self) -> int:
        return self.run + 1

    def is_set(self) -> bool:
        return self.board.is_cancelled(self.run)


class CancelBoard:
    """Run r has slot r modulo SLOTS: its number plus 1, and from when on it counts as cancelled, in
    ns of `time.perf_counter_ns`, which is the same clock in all processes of a host."""

    def __init__(self, memory: mmap.mmap | bytearray | None = None) -> None:
        self._memory = memory or bytearray(BOARD_BYTES)
        self._numbers = memoryview(self._memory).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def cancel(self, run: int, delay_s: float = 0.0) -> None:
        slot = run % SLOTS * 2
        self._numbers[slot + 1] = time.perf_counter_ns() + int(1e9 * delay_s)
        self._numbers[slot] = run + 1

    def is_cancelled(self, run: int) -> bool:
        slot = run % SLOTS * 2
        if self._numbers[slot] != run + 1:
            return False
        return time.perf_counter_ns() >= self._numbers[slot + 1]


class Canceller:
    """Tells all stages what is cancelled: those that look at `board`, for which it takes `delay_s`,
    and those of other hosts, to each of which a channel leads."""

    def __init__(
        self, board: CancelBoard, channels: Sequence[Sender] = (), delay_s: float = 0.0
    ) -> None:
        self.board, self.channels, self.delay_s = board, channels, delay_s

    def cancel(self, runs: Sequence[int]) -> None:
        """Returns before the stages know it."""
        for channel in self.channels:
            channel.send(Message(Kind.NUMBERS, words=tuple(runs)))
        for run in runs:
            self.board.cancel(run, self.delay_s)

    def close(self) -> None:
        """No run is cancelled any more."""
        for channel in self.channels:
            channel.send(Message(Kind.END))
            channel.close()


def listen(channel: Receiver, board: CancelBoard) -> Thread:
    """A thread that writes into `board` what comes through `channel`, until its end. If the channel
    breaks it ends: the stage notices that itself, and a run that is not skipped does no harm."""

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


@dataclass
class Wires:
    """This rank's ends of all channels. Between parts of one rank a channel is local."""

    launches: Sender | None = None  # of the head
    inbound: Receiver | None = None  # of a stage
    outbound: Sender | None = None
    results: Receiver | None = None  # of the head
    asks: Sender | None = None  # of the head, to the drafter
    draft_steps: Receiver | None = None  # of the drafter, on each of its ranks
    answers: Sender | None = None  # of the first of these
    others: list[Sender] = field(default_factory=list)  # of the same, to the other ones
    answered: Receiver | None = None  # of the head
    board: CancelBoard = field(default_factory=CancelBoard)
    canceller: Canceller | None = None  # of the head
    listener: Thread | None = None


class Connections:
    """Makes the channels. All ranks make the same ones in the same order."""

    def __init__(
        self,
        layout: Layout,
        launch: Launch,
        headers: str | None,
        link: Link | None,
        form: MessageForm,
        device: torch.device,
        apart: str | None = None,
    ) -> None:
        """`headers` is gloo or shared_memory. `form` is that of hidden states, on `device`; with
        `apart` they go by process groups of that backend."""
        self.layout, self.rank, self.headers, self.link = layout, launch.rank, headers, link
        self.runs, self.numbers = (
            replace(form, num_words=count) for count in (RUN_WORDS, NUMBER_WORDS)
        )
        self.device, self.apart, self.processes = device, apart, processes_of(launch)

    def connect(self, has_drafter: bool) -> Wires:
        wires, stages = Wires(), self.layout.stages
        wires.launches, wires.inbound = self._edge(0, stages[0], self.runs)
        for here, there in pairwise(stages):
            sender, receiver = self._edge(here, there, self.runs, self.apart)
            wires.outbound, wires.inbound = sender or wires.outbound, receiver or wires.inbound
        sender, wires.results = self._edge(stages[-1], 0)
        wires.outbound = sender or wires.outbound
        if has_drafter:
            first, *others = self.layout.draft_ranks
            wires.asks, wires.draft_steps = self._edge(0, first)
            wires.answers, wires.answered = self._edge(first, 0)
            for other in others:
                sender, receiver = self._edge(first, other)
                wires.others += [] if sender is None else [sender]
                wires.draft_steps = receiver or wires.draft_steps
        self._connect_cancellations(wires)
        return wires

    def _edge(
        self, sender: int, receiver: int, form: MessageForm | None = None, apart: str | None = None
    ) -> tuple[Sender | None, Receiver | None]:
        """This rank's ends of a channel from one rank to another, or to itself."""
        if sender == receiver:
            channel = Loopback()
            return (channel, channel) if self.rank == sender else (None, None)
        form = form or self.numbers
        sends, receives = connect_edge(
            (sender, receiver), self.rank, form, DEPTH, CAPACITY, self.headers, self.processes,
            self.device, apart,
        )  # fmt: skip
        if sends is not None and self.link is not None:
            sends = DelayedSender(sends, self.link, form)
        return sends, receives

    def _connect_cancellations(self, wires: Wires) -> None:
        others = [rank for rank in self.layout.stages if rank != 0]
        if not others or self.headers == "shared_memory":
            if others:
                wires.board = CancelBoard(map_segment(BOARD_BYTES, 0, None, self.rank == 0))
            delay_s = 0.0 if self.link is None else self.link.delay_s
            wires.canceller = Canceller(wires.board, delay_s=delay_s)
            return
        senders = []
        for rank in others:
            sends, receives = self._edge(0, rank)
            if sends is not None:
                senders.append(sends)
            if receives is not None:
                wires.listener = listen(receives, wires.board)
        wires.canceller = Canceller(wires.board, senders)
