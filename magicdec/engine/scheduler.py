"""Scheduler: decides each step, alone changes the state of requests, and counts the KV blocks of
rows (`RowBlocks`). It depends on no clock. Imports no torch.

Requests join between two steps, when a row and enough blocks are free, and leave when they have
ended (Orca, Yu et al. 2022). Blocks are taken as tokens come; when none is free the youngest
request is preempted, and prefilled again later (PagedAttention, arXiv 2309.06180, section 4.5).
"""

from __future__ import annotations

import sys
import time
import zlib
from array import array
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from magicdec.kv.prefix_cache import Beginning, PrefixCache
from magicdec.runner.request import Batch, Moves, Request, RequestStatus, StepOutput
from magicdec.runner.step_plan import BatchLimits, PrefillChunk, StepPlan


class Scheduler:
    """The admission of waiting requests to rows, and the commit of emitted tokens. A step costs
    constant time for each running request, none for waiting ones."""

    def __init__(
        self,
        num_rows: int,
        limits: BatchLimits = BatchLimits(),
        waiting: list[Request] | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """`waiting` is an empty list that several schedulers may share. Requests begin with what
        `prefixes` has of their texts."""
        self.num_rows = num_rows
        self.limits = limits
        self.waiting: list[Request] = [] if waiting is None else waiting  # in order of admission
        self.rows: list[Request | None] = [None] * num_rows
        self.blocks = RowBlocks(num_rows, limits, prefixes)
        self.prefixes = prefixes
        self._prefilled: dict[Request, int] = {}  # tokens so far, of texts that are not complete
        self._shared: dict[Request, int] = {}  # tokens that texts begin with, where any
        # Tokens that texts have in common with others, after which states are kept, where any.
        self._known: dict[Request, int] = {}
        self._cancelled: set[Request] = set()
        self._repeated: StepPlan | None = None  # the plan of each step until something changes

    @property
    def running(self) -> list[Request]:
        return [request for request in self.rows if request is not None]

    def add(self, requests: Sequence[Request], now: float) -> None:
        """Let `requests` that arrived at `now` wait for rows. Raises ValueError if one can never
        be served."""
        for request in requests:
            self.limits.check(request)
        for request in requests:
            request.arrived_s = now
            self._wait(request)

    def cancel(self, request: Request) -> None:
        """End a request early. Its row is freed in the next step."""
        if request in self.waiting:
            self.waiting.remove(request)
            request.status = RequestStatus.CANCELLED
        elif request.status is RequestStatus.RUNNING:
            self._cancelled.add(request)
            self._repeated = None

    def schedule(self) -> StepPlan | None:
        """The next step, taken to happen. None if no request waits or runs."""
        may_admit = self.waiting and None in self.rows
        if self._repeated is not None and not self.blocks.short and not may_admit:
            return self._repeated
        if not self.waiting and not any(self.rows):
            return None
        plan = self._decide()
        self._apply(plan)
        # Requests that wait for a row, and not for blocks, wait until another request leaves.
        is_waiting = self.waiting and None in self.rows
        self._repeated = None  # of before: who joins now decodes in the next step
        if not (is_waiting or plan.parts or plan.cancelled or plan.preempted):
            self._repeated = StepPlan(plan.decoding) if plan.reserved else plan
        return plan

    def _apply(self, plan: StepPlan) -> None:
        for request, row in (*plan.preempted, *plan.cancelled):
            self._leave(row)
            request.row = None
            request.status = RequestStatus.CANCELLED
        for request, _ in plan.preempted:
            request.status = RequestStatus.WAITING
            self._wait(request)
        for request, row in plan.admitted:
            self.waiting.remove(request)
            self.rows[row] = request
            self._prefilled[request] = self._shared.get(request, 0)
            request.row = row
            request.status = RequestStatus.RUNNING
        for row, num_tokens in plan.reserved:
            self.blocks.reserve(row, num_tokens)
        for part in plan.parts:
            self._prefilled[part.request] = part.stop
            if part.is_last:
                del self._prefilled[part.request]

    def commit(self, batch: Batch, output: StepOutput, now: float) -> StepOutput:
        """Append emitted tokens to requests, up to their end. Returns the output with the
        appended tokens and, of a step that drafts, the lengths of the texts before it."""
        contexts = None
        if output.num_accepted is not None:
            contexts = [len(r.prompt_ids) + len(r.output_ids) for r in batch.requests]
        appended = []
        times = output.emitted_s or [now] * len(batch.requests)
        for request, tokens, at in zip(batch.requests, output.token_ids, times, strict=True):
            new_tokens = request.append(tokens, at)
            appended.append(new_tokens)
            if request.row is None:
                continue
            if request.status is RequestStatus.FINISHED:
                self._leave(request.row)
            elif new_tokens:
                self.blocks.grow(request.row, request.num_cached)
        if contexts is None and appended == output.token_ids:
            return output
        return replace(output, token_ids=appended, contexts=contexts)

    def rewind(self, requests: Sequence[Request]) -> None:
        """Go on with `requests`, which have rows, alone."""
        self.waiting.clear()
        self._prefilled.clear()
        self.rows = [None] * self.num_rows
        for request in requests:
            if request.status is RequestStatus.RUNNING and request.row is not None:
                self.rows[request.row] = request
        self._repeated = None

    def digest(self) -> int:
        """A hash of the running batch and its tokens, equal on all ranks."""
        state = [
            (r.request_id, len(r.output_ids), r.output_ids[-1] if r.output_ids else 0, num_blocks)
            for r, num_blocks in zip(self.rows, self.blocks.held, strict=True)
            if r is not None
        ]
        return zlib.crc32(
            array("q", [number for row_state in state for number in row_state]).tobytes()
        )

    def _wait(self, request: Request) -> None:
        """First come, first served; ties by smallest id."""
        insort(self.waiting, request, key=lambda r: (r.arrived_s, r.request_id))

    def _leave(self, row: int) -> None:
        request = self.rows[row]
        assert request is not None, "a request leaves its row once"
        self._prefilled.pop(request, None)
        self._shared.pop(request, None)
        self._known.pop(request, None)
        self._cancelled.discard(request)
        self.rows[row] = None
        self._repeated = None
        self.blocks.release(row)

    def _decide(self) -> StepPlan:
        running = self.running
        cancelled = [r for r in running if r in self._cancelled] if self._cancelled else []
        if cancelled and self.prefixes is not None:
            # A step of its own, which computes nothing, so that who joins finds what they leave.
            return StepPlan(cancelled=_with_rows(cancelled), shared=())
        preempted, reserved = self._grow(cancelled)
        leaving = cancelled + preempted
        shared = dict[int, Beginning]()
        # A request that was just preempted would come back at once.
        admitted = [] if preempted else self._admit(leaving, reserved, shared)
        decoding = tuple(r for r in running if r not in self._prefilled and r not in leaving)
        return StepPlan(
            Batch(decoding) if decoding else None,
            _with_rows(preempted),
            _with_rows(cancelled),
            tuple(admitted),
            None if self.prefixes is None else tuple(shared.items()),
            tuple(sorted(reserved.items())),
            self._prefill(leaving, admitted),
        )

    def _grow(self, cancelled: Sequence[Request]) -> tuple[list[Request], dict[int, int]]:
        """The requests to preempt, youngest first, and by row the tokens for which decoding rows
        need more blocks."""
        blocks = self.blocks
        preempted = list[Request]()
        reserved = dict[int, int]()
        if not blocks.short:
            return preempted, reserved
        taken = 0
        survivors = sorted(
            (r for r in self.running if r not in cancelled),
            key=lambda r: (r.arrived_s, r.request_id),
        )
        for request in survivors.copy():  # the oldest first
            assert request.row is not None, "what runs has a row"
            if request in preempted or request.row not in blocks.short:
                continue
            num_tokens = blocks.short[request.row]
            lacking = blocks.lacking(request.row, num_tokens)
            while request not in preempted:
                free = blocks.free(_rows_of([*cancelled, *preempted]))
                if taken + lacking <= free:
                    reserved[request.row] = num_tokens
                    taken += lacking
                    break
                preempted.append(survivors.pop())
        return preempted, reserved

    def _admit(
        self,
        leaving: Sequence[Request],
        reserved: dict[int, int],
        shared: dict[int, Beginning],
    ) -> list[tuple[Request, int]]:
        """The requests that get a row in the next step, in order; none overtakes one without
        room. Blocks for the text and one step are added to `reserved`, and what rows begin
        with to `shared`."""
        limits = self.limits
        blocks = self.blocks
        admitted = list[tuple[Request, int]]()
        if not self.waiting:
            return admitted
        free_rows = [r for r, one in enumerate(self.rows) if one is None or one in leaving]
        free = 0
        if blocks.is_limited:
            free = blocks.free(_rows_of(leaving))
            free -= sum(blocks.lacking(row, num_tokens) for row, num_tokens in reserved.items())
        for request, row in zip(self.waiting, free_rows, strict=False):
            tokens = request.num_cached + limits.step_tokens
            found = Beginning()
            if self.prefixes is not None:
                found = self.prefixes.find(request.cached_ids)
            if blocks.is_limited:
                # Blocks that no row holds count as free, also those that are kept for texts.
                num_blocks = limits.num_blocks_of(tokens)
                found = found.that_fits(free, num_blocks)
                free -= found.num_needed(num_blocks)
                if free < 0:
                    break
                reserved[row] = tokens
                free -= found.keeps_block
            if found.num_known > found.num_tokens:
                self._known[request] = found.num_known
            if self.prefixes is not None and found.num_tokens:
                self.prefixes.adopt(row, found)
                self._shared[request] = found.num_tokens
                shared[row] = found
            admitted.append((request, row))
        return admitted

    def _prefill(
        self, leaving: Sequence[Request], admitted: Sequence[tuple[Request, int]]
    ) -> tuple[PrefillChunk, ...]:
        room = self.limits.prefill_tokens
        parts = []
        unfinished = [
            (r, r.row, num_done) for r, num_done in self._prefilled.items() if r not in leaving
        ]
        new = [(r, row, self._shared.get(r, 0)) for r, row in admitted]
        for request, row, num_done in [*unfinished, *new]:
            assert row is not None, "what is prefilled has a row"
            stop = request.num_cached if room is None else min(request.num_cached, num_done + room)
            known = self._known.get(request, 0)
            keeps_state = num_done < known <= stop
            if keeps_state:
                stop = known
            if stop > num_done:
                num_shared = self._shared.get(request, 0)
                part = PrefillChunk(request, row, num_done, stop, num_shared, keeps_state)
                parts.append(part)
                room = None if room is None else room - (stop - num_done)
        return tuple(sorted(parts, key=lambda part: part.row))


@dataclass
class StepCounts:
    """Counts of the steps of serving. `now` is the clock of arrivals."""

    now: Callable[[], float] = field(default=lambda: time.perf_counter(), compare=False)
    num_steps: int = 0
    num_preemptions: int = 0
    num_in_flight: int = 0  # summed over the steps
    num_looked_up: int = 0  # tokens that were looked for in a prefix cache
    num_found: int = 0
    blocks_to_host: int | None = None  # that the caches of target and draft have copied there
    blocks_from_host: int | None = None
    moves: dict[int, Moves] = field(default_factory=lambda: defaultdict(Moves))

    def look_up(
        self, request_id: int, num_tokens: int, num_found: int, num_from_host: int = 0
    ) -> None:
        """Count a request that joins with so many tokens, of which a prefix cache has some, of
        these some in host memory."""
        self.num_looked_up += num_tokens
        self.num_found += num_found
        self.moves[request_id].num_looked_up += num_tokens
        self.moves[request_id].found.append(num_found)
        self.moves[request_id].from_host.append(num_from_host)

    def watch(self, plan: StepPlan) -> None:
        """Count a step that begins now. A request is prefilled or decoded in it."""
        now = self.now()
        decoding = () if plan.decoding is None else plan.decoding.requests
        self.num_steps += 1
        self.num_preemptions += len(plan.preempted)
        self.num_in_flight += len(decoding) + len(plan.parts)
        if plan.shared is not None:
            beginnings = dict(plan.shared)
            for request, row in plan.admitted:
                found = beginnings.get(row, Beginning())
                counts = request.num_cached, found.num_tokens, found.num_from_host
                self.look_up(request.request_id, *counts)
        for request, _ in plan.preempted:
            self.moves[request.request_id].preempted_s.append(now)
        for request, _ in plan.admitted:
            self.moves[request.request_id].joined_s.append(now)


class RowBlocks:
    """The blocks of each row, and the rows that need more. Nothing is counted without
    `BatchLimits.num_blocks`. `prefixes` knows which blocks several rows hold."""

    def __init__(
        self, num_rows: int, limits: BatchLimits, prefixes: PrefixCache | None = None
    ) -> None:
        self.limits = limits
        self.prefixes = prefixes
        self.is_limited = limits.num_blocks is not None
        self.held = [0] * num_rows
        # The most cached tokens of a row for which its blocks have room for one more step.
        self._enough = [0 if self.is_limited else sys.maxsize] * num_rows
        self.short: dict[int, int] = {}  # row: the tokens that it must have room for; it has not

    def free(self, leaving: Collection[int] = ()) -> int:
        """Blocks that no row holds once the rows that are `leaving` return theirs."""
        assert self.limits.num_blocks is not None, "asked only if blocks are limited"
        held = sum(self.held) - sum(self.held[row] for row in leaving)
        if self.prefixes is not None:
            held -= self.prefixes.num_repeated(leaving)
        return self.limits.num_blocks - held

    def lacking(self, row: int, num_tokens: int) -> int:
        return self.limits.num_blocks_of(num_tokens) - self.held[row]

    def grow(self, row: int, num_cached: int) -> None:
        """Note that a row holds `num_cached` tokens before its next step."""
        if num_cached > self._enough[row]:
            self.short[row] = num_cached + self.limits.step_tokens

    def reserve(self, row: int, num_tokens: int) -> None:
        self.held[row] = num_blocks = self.limits.num_blocks_of(num_tokens)
        self._enough[row] = num_blocks * self.limits.block_size - self.limits.step_tokens
        self.short.pop(row, None)

    def release(self, row: int) -> None:
        self.held[row] = 0
        self.short.pop(row, None)


def _rows_of(requests: Sequence[Request]) -> list[int]:
    return [request.row for request in requests if request.row is not None]


def _with_rows(requests: Sequence[Request]) -> tuple[tuple[Request, int], ...]:
    return tuple(sorted(zip(requests, _rows_of(requests), strict=True), key=lambda p: p[1]))
