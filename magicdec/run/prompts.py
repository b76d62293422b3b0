"""The prompts of a run in KV caches, from which every pass starts.

Owns which caches there are: one that the batches take in turn, or one for each batch, so that the
runs of a study which share their prompts prefill them once. Must not know how tokens are decoded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from magicdec.console import Progress
from magicdec.engine import Engine
from magicdec.request import Request
from magicdec.run.unmeasured import warm_up_prefill
from magicdec.runner import ModelRunner
from magicdec.sampling.sampling import make_params
from magicdec.setup.prepare import Prepared


@dataclass(frozen=True)
class Prefilled:
    """A batch whose prompts are in the cache of the engine's runner. Every pass rewinds the engine
    to `snapshots`."""

    engine: Engine
    snapshots: list[Request]
    seconds: float  # of the prefill


class Prompts:
    """Prefills batches on request. If they are kept, each has a runner of its own."""

    def __init__(
        self, make_runner: Callable[[], ModelRunner], chunk: int, progress: Progress, is_kept: bool
    ) -> None:
        self.make_runner, self.chunk = make_runner, chunk
        self.progress, self.is_kept = progress, is_kept
        self.engine = Engine(make_runner(), chunk)
        self._batches: dict[int, Prefilled] = {}

    def batch(self, index: int, prepared: Prepared) -> Prefilled:
        """The batch of that number, prefilled now unless it was kept."""
        found = self._batches.get(index)
        if found is None:
            if self.is_kept and index:
                self.engine = Engine(self.make_runner(), self.chunk)
            found = self._prefill(index, prepared)
            if self.is_kept:
                self._batches[index] = found
        return found

    def forget(self) -> None:
        """The caches no longer hold the prompts."""
        self._batches.clear()

    def _prefill(self, index: int, prepared: Prepared) -> Prefilled:
        w, engine = prepared.config.workload, self.engine
        if index == 0 and engine.runner.device.type == "cuda":
            warm_up_prefill(engine, prepared.workload.prompts[0], self.chunk)
        requests = make_requests(prepared, index)
        started = time.perf_counter()
        name = f"prefill, batch {index + 1} of {w.num_batches}"
        with self.progress.task(name, w.batch_size * w.prefix_len) as advance:
            snapshots = engine.prefill(requests, advance)
        return Prefilled(engine, snapshots, time.perf_counter() - started)


def make_requests(prepared: Prepared, batch: int) -> list[Request]:
    """The requests of a batch, numbered through all batches."""
    config, w = prepared.config, prepared.config.workload
    eos = () if config.decoding.ignore_eos else prepared.source.config.eos_token_ids
    first = batch * w.batch_size
    prompts = prepared.workload.prompts[first : first + w.batch_size]
    return [
        Request(first + i, prompt, make_params(config.sampling, w.num_new_tokens, eos, first + i))
        for i, prompt in enumerate(prompts)
    ]
