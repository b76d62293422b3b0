"""What a rank keeps in memory from one run of a study to the next: loaded models, and prompts in
the cache.

Owns when it is dropped. A run outside a study has a `Resident` of its own, which ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from magicdec.config.resolved import ResolvedConfig
from magicdec.config.sections import KVSection
from magicdec.console import Progress
from magicdec.drafting.policies.policy import keep_queries, make_policy
from magicdec.memory.working_memory import max_tokens
from magicdec.run.prompts import Prompts
from magicdec.runner import ModelRunner
from magicdec.setup.loading import LoadedModels


@dataclass(frozen=True)
class Room:
    """What the caches of runs that share their prompts must offer: tokens of a row, and the KV
    section whose policy needs the queries of most prompt tokens. `is_kept`: every batch keeps a
    cache of its own, so that the prompts are prefilled once for all these runs."""

    max_tokens: int
    kv: KVSection | None
    is_kept: bool = False

    @classmethod
    def of(cls, configs: Sequence[ResolvedConfig], is_kept: bool = False) -> Room:
        longest = max(max_tokens(config) for config in configs)
        observing = [config.kv for config in configs if config.decoding.drafter == "self"]
        most = max(observing, key=lambda kv: make_policy(kv).observed_tokens, default=None)
        return cls(longest, most, is_kept)


def prefill_key(config: ResolvedConfig) -> tuple[Any, ...]:
    """Equal for two runs if the state after prefill is the same: the first tokens, and what the
    target's cache holds."""
    model = config.model
    return (
        *(model.model, model.dtype, model.linear, model.elementwise, model.native_steps),
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
    def __init__(self, device: torch.device, progress: Progress) -> None:
        self.models = LoadedModels(device, progress)
        self.progress = progress
        self._prompts: Prompts | None = None
        self._key: object = None

    @property
    def is_empty(self) -> bool:
        return self._prompts is None and not len(self.models)

    def prompts(
        self, config: ResolvedConfig, room: Room, make_runner: Callable[[int], ModelRunner]
    ) -> Prompts:
        """The caches of a run, with what the last run left in them if it had the same prompts.
        `make_runner` gets the tokens of a row."""
        key = prefill_key(config), room
        if self._prompts is None or key != self._key:
            self.drop_prompts()

            def make() -> ModelRunner:
                runner = make_runner(room.max_tokens)
                if room.kv is not None:
                    keep_queries(runner, room.kv)
                return runner

            chunk = config.attention.prefill_chunk
            self._prompts = Prompts(make, chunk, self.progress, room.is_kept)
            self._key = key
        return self._prompts

    def drop_prompts(self) -> None:
        self._prompts, self._key = None, None
