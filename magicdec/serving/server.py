"""Server: serves the requests of a workload under one batching after the other, by one model and
one KV cache.

Owns the requests, their arrival on the clock, the counting of steps, and the clock of the first
rank of a group, for decisions that all ranks take alike (`GroupClock`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from magicdec.config.sections import SamplingSection
from magicdec.decoding.strategy import DecodingStrategy
from magicdec.distributed.groups import Group
from magicdec.engine import Engine, Observer
from magicdec.hardware.timing import Clock, RealClock, peak_memory_bytes, reset_peak_memory
from magicdec.names import BATCHINGS, load_named
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.sampling.sampling import make_params
from magicdec.scheduling.plan import Limits, Plan
from magicdec.serving.batching import Batching
from magicdec.serving.live_view import View
from magicdec.serving.metrics import Served, StepCounts
from magicdec.serving.options import Pass
from magicdec.workload.request_shapes import RequestShape

WARM_UP_TOKENS = 3
LONE_TIMES = 3


@dataclass(frozen=True)
class Server:
    """`prompts` has the text of each of `shapes`. `make_strategy` makes what decodes, with the
    drafter or without it, anew for each batching. `limits` are the same under every batching; a
    step of the drafter appends up to `num_draft_tokens` more tokens to a row."""

    runner: ModelRunner
    limits: Limits
    prefill_chunk: int
    make_strategy: Callable[[Pass], DecodingStrategy]
    prompts: Sequence[tuple[int, ...]]
    shapes: Sequence[RequestShape]
    window_s: float = 0.0
    num_draft_tokens: int = 0
    sampling: SamplingSection = SamplingSection()
    make_clock: Callable[[], Clock] = RealClock

    def serve(
        self,
        each: Pass,
        observe: Observer = lambda o, s: None,
        view: View | None = None,
    ) -> Served:
        """Serve all requests in one pass, which `view` shows meanwhile. Raises ValueError, before
        the first step, if a request can never be served."""
        limits = self.limits_of(each.is_drafting)
        clock = self.make_clock()
        engine = Engine(self.runner, self.prefill_chunk, limits, clock=clock)
        strategy, batching = self.make_strategy(each), load_batching(each.mode)
        shared = GroupClock(clock, self.runner.group, self.runner.device)
        counts, begin_s = StepCounts(clock.now), shared.now()
        requests = make_requests(self.prompts, self.shapes, begin_s, self.sampling)
        for request in requests:
            limits.check(request)
        if view is not None:
            view.begin(requests, begin_s, clock.now)

        def watch(plan: Plan) -> None:
            counts.watch(plan)
            if view is not None:
                view.step(counts.in_flight)

        def serve(batch: Sequence[Request]) -> None:
            engine.serve(strategy, batch, observe, watch)

        is_reset = reset_peak_memory(self.runner.device)
        batching(serve, requests, shared, self.runner.num_rows, self.window_s)
        peak = peak_memory_bytes(self.runner.device) if is_reset else None
        peaks = self.runner.group.all_gather_object(peak)
        return Served(requests, counts, begin_s, None if None in peaks else sum(peaks))

    def lone_s(self, each: Pass) -> float:
        """The time of the first request, served alone: the shortest of `LONE_TIMES`."""
        first = replace(self.shapes[0], arrival_ms=0.0)
        server, times_s = replace(self, shapes=[first], prompts=self.prompts[:1]), list[float]()
        for _ in range(LONE_TIMES):
            alone = server.serve(each)
            finished_s = alone.requests[0].finished_s
            assert finished_s is not None, "it has ended"
            times_s.append(finished_s - alone.begin_s)
        return min(times_s)

    def warm_up(self, each: Pass) -> None:
        """Serve the first requests once, unmeasured and shortened, so that the first batching does
        not pay for what happens once."""
        limits = self.limits_of(each.is_drafting)
        engine = Engine(self.runner, self.prefill_chunk, limits)
        short = shortened(self.shapes[: self.runner.num_rows], self.prefill_chunk)
        requests = make_requests(self.prompts, short, engine.clock.now(), self.sampling)
        engine.serve(self.make_strategy(each), requests)

    def limits_of(self, is_drafting: bool) -> Limits:
        drafts = self.num_draft_tokens if is_drafting else 0
        return replace(self.limits, step_tokens=1 + drafts)


def load_batching(name: str) -> Batching:
    batching: Batching = load_named(BATCHINGS, name)
    return batching


def shortened(shapes: Sequence[RequestShape], chunk: int) -> list[RequestShape]:
    """The shapes of requests that warm up: at most `chunk` tokens of each prompt, and few more."""
    return [
        RequestShape(0.0, min(chunk, shape.prompt_len), min(WARM_UP_TOKENS, shape.output_len))
        for shape in shapes
    ]


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    shapes: Sequence[RequestShape],
    begin_s: float,
    sampling: SamplingSection,
    end_ids: tuple[int, ...] = (),
    is_coupled: bool = False,
) -> list[Request]:
    """The requests, of which the first arrives at `begin_s`. Each takes as much of its prompt as
    its shape says, and ends at its output length or with a token of `end_ids`. Its random numbers
    follow from its place in the order of arrival, so that they are the same in every pass;
    `sampling.coupled` explains `is_coupled`."""
    requests = []
    for i, (prompt, shape) in enumerate(zip(prompts[: len(shapes)], shapes, strict=True)):
        params = make_params(sampling, shape.output_len, end_ids, i, is_coupled)
        request = Request(i, prompt[: shape.prompt_len], params)
        request.arrived_s = begin_s + shape.arrival_ms / 1e3
        requests.append(request)
    return requests


@dataclass(frozen=True)
class GroupClock:
    """`clock` is that of this rank. All ranks of the group must call `now` equally often."""

    clock: Clock
    group: Group
    device: torch.device

    def now(self) -> float:
        return of_first_rank(self.clock.now(), self.group, self.device)

    def wait_until(self, at: float) -> None:
        """Only the first rank waits. The others wait for it when they need its time or its plan."""
        if self.group.index == 0:
            self.clock.wait_until(at)

    def after_step(self) -> None:
        self.clock.after_step()


def of_first_rank(value: float, group: Group, device: torch.device) -> float:
    """The `value` of the group's first rank, on every rank. All must call it."""
    if group.size == 1:
        return value
    sent = torch.tensor([value], dtype=torch.float64, device=device)
    return float(group.broadcast(sent, 0).item())
