"""Server: serves the requests of a workload under one batching after the other, by one model and
one KV cache.

Owns the requests, their arrival on the clock, and the counting of steps. Must not know what is
computed from the time stamps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from magicdec.config.sections import SamplingSection
from magicdec.decoding.strategy import DecodingStrategy
from magicdec.engine import Engine, Observer
from magicdec.hardware.timing import Clock, RealClock, peak_memory_bytes, reset_peak_memory
from magicdec.names import BATCHINGS, load_named
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.sampling.sampling import make_params
from magicdec.scheduling.plan import Limits, Plan
from magicdec.serving.batching import Batching
from magicdec.serving.group_clock import DrawingClock, GroupClock
from magicdec.serving.metrics import StepCounts
from magicdec.serving.options import Pass
from magicdec.serving.showing.view import View
from magicdec.workload.trace import RequestShape

WARM_UP_TOKENS = 3
LONE_TIMES = 3


@dataclass(frozen=True)
class Served:
    """All requests, finished, in the order of arrival, and what was counted meanwhile."""

    requests: list[Request]
    counts: StepCounts
    begin_s: float  # when the first request arrived, on the clock
    peak_memory_bytes: int | None = None  # of all ranks together
    threads: Sequence[int] = ()  # of each rank


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
        """Serve all requests in one pass. `view` is drawn meanwhile, while the clock stands still.
        Raises ValueError, before the first step, if a request can never be served."""
        limits = self.limits_of(each.is_drafting)
        clock = self.make_clock() if view is None else DrawingClock(self.make_clock(), view.draw)
        engine = Engine(
            self.runner, self.prefill_chunk, limits, clock=clock, compaction=each.compaction
        )
        strategy, batching = self.make_strategy(each), load_batching(each.mode)
        shared = GroupClock(clock, self.runner.group, self.runner.device)
        counts, begin_s = StepCounts(clock.now), shared.now()
        requests = make_requests(self.prompts, self.shapes, begin_s, self.sampling)
        for request in requests:
            limits.check(request)
        if view is not None:
            view.begin(requests, begin_s)

        def watch(plan: Plan) -> None:
            counts.watch(plan)
            if view is not None:
                view.step(counts.in_flight)

        def serve(batch: Sequence[Request]) -> None:
            engine.serve(strategy, batch, observe, watch)

        is_reset = reset_peak_memory(self.runner.device)
        batching(serve, requests, shared, self.runner.num_rows, self.window_s)
        peak = peak_memory_bytes(self.runner.device) if is_reset else None
        counts.num_moves, counts.moved_bytes = engine.num_moves, engine.moved_bytes
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
        engine = Engine(self.runner, self.prefill_chunk, limits, compaction=each.compaction)
        most = self.prefill_chunk
        short = [
            RequestShape(0.0, min(most, s.prompt_len), min(WARM_UP_TOKENS, s.output_len))
            for s in self.shapes[: self.runner.num_rows]
        ]
        place = self.prompts[: len(short)], short, engine.clock.now(), self.sampling
        engine.serve(self.make_strategy(each), make_requests(*place))

    def limits_of(self, is_drafting: bool) -> Limits:
        drafts = self.num_draft_tokens if is_drafting else 0
        return replace(self.limits, step_tokens=1 + drafts)


def load_batching(name: str) -> Batching:
    batching: Batching = load_named(BATCHINGS, name)
    return batching


def make_requests(
    prompts: Sequence[tuple[int, ...]],
    shapes: Sequence[RequestShape],
    begin_s: float,
    sampling: SamplingSection,
) -> list[Request]:
    """The requests, of which the first arrives at `begin_s`. Each takes as much of its prompt as
    its shape says, and ends only at its output length. Its random numbers follow from its place in
    the order of arrival, so that they are the same in every pass."""
    requests = []
    for i, (prompt, shape) in enumerate(zip(prompts, shapes, strict=True)):
        params = make_params(sampling, shape.output_len, (), i)
        request = Request(i, prompt[: shape.prompt_len], params)
        request.arrived_s = begin_s + shape.arrival_ms / 1e3
        requests.append(request)
    return requests


def differing(expected: Sequence[Request], found: Sequence[Request]) -> list[int]:
    """The ids of the requests whose output tokens are not the same."""
    pairs = zip(expected, found, strict=True)
    return [a.request_id for a, b in pairs if a.output_ids != b.output_ids]
