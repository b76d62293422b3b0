"""Head: carries out what the scheduler decides. It launches runs into the first stage, cancels
them, asks the drafter for its next step, and gives requests their tokens. Only the head has a
scheduler. Results and drafts come in through threads that do nothing else, so that it never waits
for one of them while the other is there.

PipelineRank: the loops and threads of one rank. The first rank leads, with its stage and its
drafter in threads; every other rank is a stage or drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

import torch

from magicdec.distributed.channels.message import (
    Ends,
    Kind,
    Message,
    Nowhere,
    Receiver,
    Sender,
    floats_of,
)
from magicdec.hardware.environment import use_device
from magicdec.hardware.threads import ThreadCount
from magicdec.hardware.timing import Clock, RealClock
from magicdec.pipeline.stage import StageLoop
from magicdec.pipeline.tracing import Spans, What
from magicdec.pipelined_run.channels import Canceller, DraftRequest, Wires, candidates_of
from magicdec.pipelined_run.drafter import Drafter, DraftLoop
from magicdec.pipelined_run.stage import CancellableStage, RunPart
from magicdec.pipelined_speculation.messages import (
    Action,
    Cancel,
    Candidates,
    Commit,
    Draft,
    Launch,
    Stop,
)
from magicdec.pipelined_speculation.options import Counts
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.request import Moves, Request

Observer = Callable[[int], None]
"""A function that is called with the number of tokens of each commit."""


Event = tuple[bool, Message] | BaseException
"""A message that came in, with whether it is a result; or what has ended a thread."""
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
                events.put((is_result, message))

    return in_thread(copy, events)


def in_thread(work: Callable[[], None], events: Events) -> Thread:
    """A thread that does `work`. An error in it is an event."""

    def run() -> None:
        try:
            work()
        except BaseException as error:
            events.put(error)

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
        clock: Clock | None = None,
    ) -> None:
        """`drafts` leads to the drafter, if there is one. `clock` tells when requests arrive and
        tokens are committed."""
        self.launches, self.cancels, self.drafts = launches, cancels, drafts
        self.events, self.spans, self.clock = events, spans, clock or RealClock()
        self.first_run = self.first_draft = 0  # numbers that were not used before
        self.drafted: list[Drafted] = []  # of the requests that were served last
        self.moves: dict[int, Moves] = {}  # of the same requests: when each got its lane
        self.counts = Counts()  # of the same

    def serve(
        self,
        scheduler: PipelinedScheduler,
        requests: Sequence[Request],
        observe: Observer = lambda num_tokens: None,
    ) -> None:
        """Serve `requests`, each from its `arrived_s` on, until all have ended and every run is
        home. The scheduler and the drafters number them in the order of arrival."""
        self.drafted, self.moves = [], {}
        self.counts = scheduler.counts
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
        if isinstance(event, BaseException):
            raise event
        assert event[1].kind is Kind.END, "no run is under way"
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
        self.head, self.scheduler, self.observe = head, scheduler, observe
        self.requests = sorted(requests, key=lambda r: (r.arrived_s, r.request_id))
        self._arrivals = deque(self.requests)  # those that have not arrived yet
        self.lanes: dict[int, int] = {}  # of the requests that have begun
        self.num_known: dict[int, int] = {}  # output tokens that the drafter knows
        self.num_drafts = 0
        self._results: deque[Message] = deque()
        self._drafted: Message | None = None
        self._is_over = False
        self._draft_step: DraftRequest | None = None  # the step that the drafter does

    def run(self) -> None:
        while self._arrivals or not self._is_over or self._draft_step is not None:
            self._step()

    def _submit(self, request: Request) -> None:
        """The scheduler has something to do again, if it had come to its end."""
        params, self._is_over = request.sampling, False
        number, actions = self.scheduler.submit(
            request.prompt_ids, params.max_new_tokens, params.eos_token_ids
        )
        assert self.requests[number] is request
        self._do(actions)

    def _step(self) -> None:
        """Results go before drafts, and the drafter begins a step only when no result waits."""
        while self._arrivals and self._arrivals[0].arrived_s <= self.head.clock.now():
            self._submit(self._arrivals.popleft())
        self._take_all()
        if self._results:
            self._result(self._results.popleft())
        elif self._drafted is not None:
            message, self._drafted = self._drafted, None
            self._take_candidates(message)
        elif self._draft_step is not None or not (actions := self.scheduler.idle()):
            self._wait()
        else:
            self._do(actions)

    def _wait(self) -> None:
        """Wait for an event, or until the next request arrives."""
        seconds = None
        if self._arrivals:
            seconds = max(0.0, self._arrivals[0].arrived_s - self.head.clock.now())
        with suppress(Empty):
            self._take(self.head.events.get(timeout=seconds))

    def _take_all(self) -> None:
        with suppress(Empty):
            while True:
                self._take(self.head.events.get_nowait())

    def _take(self, event: Event) -> None:
        if isinstance(event, BaseException):
            raise event
        is_result, message = event
        if is_result:
            self._results.append(message)
        else:
            assert self._drafted is None, "one draft at a time"
            self._drafted = message

    def _result(self, message: Message) -> None:
        is_void = message.kind is Kind.VOID
        self.head.spans.moment(What.RESULT, message.run, int(is_void))
        run = message.run - self.head.first_run
        if is_void:
            return self._do(self.scheduler.result(run, None))
        count = len(message.words) // 2
        tokens, margins = message.words[:count], floats_of(message.words[count:])
        self._do(self.scheduler.result(run, tokens, margins))

    def _take_candidates(self, message: Message) -> None:
        step, self._draft_step = self._draft_step, None
        assert step is not None, "an answer to a step"
        request, candidates = self.requests[step.request], candidates_of(message)
        num_output = step.kept + len(step.new) - len(request.prompt_ids)
        for path, each in zip(step.paths, candidates, strict=True):
            self.head.drafted.append(Drafted(step.request, num_output, path, each))
        self._do(self.scheduler.drafted(message.run - self.head.first_draft, candidates))

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Launch):
                self._launch(action)
            elif isinstance(action, Cancel):
                self.head.cancels.cancel([self.head.first_run + run for run in action.runs])
            elif isinstance(action, Commit):
                tokens = list(action.tokens)
                self.requests[action.request].append(tokens, self.head.clock.now())
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
        self.head.launches.send(Message(Kind.HIDDEN, run, words=launch.to_words()))

    def _begin(self, launch: Launch) -> None:
        """The request's first run: tell the drafter its prompt, which it reads meanwhile."""
        request = launch.request
        self.head.moves[self.requests[request].request_id] = Moves([self.head.clock.now()])
        self.lanes[request], self.num_known[request] = launch.lane, 0
        if self.head.drafts is not None and self.scheduler.options.mode != "iterative":
            prompt = self.requests[request].prompt_ids
            self.head.drafts.send(DraftRequest(request, launch.lane, 0, prompt).to_message(0))

    def _draft(self, draft: Draft) -> None:
        assert self.head.drafts is not None, "without a drafter the mode is iterative"
        request, num_known = self.requests[draft.request], self.num_known[draft.request]
        self.num_known[draft.request], self.num_drafts = len(request.output_ids), draft.draft + 1
        self._draft_step = DraftRequest(
            draft.request,
            self.lanes[draft.request],
            len(request.prompt_ids) + num_known,
            tuple(request.output_ids[num_known:]),
            draft.paths,
        )
        self.head.drafts.send(self._draft_step.to_message(self.head.first_draft + draft.draft))


CPU = torch.device("cpu")
End = TypeVar("End")


class PipelineRank:
    """`part` is this rank's stage and `drafter` its drafter, None where it has none. They compute
    on `device`, each in a thread if this rank has both; on a GPU they share a stream."""

    def __init__(
        self,
        rank: int,
        wires: Wires,
        part: RunPart | None,
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
            ends = Ends(there(wires.inbound), wires.outbound or Nowhere())
            stage = CancellableStage(self.part, wires.board)
            loops.append(StageLoop(stage, ends, spans).serve)
        if self.drafter is not None:
            inbound, outbound = there(wires.draft_steps), wires.answers or Nowhere()
            loops.append(DraftLoop(self.drafter, inbound, outbound, spans).serve)
        loops = [count.during()(loop) for loop in loops]
        if self.rank == 0:
            self._lead(lead, loops, spans)
        else:
            for loop in loops:  # one at most: only the first rank is several things
                loop()
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


def there(end: End | None) -> End:
    assert end is not None, "the layout says that this rank has it"
    return end
