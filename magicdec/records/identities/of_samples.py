"""What must hold between the samples of a run: counts and times that were measured separately, and
that a fault in the measuring code would set against each other. Imports no torch.

Every function raises AssertionError, naming both values, where it does not hold. Must not know how
metrics are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from magicdec.records.samples import PassSamples, PrefillSamples, SamplesRecord

ROUNDING_MS = 1e-5  # a sample is rounded to 1e-6 ms; times a few samples
PHASE_TOLERANCE = 0.01  # on CUDA phases have the device's clock and steps the host's


def must_equal(name: str, value: float, other: str, expected: float) -> None:
    """Both values are the same up to rounding."""
    if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=ROUNDING_MS):
        raise AssertionError(f"{name} is {value!r}, but {other} is {expected!r}")


def must_not_exceed(name: str, value: float, other: str, limit: float) -> None:
    """The value is at most the limit, up to rounding."""
    if value > limit + ROUNDING_MS + 1e-6 * abs(limit):
        raise AssertionError(f"{name} is {value!r}, but {other} is {limit!r}")


def check_prefill(prefill: PrefillSamples) -> None:
    """The prompts of a batch are prefilled one after the other, and the last is the end of it."""
    for batch, (ms, ttft_ms) in enumerate(zip(prefill.prefill_ms, prefill.ttft_ms, strict=True)):
        must_not_exceed(
            f"batch {batch}: the last TTFT", max(ttft_ms, default=0.0), "prefill_ms", ms
        )
        if any(later <= earlier for earlier, later in pairwise(ttft_ms)):
            raise AssertionError(f"batch {batch}: ttft_ms {ttft_ms} does not rise from row to row")


def unequal_threads(passes: Mapping[str, PassSamples | SamplesRecord]) -> str | None:
    """Where the passes of a run had other ranks or threads than its first pass had in its first
    batch, or do not say so in each batch; None if they had equal ones."""
    known = (threads for samples in passes.values() for threads in samples.threads)
    first = next(known, None)
    for name, samples in passes.items():
        num_known, count = len(samples.threads), len(samples.step_ms)
        if num_known != count:
            return f"{name} has the threads of {num_known} batches, but there are {count}"
        for batch, threads in enumerate(samples.threads):
            if threads != first:
                return (
                    f"{name}, batch {batch}: the ranks had {threads} threads, but {first} in the "
                    "first batch of the run"
                )
    return None


def check_threads(passes: Mapping[str, PassSamples]) -> None:
    """All passes of a run compute with the same ranks and threads, and say so."""
    if (problem := unequal_threads(passes)) is not None:
        raise AssertionError(problem)


def check_samples(name: str, samples: PassSamples) -> None:
    """The samples of the pass of that name."""
    counts = {
        key: len(getattr(samples, key))
        for key in ("begin_ms", "step_ms", "num_drafted", "num_accepted", "num_emitted")
    } | {key: len(getattr(samples, key)) for key in ("sequence_tokens", "sequence_ms")}
    if len(set(counts.values())) != 1:
        raise AssertionError(f"{name}: numbers of batches differ: {counts}")
    for batch in range(len(samples.step_ms)):
        place = f"{name}, batch {batch}"
        check_steps(place, samples, batch)
        check_sequences(place, samples, batch)
    check_phases(name, samples)
    for key in ("begin_ms", "calibration_ms"):
        for ms in getattr(samples, key) or ():
            must_not_exceed(f"{name}: 0", 0.0, key, ms)


def check_steps(place: str, samples: PassSamples, batch: int) -> None:
    """A step emits a token of each row, and one for each accepted draft up to the row's end."""
    steps = zip(
        samples.step_ms[batch], samples.num_drafted[batch], samples.num_accepted[batch],
        samples.num_emitted[batch], strict=True,
    )  # fmt: skip
    for step, (_, drafted, accepted, emitted) in enumerate(steps):
        verified = accepted if drafted else [0] * len(emitted)
        is_possible = len(verified) == len(emitted) and all(
            0 <= count <= drafted and 1 <= tokens <= count + 1
            for count, tokens in zip(verified, emitted, strict=True)
        )
        if not is_possible or (accepted and not drafted):
            raise AssertionError(
                f"{place}, step {step}: num_drafted {drafted}, num_accepted {accepted}, "
                f"num_emitted {emitted}"
            )


def check_sequences(place: str, samples: PassSamples, batch: int) -> None:
    """Each sequence takes part in the steps until it has its tokens, and all that it drafts before
    its last step is emitted; no sequence ends before the steps that it took part in."""
    wanted, ends_ms = samples.sequence_tokens[batch], samples.sequence_ms[batch]
    left = list(wanted)
    steps_ms = 0.0
    steps = zip(
        samples.step_ms[batch], samples.num_accepted[batch], samples.num_emitted[batch], strict=True
    )
    for step, (ms, accepted, emitted) in enumerate(steps):
        running = [i for i, count in enumerate(left) if count > 0]
        must_equal(f"{place}, step {step}: rows", len(emitted), "running sequences", len(running))
        steps_ms += ms
        for row, i in enumerate(running):
            left[i] -= emitted[row]
            if left[i] == 0:
                name = f"{place}, sequence {i}: the time of its steps"
                must_not_exceed(name, steps_ms, "its sequence_ms", ends_ms[i])
            else:
                verified = 1 + (accepted[row] if accepted else 0)
                name = f"{place}, step {step}, row {row}: num_emitted"
                must_equal(name, emitted[row], "1 + num_accepted", verified)
    for i, count in enumerate(left):
        must_equal(
            f"{place}, sequence {i}: emitted tokens", wanted[i] - count, "its tokens", wanted[i]
        )


def check_phases(name: str, samples: PassSamples) -> None:
    """Where phases are timed, every step has those of its kind, and they lie within the step."""
    phases = {key: getattr(samples, key) for key in ("draft_ms", "verify_ms", "decode_ms")}
    if not any(phases.values()):
        return
    drafted = [count for batch in samples.num_drafted for count in batch]
    drafting = sum(count > 0 for count in drafted)
    for key, times in phases.items():
        of_kind = len(drafted) - drafting if key == "decode_ms" else drafting
        must_equal(f"{name}: times in {key}", len(times), "steps that have it", of_kind)
    draft, verify, decode = map(iter, phases.values())
    steps_ms = [ms for batch in samples.step_ms for ms in batch]
    for step, (ms, count) in enumerate(zip(steps_ms, drafted, strict=True)):
        phases_ms = next(draft) + next(verify) if count else next(decode)
        label, limit = f"{name}, step {step}: the time of its phases", ms * (1 + PHASE_TOLERANCE)
        must_not_exceed(label, phases_ms, "its step_ms, with a tolerance,", limit)
