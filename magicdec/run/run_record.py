"""The record of a run from what it measured: metrics enter it only if the check passed.

Owns which numbers of a pass are told. Must not measure anything.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from magicdec.memory.watch import describe_memory
from magicdec.records.metrics import decode_metrics, speedups
from magicdec.records.record import Correctness, RunRecord
from magicdec.workload.answers import answer_score

if TYPE_CHECKING:
    from magicdec.run.run import Run

BASELINE = "autoregressive"


def make_record(
    run: Run,
    prefill: dict[str, Any],
    correctness: Correctness,
    environment: dict[str, Any],
    memory: dict[str, int],
) -> RunRecord:
    """Metrics enter the record only if the check passed."""
    asked = run.passes[-1]
    bandwidth = environment["read_bandwidth_bytes_per_s"]
    run.samples[asked].calibration_s = run.draft_length.calibration_s
    for name in run.passes:
        run.samples[name].phase_s = dict(run.timers[name].seconds)
    metrics: dict[str, dict[str, Any]] = {}
    for name in run.passes:
        is_drafting = name != BASELINE
        metrics[name] = prefill | decode_metrics(run.samples[name], bandwidth, is_drafting)
        metrics[name]["answer_score"] = score_pass(run, name)
    if BASELINE in run.passes[:-1]:
        values = speedups(run.samples[BASELINE], run.samples[asked])
        metrics[asked] |= {
            "speedup": statistics.median(values) if values else None,
            "speedup_per_batch": values or None,
        }
    if run.prepared.is_random and asked != BASELINE:
        withhold_acceptance(metrics[asked])
    passed = correctness.passed
    return RunRecord(
        status="ok" if passed else "diverged",
        config=run.config.to_dict(),
        environment=environment,
        workload=run.prepared.describe_workload(),
        correctness=correctness,
        metrics=metrics[asked] if passed else None,
        baseline_metrics=metrics.get(BASELINE) if passed and asked != BASELINE else None,
        samples=describe_samples(run),
        memory=describe_memory(run.prepared.plan, run.prepared.free, memory if passed else None),
    )


def score_pass(run: Run, name: str) -> float | None:
    """How right the pass's outputs are; None without known answers, and of random weights."""
    answers = None if run.prepared.source.is_random else run.prepared.workload.answers
    return answer_score(answers, run.finished[name], run.prepared.tokenizer)


def withhold_acceptance(metrics: dict[str, Any]) -> None:
    """Random weights agree with themselves by chance: times of a step count, acceptance and what
    follows from it do not."""
    for key in metrics:
        chance = ("acceptance", "speedup", "decode_tokens", "mean_draft_tokens")
        if key.startswith(chance) or key.endswith("_tpot_ms"):
            metrics[key] = None


def describe_samples(run: Run) -> dict[str, Any]:
    """Raw step times (ms) and accepted counts of each pass, by batch."""
    random = run.prepared.is_random
    return {
        name: {
            "step_ms": [[round(1e3 * s, 4) for s in batch] for batch in samples.step_s],
            "num_tokens": samples.num_tokens,
            "num_drafted": None if name == BASELINE or random else samples.num_drafted,
            "num_accepted": None if name == BASELINE or random else samples.num_accepted,
        }
        for name, samples in run.samples.items()
    }
