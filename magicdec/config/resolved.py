"""ResolvedConfig: the config that runs. No `auto` is left, and no None that means a default.
Imports no torch.

`config.resolve` makes the resolved sections from what the user wrote (`RunConfig`). A field that
ends in `_choice` holds what was chosen and why; the property without that ending is the name of
what was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from magicdec.config.choices.backend import choose_graphs
from magicdec.config.choices.choice import Choice
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import (
    DEFAULT_GEN_LEN,
    DecodingSection,
    KVSection,
    OutputSection,
    SamplingSection,
    WorkloadSection,
)
from magicdec.config.threads import Threads, threads_of


@dataclass(frozen=True)
class ResolvedModel:
    model: str
    dtype: str  # of activations, KV cache, and weights that are not int8
    linear: str
    elementwise_choice: Choice
    native_steps_choice: Choice  # on or off
    target_dtype: str  # of the target's matrices

    @property
    def elementwise(self) -> str:
        return self.elementwise_choice.name

    @property
    def native_steps(self) -> str:
        return self.native_steps_choice.name


@dataclass(frozen=True)
class ResolvedDraft:
    """A standalone draft and the ranks that hold it."""

    model: str
    rank_group: tuple[int, ...]
    backend_choice: Choice
    native_steps_choice: Choice
    draft_dtype: str

    @property
    def backend(self) -> str:
        return self.backend_choice.name

    @property
    def native_steps(self) -> str:
        return self.native_steps_choice.name


@dataclass(frozen=True)
class ResolvedParallel:
    rank_group: tuple[int, ...]
    device: str
    collectives_choice: Choice | None  # None for one rank
    threads: Threads

    def threads_of(self, rank: int) -> int:
        """The number of CPU threads of that rank of the run."""
        return threads_of(self.threads, rank)

    def threads_on(self, ranks: Iterable[int]) -> int:
        """Those of these ranks together, which one process has while the others wait."""
        return sum(map(self.threads_of, ranks))

    @property
    def collectives(self) -> str | None:
        return None if self.collectives_choice is None else self.collectives_choice.name


@dataclass(frozen=True)
class ResolvedAttention:
    backend_choice: Choice
    prefill_chunk: int

    @property
    def backend(self) -> str:
        return self.backend_choice.name


@dataclass(frozen=True)
class ResolvedDecoding(DecodingSection):
    """`cuda_graphs` is on or off. `num_draft_tokens` may stay `auto`, which is a way to decode."""

    graphs_choice: Choice = field(kw_only=True)

    def __post_init__(self) -> None:
        assert self.cuda_graphs == self.graphs_choice.name

    def to_dict(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "drafter": self.drafter,
            "num_draft_tokens": self.num_draft_tokens,
            "tree": self.tree,
            "tree_nodes": None if self.tree is None else self.most_draft_tokens,
            "machine": self.machine,
            "cuda_graphs": self.cuda_graphs,
            "cuda_graphs_reason": self.graphs_choice.why,
            "ignore_eos": self.ignore_eos,
            "baseline": self.baseline,
        }


@dataclass(frozen=True)
class ResolvedWorkload(WorkloadSection):
    """`gen_len` is the generated length, whichever of its two flags the user gave."""

    gen_len: int = DEFAULT_GEN_LEN
    max_len: None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "batch_size": self.batch_size,
            "prefix_len": self.prefix_len,
            "gen_len": self.gen_len,
            "max_len": self.prefix_len + self.gen_len,
            "num_batches": self.num_batches,
            "warmup_batches": self.warmup_batches,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class ResolvedConfig:
    """The resolved sections. `run_config` is what the user wrote, for messages that name a flag."""

    run_config: RunConfig
    model: ResolvedModel
    draft: ResolvedDraft | None
    parallel: ResolvedParallel
    kv: KVSection
    attention: ResolvedAttention
    decoding: ResolvedDecoding
    sampling: SamplingSection
    workload: ResolvedWorkload
    output: OutputSection

    def resolve_graphs(self, is_staged: bool = False) -> ResolvedConfig:
        """This config with CUDA graphs chosen again, after a measurement has chosen a backend.
        `is_staged` as in `resolve`.
        Raises ValueError if the user asked for graphs that cannot be captured."""
        drafts = [] if self.draft is None else [self.draft.backend_choice.settled]
        backends = [self.attention.backend_choice.settled, *drafts]
        d = self.decoding
        flag = "auto" if d.graphs_choice.is_auto else d.cuda_graphs
        graphs = choose_graphs(flag, self.parallel.device, backends, d.tree is not None, is_staged)
        decoding = dataclasses.replace(d, cuda_graphs=graphs.name, graphs_choice=graphs)
        return dataclasses.replace(self, decoding=decoding)

    def to_dict(self) -> dict[str, Any]:
        """The `config` of a record, nested by section (docs/record.md)."""
        return {
            "model": _section(self.model),
            "draft": None if self.draft is None else _section(self.draft),
            "parallel": _section(self.parallel),
            "kv": _section(self.kv),
            "attention": _section(self.attention),
            "decoding": self.decoding.to_dict(),
            "sampling": _section(self.sampling),
            "workload": self.workload.to_dict(),
            "output": _section(self.output),
        }


def _section(values: Any) -> dict[str, Any]:
    """The fields of a section in their order. A choice is two entries: its name and its reason."""
    entries: dict[str, Any] = {}
    for each in dataclasses.fields(values):
        value, name = getattr(values, each.name), each.name.removesuffix("_choice")
        if name == each.name:
            entries[name] = value
        else:
            entries[name] = None if value is None else value.name
            entries[f"{name}_reason"] = None if value is None else value.why
    return entries
