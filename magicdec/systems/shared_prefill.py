"""SharedPrefill: loaded models, and prompts in KV caches, from which several passes start; a study
keeps them from one run to the next. Groups of prompts take turns in one cache, or have one each, so
that runs with the same prompts prefill them once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import KVSection
from magicdec.engine.engine import Engine
from magicdec.output.console import Progress
from magicdec.runner.layer_states import StateRoom
from magicdec.runner.model_runner import ModelRunner
from magicdec.runner.observers.prompt_queries import PromptQueries
from magicdec.runner.request import Request, SamplingParams
from magicdec.setup.loading import LoadedModels
from magicdec.setup.model_plan import max_tokens, rewound_by_pass, state_room
from magicdec.speculation.policies.policy import make_policy


@dataclass(frozen=True)
class KeptPrompts:
    """A group of prompts in the engine's cache, by its number. Every pass rewinds the engine to
    `snapshots`."""

    number: int
    engine: Engine
    snapshots: list[Request]
    seconds: float  # of the prefill

    def is_of(self, requests: Sequence[Request]) -> bool:
        """Whether these are its prompts."""
        pairs = zip(self.snapshots, requests, strict=True)
        return all(snapshot.prompt_ids == request.prompt_ids for snapshot, request in pairs)

    def begins_with(self, requests: Sequence[Request]) -> bool:
        """Whether its prompts begin with these."""
        pairs = zip(self.snapshots, requests, strict=True)
        return all(
            snapshot.prompt_ids[: len(request.prompt_ids)] == request.prompt_ids
            for snapshot, request in pairs
        )


class PromptCaches:
    """Groups of prompts, prefilled on request; if `is_kept`, each has its own runner. `results` are
    those of passes that runs share, by the pass and the number of the group."""

    def __init__(
        self, make_runner: Callable[[], ModelRunner], chunk: int, progress: Progress, is_kept: bool
    ) -> None:
        # It holds the system that makes runners, with its draft, for as long as more are made.
        self.make_runner = make_runner if is_kept else None
        self.chunk = chunk
        self.progress = progress
        self.is_kept = is_kept
        self.engine = Engine(make_runner(), chunk)
        self._groups: dict[int, KeptPrompts] = {}  # that caches hold now
        self.results: dict[tuple[str, int], Any] = {}

    def keep(self, number: int, requests: Sequence[Request], name: str) -> KeptPrompts:
        """The prompts of these requests, prefilled unless a cache of their own has them. `name`
        says in the progress what is prefilled."""
        held = self._groups.get(number)
        if held is not None and held.is_of(requests):
            return held
        if held is not None:
            self.results.clear()
        # States of linear attention are kept at the ends of prompts alone.
        can_cut = held is not None and held.engine.runner.states is None
        if held is not None and can_cut and held.begins_with(requests):
            self._groups[number] = kept = self._shorten(held, requests)
            return kept
        if not self.is_kept:
            self._groups.clear()
        elif number:
            assert self.make_runner is not None, "every group has a runner"
            self.engine = Engine(self.make_runner(), self.chunk)
        kept = self._prefill(number, requests, name)
        self._groups[number] = kept
        return kept

    def _shorten(self, held: KeptPrompts, requests: Sequence[Request]) -> KeptPrompts:
        engine = held.engine
        queries = engine.runner.observer(PromptQueries)
        num_again = 1 if queries is None else max(1, queries.num_tokens)
        started = time.perf_counter()
        snapshots = engine.shorten(requests, num_again)
        return KeptPrompts(held.number, engine, snapshots, time.perf_counter() - started)

    def forget(self) -> None:
        """The caches have lost what they held."""
        self._groups.clear()

    def _prefill(self, number: int, requests: Sequence[Request], name: str) -> KeptPrompts:
        engine = self.engine
        engine.rewind(())  # of a pass that was interrupted, or was not decoded
        if number == 0 and engine.runner.device.type == "cuda":
            warm_up_prefill(engine, requests[0].prompt_ids, self.chunk)
        started = time.perf_counter()
        longest = max(len(request.prompt_ids) for request in requests)
        with self.progress.task(name, len(requests) * longest) as advance:
            snapshots = engine.prefill(requests, advance)
        return KeptPrompts(number, engine, snapshots, time.perf_counter() - started)


def warm_up_prefill(engine: Engine, prompt: Sequence[int], chunk: int) -> None:
    """Prefills one full chunk and one as short as the prompt's last, so that kernels are built
    before a prefill is timed. The request ends with its first token and frees the engine."""
    beginning = tuple(prompt[: min(len(prompt), chunk + len(prompt) % chunk)])
    engine.prefill([Request(-1, beginning, SamplingParams(max_new_tokens=1))])


@dataclass(frozen=True)
class CacheDemand:
    """The caches of runs that share their prompts: tokens of a row, by how many it is truncated,
    how far layers' states go back, and the KV section whose policy needs queries of most prompt
    tokens. `is_kept`: every group of prompts has its own cache and is prefilled once. `num_forks`:
    rows beside those of prompts. `is_nested`: prompts may be the beginnings of those that a cache
    has. `state_layers`: after these the states of all tokens are kept, also where the run reads
    none."""

    max_tokens: int
    rewound: int | None  # None: to the begin of a row
    state_room: StateRoom
    kv: KVSection | None
    is_kept: bool = False
    num_forks: int = 0
    is_nested: bool = False
    state_layers: tuple[int, ...] = ()

    @classmethod
    def of(cls, configs: Sequence[ResolvedConfig], is_kept: bool = False) -> CacheDemand:
        longest = max(max_tokens(config) for config in configs)
        rewound = max(rewound_by_pass(config, longest) for config in configs)
        observing = [config.kv for config in configs if config.decoding.drafts_itself]
        most = max(observing, key=lambda kv: make_policy(kv).observed_tokens, default=None)
        room = reduce(StateRoom.joined, map(state_room, configs))
        return cls(longest, rewound, room, most, is_kept)


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


class SharedPrefill:
    """The models and prompts that runs share. Runs for their counts (`is_counted`), not times, also
    share the result of a pass without drafts, and log their drafts (`DraftLog`)."""

    def __init__(self, device: torch.device, progress: Progress, is_counted: bool = False) -> None:
        self.models = LoadedModels(device, progress)
        self.progress = progress
        self.is_counted = is_counted
        self._caches: PromptCaches | None = None
        self._key: object = None

    @property
    def is_empty(self) -> bool:
        return self._caches is None and not len(self.models)

    def caches(
        self,
        config: ResolvedConfig,
        room: CacheDemand,
        make_runner: Callable[[], ModelRunner],
    ) -> PromptCaches:
        """The caches of a run, filled if the last run had the same prompts. `make_runner` makes one
        with such a cache."""
        if room.is_nested:
            config = replace(config, workload=replace(config.workload, prefix_len=0))
        if room.state_layers:
            config = replace(config, draft=None)
        key = prefill_key(config), room
        if self._caches is None or key != self._key:
            self._caches = None  # before others take their memory
            chunk = config.attention.prefill_chunk
            self._caches = PromptCaches(make_runner, chunk, self.progress, room.is_kept)
            self._key = key
        return self._caches
