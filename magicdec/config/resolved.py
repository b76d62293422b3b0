"""ResolvedConfig: the config that runs, without `auto` or a None that means a default. Imports no
torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from magicdec.config.capacity import Capacity
from magicdec.config.choices.choice import Choice
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DEFAULT_BATCHES,
    DEFAULT_GEN_LEN,
    DecodingSection,
    KVSection,
    OutputSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.names import BASELINE

UNRECORDED = ("run_config", "capacity")  # of a config


@dataclass(frozen=True)
class ResolvedModel:
    model: str
    dtype: str  # of activations, KV cache, and weights that are not int8
    linear: str
    elementwise: Choice
    native_steps: Choice  # on or off
    target_dtype: str  # of the target's matrices


@dataclass(frozen=True)
class ResolvedDraft:
    model: str
    rank_group: tuple[int, ...]
    backend: Choice
    native_steps: Choice
    draft_dtype: str
    state_layers: tuple[int, ...] = ()  # of the target, from which a draft head takes states


@dataclass(frozen=True)
class ResolvedParallel:
    rank_group: tuple[int, ...]
    device: str
    collectives: Choice | None  # None for one rank
    threads: int  # of each rank of this host


@dataclass(frozen=True)
class ResolvedAttention:
    backend: Choice
    prefill_chunk: int
    kv_dtype: str  # in which the target's cache is stored


@dataclass(frozen=True)
class ResolvedDecoding(DecodingSection):
    """The decoding section. `gamma` may stay `auto`, which is a way to decode."""

    cuda_graphs: Choice = Choice("off")


@dataclass(frozen=True)
class ResolvedWorkload(WorkloadSection):
    """The workload section. `num_batches` is what a `Prepared` run has."""

    gen_len: int = DEFAULT_GEN_LEN
    num_batches: int = DEFAULT_BATCHES


def tokens_of_rows(capacity: Capacity, decoding: DecodingSection) -> int:
    """The most cached tokens of a row: not the newest token, but drafts."""
    max_gamma = 0 if decoding.strategy == BASELINE else decoding.max_gamma
    return capacity.max_len + max_gamma


@dataclass(frozen=True)
class ResolvedConfig:
    """The resolved sections; `run_config`, the user's, for messages; and what models must hold."""

    run_config: RunConfig
    capacity: Capacity
    model: ResolvedModel
    draft: ResolvedDraft | None
    parallel: ResolvedParallel
    kv: KVSection
    attention: ResolvedAttention
    decoding: ResolvedDecoding
    sampling: SamplingSection
    workload: ResolvedWorkload
    output: OutputSection

    @property
    def low_bit(self) -> str | None:
        """The kind of the low-bit matrices that self-speculation drafts with; None without."""
        return self.decoding.draft_weights if self.decoding.drafts_itself else None

    def on_ranks(self, ranks: Sequence[int]) -> ResolvedConfig:
        parallel = dataclasses.replace(self.parallel, rank_group=tuple(ranks))
        return dataclasses.replace(self, parallel=parallel)

    def without_drafts(self) -> ResolvedConfig:
        decoding = dataclasses.replace(
            self.decoding, strategy=BASELINE, drafter=None, emulate_acceptance=None
        )
        return dataclasses.replace(self, decoding=decoding, draft=None)

    def to_dict(self) -> dict[str, Any]:
        """The `config` of a record, nested by section (docs/record.md)."""
        w = self.workload
        names = [field.name for field in dataclasses.fields(self)]
        sections = {name: _section(getattr(self, name)) for name in names if name not in UNRECORDED}
        sections["workload"]["max_len"] = w.prefix_len + w.gen_len
        return sections


def _section(values: Any) -> Any:
    """The fields of a section in order. A choice is two entries: its name and its reason."""
    if values is None:
        return None
    entries: dict[str, Any] = {}
    for field in dataclasses.fields(values):
        entries[field.name] = value = getattr(values, field.name)
        if "Choice" in str(field.type):  # a text, such as "Choice | None"
            entries[f"{field.name}_reason"] = None if value is None else value.why
    return entries
