"""Times the kinds of steps of a batch before decoding, for `--gamma auto`. It is short, because
decoding corrects the times.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise

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
    """Seconds of a step of `batch` with 0, 1, ..., most draft tokens. `cached` are its rows'
    lengths.

    Times a decode step, two short drafts without `pa`, the shortest and a long verification;
    others are taken on the line through two. Of a mixture of experts it drafts as many tokens as it
    verifies, since unlike tokens read more experts, and times a verification between these, since
    each token adds fewer than the one before. Restores all state."""
    drafter = steps.drafter
    state = [] if drafter.draft_kv is None else drafter.draft_kv.state
    before = [tensor.clone() for tensor in state]
    phase = steps.phase
    steps.phase = nullcontext
    pa = drafter.pa
    try:
        drafter.pa = 0.0
        seconds = _measure(steps, batch, cached, max_gamma)
    finally:
        steps.phase = phase
        drafter.pa = pa
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    draft_s, verify_s = (_line(seconds[kind]) for kind in ("draft", "verify"))
    counts = range(1, max_gamma + 1)
    return [seconds["decode"][0], *(draft_s(count) + verify_s(count) for count in counts)]


def _measure(
    steps: DecodeSteps, batch: Batch, cached: Sequence[int], max_gamma: int
) -> dict[str, dict[int, float]]:
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
        short = min(LONGER_DRAFT, few)
        longest = few if steps.reads_experts else short
        for count in sorted({1, steps.padded_gamma(longest)}):
            with timed("draft", count):
                proposal = steps.draft(batch, count)
                proposal.ids.tolist()  # waits for the device
        between = {steps.padded_gamma(short)} if steps.reads_experts else set()
        for count in sorted({1, steps.padded_gamma(few)} | between):
            verified = repeated(proposal, count)
            with timed("verify", count):
                steps.verify(batch, verified)
    return seconds


def repeated(proposal: Proposal, count: int) -> Proposal:
    """A proposal of `count` tokens a row that repeats another's tokens, which do not matter for
    the time of a model without experts."""
    times = -(-count // proposal.ids.shape[1])
    probs = proposal.probabilities
    probs = None if probs is None else probs.repeat(1, times, 1)
    return Proposal(proposal.ids.repeat(1, times), probs).first(count)


def _line(seconds: dict[int, float]) -> Callable[[int], float]:
    """Seconds by count: on the lines between those that were timed, which never fall."""
    points = sorted(seconds.items())
    segments = list(pairwise(points)) or [(points[0], points[0])]

    def on_line(count: int) -> float:
        ends = (segment for segment in segments if count <= segment[1][0])
        (first, low), (last, high) = next(ends, segments[-1])
        slope = max(0.0, high - low) / max(1, last - first)
        return low + slope * (count - first)

    return on_line
