"""Loaded models, and prompts in KV caches, that a rank keeps from one run of a study to the next.
Every pass starts from the prompts. Batches take turns in one cache, or have one each, so that runs
with the same prompts prefill them once. A run outside a study has its own `Resident`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from magicdec.bench.run.samples import PassSamples
from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import KVSection
from magicdec.engine.engine import Engine
from magicdec.output.console import Progress
from magicdec.records.correctness import JudgedAgain
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.request import Request, SamplingParams
from magicdec.runner.sampling.sampling import make_params
from magicdec.setup.loading import LoadedModels
from magicdec.setup.model_plan import max_tokens, rewound_by_pass
from magicdec.setup.prepare import Prepared
from magicdec.speculation.policies.policy import keep_queries, make_policy


@dataclass(frozen=True)
class Prefilled:
    """A batch whose prompts are in the engine's cache. Every pass rewinds the engine to
    `snapshots`."""

    engine: Engine
    snapshots: list[Request]
    seconds: float  # of the prefill


@dataclass(frozen=True)
class MeasuredBatch:
    samples: PassSamples
    requests: list[Request]
    judged: JudgedAgain | None


class Prompts:
    """Batches, prefilled on request; if kept, each has its own runner. `baselines` are passes
    without drafts that runs share."""

    def __init__(
        self, make_runner: Callable[[], ModelRunner], chunk: int, progress: Progress, is_kept: bool
    ) -> None:
        self.make_runner = make_runner
        self.chunk = chunk
        self.progress = progress
        self.is_kept = is_kept
        self.engine = Engine(make_runner(), chunk)
        self._batches: dict[int, Prefilled] = {}
        self._last: int | None = None  # the batch that is in the newest cache
        self.baselines: dict[int, MeasuredBatch] = {}

    def holds(self, index: int) -> bool:
        return index in self._batches or index == self._last

    def batch(self, index: int, prepared: Prepared) -> Prefilled:
        if index in self._batches:
            return self._batches[index]
        if self.is_kept and index:
            self.engine = Engine(self.make_runner(), self.chunk)
        self._last = None
        batch = self._prefill(index, prepared)
        self._last = index
        if self.is_kept:
            self._batches[index] = batch
        return batch

    def forget(self) -> None:
        self._batches.clear()
        self._last = None

    def _prefill(self, index: int, prepared: Prepared) -> Prefilled:
        w = prepared.config.workload
        engine = self.engine
        if index == 0 and engine.runner.device.type == "cuda":
            warm_up_prefill(engine, prepared.workload.prompts[0], self.chunk)
        requests = make_requests(prepared, index)
        started = time.perf_counter()
        name = f"prefill, batch {index + 1} of {w.num_batches}"
        with self.progress.task(name, w.batch_size * w.prefix_len) as advance:
            snapshots = engine.prefill(requests, advance)
        return Prefilled(engine, snapshots, time.perf_counter() - started)


def warm_up_prefill(engine: Engine, prompt: Sequence[int], chunk: int) -> None:
    """Prefills one full chunk and one as short as the prompt's last, so that kernels are built
    before a prefill is timed. The request ends with its first token and frees the engine."""
    beginning = tuple(prompt[: min(len(prompt), chunk + len(prompt) % chunk)])
    engine.prefill([Request(-1, beginning, SamplingParams(max_new_tokens=1))])


def make_requests(prepared: Prepared, batch: int) -> list[Request]:
    config = prepared.config
    w = prepared.config.workload
    eos = () if config.decoding.ignore_eos else prepared.source.config.eos_token_ids
    first = batch * w.batch_size
    prompts = prepared.workload.prompts[first : first + w.batch_size]
    return [
        Request(first + i, prompt, make_params(config.sampling, w.num_new_tokens, eos, first + i))
        for i, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class CacheDemand:
    """The caches of runs that share their prompts: tokens of a row, by how many it is truncated,
    and the KV section whose policy needs queries of most prompt tokens. `is_kept`: every batch has
    its own cache and is prefilled once."""

    max_tokens: int
    rewound: int
    kv: KVSection | None
    is_kept: bool = False

    @classmethod
    def of(cls, configs: Sequence[ResolvedConfig], is_kept: bool = False) -> CacheDemand:
        longest = max(max_tokens(config) for config in configs)
        rewound = max(rewound_by_pass(config, longest) for config in configs)
        observing = [config.kv for config in configs if config.decoding.model_drafter == "self"]
        most = max(observing, key=lambda kv: make_policy(kv).observed_tokens, default=None)
        return cls(longest, rewound, most, is_kept)


def prefill_key(config: ResolvedConfig) -> tuple[Any, ...]:
    """A key that equals another run's if both have the same state after prefill."""
    model = config.model
    draft = config.draft
    return (
        () if draft is None else draft.state_layers,
        model.model,
        model.dtype,
        model.linear,
        model.elementwise,
        model.native_steps,
        model.target_dtype,
        config.parallel.rank_group,
        config.parallel.device,
        config.parallel.threads,
        config.parallel.collectives,
        config.attention.backend,
        config.attention.prefill_chunk,
        config.sampling,
        config.decoding.ignore_eos,
        replace(config.workload, warmup_batches=0),
    )


class Resident:
    """The models and prompts that runs share. Runs for their counts (`is_counted`), not times, also
    share a baseline pass, and log their drafts (`kv.draft_log`)."""

    def __init__(self, device: torch.device, progress: Progress, is_counted: bool = False) -> None:
        self.models = LoadedModels(device, progress)
        self.progress = progress
        self.is_counted = is_counted
        self._prompts: Prompts | None = None
        self._key: object = None

    @property
    def is_empty(self) -> bool:
        return self._prompts is None and not len(self.models)

    def prompts(
        self,
        config: ResolvedConfig,
        room: CacheDemand,
        make_runner: Callable[[CacheDemand], ModelRunner],
    ) -> Prompts:
        """The caches of a run, filled if the last run had the same prompts."""
        key = prefill_key(config), room
        if self._prompts is None or key != self._key:
            self._prompts = None  # before others take their memory

            def make() -> ModelRunner:
                runner = make_runner(room)
                keep_queries(runner, room.kv)
                return runner

            chunk = config.attention.prefill_chunk
            self._prompts = Prompts(make, chunk, self.progress, room.is_kept)
            self._key = key
        return self._prompts
