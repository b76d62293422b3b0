"""Outcome: what a run ends with, also when Ctrl-C has ended it: the batches that were done by then
make a record.

Owns what of an interrupted run is kept. Nothing here needs the other ranks, which may have ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from magicdec.hardware.timing import PhaseTimer
from magicdec.memory.sampler import NOT_MEASURED, describe_memory
from magicdec.names import BASELINE
from magicdec.records.correctness import Correctness
from magicdec.records.environment import Environment
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples, PrefillSamples
from magicdec.request import Request
from magicdec.run.check import first_difference
from magicdec.run.run_record import Measured, make_record
from magicdec.setup.prepare import Prepared

BY_BATCH = (
    *("begin_ms", "calibration_ms", "draft_prefill_ms", "step_ms", "num_drafted", "num_accepted"),
    *("num_emitted", "sequence_tokens", "sequence_ms", "bytes_read", "draft_kv_tokens"),
    *("draft_rows", "peak_memory_bytes", "threads"),
)


@dataclass
class Outcome:
    """The record of a run, and its finished requests in the order of the prompts."""

    record: RunRecord
    requests: list[Request] = field(default_factory=list)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a run. `outcome` has the batches that were done; None if there is none."""

    def __init__(self, outcome: Outcome | None) -> None:
        super().__init__()
        self.outcome = outcome


class Passes(Protocol):
    """The part of `run.run.Run` that this module uses."""

    prepared: Prepared
    prefill: PrefillSamples
    samples: dict[str, PassSamples]
    finished: dict[str, list[Request]]
    timers: dict[str, PhaseTimer]

    @property
    def is_compared(self) -> bool: ...


def outcome_of_done(run: Passes, environment: Environment) -> Outcome | None:
    """The outcome of the batches that every pass has decoded; None if there is none. Its record has
    metrics if all tokens are identical or nothing is compared. Differences are not judged, because
    that takes as long as the run."""
    prepared, w = run.prepared, run.prepared.config.workload
    num_done = min(len(samples.peak_memory_bytes) for samples in run.samples.values())
    if num_done == 0:
        return None
    finished = {name: done[: num_done * w.batch_size] for name, done in run.finished.items()}
    samples = {
        name: first_batches(samples, num_done, run.timers[name].seconds)
        for name, samples in run.samples.items()
    }
    measured = Measured(samples, finished, first_prefills(run.prefill, num_done), NOT_MEASURED)
    asked = finished[measured.asked]
    error = f"interrupted after {num_done} of {w.num_batches} batches"
    correctness = compare_done(finished[BASELINE], asked) if run.is_compared else uncompared(asked)
    if correctness is None:
        error += "; some of their outputs differ from the baseline's, and were not judged"
        config, workload = prepared.config.to_dict(), prepared.describe_workload()
        memory = describe_memory(prepared.plan, prepared.free)
        interrupted = RunRecord(
            status="interrupted", config=config, environment=environment, error=error,
            workload=workload, memory=memory,
        )  # fmt: skip
        return Outcome(interrupted, asked)
    record = make_record(prepared, measured, correctness, environment)
    return Outcome(replace(record, status="interrupted", error=error), asked)


def uncompared(asked: list[Request]) -> Correctness:
    return Correctness(None, num_tokens=sum(len(r.output_ids) for r in asked))


def compare_done(expected: list[Request], found: list[Request]) -> Correctness | None:
    """The comparison if all outputs are equal, else None."""
    pairs = zip(expected, found, strict=True)
    if any(first_difference(0, a.output_ids, b.output_ids) for a, b in pairs):
        return None
    return replace(uncompared(found), reference=BASELINE, identical=True, num_excused=0,
                   num_diverged=0)  # fmt: skip


def first_batches(
    samples: PassSamples, count: int, seconds: Mapping[str, list[float]]
) -> PassSamples:
    """The samples of the first `count` batches, with their part of the `seconds` of the phases."""
    values: dict[str, Any] = {name: getattr(samples, name) for name in BY_BATCH}
    first = replace(samples, **{k: v and v[:count] for k, v in values.items()})
    drafted = [number for batch in first.num_drafted for number in batch]
    drafting = sum(number > 0 for number in drafted)
    ends = {"draft": drafting, "verify": drafting, "decode": len(drafted) - drafting}
    first.observe_phases({name: seconds.get(name, [])[:end] for name, end in ends.items()})
    return first


def first_prefills(prefill: PrefillSamples, count: int) -> PrefillSamples:
    return PrefillSamples(
        prefill_ms=prefill.prefill_ms[:count],
        ttft_ms=prefill.ttft_ms[:count],
        num_tokens=prefill.num_tokens[:count],
    )
