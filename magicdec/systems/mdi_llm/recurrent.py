"""RecurrentPipeline: samples circulate through a ring of stages, so that every stage works on
another one (recurrent pipeline parallelism; MDI-LLM, arXiv 2505.18164, section III).

A lane is a running batch with its own scheduler, whose rows travel in one message; all lanes admit
from one queue. A step of a lane ends when its messages are home, and the next begins at once.

With drafts, a decoding message holds a row's newest token and its drafts, and says how many tokens
every stage keeps of each row. The first stage drafts and judges (`RingSpeculation`). Messages come
home in the order of their sending, so that all ranks of the first stage act alike without agreeing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magicdec.config.resolved import ResolvedConfig
from magicdec.distributed.channels.message import Ends, Kind, Message, wait_for_stream
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.engine.arrivals import Arrivals
from magicdec.engine.scheduler import Scheduler
from magicdec.hardware.timing import Clock, GroupClock, RealClock
from magicdec.kv.cache import BatchRows, Lengths, upload
from magicdec.runner.device_batch import DeviceBatch
from magicdec.runner.forward_batch import Tokens
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.draft_log import DraftLog
from magicdec.runner.observers.hidden_states import ReceivedStates
from magicdec.runner.request import (
    Batch,
    Observer,
    Request,
    RequestStatus,
    StepOutput,
    ignore_step,
    naming,
)
from magicdec.runner.sampling.metadata import SamplingMetadata
from magicdec.runner.sampling.model_tokens import Proposal, judge, next_tokens
from magicdec.runner.step_plan import BatchLimits, StepObserver, StepPlan
from magicdec.setup.loading import LoadedModels, make_draft
from magicdec.setup.model_plan import StagePart
from magicdec.setup.prepare import Prepared
from magicdec.speculation.draft_length import FixedLength
from magicdec.speculation.drafter import Drafter, DraftSetup, DraftShape, make_drafter
from magicdec.systems.mdi_llm.details import DraftCounts
from magicdec.systems.mdi_llm.ring_stage import ENDS_PROMPT, IN_PROMPT, VERIFY, WANTED, Stage
from magicdec.systems.stages.spans import SpanKind, Spans


@dataclass(frozen=True)
class PendingDraft:
    """Drafted tokens that await verification: `tokens`, int64 [B, 1 + K], are the newest token and
    K drafts of each request."""

    requests: Sequence[Request]
    tokens: Tensor
    proposal: Proposal
    sampling: SamplingMetadata
    num_drafted: Sequence[int]  # of each row, without padding
    digests: Sequence[tuple[str, int]] | None = None  # of each row (`DraftLog`), if it is kept


class RingSpeculation:
    """Drafting and judging on the first stage: `drafter` drafts `gamma` for each row of
    a message."""

    def __init__(self, runner: ModelRunner, drafter: Drafter, gamma: int) -> None:
        self.runner = runner
        self.drafter = drafter
        self.gamma = gamma
        self.counts = DraftCounts()
        self.draft_length = FixedLength(gamma)
        self.is_padded = False  # whether each message has so many drafts, for a timing
        self.log: DraftLog | None = None
        draft_runners = () if drafter.draft_kv is None else (drafter.draft_kv.runner,)
        self._vocab_size = max(r.model.config.vocab_size for r in (runner, *draft_runners))
        self._known: dict[int, Request] = {}  # by row; they share the lists of their output tokens

    def admit(self, requests: Sequence[Request], rows: Sequence[int]) -> None:
        """Take requests whose prompts are cached and whose first tokens are known."""
        in_rows = [replace(r, row=row) for r, row in zip(requests, rows, strict=True)]
        self._known |= zip(rows, in_rows, strict=True)
        with self._timed():
            self.drafter.admit(in_rows)

    @torch.inference_mode()
    def draft(self, rows: Sequence[int]) -> PendingDraft:
        """Drafts for `rows`, whose committed tokens alone are in the cache."""
        batch = Batch(tuple(self._known[row] for row in rows))
        count = self.gamma
        if self.log is not None:
            self.log.begin()
        with self._timed():
            on_device = DeviceBatch.of(batch, self._vocab_size, self.runner.device)
            plan = self.drafter.plan(batch.requests, count, self.draft_length)
            count = count if self.is_padded else max(plan.counts)
            pending = self.drafter.prepare(batch.requests, count)
            proposal = self.drafter.propose(on_device, DraftShape(count, pending))
        self.counts.num_messages += 1
        tokens = torch.cat([on_device.newest[:, -1:], proposal.ids], dim=1)
        most = proposal.ids.shape[1]  # fewer than were asked for, if the chains have stopped
        counts = [min(count, most) for count in plan.counts]
        digests = None
        if self.log is not None:
            self.log.drafted(rows, proposal.ids, counts)
            digests = self.log.digests(rows)
        return PendingDraft(batch.requests, tokens, proposal, on_device.sampling, counts, digests)

    def keep_log(self, log: DraftLog | None) -> None:
        """Let steps say what was drafted and read, or no longer."""
        self.log = log
        own = () if self.drafter.draft_kv is None else (self.drafter.draft_kv.runner,)
        for runner in (self.runner, *own):
            runner.set_observer(DraftLog, log)

    @torch.inference_mode()
    def judge(self, draft: PendingDraft, logits: Tensor) -> StepOutput:
        """The tokens that each row emits, from this rank's logits [B, 1 + K, V]."""
        judgement = judge(self.runner, draft.sampling, draft.proposal, logits)
        columns = [judgement.accepted.unsqueeze(1), judgement.ids]
        lines = draft.sampling.with_flaws(columns).tolist()
        for request, line in zip(draft.requests, lines, strict=True):
            draft.sampling.check(request, line)
        counts = [line[1] for line in lines]
        emitted = [line[2:] for line in lines]
        proposed = draft.num_drafted
        self.counts.num_rounds += len(counts)
        tokens = [row_tokens[: n + 1] for row_tokens, n in zip(emitted, counts, strict=True)]
        longest = draft.proposal.ids.shape[1]
        digests = None if draft.digests is None else list(draft.digests)
        return StepOutput(tokens, longest, counts, list(proposed), digests=digests)

    def commit(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Keep the first `lengths` tokens of `rows`, which are committed, and forget the rest."""
        device = self.runner.device
        self.drafter.commit(BatchRows.of(rows, device), Lengths.of(lengths, device))

    def release(self, rows: Sequence[int]) -> None:
        self.drafter.release([row for row in rows if self._known.pop(row, None) is not None])

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin_s = time.perf_counter()
        yield
        wait_for_stream(self.runner.device)
        self.counts.draft_s += time.perf_counter() - begin_s


@dataclass(frozen=True)
class Lane:
    """A running batch in consecutive rows of the cache, from `first_row` on."""

    index: int
    first_row: int
    scheduler: Scheduler

    def rows(self, requests: Sequence[Request]) -> list[int]:
        return [self.first_row + row for row in Batch(tuple(requests)).rows]


@dataclass(frozen=True)
class RingRun:
    """A run under way. `is_wanted`: next tokens follow from it. `is_decode`: it has newest tokens,
    no prompt. `ends_step`: it is the last of the lane's step."""

    lane: Lane
    requests: tuple[Request, ...]
    is_wanted: bool
    is_decode: bool
    draft: PendingDraft | None = None
    ends_step: bool = False

    @property
    def status(self) -> int:
        if self.draft is not None:
            return VERIFY
        if self.is_decode:
            return WANTED
        return ENDS_PROMPT if self.is_wanted else IN_PROMPT


@dataclass(frozen=True)
class SentTokens:
    """Token ids [B, T] of a message, and their positions in the texts of `rows`."""

    rows: Tensor
    positions: Tensor
    token_ids: Tensor

    @classmethod
    def of(cls, runner: ModelRunner, rows: Sequence[int], token_ids: Tokens) -> SentTokens:
        """Tokens that `runner` appends next."""
        device = runner.device
        ids = token_ids if isinstance(token_ids, Tensor) else upload(token_ids, device)
        lengths = upload([runner.cache.lengths[row] for row in rows], device)
        steps = torch.arange(ids.shape[1], device=device)
        return cls(upload(rows, device), lengths.unsqueeze(1) + steps, ids)


class RecurrentPipeline:
    """The first stage of the ring. `limits` are per lane. `spans`, `samples` (whose tokens each run
    had) and `prompts` (runs of prompts) are of the last call of `serve`."""

    def __init__(
        self,
        stage: Stage,
        ends: Ends,
        num_lanes: int,
        lane_size: int,
        limits: BatchLimits,
        prefill_chunk: int,
        clock: Clock | None = None,
        speculation: RingSpeculation | None = None,
    ) -> None:
        assert num_lanes * lane_size <= stage.runner.num_rows
        assert limits.num_blocks is None
        self.stage = stage
        self.ends = ends
        self.prefill_chunk = prefill_chunk
        self.clock = clock or RealClock()
        self.speculation = speculation
        self.is_alone = stage.runner.group.size == 1  # no other rank must begin lanes alike
        self.shared_clock = GroupClock(self.clock, stage.runner.group, stage.runner.device)
        waiting: list[Request] = []
        self.lanes = [
            Lane(i, i * lane_size, Scheduler(lane_size, limits, waiting=waiting))
            for i in range(num_lanes)
        ]
        self.spans = Spans()
        self.samples = list[list[int]]()
        self.prompts = set[int]()
        # Their numbers, when they were sent, and what they are.
        self._under_way: deque[tuple[int, float, RingRun, SentTokens | None]] = deque()
        # From which a head drafts; they come home. None without a head, and of a ring of one stage.
        self._states = stage.runner.observer(ReceivedStates)
        self._idle_lanes = list(self.lanes)
        self._arrivals = Arrivals([])  # those that have not arrived yet
        self._watch: StepObserver

    def serve(
        self,
        requests: Sequence[Request] | Arrivals,
        observe: Observer = ignore_step,
        watch: StepObserver = lambda plan: None,
    ) -> None:
        """Serve `requests`, each from its arrival on, until all have ended. All ranks must have
        the same.

        `observe` is called after each message that has emitted tokens, with the seconds since its
        sending, and `watch` with the plan of every step. Raises ValueError, before the first
        message, if a request can never be served.
        """
        for request in requests:
            self.lanes[0].scheduler.limits.check(request)
        self._arrivals = Arrivals.of(requests)
        self.spans = Spans()
        self.samples = []
        self.prompts = set()
        self._watch = watch
        while self._under_way or self._arrivals:
            if not self._comes_first():
                self.shared_clock.wait_until(self._arrivals.next_s)
                with self.spans.during(SpanKind.HEAD, -1):
                    self._take_arrivals()
                continue
            message = self.ends.inbound.receive()
            arrived_s = time.perf_counter()
            run, sent_s, flight, sent = self._under_way.popleft()
            assert message.run == run, "messages come home in their order"
            if sent is not None:
                self._keep_states(sent, message)
            num_prompts = len(self.prompts)
            with naming(f"step of message {run}"):
                output = self._land(flight, message)
            if output is not None:
                ids = [request.request_id for request in flight.requests]
                observe(ids, output, time.perf_counter() - sent_s)
            self._take_arrivals()
            if flight.ends_step:
                self._begin(flight.lane)
            is_decode = flight.is_decode and len(self.prompts) == num_prompts
            self.spans.add(SpanKind.HEAD, run, arrived_s, int(is_decode))

    def close(self) -> None:
        self.ends.outbound.send(Message(Kind.END))
        last = self.ends.inbound.receive()
        assert last.kind is Kind.END, "no message is behind the last"
        self.ends.outbound.close()

    def _comes_first(self) -> bool:
        """Whether the next message comes home before a request arrives that an idle lane may begin;
        waits until that is known. Several ranks must begin lanes alike, so they wait for the
        message."""
        if not self._under_way:
            return False
        if not (self.is_alone and self._idle_lanes and self._arrivals):
            return True
        next_s = self._arrivals.next_s
        return math.isinf(next_s) or self.ends.inbound.has_arrived(next_s - self.clock.now())

    def _take_arrivals(self) -> None:
        """Queue requests that have arrived, and begin idle lanes. All ranks of the first stage read
        the shared clock equally often."""
        if not self._arrivals:
            return
        now = self.shared_clock.now()
        for request in self._arrivals.take(self._arrivals.count(now)):
            self.lanes[0].scheduler.add([request], request.arrived_s)  # the queue of all lanes
        idle_lanes = sorted(self._idle_lanes, key=lambda lane: lane.index)
        self._idle_lanes = []
        for lane in idle_lanes:
            self._begin(lane)

    def _begin(self, lane: Lane) -> None:
        """Send the messages of the lane's next step; without one the lane is idle."""
        plan = lane.scheduler.schedule()
        if plan is None:
            self._idle_lanes.append(lane)
            return
        assert not plan.preempted, "every row has room for its whole text"
        self._watch(plan)
        chunks = list(self._chunks(lane, plan))
        for i, (flight, token_ids) in enumerate(chunks, 1):
            ends_step = i == len(chunks) and plan.decoding is None
            self._send(replace(flight, ends_step=ends_step), token_ids)
        if plan.decoding is not None:
            self._send(*self._newest(lane, plan.decoding.requests))

    def _chunks(self, lane: Lane, plan: StepPlan) -> Iterator[tuple[RingRun, Tokens]]:
        """The messages of the prompts of a step with their token ids [1, T], one per chunk."""
        for part in plan.parts:
            text = part.request.cached_ids
            size = self.prefill_chunk
            for start in range(part.start, part.stop, size):
                stop = min(start + size, part.stop)
                is_wanted = part.is_last and stop == part.stop
                yield RingRun(lane, (part.request,), is_wanted, False), [text[start:stop]]

    def _newest(self, lane: Lane, requests: tuple[Request, ...]) -> tuple[RingRun, Tokens]:
        """The last message of a step, of all decoding rows, with token ids [B, T]: newest tokens
        and drafts."""
        flight = RingRun(lane, requests, True, True, ends_step=True)
        if self.speculation is None:
            return flight, [[request.last_token] for request in requests]
        draft = self.speculation.draft(lane.rows(requests))
        return replace(flight, draft=draft), draft.tokens

    def _send(self, flight: RingRun, token_ids: Tokens) -> None:
        rows = flight.lane.rows(flight.requests)
        status = flight.status
        lengths = [r.num_cached for r in flight.requests] if status == VERIFY else []
        run = len(self.samples)
        begun_s = time.perf_counter()
        sent = None
        if self._states is not None:
            sent = SentTokens.of(self.stage.runner, rows, token_ids)
        with self.spans.during(SpanKind.STAGE, run):
            out = self.stage.forward(token_ids, rows, status)
        kind = Kind.VOID if out is None else Kind.HIDDEN
        self.ends.outbound.send(Message(kind, run, status, (*rows, *lengths), out))
        self._under_way.append((run, begun_s, flight, sent))
        self.samples.append([request.request_id for request in flight.requests])
        if not flight.is_decode:
            self.prompts.add(run)

    def _keep_states(self, sent: SentTokens, message: Message) -> None:
        """Keep the states of all tokens of a message for a head."""
        assert self._states is not None, "a head drafts"
        assert message.payload is not None, "the last stage sends states"
        states = message.payload.unsqueeze(0)
        self._states.write(sent.rows, sent.positions, sent.token_ids, states)

    def _land(self, flight: RingRun, message: Message) -> StepOutput | None:
        """Commit the tokens of a message, free rows of ended requests, and update the drafter.
        Returns the appended tokens, None without any."""
        if not flight.is_wanted:
            return None
        assert message.payload is not None, "the last stage sends what is wanted"
        requests = flight.requests
        lane = flight.lane
        if self.stage.is_whole:
            logits = message.payload
        else:
            hidden = message.payload if flight.draft is not None else message.payload[:, -1:]
            logits = self.stage.logits(hidden)
        output = self._tokens(flight, logits)
        clock = self.shared_clock if self._arrivals.is_timed else self.clock
        output = lane.scheduler.commit(Batch(requests), output, clock.now())
        ended = [request for request in requests if request.status is RequestStatus.FINISHED]
        if ended:
            self._free(lane, lane.rows(ended))
        if self.speculation is not None and len(ended) < len(requests):
            going = [request for request in requests if request.status is RequestStatus.RUNNING]
            rows = lane.rows(going)
            lengths = [request.num_cached for request in going]
            if flight.draft is None:
                self.speculation.admit(going, rows)
            else:  # the other stages forget what was rejected with the lane's next message
                self.stage.runner.truncate(rows, lengths)
                self.speculation.commit(rows, lengths)
        return output

    def _tokens(self, flight: RingRun, logits: Tensor) -> StepOutput:
        """The next tokens, from this rank's logits [B, T, V]."""
        if flight.draft is not None:
            assert self.speculation is not None, "it has drafted"
            return self.speculation.judge(flight.draft, logits)
        runner = self.stage.runner
        vocab_size = runner.model.config.vocab_size
        sampling = SamplingMetadata.of(flight.requests, vocab_size, runner.device)
        tokens = next_tokens(runner, logits, sampling)
        lines = sampling.with_flaws([tokens]).tolist()
        for request, line in zip(flight.requests, lines, strict=True):
            sampling.check(request, line)
        return StepOutput([line[1:] for line in lines])

    def _free(self, lane: Lane, rows: Sequence[int]) -> None:
        self.stage.free(rows)
        if self.speculation is not None:
            self.speculation.release(rows)
        if not self.stage.is_whole:
            self.ends.outbound.send(Message(Kind.FREE, words=tuple(rows)))


def most_under_way(num_lanes: int, lane_size: int, limits: BatchLimits, chunk: int) -> int:
    """The most messages under way: per lane one for each prompt chunk, one that decodes and one
    that frees rows."""
    assert limits.prefill_tokens is not None, "a step prefills a limited number of tokens"
    chunks = -(-limits.prefill_tokens // chunk) + lane_size
    return num_lanes * (chunks + 2)


def max_gamma_of(config: ResolvedConfig) -> int:
    """Draft tokens of each row of a decoding message."""
    return 0 if config.decoding.drafter is None else config.decoding.max_gamma


def make_speculation(
    run: Prepared,
    runner: ModelRunner,
    groups: ParallelGroups,
    models: LoadedModels,
    part: StagePart,
) -> RingSpeculation:
    """The drafter of `run` on the first stage, which has a `part` of the target. A draft model is
    on its first rank alone, and a head on all of its ranks, whose matrices it shares."""
    config = run.config
    assert config.decoding.drafter is not None, "the run drafts"
    drafting: Group | None = groups.target
    if not config.decoding.has_mtp_head:
        drafting = Group((0,), 0) if groups.rank == 0 else None
    groups = replace(groups, draft=drafting)
    draft = make_draft(run, groups, models, runner.max_tokens, target_part=part)
    setup = DraftSetup(runner, config.decoding, config.kv, draft, run.corpus)
    drafter = make_drafter(config.decoding.drafter, setup)
    return RingSpeculation(runner, drafter, config.decoding.max_draft_forwards)
