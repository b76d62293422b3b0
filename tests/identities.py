"""What must hold between the samples of a run, and between them and the metrics of its record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from typing import Any

from magicdec.bench.serving.recomputing import (
    contexts_of,
    metrics_of,
    turns_of,
    unfounded_metric,
)
from magicdec.bench.serving.record import ServingRecord
from magicdec.names import BASELINE
from magicdec.records.comparison.values import is_close
from magicdec.records.metrics import run_metrics
from magicdec.records.performance import SUFFIX
from magicdec.records.record import RunRecord
from magicdec.records.samples import PassSamples, PrefillSamples, unequal_threads

ROUNDING_MS = 1e-5  # a sample is rounded to 1e-6 ms; times a few samples
PHASE_TOLERANCE = 0.01  # on CUDA phases have the device's clock and steps the host's
BY_BATCH = (
    "begin_ms",
    "step_ms",
    "padded_gamma",
    "num_accepted",
    "num_emitted",
    "sequence_tokens",
    "sequence_ms",
)


def check_record(record: RunRecord) -> None:
    """The samples of a record with metrics do not contradict each other."""
    assert record.samples is not None and record.prefill_samples is not None
    passes = {name: samples.restored() for name, samples in record.samples.items()}
    check_run(passes, record.prefill_samples)
    problem = unequal_threads(passes)
    assert problem is None, problem


def check_metrics(record: RunRecord) -> list[str]:
    """The names of the metrics of a record that are not what its samples give."""
    if record.metrics is None:
        return []
    assert record.samples is not None and record.prefill_samples is not None
    assert record.workload is not None
    bandwidth = record.environment.read_bandwidth_bytes_per_s
    assert bandwidth is not None
    passes = {name: samples.restored() for name, samples in record.samples.items()}
    is_random = record.workload.is_random
    categories = record.workload.categories
    again = run_metrics(passes, record.prefill_samples, bandwidth, is_random, categories)
    strategy = record.config["decoding"]["strategy"]
    parts = {"metrics": (record.metrics, again[strategy])}
    if record.baseline_metrics is not None:
        parts["baseline_metrics"] = record.baseline_metrics, again[BASELINE]
    return [
        f"{part}.{name}"
        for part, (stored, computed) in parts.items()
        if stored is not None
        for name, value in asdict(stored).items()
        if not is_equal(value, asdict(computed)[name])
    ]


def check_pass(record: ServingRecord) -> list[str]:
    """The names of the metrics of a pass that are not what its requests give, or are lacking
    although no server says so."""
    if record.metrics is None:
        return []
    wrong = unfounded_metric(record)
    missing = getattr(record.details, "missing", [])
    expected = metrics_of(record)
    expected["times_by_turn"] = turns_of(record.requests)
    expected["acceptance_by_context"] = contexts_of(record)
    stated = asdict(record)
    stated |= stated["metrics"]
    lacking = [name for name in expected if lacks(stated, expected, name, missing)]
    return ([] if wrong is None else [wrong]) + lacking


def lacks(stated: Any, expected: Any, key: Any, missing: Sequence[str]) -> bool:
    """Whether the value of that key, or one inside it, is None although it could be known."""
    ours = stated[key]
    theirs = expected[key]
    if str(key).removesuffix(SUFFIX) in missing:
        return False
    if ours is None or theirs is None:
        return ours is not theirs
    if isinstance(theirs, dict):
        return any(lacks(ours, theirs, each, missing) for each in ours.keys() & theirs.keys())
    if isinstance(theirs, list):
        return any(lacks(ours, theirs, each, missing) for each in range(len(theirs)))
    return False


def is_equal(one: Any, other: Any) -> bool:
    """`is_close`, of the numbers of each category too."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    return is_close(one, other)


def drafts(samples: PassSamples) -> list[tuple[int, int]]:
    """(draft tokens, accepted ones) of each row of each step that drafts."""
    return [
        (drafted, count)
        for batch, steps in zip(samples.padded_gamma, samples.num_accepted, strict=True)
        for drafted, step in zip(batch, steps, strict=True)
        for count in step
        if drafted
    ]


def acceptance(samples: PassSamples) -> tuple[float, float, list[float]]:
    """The acceptance rate, length and acceptance by position of a pass that drafted."""
    rows = drafts(samples)
    survived: list[float] = []
    for k in range(1, max(drafted for drafted, _ in rows) + 1):
        judged = [count for drafted, count in rows if drafted >= k and count >= k - 1]
        share = sum(count >= k for count in judged) / len(judged) if judged else 0.0
        survived.append(share * (survived[-1] if survived else 1.0))
    accepted = sum(count for _, count in rows)
    return accepted / sum(drafted for drafted, _ in rows), 1 + accepted / len(rows), survived


def must_equal(name: str, value: float, other: str, expected: float) -> None:
    """Both values are the same up to rounding."""
    if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=ROUNDING_MS):
        raise AssertionError(f"{name} is {value!r}, but {other} is {expected!r}")


def must_not_exceed(name: str, value: float, other: str, limit: float) -> None:
    """The value is at most the limit, up to rounding."""
    if value > limit + ROUNDING_MS + 1e-6 * abs(limit):
        raise AssertionError(f"{name} is {value!r}, but {other} is {limit!r}")


def check_run(passes: Mapping[str, PassSamples], prefill: PrefillSamples) -> None:
    """The samples of all passes of a run, by the name of the pass. No record can be made of passes
    with unequal threads (`RunRecord`). The prompts of a batch are prefilled one after the other,
    and the last is the end of it."""
    for batch, (ms, ttft_ms) in enumerate(zip(prefill.prefill_ms, prefill.ttft_ms, strict=True)):
        last = max(ttft_ms, default=0.0)
        must_not_exceed(f"batch {batch}: the last TTFT", last, "prefill_ms", ms)
        if any(later <= earlier for earlier, later in pairwise(ttft_ms)):
            raise AssertionError(f"batch {batch}: ttft_ms {ttft_ms} does not rise from row to row")
    for name, samples in passes.items():
        check_samples(name, samples)


def check_samples(name: str, samples: PassSamples) -> None:
    """The samples of the pass of that name."""
    counts = {key: len(getattr(samples, key)) for key in BY_BATCH}
    if len(set(counts.values())) != 1:
        raise AssertionError(f"{name}: numbers of batches differ: {counts}")
    for batch in range(len(samples.step_ms)):
        check_steps(f"{name}, batch {batch}", samples, batch)
    check_phases(name, samples)
    for key in ("begin_ms", "calibration_ms"):
        for ms in getattr(samples, key) or ():
            must_not_exceed(f"{name}: 0", 0.0, key, ms)


def check_steps(batch_name: str, samples: PassSamples, batch: int) -> None:
    """A step emits a token of each running sequence and one for each of its accepted drafts, up to
    the sequence's end. No sequence ends before the steps that it took part in."""
    lengths = samples.sequence_tokens[batch]
    ends_ms = samples.sequence_ms[batch]
    remaining = list(lengths)
    steps_ms = 0.0
    steps = zip(
        samples.step_ms[batch],
        samples.padded_gamma[batch],
        samples.num_accepted[batch],
        samples.num_emitted[batch],
        strict=True,
    )
    for step, (ms, drafted, accepted, emitted) in enumerate(steps):
        name = f"{batch_name}, step {step}"
        running = [i for i, count in enumerate(remaining) if count > 0]
        must_equal(f"{name}: rows", len(emitted), "running sequences", len(running))
        verified = accepted if drafted or accepted else [0] * len(emitted)
        counts = zip(verified, emitted, strict=False)
        if (
            len(verified) != len(emitted)
            or any(not (0 <= n <= drafted and 1 <= tokens <= n + 1) for n, tokens in counts)
            or (accepted and not drafted)
        ):
            raise AssertionError(
                f"{name}: padded_gamma {drafted}, num_accepted {accepted}, num_emitted {emitted}"
            )
        steps_ms += ms
        for i, count, tokens in zip(running, verified, emitted, strict=True):
            sequence = f"{name}, sequence {i}"
            remaining[i] -= tokens
            if remaining[i] == 0:
                label = f"{sequence}: the time of its steps"
                must_not_exceed(label, steps_ms, "its sequence_ms", ends_ms[i])
            else:
                must_equal(f"{sequence}: num_emitted", tokens, "1 + num_accepted", 1 + count)
    for i, count in enumerate(remaining):
        label = f"{batch_name}, sequence {i}: emitted tokens"
        must_equal(label, lengths[i] - count, "its tokens", lengths[i])


def check_phases(name: str, samples: PassSamples) -> None:
    """Where phases are timed, every step has those of its kind, and they lie within the step."""
    phases = {key: getattr(samples, key) for key in ("draft_ms", "verify_ms", "decode_ms")}
    if not any(phases.values()):
        return
    drafted = list(chain.from_iterable(samples.padded_gamma))
    num_drafting = sum(count > 0 for count in drafted)
    for key, times in phases.items():
        of_kind = len(drafted) - num_drafting if key == "decode_ms" else num_drafting
        must_equal(f"{name}: times in {key}", len(times), "steps that have it", of_kind)
    draft, verify, decode = map(iter, phases.values())
    for step, (ms, count) in enumerate(zip(chain(*samples.step_ms), drafted, strict=True)):
        phases_ms = next(draft) + next(verify) if count else next(decode)
        label = f"{name}, step {step}: the time of its phases"
        limit = ms * (1 + PHASE_TOLERANCE)
        must_not_exceed(label, phases_ms, "its step_ms, with a tolerance,", limit)
