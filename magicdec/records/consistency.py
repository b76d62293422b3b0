"""What must hold between the samples of a run: counts and times that were measured separately, and
that a fault in the measuring code would set against each other. Imports no torch.

Every check raises AssertionError, naming both values, where it does not hold. Must not know how
metrics are computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain, pairwise

from magicdec.records.samples import PassSamples, PrefillSamples, SamplesRecord

ROUNDING_MS = 1e-5  # a sample is rounded to 1e-6 ms; times a few samples
PHASE_TOLERANCE = 0.01  # on CUDA phases have the device's clock and steps the host's
BY_BATCH = (
    *("begin_ms", "step_ms", "num_drafted", "num_accepted", "num_emitted"),
    *("sequence_tokens", "sequence_ms"),
)


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


def unequal_threads(passes: Mapping[str, SamplesRecord]) -> str | None:
    """Where the passes of a run had other ranks or threads than its first pass had in its first
    batch, or do not say so in each batch; None if they had equal ones."""
    first = next(chain.from_iterable(samples.threads for samples in passes.values()), None)
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
    lengths, ends_ms = samples.sequence_tokens[batch], samples.sequence_ms[batch]
    remaining, steps_ms = list(lengths), 0.0
    steps = zip(
        samples.step_ms[batch], samples.num_drafted[batch], samples.num_accepted[batch],
        samples.num_emitted[batch], strict=True,
    )  # fmt: skip
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
                f"{name}: num_drafted {drafted}, num_accepted {accepted}, num_emitted {emitted}"
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
    drafted = list(chain.from_iterable(samples.num_drafted))
    num_drafting = sum(count > 0 for count in drafted)
    for key, times in phases.items():
        of_kind = len(drafted) - num_drafting if key == "decode_ms" else num_drafting
        must_equal(f"{name}: times in {key}", len(times), "steps that have it", of_kind)
    draft, verify, decode = map(iter, phases.values())
    for step, (ms, count) in enumerate(zip(chain(*samples.step_ms), drafted, strict=True)):
        phases_ms = next(draft) + next(verify) if count else next(decode)
        label, limit = f"{name}, step {step}: the time of its phases", ms * (1 + PHASE_TOLERANCE)
        must_not_exceed(label, phases_ms, "its step_ms, with a tolerance,", limit)
