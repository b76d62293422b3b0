"""The ways to decode on a pipeline, side by side on the same simulated machine. All of them are the
same scheduler.

- `iterative`: one request, one token after the other.
- `sync`: drafts, then one run that verifies them, then drafts again.
- `async`: pipelined speculation.
- `ring`: recurrent pipeline parallelism (Macario et al. 2025, MDI-LLM): as many requests as stages
  or more, without drafts, so that every stage works on a different one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from magicdec.pipelined_speculation.options import Options
from magicdec.pipelined_speculation.scheduler import PipelinedScheduler
from magicdec.simulator.machine import Machine
from magicdec.simulator.measured import Measured, measure
from magicdec.simulator.simulation import Simulation, Trace
from magicdec.simulator.text import Text, TextModels

MODES = ("iterative", "sync", "async", "ring")
WITHOUT_DRAFTS = ("iterative", "ring")  # every token takes as long as the one before
STEADY_TOKENS = 4  # that tell their speed
PROMPT = (0,)  # its length is told by the machine's `prefill_s`


@dataclass(frozen=True)
class Work:
    """What is decoded: by position of the output, the rank of the target's token among the draft's
    candidates, which have these probabilities."""

    ranks: Sequence[int]
    probabilities: Sequence[float]
    gen_len: int
    num_requests: int = 1  # of iterative, sync and async
    ring_requests: int | None = None  # None: as many as stages


def run_mode(mode: str, machine: Machine, options: Options, work: Work) -> tuple[Trace, Measured]:
    """Simulate one mode of `MODES`."""
    is_ring = mode == "ring"
    requests = (work.ring_requests or machine.num_stages) if is_ring else work.num_requests
    kind = "iterative" if is_ring else mode
    scheduler = PipelinedScheduler(replace(options, mode=kind, lanes=requests))
    texts = [Text(0, _ranks(work, index), work.probabilities) for index in range(requests)]
    simulation = Simulation(machine, scheduler, TextModels(texts), is_ring)
    trace = simulation.run([PROMPT] * requests, work.gen_len)
    return trace, measure(machine, trace, scheduler.counts)


def _ranks(work: Work, request: int) -> Sequence[int]:
    """Every request has another part of the ranks, which are taken in a circle."""
    start = request * work.gen_len % len(work.ranks)
    return [*work.ranks[start:], *work.ranks[:start]] if start else work.ranks
