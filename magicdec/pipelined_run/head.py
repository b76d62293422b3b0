"""Head: carries out what the scheduler decides. It launches runs into the first stage, cancels
them, asks the drafter for its next step, and gives requests their tokens.

Only the head has a scheduler. Results and drafts come in through threads that do nothing else, so
that it never waits for one of them while the other is there. Must not know how anything is
computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread

from magicdec.distributed.channels.message import Kind, Message, Receiver, Sender
from magicdec.pipelined_run.board import Canceller
from magicdec.pipelined_run.parcel import (
    DraftRequest,
    candidates_of,
    margins_of,
    numbers_of,
    pack,
)
from magicdec.pipelined_run.spans import Spans, What
from magicdec.pipelined_speculation.messages import (
    Action,
    Cancel,
    Candidates,
    Commit,
    Draft,
    Launch,
    Stop,
)
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.request import Request
from magicdec.serving.metrics import Moves

Observer = Callable[[int], None]
"""A function that is called with the number of tokens of each commit."""


@dataclass(frozen=True)
class Event:
    """A message that came in, or what has ended a thread."""

    is_result: bool = False
    message: Message | None = None
    error: BaseException | None = None


Events = SimpleQueue[Event]


@dataclass(frozen=True)
class Drafted:
    """What the drafter gave after `path`, which followed `num_output` tokens of the request."""

    request: int
    num_output: int
    path: tuple[int, ...]
    candidates: Candidates


def forward(channel: Receiver, is_result: bool, events: Events) -> Thread:
    """A thread that turns the messages of a channel into events, until its end. The end of a
    channel of results is an event too."""

    def copy() -> None:
        message = None
        while message is None or message.kind is not Kind.END:
            message = channel.receive()
            if is_result or message.kind is not Kind.END:
                events.put(Event(is_result, message))

    return in_thread(copy, events)


def in_thread(work: Callable[[], None], events: Events) -> Thread:
    """A thread that does `work`. An error in it is an event."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            events.put(Event(error=error))

    thread = Thread(target=run, daemon=True)
    thread.start()
    return thread


class Head:
    def __init__(
        self,
        launches: Sender,
        cancels: Canceller,
        drafts: Sender | None,
        events: Events,
        spans: Spans,
    ) -> None:
        """`drafts` leads to the drafter, if there is one."""
        self.launches, self.cancels, self.drafts = launches, cancels, drafts
        self.events, self.spans = events, spans
        self.first_run = self.first_draft = 0  # numbers that were not used before
        self.drafted: list[Drafted] = []  # of the requests that were served last
        self.moves: dict[int, Moves] = {}  # of the same requests: when each got its lane

    def serve(
        self,
        scheduler: PipelinedScheduler,
        requests: Sequence[Request],
        observe: Observer = lambda num_tokens: None,
    ) -> None:
        """Serve `requests`, which arrive now, until all have ended and every run is home."""
        self.drafted, self.moves = [], {}
        serving = Serving(self, scheduler, requests, observe)
        serving.run()
        self.first_run += scheduler.counts.runs
        self.first_draft += serving.num_drafts

    def close(self) -> None:
        """End the stages and the drafter. Returns when the last stage has ended."""
        self.launches.send(Message(Kind.END))
        if self.drafts is not None:
            self.drafts.send(Message(Kind.END))
            self.drafts.close()
        event = self.events.get()
        if event.error is not None:
            raise event.error
        assert event.message is not None and event.message.kind is Kind.END, "no run is under way"
        self.launches.close()


class Serving:
    """The requests of one call of `Head.serve`. Runs and drafts are numbered from those of the head
    on, so that nothing of an earlier call is taken for them."""

    def __init__(
        self,
        head: Head,
        scheduler: PipelinedScheduler,
        requests: Sequence[Request],
        observe: Observer,
    ) -> None:
        self.head, self.scheduler, self.requests, self.observe = head, scheduler, requests, observe
        self.lanes: dict[int, int] = {}  # of the requests that have begun
        self.told: dict[int, int] = {}  # output tokens that the drafter knows
        self.num_drafts = 0
        self._results: deque[Message] = deque()
        self._drafted: Message | None = None
        self._is_over = False
        self._asked: DraftRequest | None = None  # the step that the drafter does

    def run(self) -> None:
        for request in self.requests:
            params = request.sampling
            assert not params.has_penalties, "they were refused"
            ends = params.max_new_tokens, params.eos_token_ids
            number, actions = self.scheduler.submit(request.prompt_ids, *ends)
            assert self.requests[number] is request
            self._do(actions)
        while not self._is_over or self._asked is not None:
            self._step()

    def _step(self) -> None:
        """Results go before drafts, and the drafter begins a step only when no result waits."""
        self._take_all()
        if self._results:
            self._result(self._results.popleft())
        elif self._drafted is not None:
            message, self._drafted = self._drafted, None
            self._take_candidates(message)
        elif self._asked is not None or not (actions := self.scheduler.idle()):
            self._take(self.head.events.get())
        else:
            self._do(actions)

    def _take_all(self) -> None:
        with suppress(Empty):
            while True:
                self._take(self.head.events.get_nowait())

    def _take(self, event: Event) -> None:
        if event.error is not None:
            raise event.error
        assert event.message is not None
        if event.is_result:
            self._results.append(event.message)
        else:
            assert self._drafted is None, "one draft at a time"
            self._drafted = event.message

    def _result(self, message: Message) -> None:
        is_void = message.kind is Kind.VOID
        self.head.spans.moment(What.RESULT, message.run, int(is_void))
        tokens, margins = (None, None) if is_void else (numbers_of(message), margins_of(message))
        self._do(self.scheduler.result(message.run - self.head.first_run, tokens, margins))

    def _take_candidates(self, message: Message) -> None:
        asked, self._asked = self._asked, None
        assert asked is not None, "an answer to what was asked"
        request, candidates = self.requests[asked.request], candidates_of(message)
        num_output = asked.kept + len(asked.new) - len(request.prompt_ids)
        for path, each in zip(asked.paths, candidates, strict=True):
            self.head.drafted.append(Drafted(asked.request, num_output, path, each))
        self._do(self.scheduler.drafted(message.run - self.head.first_draft, candidates))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                self._launch(action)
            elif isinstance(action, Cancel):
                self.head.cancels.cancel([self.head.first_run + run for run in action.runs])
            elif isinstance(action, Commit):
                tokens = list(action.tokens)
                self.requests[action.request].append(tokens, time.perf_counter())
                self.observe(len(tokens))
            elif isinstance(action, Draft):
                self._draft(action)
            elif isinstance(action, Stop):
                self._is_over = True

    def _launch(self, launch: Launch) -> None:
        if launch.request not in self.lanes:
            self._begin(launch)
        run = self.head.first_run + launch.run
        what = What.LAUNCH if self.requests[launch.request].output_ids else What.PROMPT
        self.head.spans.moment(what, run, launch.num_rows)
        self.head.launches.send(pack(Kind.HIDDEN, run, launch.to_words()))

    def _begin(self, launch: Launch) -> None:
        """The request's first run: tell the drafter its prompt, which it reads meanwhile."""
        request = launch.request
        self.head.moves[self.requests[request].request_id] = Moves([time.perf_counter()])
        self.lanes[request], self.told[request] = launch.lane, 0
        if self.head.drafts is not None and self.scheduler.options.mode != "iterative":
            prompt = self.requests[request].prompt_ids
            self.head.drafts.send(DraftRequest(request, launch.lane, 0, prompt).to_message(0))

    def _draft(self, draft: Draft) -> None:
        assert self.head.drafts is not None, "without a drafter the mode is iterative"
        request, told = self.requests[draft.request], self.told[draft.request]
        kept, new = len(request.prompt_ids) + told, tuple(request.output_ids[told:])
        self.told[draft.request] = len(request.output_ids)
        asked = DraftRequest(draft.request, self.lanes[draft.request], kept, new, draft.paths)
        self._asked, self.num_drafts = asked, draft.draft + 1
        self.head.drafts.send(asked.to_message(self.head.first_draft + draft.draft))
