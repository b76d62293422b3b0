"""PipelineRank: what one rank does in pipelined speculation, and the channels that join it to the
others.

Owns which loops and threads a rank has: the first rank leads, with its stage and its drafter in
threads; every other rank is a stage or drafts. Must not know what is computed from the spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

import torch

from magicdec.distributed.channels.connect import connect_edge
from magicdec.distributed.channels.device import DevicePayloads
from magicdec.distributed.channels.message import Receiver, Sender
from magicdec.distributed.channels.tensors import connect_tensors
from magicdec.distributed.groups import Launch
from magicdec.distributed.watching.processes import processes_of
from magicdec.hardware.environment import use_device
from magicdec.hardware.threads import ThreadCount
from magicdec.pipeline.emulation import DelayedSender, Link
from magicdec.pipelined_run.board import (
    BoardCanceller,
    CancelBoard,
    Canceller,
    ChannelCanceller,
    listen,
    shared_board,
)
from magicdec.pipelined_run.drafter import Drafter, DraftLoop
from magicdec.pipelined_run.head import Event, Head, forward, in_thread
from magicdec.pipelined_run.layout import Layout
from magicdec.pipelined_run.parcel import FORM, LocalChannel
from magicdec.pipelined_run.spans import Spans
from magicdec.pipelined_run.stage import HiddenEnds, Part, StageLoop

DEPTH = 64  # messages that are under way on an edge through gloo
CAPACITY = 1 << 22  # bytes of an edge in shared memory
CPU = torch.device("cpu")
End = TypeVar("End")
Ends = tuple[Sender | None, Receiver | None]


@dataclass
class Wires:
    """This rank's ends of all channels. Between parts of one rank a channel is local."""

    launches: Sender | None = None  # of the head
    inbound: Receiver | None = None  # of a stage
    outbound: Sender | None = None
    results: Receiver | None = None  # of the head
    asks: Sender | None = None  # of the head, to the drafter
    asked: Receiver | None = None  # of the drafter, on each of its ranks
    answers: Sender | None = None  # of the first of these
    others: list[Sender] = field(default_factory=list)  # of the same, to the other ones
    answered: Receiver | None = None  # of the head
    board: CancelBoard = field(default_factory=CancelBoard)
    canceller: Canceller | None = None  # of the head
    listener: Thread | None = None
    hidden: HiddenEnds = HiddenEnds()  # of a stage


@dataclass(frozen=True)
class HiddenForm:
    """Hidden states that go from device to device, apart from their messages."""

    payloads: DevicePayloads
    width: int
    dtype: torch.dtype


class Connections:
    """Makes the channels. All ranks make the same ones in the same order."""

    def __init__(
        self,
        layout: Layout,
        launch: Launch,
        headers: str | None,
        link: Link | None,
        hidden: HiddenForm | None = None,
    ) -> None:
        """`headers` is gloo or shared_memory. With `hidden`, hidden states go apart."""
        self.layout, self.rank, self.headers, self.link = layout, launch.rank, headers, link
        self.hidden = hidden
        self.processes = processes_of(launch)

    def connect(self, has_drafter: bool) -> Wires:
        wires, stages = Wires(), self.layout.stages
        wires.launches, wires.inbound = self._edge(0, stages[0])
        for here, there in pairwise(stages):
            sender, receiver = self._edge(here, there)
            wires.outbound, wires.inbound = sender or wires.outbound, receiver or wires.inbound
            if self.hidden is not None:
                self._connect_hidden(wires, (here, there), self.hidden)
        sender, wires.results = self._edge(stages[-1], 0)
        wires.outbound = sender or wires.outbound
        if has_drafter:
            first, *others = self.layout.draft_ranks
            wires.asks, wires.asked = self._edge(0, first)
            wires.answers, wires.answered = self._edge(first, 0)
            for other in others:
                sender, receiver = self._edge(first, other)
                wires.others += [] if sender is None else [sender]
                wires.asked = receiver or wires.asked
        self._connect_cancellations(wires)
        return wires

    def _edge(self, sender: int, receiver: int) -> Ends:
        """This rank's ends of a channel from one rank to another, or to itself."""
        if sender == receiver:
            channel = LocalChannel()
            return (channel, channel) if self.rank == sender else (None, None)
        sends, receives = connect_edge(
            (sender, receiver), self.rank, FORM, DEPTH, CAPACITY, self.headers, self.processes
        )
        if sends is not None and self.link is not None:
            sends = DelayedSender(sends, self.link, FORM)
        return sends, receives

    def _connect_hidden(self, wires: Wires, edge: tuple[int, int], form: HiddenForm) -> None:
        place = form.dtype, form.payloads.device, form.payloads.backend
        sends, receives = connect_tensors(edge, self.rank, *place, DEPTH, self.processes)
        known = wires.hidden
        ends = receives or known.inbound, sends or known.outbound
        wires.hidden = HiddenEnds(*ends, form.width)

    def _connect_cancellations(self, wires: Wires) -> None:
        others = [rank for rank in self.layout.stages if rank != 0]
        delay_s = 0.0 if self.link is None else self.link.delay_s
        if not others or self.headers == "shared_memory":
            if others:
                wires.board = shared_board(self.rank)
            wires.canceller = BoardCanceller(wires.board, delay_s)
            return
        senders = []
        for rank in others:
            sends, receives = self._edge(0, rank)
            if sends is not None:
                senders.append(sends)
            if receives is not None:
                wires.listener = listen(receives, wires.board)
        wires.canceller = ChannelCanceller(wires.board, senders)


class PipelineRank:
    """`part` is this rank's stage and `drafter` its drafter, None where it has none. They compute
    on `device`, each in a thread if this rank has both; on a GPU they share a stream."""

    def __init__(
        self,
        rank: int,
        wires: Wires,
        part: Part | None,
        drafter: Drafter | None,
        device: torch.device = CPU,
    ) -> None:
        self.rank, self.wires, self.part, self.drafter = rank, wires, part, drafter
        self.device = device
        self.first_run = self.first_draft = 0

    @property
    def computes(self) -> bool:
        return self.part is not None or self.drafter is not None

    def serve(self, lead: Callable[[Head], None], count: ThreadCount) -> Spans:
        """Serve until the head has no more. `lead` is what the head does; it is called on the first
        rank only. `count` measures in each loop. Returns what this rank did when."""
        spans, wires = Spans(), self.wires
        loops: list[Callable[[], None]] = []
        if self.part is not None:
            ends = there(wires.inbound), there(wires.outbound)
            loops.append(StageLoop(self.part, *ends, wires.board, spans, wires.hidden).serve)
        if self.drafter is not None:
            inbound, others = there(wires.asked), wires.others
            loops.append(DraftLoop(self.drafter, inbound, wires.answers, spans, others).serve)
        if self.rank == 0:
            self._lead(lead, [partial(measured, loop, count) for loop in loops], spans)
        else:
            for loop in loops:  # one at most: only the first rank is several things
                measured(loop, count)
        return spans

    def _lead(
        self, lead: Callable[[Head], None], loops: list[Callable[[], None]], spans: Spans
    ) -> None:
        wires, events = self.wires, SimpleQueue[Event]()
        compute = partial(self._compute, torch.get_num_threads())
        threads = [in_thread(partial(compute, loop), events) for loop in loops]
        threads.append(forward(there(wires.results), True, events))
        if wires.answered is not None:
            threads.append(forward(wires.answered, False, events))
        head = Head(there(wires.launches), there(wires.canceller), wires.asks, events, spans)
        head.first_run, head.first_draft = self.first_run, self.first_draft
        lead(head)
        head.close()
        for thread in threads:
            thread.join()
        self.first_run, self.first_draft = head.first_run, head.first_draft

    def _compute(self, num_threads: int, loop: Callable[[], None]) -> None:
        """In a thread of Python, which has neither the device of the thread that started it nor,
        in OpenMP, its number of threads."""
        use_device(self.device)
        torch.set_num_threads(num_threads)
        loop()

    def close(self) -> None:
        """No rank serves any more. All ranks call it."""
        if self.rank == 0:
            there(self.wires.canceller).close()
        if self.wires.listener is not None:
            self.wires.listener.join()


def measured(loop: Callable[[], None], count: ThreadCount) -> None:
    with count.during():
        loop()


def there(end: End | None) -> End:
    assert end is not None, "the layout says that this rank has it"
    return end
