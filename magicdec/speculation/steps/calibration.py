"""Times the kinds of steps of a batch before it is decoded, for `--gamma auto`.

Owns what is timed and what follows from it. It is kept short, because no token comes of it: while
the batch is decoded, the times are corrected by those of its steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from magicdec.config.sections import MAX_AUTO_GAMMA
from magicdec.runner.request import Batch
from magicdec.runner.sampling.model_tokens import Proposal
from magicdec.speculation.steps.steps import DecodeSteps

REPEATS = 2  # the faster one counts, so that one disturbance does no harm
LONGER_DRAFT = 3  # tokens of the longer of the two drafts that are timed


@torch.inference_mode()
def measure_steps(
    steps: DecodeSteps, batch: Batch, cached: Sequence[int], max_gamma: int
) -> list[float]:
    """Seconds of a step of `batch` with 0, 1, ..., most draft tokens. `cached` are the cached
    lengths of its rows.

    Times a decode step, two short drafts, which do not stop at `pa`, and the shortest and a long
    verification. Other drafts and verifications are taken to lie on the line through those two.
    Leaves everything as it was, also what the drafter observed of the attention.
    """
    drafter = steps.drafter
    draft_kv = None if drafter is None else drafter.draft_kv
    state = [] if draft_kv is None else draft_kv.state
    before = [tensor.clone() for tensor in state]
    phase = steps.phase
    steps.phase = nullcontext
    pa = 0.0 if drafter is None else drafter.pa
    try:
        if drafter is not None:
            drafter.pa = 0.0
        seconds = _measure(steps, batch, cached, max_gamma)
    finally:
        steps.phase = phase
        if drafter is not None:
            drafter.pa = pa
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    draft_s, verify_s = (_line(seconds[kind]) for kind in ("draft", "verify"))
    counts = range(1, max_gamma + 1)
    return [seconds["decode"][0], *(draft_s(count) + verify_s(count) for count in counts)]


def _measure(
    steps: DecodeSteps, batch: Batch, cached: Sequence[int], max_gamma: int
) -> dict[str, dict[int, float]]:
    """The least seconds of each kind of work, by its number of draft tokens."""
    seconds: dict[str, dict[int, float]] = defaultdict(dict)

    @contextmanager
    def timed(kind: str, count: int) -> Iterator[None]:
        started = time.perf_counter()
        yield
        elapsed = time.perf_counter() - started
        seconds[kind][count] = min(elapsed, seconds[kind].get(count, elapsed))
        steps.undo(batch, cached)

    for _ in range(REPEATS):
        with timed("decode", 0):
            steps.decode(batch)
        few = min(MAX_AUTO_GAMMA, max_gamma)
        for count in sorted({1, steps.padded_gamma(min(LONGER_DRAFT, few))}):
            with timed("draft", count):
                proposal = steps.draft(batch, count)
                proposal.ids.tolist()  # waits for the device
        for count in sorted({1, steps.padded_gamma(few)}):
            verified = repeated(proposal, count)
            with timed("verify", count):
                steps.verify(batch, verified)
    return seconds


def repeated(proposal: Proposal, count: int) -> Proposal:
    """A proposal of `count` tokens a row, which repeats a shorter or longer one. What is drafted
    does not change how long its verification takes."""
    times = -(-count // proposal.ids.shape[1])
    probs = proposal.probabilities
    probs = None if probs is None else probs.repeat(1, times, 1)
    return Proposal(proposal.ids.repeat(1, times), probs).first(count)


def _line(seconds: dict[int, float]) -> Callable[[int], float]:
    """The line through one or two points, which never falls."""
    (first, low), (last, high) = min(seconds.items()), max(seconds.items())
    slope = max(0.0, high - low) / max(1, last - first)
    return lambda count: low + slope * (count - first)
