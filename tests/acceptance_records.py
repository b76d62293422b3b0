"""Records of `magicdec acceptance` whose counts tests write by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from synthetic_records import ENVIRONMENT, WORKLOAD

from magicdec.bench.acceptance.record import (
    AcceptanceRecord,
    counts_of,
    cumulative_of_counts,
    depths_of,
)
from magicdec.config.machine import Machine
from magicdec.config.resolve import resolve
from magicdec.config.run_config import RunConfig
from magicdec.config.sections import DecodingSection, KVSection
from magicdec.records.record import append_together
from magicdec.records.workload import ModelRecord
from magicdec.setup.memory_plan import MemoryPlan
from magicdec.setup.memory_sampler import describe_memory

TEXTS = ("0312", "2233", "3011", "1302", "3331")  # accepted draft tokens at each position
WORSE = ("0310", "2230", "3011", "1300", "0031")
GAMMA = 3


def acceptance_record(
    context: int,
    accepted: Sequence[str] = TEXTS,
    *,
    gamma: int = GAMMA,
    drafter: str = "self",
    draft: str | None = None,
    kv: KVSection | None = None,
    is_chain: bool = True,
    inexact: str | None = None,
    dtype: str = "float32",
    draft_weights: str | None = None,
    **workload: Any,
) -> AcceptanceRecord:
    decoding = DecodingSection("speculative", "self", gamma)
    kv = kv or KVSection(budget=65)
    config = resolve(RunConfig(kv=kv, decoding=decoding), Machine(1)).to_dict()
    config["decoding"] |= {"drafter": drafter, "draft_weights": draft_weights}
    config["model"] |= {"dtype": dtype, "target_dtype": dtype}
    config["workload"] |= {"prefix_len": context, "gen_len": 5, "batch_size": len(accepted)}
    counts = [counts_of(text) for text in accepted]
    cumulative = [cumulative_of_counts(text, gamma) for text in counts]
    drafted = [[gamma] * len(text) for text in counts]
    draft_model = draft and ModelRecord(model=draft, random_weights=False, model_sha256=draft)
    beside = {"prefix_len": context, "num_prompts": len(accepted), "draft": draft_model or None}
    return AcceptanceRecord(
        config=config,
        environment=ENVIRONMENT,
        workload=replace(WORKLOAD, **beside | workload),
        seconds=1.0,
        outputs_sha256="o",
        accepted=list(accepted),
        drafted=None,
        rows=depths_of(cumulative, drafted, gamma, is_chain),
        memory=describe_memory(MemoryPlan(1, 1), None),
        is_forked=True,
        inexact=inexact,
    )


def write_records(path: Path, records: Sequence[Any]) -> Path:
    append_together(path, records)
    return path
