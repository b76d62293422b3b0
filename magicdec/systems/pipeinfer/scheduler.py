"""PipelinedScheduler: decides what a pipeline of stages computes and skips, by asynchronous
pipelined speculation (PipeInfer, arXiv 2407.11798; docs/pipeinfer.md), synchronous speculation or
plain decoding.

Pure Python without torch, clock or channels: events go in, ordered actions come out, and equal
calls give equal actions. Three rules make it lossless:

  1. A token is committed only from a row whose whole context is committed (`Sequence.commit`).
  2. A run is skipped only if no row that can still be right is in it or reads it
     (`Sequence.needed_runs`). So no position that a live row reads is missing.
  3. A position is written anew by a later run only, and every stage runs in order.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import groupby

from magicdec.systems.pipeinfer.messages import (
    Action,
    Cancel,
    Candidate,
    Commit,
    DraftAction,
    JudgedRun,
    RunLaunch,
)
from magicdec.systems.pipeinfer.options import PIPELINE, PIPELINE_WITH_DRAFT, Options
from magicdec.systems.pipeinfer.sequence import LaunchedRun, Microbatch, Node, Sequence


@dataclass
class Counts:
    runs: int = 0
    speculative_runs: int = 0
    invalid_runs: int = 0  # cancelled: no row of them could be right any more
    num_drafted: int = 0  # draft tokens of the runs whose first draft was judged
    num_accepted: int = 0  # of these
    num_cancelled: int = 0  # draft tokens of other speculative runs
    failed_attempts: int = 0  # to draft; the candidate was less probable than the threshold
    # By how much the largest logit exceeded the second, at the committed token with the least.
    least_margin: float = math.inf


def judge(tip: Node, drafts: Tokens[Node], is_over: bool) -> tuple[tuple[JudgedRun, ...], int]:
    """The newly judged runs of `drafts`, and the number of draft tokens that nobody will judge.
    `tip` is as before the results. A run counts with all its drafts once its first is judged.
    `is_over`: the request has ended."""
    before = tip
    is_ended = False
    num_cancelled = 0
    judged: list[JudgedRun] = []
    for run, nodes in groupby(drafts, key=lambda node: node.run):
        assert run is not None, "it was launched"
        num_drafted = run.num_drafted
        for node in nodes:
            if is_ended:
                break
            if before.predicted is None:
                if not is_over:
                    return tuple(judged), num_cancelled
                is_ended = True
                num_drafted = run.num_accepted
                break
            run.is_judged = True
            is_ended = before.predicted != node.token
            run.num_accepted += not is_ended
            before = node
        if run.is_judged:
            judged.append(JudgedRun(num_drafted, run.num_accepted, run.first_draft))
            num_cancelled += run.num_drafted - num_drafted
        else:
            num_cancelled += run.num_drafted
    return tuple(judged), num_cancelled


class PipelinedScheduler:
    def __init__(self, options: Options, prefill_chunk: int | None = None) -> None:
        """`prefill_chunk` is the most prompt tokens in a run; None stands for the whole prompt."""
        self.options = options
        self.prefill_chunk = prefill_chunk
        self.counts = Counts()
        self.in_flight: deque[LaunchedRun] = deque()  # the oldest first
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[Sequence] = deque()  # those that have no lane yet
        self._free_lanes = list(range(options.lanes))
        self._drafting: tuple[int, Sequence, Microbatch] | None = None
        self._num_drafts = self._num_requests = 0
        self._turn: deque[int] = deque()  # requests, the next to draft for first

    @property
    def is_over(self) -> bool:
        """Whether every request so far has ended and every run is home."""
        return not (self.in_flight or self._sequences or self._waiting)

    def submit(
        self,
        prompt: Tokens[int],
        max_new_tokens: int,
        eos_ids: Tokens[int] = (),
        request: int | None = None,
    ) -> tuple[int, list[Action]]:
        """The number of a new request, which begins at once if a lane is free: `request`, or that
        of the requests before it."""
        assert len(prompt) > 0 and max_new_tokens > 0, "checked by the caller"
        request = self._num_requests if request is None else request
        self._num_requests = self._num_requests + 1
        ends = frozenset(eos_ids)
        self._waiting.append(Sequence(request, prompt, max_new_tokens, ends, self.options))
        return request, self._admit()

    def result(
        self, run: int, tokens: Tokens[int] | None, margins: Tokens[float] | None = None
    ) -> list[Action]:
        """Take the oldest run's result: the target's next token after each of its last
        `num_outputs` rows, None if void, and the leads of their logits over the second largest."""
        oldest = self.in_flight.popleft()
        assert oldest.run == run, f"result of run {run}, but run {oldest.run} is the oldest"
        if oldest.is_cancelled:
            return []
        assert tokens is not None and len(tokens) == oldest.num_outputs, "no stage skipped it"
        sequence = self._sequences[oldest.request]
        sequence.num_in_flight -= 1
        if oldest.num_outputs:
            margins = margins or [math.inf] * len(tokens)
            for node, token, margin in zip(oldest.nodes, tokens, margins, strict=True):
                node.predicted = token
                node.margin = margin
        return self._commit(sequence)

    def drafted(self, draft: int, candidate: Candidate | None) -> list[Action]:
        assert self._drafting is not None and self._drafting[0] == draft, "one draft at a time"
        _, sequence, batch = self._drafting
        self._drafting = None
        if sequence.microbatch is not batch:  # it was given up meanwhile
            return []
        batch.extend(candidate, sequence.grow)
        return [] if sequence.is_drafting else self._end_microbatch(sequence)

    def idle(self) -> list[Action]:
        """The next draft step, if there is one, when no result waits and the drafter is free."""
        if self._drafting is not None or self.options.mode == PIPELINE:
            return []
        actions: list[Action] = []
        for _ in range(len(self._turn)):
            sequence = self._sequences[self._turn[0]]
            self._turn.rotate(-1)
            if sequence.microbatch is None and self._may_draft(sequence):
                sequence.begin_microbatch()
            if sequence.is_drafting:
                return [*actions, self._draft(sequence)]
            if sequence.microbatch is not None:
                actions += self._end_microbatch(sequence)
        return actions

    def _draft(self, sequence: Sequence) -> DraftAction:
        assert sequence.microbatch is not None
        draft = self._num_drafts
        self._num_drafts = self._num_drafts + 1
        self._drafting = draft, sequence, sequence.microbatch
        return DraftAction(draft, sequence.request, sequence.path())

    def _may_draft(self, sequence: Sequence) -> bool:
        if sequence.is_stalled or not sequence.num_output:
            return False
        if self.options.mode == PIPELINE_WITH_DRAFT and sequence.tip.run is not None:
            return False  # its result decides what is drafted next
        limit = self.options.max_in_flight
        if limit is not None and sequence.num_in_flight >= limit:
            return False
        return sequence.adjustment.may_draft and sequence.may_grow

    def _end_microbatch(self, sequence: Sequence) -> list[Action]:
        batch = sequence.microbatch
        assert batch is not None
        rows = sequence.take_drafted()
        if not batch.rows and batch.was_refused:
            before = sequence.adjustment.value
            sequence.adjustment.rejects += 1
            sequence.is_stalled = sequence.adjustment.value >= before
            self.counts.failed_attempts += 1
        if rows:
            sequence.adjustment.num_launched += 1
        if sequence.tip.run is None:  # of synchronous speculation, whose run begins with it
            rows = [sequence.tip, *rows]
        return [self._launch(sequence, rows)] if rows else []

    def _commit(self, sequence: Sequence) -> list[Action]:
        """Commit what the results tell, cancel useless runs, and launch the newest token."""
        tip = sequence.tip
        drafts = [n for n in sequence.chain if n.run is not None and not n.was_tip]
        tokens, finished = sequence.commit()
        self.counts.least_margin = min(self.counts.least_margin, sequence.least_margin)
        if not tokens:
            return []
        judged, num_cancelled = judge(tip, drafts, finished is not None)
        self.counts.num_drafted += sum(run.num_drafted for run in judged)
        self.counts.num_accepted += sum(run.num_accepted for run in judged)
        self.counts.num_cancelled += num_cancelled
        actions: list[Action] = [Commit(sequence.request, tokens, finished, judged, num_cancelled)]
        actions += self._cancel(sequence)
        if finished is not None:
            return [*actions, *self._leave(sequence)]
        waits_for_drafts = self.options.mode == PIPELINE_WITH_DRAFT and self._may_draft(sequence)
        if sequence.tip.run is None and not waits_for_drafts:
            actions.append(self._launch(sequence, [sequence.tip]))
        return actions

    def _cancel(self, sequence: Sequence) -> list[Action]:
        needed = sequence.needed_runs()
        useless = [
            run
            for run in self.in_flight
            if run.request == sequence.request and not run.is_cancelled and run not in needed
        ]
        for run in useless:
            run.is_cancelled = True
            sequence.num_in_flight -= 1
        self.counts.invalid_runs += len(useless)
        return [Cancel(tuple(run.run for run in useless))] if useless else []

    def _launch(self, sequence: Sequence, nodes: list[Node]) -> RunLaunch:
        drafts = [node for node in nodes if not node.was_tip]
        run = LaunchedRun(self.counts.runs, sequence.request, nodes, len(nodes), bool(drafts))
        run.num_drafted = len(drafts)
        run.first_draft = drafts[0].position if drafts else 0
        self.counts.speculative_runs += run.is_speculative
        self._take_off(run)
        return sequence.launch(run, nodes[0].position, [node.token for node in nodes])

    def _take_off(self, run: LaunchedRun) -> None:
        self.counts.runs += 1
        self.in_flight.append(run)

    def _admit(self) -> list[Action]:
        actions: list[Action] = []
        while self._waiting and self._free_lanes:
            sequence = self._waiting.popleft()
            sequence.lane = heapq.heappop(self._free_lanes)
            self._sequences[sequence.request] = sequence
            self._turn.append(sequence.request)
            actions += self._prefill(sequence)
        return actions

    def _prefill(self, sequence: Sequence) -> list[Action]:
        tip = sequence.tip
        actions = list[Action]()
        size = self.prefill_chunk or len(sequence.prompt)
        for first in range(0, tip.position + 1, size):
            last = min(first + size, tip.position + 1) - 1
            nodes = [tip] if last == tip.position else []
            run = LaunchedRun(self.counts.runs, sequence.request, nodes, len(nodes), False)
            self._take_off(run)
            actions.append(sequence.launch(run, first, sequence.prompt[first : last + 1]))
        return actions

    def _leave(self, sequence: Sequence) -> list[Action]:
        del self._sequences[sequence.request]
        self._turn.remove(sequence.request)
        heapq.heappush(self._free_lanes, sequence.lane)
        sequence.microbatch = None
        return self._admit()
