"""How a pass serves the requests of `magicdec recurrent`: a few shortened ones first, unmeasured,
then all of them.

Owns the requests of a pass, their limits, and what a pass leaves behind. Must not know how a pass
computes, nor what is computed from the time stamps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from magicdec.pipeline.metrics import DraftCounts, StageUse
from magicdec.pipeline.prepare import PreparedRing
from magicdec.pipeline.tracing import RingTrace
from magicdec.request import Request
from magicdec.runner import ModelRunner
from magicdec.sampling.sampling import make_params
from magicdec.scheduling.plan import Limits
from magicdec.serving.metrics import StepCounts
from magicdec.setup.prepare import Prepared
from magicdec.workload.trace import RequestShape

WARM_UP_TOKENS = 3
Serve = Callable[[list[Request], StepCounts, Callable[[int], None]], None]


@dataclass(frozen=True)
class RingUse:
    """What the ring measured beside the times of requests."""

    uses: list[StageUse]  # of the stages in order
    hop_bytes: int
    link_s: float | None
    trace: RingTrace | None = None
    drafts: DraftCounts | None = None


@dataclass(frozen=True)
class Outcome:
    """All requests of a pass, finished, and what was counted meanwhile. `memory` has the samples
    of each rank's memory, [N, 2]: seconds and bytes. It is empty if they were not asked for.
    `threads` are those of each rank, as in a record."""

    requests: list[Request]
    counts: StepCounts
    begin_s: float
    ring: RingUse | None = None
    memory: Sequence[Tensor] = ()
    threads: Sequence[int] = ()


def serve_measured(
    run: Prepared,
    shapes: Sequence[RequestShape],
    serve: Serve,
    rows: int,
    observe: Callable[[int], None],
    after_warm_up: Callable[[], None] = lambda: None,
    is_coupled: bool = False,
) -> Outcome:
    """Serve the first requests once, shortened, so that what happens once is not measured. Then
    serve all. `serve` gets the requests, where to count steps, and `observe`, which it tells the
    number of tokens of every step."""
    shortened = make_requests(run, shapes[:rows], True, is_coupled)
    serve(shortened, StepCounts(), lambda num_tokens: None)
    after_warm_up()
    requests, counts = make_requests(run, shapes, False, is_coupled), StepCounts()
    begin_s = requests[0].arrived_s
    serve(requests, counts, observe)
    return Outcome(requests, counts, begin_s)


def make_requests(
    run: Prepared,
    shapes: Sequence[RequestShape],
    is_warm_up: bool = False,
    is_coupled: bool = False,
) -> list[Request]:
    """Requests of these shapes, which arrive now. Their random numbers follow from their
    places, so that they are the same in every pass. `sampling.coupled` explains `is_coupled`."""
    now, made = time.perf_counter(), list[Request]()
    decoding, chunk = run.config.decoding, run.config.attention.prefill_chunk
    ends = () if decoding.ignore_eos else run.source.config.eos_token_ids
    for i, (prompt, shape) in enumerate(zip(run.workload.prompts, shapes, strict=False)):
        num_new = min(shape.output_len, WARM_UP_TOKENS) if is_warm_up else shape.output_len
        params = make_params(run.config.sampling, num_new, ends, i, is_coupled)
        most = min(chunk, shape.prompt_len) if is_warm_up else shape.prompt_len
        made.append(Request(i, prompt[:most], params))
        made[-1].arrived_s = now
    return made


def limits_of(prepared: PreparedRing, runner: ModelRunner) -> Limits:
    """The same for the engine and for a lane, so that both prefill alike."""
    chunk = prepared.run.config.attention.prefill_chunk
    most = prepared.options.prefill_tokens(prepared.grid.num_stages, chunk)
    return Limits(runner.max_tokens, prefill_tokens=most)
