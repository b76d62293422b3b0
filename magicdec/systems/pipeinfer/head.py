"""Head: carries out the scheduler's actions. Threads receive results and drafts, so that it never
waits for one while the other is there.

PipelineRank: the channels, loops and threads of one rank. The first rank is the head, with its
stage and its drafter in threads; every other rank is a stage or drafts.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

import torch

from magicdec.distributed.channels.connect import Connector
from magicdec.distributed.channels.message import (
    Ends,
    Kind,
    Message,
    MessageForm,
    Nowhere,
    Receiver,
    Sender,
    SharedReceiver,
    floats_of,
)
from magicdec.distributed.layout import PipelineLayout
from magicdec.distributed.shared_memory import map_segment
from magicdec.engine.arrivals import Arrivals
from magicdec.hardware.environment import use_device
from magicdec.hardware.threads import ThreadCount
from magicdec.runner.request import Moves, Observer, Request, StepOutput, ignore_step, naming
from magicdec.systems.pipeinfer.messages import Action, Cancel, Commit, DraftAction, RunLaunch
from magicdec.systems.pipeinfer.options import PIPEINFER, PIPELINE
from magicdec.systems.pipeinfer.path_drafter import (
    DraftRequest,
    PathDrafter,
    PathDraftHandler,
    candidate_of,
)
from magicdec.systems.pipeinfer.run_stage import (
    BOARD_BYTES,
    CancelBoard,
    Canceller,
    RunStage,
    listen,
)
from magicdec.systems.pipeinfer.scheduler import PipelinedScheduler
from magicdec.systems.stages.spans import SpanKind, Spans
from magicdec.systems.stages.stage import StageLoop

RUN_WORDS = 8  # of the header of a launch: a run of one row has so many words
NUMBER_WORDS = 3  # of the header of other messages, which have no payload

Event = tuple[bool, Message] | BaseException
"""A message that came in, with whether it is a result; or what has ended a thread."""
Events = SimpleQueue[Event]


def forward(channel: Receiver, is_result: bool, events: Events) -> Thread:
    """A thread that turns a channel's messages into events until its end, which is an event of
    results too."""

    def copy() -> None:
        message = None
        while message is None or message.kind is not Kind.END:
            message = channel.receive()
            if is_result or message.kind is not Kind.END:
                events.put((is_result, message))

    return in_thread(copy, events)


def in_thread(work: Callable[[], None], events: Events) -> Thread:
    """A thread that does `work`, whose error becomes an event."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            events.put(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


@dataclass
class Wires:
    """This rank's ends of all channels, which are local between parts of one rank."""

    launches: Sender | None = None  # of the head
    inbound: Receiver | None = None  # of a stage
    outbound: Sender | None = None
    results: Receiver | None = None  # of the head
    asks: Sender | None = None  # of the head, to the drafter
    draft_steps: Receiver | None = None  # of the drafter
    answers: Sender | None = None
    answered: Receiver | None = None  # of the head
    board: CancelBoard | None = None  # of a stage of one rank
    canceller: Canceller | None = None  # of the head
    listener: Thread | None = None


def connect_ranks(connector: Connector, layout: PipelineLayout, has_drafter: bool) -> Wires:
    """Connect the head, the stages and the drafter of `layout`. All ranks must call it together."""
    wires = Wires()
    stages = layout.stages
    apart = connector.apart
    runs, numbers = (
        replace(connector.form, num_words=count) for count in (RUN_WORDS, NUMBER_WORDS)
    )
    wires.launches, wires.inbound = connector.edge(0, stages[0], runs)
    for here, there in pairwise(stages):
        sender, receiver = connector.edge(here, there, runs, apart)
        wires.outbound = sender or wires.outbound
        wires.inbound = receiver or wires.inbound
    sender, wires.results = connector.edge(stages[-1], 0, numbers)
    wires.outbound = sender or wires.outbound
    if has_drafter:
        wires.asks, wires.draft_steps = connector.edge(0, layout.draft_rank, numbers)
        wires.answers, wires.answered = connector.edge(layout.draft_rank, 0, numbers)
    board = connect_cancellations(connector, layout, wires, numbers)
    for rank in stages:
        ranks = layout.group_of(rank)
        change = board.void_if_cancelled
        wires.inbound = share(connector, ranks, wires.inbound, runs, apart, change)
    wires.board = board if layout.tensor_parallel == 1 else None
    return wires


def share(
    connector: Connector,
    ranks: Sequence[int],
    inbound: Receiver | None,
    form: MessageForm,
    apart: str | None = None,
    change: Callable[[Message], Message] = lambda message: message,
) -> Receiver | None:
    """This rank's inbound end if `ranks` do the same work: all get what the first of them
    receives."""
    first, *others = ranks
    senders = list[Sender]()
    for other in others:
        sender, receiver = connector.edge(first, other, form, apart)
        inbound = receiver or inbound
        senders += [] if sender is None else [sender]
    if not senders or inbound is None:
        return inbound
    return SharedReceiver(inbound, senders, change)


def connect_cancellations(
    connector: Connector, layout: PipelineLayout, wires: Wires, numbers: MessageForm
) -> CancelBoard:
    """This rank's board, if it is the first of a stage."""
    others = [rank for rank in layout.stages if rank]
    board = CancelBoard()
    senders = list[Sender]()
    if others and connector.shares_memory:
        board = CancelBoard(map_segment(BOARD_BYTES, 0, None, connector.rank == 0))
        others = []
    for rank in others:
        sends, receives = connector.edge(0, rank, numbers)
        senders += [] if sends is None else [sends]
        if receives is not None:
            wires.listener = listen(receives, board)
    wires.canceller = Canceller(board, senders)
    return board


class Head:
    """The head's loop. Runs are numbered from `first_run` on, so that no earlier head's run is
    mistaken for them."""

    def __init__(
        self,
        wires: Wires,
        events: Events,
        spans: Spans,
        scheduler: PipelinedScheduler,
        requests: Sequence[Request] | Arrivals,
        observe: Observer = ignore_step,
        first_run: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.launches = there(wires.launches)
        self.cancels = there(wires.canceller)
        self.drafts = wires.asks
        self.events = events
        self.spans = spans
        self.scheduler = scheduler
        self.observe = observe
        self.first_run = first_run
        self.clock = clock
        self._arrivals = Arrivals.of(requests)
        self.requests = {request.request_id: request for request in self._arrivals}
        self.moves: dict[int, Moves] = {}  # when each request got its lane
        self._lanes: dict[int, int] = {}  # of the requests that have begun
        self._num_known: dict[int, int] = {}  # output tokens that the drafter knows
        self._committed_s: dict[int, float] = {}  # when each request had its newest token
        self._results: deque[Message] = deque()
        self._answer: Message | None = None  # of the drafter
        self._launched: dict[int, RunLaunch] = {}  # by their numbers in messages
        self._is_drafting = False

    def serve(self) -> None:
        """Serve until all requests have ended and every run is home."""
        while self._arrivals or not self.scheduler.is_over or self._is_drafting:
            self._step()

    def close(self) -> None:
        """End the stages and the drafter. Returns when the last stage has ended."""
        self.launches.send(Message(Kind.END))
        if self.drafts is not None:
            self.drafts.send(Message(Kind.END))
            self.drafts.close()
        event = self.events.get()
        if isinstance(event, BaseException):
            raise event
        assert event[1].kind is Kind.END, "no run is under way"
        self.launches.close()

    def _step(self) -> None:
        """Take one event. Results go before drafts; the drafter begins a step only when no result
        waits."""
        if self._arrivals:
            for request in self._arrivals.take(self._arrivals.count(self.clock())):
                self._submit(request)
        with suppress(Empty):
            while True:
                self._take(self.events.get_nowait())
        if self._results:
            self._result(self._results.popleft())
        elif self._answer is not None:
            message = self._answer
            self._answer = None
            self._is_drafting = False
            self._do(self.scheduler.drafted(message.run, candidate_of(message)))
        elif self._is_drafting or not (actions := self.scheduler.idle()):
            self._wait()
        else:
            self._do(actions)

    def _submit(self, request: Request) -> None:
        params = request.sampling
        _, actions = self.scheduler.submit(
            request.prompt_ids, params.max_new_tokens, params.eos_token_ids, request.request_id
        )
        self._do(actions)

    def _wait(self) -> None:
        seconds = None
        if self._arrivals and math.isfinite(next_s := self._arrivals.next_s):
            seconds = max(0.0, next_s - self.clock())
        with suppress(Empty):
            self._take(self.events.get(timeout=seconds))

    def _take(self, event: Event) -> None:
        if isinstance(event, BaseException):
            raise event
        is_result, message = event
        if is_result:
            self._results.append(message)
        else:
            assert self._answer is None, "one draft at a time"
            self._answer = message

    def _result(self, message: Message) -> None:
        is_void = message.kind is Kind.VOID
        run = message.run - self.first_run
        launch = self._launched.pop(message.run)
        if message.payload is not None and self.drafts is not None:  # before they are committed
            states = Message(Kind.HIDDEN, words=launch.to_words(), payload=message.payload)
            self.drafts.send(states)
        self.spans.moment(SpanKind.RESULT, message.run, int(is_void))
        if is_void:
            return self._do(self.scheduler.result(run, None))
        count = len(message.words) // 2
        tokens = message.words[:count]
        margins = floats_of(message.words[count:])
        with naming(f"run {run}"):
            actions = self.scheduler.result(run, tokens, margins)
        self._do(actions)

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, RunLaunch):
                self._launch(action)
            elif isinstance(action, Cancel):
                self.cancels.cancel([self.first_run + run for run in action.runs])
            elif isinstance(action, Commit):
                self._commit(action)
            elif isinstance(action, DraftAction):
                self._draft(action)

    def _commit(self, commit: Commit) -> None:
        """Append the tokens and report the judged runs; the first report has the tokens and the
        time since the commit before."""
        request = self.requests[commit.request]
        now_s = self.clock()
        request.append(list(commit.tokens), now_s)
        seconds = now_s - self._committed_s.get(commit.request, now_s)
        self._committed_s[commit.request] = now_s
        tokens = list(commit.tokens)
        num_cancelled = commit.num_cancelled
        runs_ahead = self.scheduler.options.mode == PIPEINFER  # else drafts follow the newest token
        for run in commit.judged or (None,):
            drafted = None if run is None else [run.num_drafted]
            accepted = None if run is None else [run.num_accepted]
            longest = 0 if run is None else run.num_drafted
            position = None if run is None else [run.position]
            output = StepOutput(
                [tokens],
                longest,
                accepted,
                drafted,
                num_cancelled=[num_cancelled],
                draft_positions=position if runs_ahead else None,
                contexts=None if runs_ahead else position,
            )
            self.observe([request.request_id], output, seconds)
            tokens = []
            num_cancelled = 0
            seconds = 0.0

    def _launch(self, launch: RunLaunch) -> None:
        if launch.request not in self._lanes:
            self._begin(launch)
        run = self.first_run + launch.run
        what = SpanKind.LAUNCH if self.requests[launch.request].output_ids else SpanKind.PROMPT
        self.spans.moment(what, run, launch.num_rows)
        self._launched[run] = launch
        self.launches.send(Message(Kind.HIDDEN, run, words=launch.to_words()))

    def _begin(self, launch: RunLaunch) -> None:
        number = launch.request
        request = self.requests[launch.request]
        self.moves[request.request_id] = Moves([self.clock()])
        self._lanes[number] = launch.lane
        self._num_known[number] = 0
        if self.drafts is not None and self.scheduler.options.mode != PIPELINE:
            prompt = DraftRequest(number, launch.lane, 0, request.prompt_ids)
            self.drafts.send(prompt.to_message(0))

    def _draft(self, draft: DraftAction) -> None:
        assert self.drafts is not None, "without a drafter no mode drafts"
        number = draft.request
        request = self.requests[draft.request]
        num_known = self._num_known[number]
        output = request.output_ids
        self._num_known[number] = len(output)
        self._is_drafting = True
        kept = len(request.prompt_ids) + num_known
        new = tuple(output[num_known:])
        step = DraftRequest(number, self._lanes[number], kept, new, draft.path)
        self.drafts.send(step.to_message(draft.draft))


CPU = torch.device("cpu")
End = TypeVar("End")


class PipelineRank:
    """One rank. Its stage and its drafter, None where it has none, compute in threads of their own;
    on a GPU they share a stream. `moves`, on the first rank, tell when requests got their lanes."""

    def __init__(
        self,
        rank: int,
        wires: Wires,
        stage: RunStage | None,
        drafter: PathDrafter | None,
        device: torch.device = CPU,
    ) -> None:
        self.rank = rank
        self.wires = wires
        self.stage = stage
        self.drafter = drafter
        self.device = device
        self.first_run = 0
        self.moves = dict[int, Moves]()
        if stage is not None:
            stage.board = wires.board

    @property
    def computes(self) -> bool:
        return self.stage is not None or self.drafter is not None

    def serve(
        self,
        scheduler: PipelinedScheduler,
        requests: Sequence[Request] | Arrivals,
        observe: Observer,
        count: ThreadCount,
    ) -> Spans:
        """The spans of this rank after all requests have ended. The first rank's scheduler
        decides."""
        spans = Spans()
        wires = self.wires
        loops: list[Callable[[], None]] = []
        if self.stage is not None:
            ends = Ends(there(wires.inbound), wires.outbound or Nowhere())
            loops.append(StageLoop(self.stage, ends, spans).serve)
        if self.drafter is not None:
            ends = Ends(there(wires.draft_steps), there(wires.answers))
            loops.append(StageLoop(PathDraftHandler(self.drafter), ends, spans).serve)
        loops = [count.during()(loop) for loop in loops]
        if self.rank == 0:
            events = Events()
            threads = self._threads(loops, events)
            head = Head(wires, events, spans, scheduler, requests, observe, self.first_run)
            head.serve()
            head.close()
            for thread in threads:
                thread.join()
            self.first_run = self.first_run + scheduler.counts.runs
            self.moves = head.moves
        else:
            for loop in loops:  # one at most: only the first rank is several things
                loop()
        return spans

    def _threads(self, loops: Sequence[Callable[[], None]], events: Events) -> list[Thread]:
        compute = partial(self._compute, torch.get_num_threads())
        threads = [in_thread(partial(compute, loop), events) for loop in loops]
        threads.append(forward(there(self.wires.results), True, events))
        if self.wires.answered is not None:
            threads.append(forward(self.wires.answered, False, events))
        return threads

    def _compute(self, num_threads: int, loop: Callable[[], None]) -> None:
        """Run `loop` with the device and the number of threads, which a new Python thread does not
        inherit."""
        use_device(self.device)
        torch.set_num_threads(num_threads)
        loop()

    def close(self) -> None:
        """End all serving. All ranks must call it."""
        if self.rank == 0:
            there(self.wires.canceller).close()
        if self.wires.listener is not None:
            self.wires.listener.join()


def there(end: End | None) -> End:
    assert end is not None, "the layout says that this rank has it"
    return end
