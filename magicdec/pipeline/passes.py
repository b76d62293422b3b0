"""Serves the requests of `magicdec recurrent` in each pass, on this rank.

Owns the passes of the engine: one process, and tensor parallelism over all ranks. `ring_pass` has
that of the ring. Must not know what is computed from the time stamps. A rank that has no part in a
pass waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed

from magicdec.console import Progress
from magicdec.decoding.strategy import Setup, make_strategy
from magicdec.distributed.groups import Group, ParallelGroups
from magicdec.distributed.start import make_groups, make_stage_groups
from magicdec.engine import Engine
from magicdec.hardware.environment import release_memory
from magicdec.hardware.threads import ThreadCount, use_threads
from magicdec.memory.sampler import MemorySampler
from magicdec.memory.working_memory import max_tokens
from magicdec.names import BASELINE, SEQUENTIAL
from magicdec.pipeline.measured_pass import Outcome, limits_of, serve_measured
from magicdec.pipeline.options import (
    BATCHED,
    RINGS,
    SPECULATIVE_RING,
    TENSOR_PARALLEL,
    WITH_CURVES,
)
from magicdec.pipeline.pass_memory import expected_threads, of_one_process
from magicdec.pipeline.prepare import PreparedRing
from magicdec.pipeline.ring_pass import RingPass
from magicdec.pipeline.tracing import gather_memory, gather_threads
from magicdec.request import Request
from magicdec.serving.metrics import StepCounts
from magicdec.setup.loading import LoadedModels, make_target


class Passes:
    """All ranks make it and serve the same passes together. The outcome of the first rank counts;
    it is None on a rank that has no requests."""

    def __init__(self, prepared: PreparedRing, device: torch.device, progress: Progress) -> None:
        self.prepared, self.device, self.progress = prepared, device, progress
        launch, parallel = prepared.run.launch, prepared.whole.parallel
        place = device, parallel.collectives
        self.stages = make_stage_groups(launch, prepared.grid, *place)
        self.everyone: ParallelGroups | None = None
        if TENSOR_PARALLEL in prepared.options.asked.passes:
            self.everyone = make_groups(launch, parallel.rank_group, *place)

    def serve(self, name: str, observe: Callable[[int], None]) -> Outcome | None:
        """Serve all requests in the pass of that name. The memory of a pass with curves is sampled
        if that was asked for. Raises AssertionError if a rank has computed with other threads than
        its config says."""
        count = ThreadCount()
        outcome = self._sample_memory(name, observe, count)
        launch, parallel = self.prepared.run.launch, self.prepared.whole.parallel
        expected = expected_threads(parallel, launch, name in (SEQUENTIAL, BATCHED))
        threads = gather_threads(name, count, expected, launch)
        return None if outcome is None else replace(outcome, threads=threads)

    def _sample_memory(
        self, name: str, observe: Callable[[int], None], count: ThreadCount
    ) -> Outcome | None:
        if name not in WITH_CURVES or not self.prepared.options.asked.has_memory:
            return self._serve(name, observe, count)
        with MemorySampler(self.device) as sampler:
            outcome = self._serve(name, observe, count)
        memory = gather_memory(self.prepared.run.launch, sampler.samples)
        used = memory[:1] if name == SEQUENTIAL else memory  # the other ranks wait
        return None if outcome is None else replace(outcome, memory=used)

    def _serve(
        self, name: str, observe: Callable[[int], None], count: ThreadCount
    ) -> Outcome | None:
        launch, outcome = self.prepared.run.launch, None
        if name in RINGS:
            place = self.prepared, self.stages, self.device, self.progress
            ring = RingPass(*place, drafts=name == SPECULATIVE_RING)
            with count.during():
                outcome = ring.serve(observe)
        elif name == TENSOR_PARALLEL:
            assert self.everyone is not None, "the pass was announced"
            rows = self.prepared.options.n_samples
            outcome = self._engine(self.everyone.target, rows, observe, count)
        elif launch.rank == 0:  # with the threads of all ranks of the host, since these wait
            rows = 1 if name == SEQUENTIAL else self.prepared.options.n_samples
            with use_threads(self.prepared.whole.parallel.threads_on(launch.local_ranks)):
                outcome = self._engine(Group((0,), 0), rows, observe, count)
        self._wait_for_all()
        return outcome

    def _engine(
        self, group: Group, rows: int, observe: Callable[[int], None], count: ThreadCount
    ) -> Outcome:
        """By the engine, with requests that join and leave a running batch of `rows`."""
        run, config = self.prepared.run, self.prepared.whole
        if group.size == 1:
            config = of_one_process(self.prepared.alone, rows)
        models, chunk = LoadedModels(self.device, self.progress), config.attention.prefill_chunk
        runner = make_target(config, run.source, group, models, max_tokens(config))
        limits = limits_of(self.prepared, runner)

        def serve(requests: list[Request], counts: StepCounts, tell: Callable[[int], None]) -> None:
            setup = Setup(runner, config.decoding, config.kv, is_in_flight=True)
            Engine(runner, chunk, limits).serve(
                make_strategy(BASELINE, setup), requests,
                lambda output, seconds: tell(sum(map(len, output.token_ids))), counts.watch,
            )  # fmt: skip

        shapes = self.prepared.options.asked.shapes
        with count.during():
            return serve_measured(run, shapes, serve, rows, observe)

    def _wait_for_all(self) -> None:
        """Wait until every rank is done with a pass, and has given back the memory that it does not
        use. Raises RuntimeError if one has ended; the heartbeat names it."""
        release_memory(self.device)
        if self.prepared.run.launch.world_size == 1:
            return
        torch.distributed.barrier()
